"""Scoring a given text: what is asked of `/generate`, and how its answer is read.

Guarantees: one finite value for each id asked for, named by that id, or an error; lists of
likeliest tokens are given only where there is one for each of these ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from openclaw_rl.engine.fastjson import loads
from openclaw_rl.engine.types import Candidates, Scores
from openclaw_rl.errors import EngineError

IDS = range(2**31)
"""What can be a token id: journals keep 32 bits."""
POSITIVE = 1e-3
"""A log-prob may exceed 0 by rounding, not by more."""


def scoring_body(ids: Sequence[int], start: int, top: int, rid: str) -> dict[str, Any]:
    """The request that scores `ids[start:]` (`start` at least 1), with the `top` likeliest tokens
    of each position."""
    body: dict[str, Any] = {
        "input_ids": list(ids),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        # One earlier than wanted: SGLang gives no value for the first position asked for.
        "logprob_start_len": start - 1,
        "stream": False,
    }
    if top:
        body["top_logprobs_num"] = top
    if rid:
        body["rid"] = rid
    return body


def read_scores(data: bytes, ids: Sequence[int], start: int, top: int) -> Scores | None:
    """The values of a scoring reply; None if the engine aborted it. Raises `EngineError`."""
    try:
        meta = loads(data)["meta_info"]
        reason = meta.get("finish_reason")
        if isinstance(reason, dict) and reason.get("type") == "abort":
            return None
        count = len(ids) - start
        wanted = meta["input_token_logprobs"][-count:]
        named = [int(entry[1]) for entry in wanted] == list(ids[start:])
        if named and all(is_log_prob(entry[0]) for entry in wanted):
            values = [float(entry[0]) for entry in wanted]
            lists = meta.get("input_top_logprobs") if top else None
            return Scores(values, None if lists is None else read_top(lists[-count:], count))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        pass
    raise EngineError("the engine's scores do not line up with the ids asked for")


def is_log_prob(value: Any) -> bool:
    """Whether it is a finite number that can be a natural-log probability."""
    try:
        return type(value) in (int, float) and -math.inf < float(value) <= POSITIVE
    except OverflowError:  # an integer of hundreds of digits
        return False


def are_ids(values: Sequence[Any]) -> bool:
    """Whether all `values` can be token ids."""
    return all(type(value) is int and value in IDS for value in values)


def read_top(entries: Any, count: int) -> list[Candidates] | None:
    """`count` lists of `[log-prob, id, text]` as pairs, likeliest first; None where they are not
    that, or one holds what is no token id or an id twice. A token of probability 0 (no finite
    log-prob) is left out of its list."""
    if not isinstance(entries, list) or len(entries) != count:
        return None
    try:
        lists = [[(float(pair[0]), pair[1]) for pair in one] for one in entries]
        if not all(are_ids([token for _, token in one]) for one in lists):
            return None
        if any(len({token for _, token in one}) < len(one) for one in lists):
            return None
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
    if any(value > POSITIVE for one in lists for value, _ in one):
        return None
    return [sorted((p for p in one if math.isfinite(p[0])), key=lambda p: -p[0]) for one in lists]
