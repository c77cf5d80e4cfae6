"""Sampling parameters of a request: which we take, and what they may be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from openclaw_rl.wire.errors import invalid

_RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0.0, math.inf, "at least 0"),
    "top_p": (0.0, 1.0, "above 0 and at most 1"),
    "min_p": (0.0, 1.0, "from 0 to 1"),
    "frequency_penalty": (-2.0, 2.0, "from -2 to 2"),
    "presence_penalty": (-2.0, 2.0, "from -2 to 2"),
    "repetition_penalty": (0.0, math.inf, "above 0"),
}
_LARGEST = 1e6  # beyond any use, and still a float
_LARGEST_INT = 2**31 - 1  # engines keep these in 32 bits, and die of larger ones
_ABOVE_LOW = ("top_p", "repetition_penalty")  # the lower bound itself is not allowed


def parse_sampling(given: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """The sampling parameters that were given, by SGLang's names, and all names we know.

    `stop` is always a list; `top_k` is -1 (no limit) or at least 1. A null counts as not given.
    """
    result: dict[str, Any] = {}
    for key, (low, high, words) in _RANGES.items():
        value = given.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid(key, "must be a number")
        if not low <= value <= high or value > _LARGEST:
            raise invalid(key, f"must be {words}")
        if key in _ABOVE_LOW and value == low:
            raise invalid(key, f"must be {words}")
        result[key] = float(value)
    top_k = given.get("top_k")
    if top_k is not None:
        if not _is_int32(top_k) or (top_k < 1 and top_k != -1):
            raise invalid("top_k", "must be an integer of at least 1, or -1 for no limit")
        result["top_k"] = top_k
    stop = given.get("stop")
    if stop is not None and stop != []:
        result["stop"] = stop_list([stop] if isinstance(stop, str) else stop, "stop")
    ids = given.get("stop_token_ids")
    if ids is not None and ids != []:
        if not isinstance(ids, list) or not all(_is_token(i) for i in ids):
            raise invalid("stop_token_ids", "must be a list of token ids")
        result["stop_token_ids"] = list(ids)
    return result, frozenset((*_RANGES, "top_k", "stop", "stop_token_ids"))


def stop_list(stops: Any, where: str) -> list[str]:
    """Stop strings: a list of non-empty ones."""
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise invalid(where, "must be a non-empty string or a list of them")
    return list(stops)


def positive_int(given: Mapping[str, Any], key: str, prefix: str = "") -> int | None:
    """The integer at `key`, at least 1; None where not given."""
    value = given.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise invalid(prefix + key, "must be an integer of at least 1")
    return value


def _is_token(value: Any) -> bool:
    return _is_int32(value) and value >= 0


def _is_int32(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value <= _LARGEST_INT
