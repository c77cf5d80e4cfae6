"""How a kind of engine is spoken to: what is asked, and what its answers mean. No I/O here: that is
`client.py`, the same for all of them.

Error texts keep the engine's own words, shortened; bodies that may echo the request (validation
errors) are reduced to the names of the fields, so no conversation text reaches logs or clients.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import orjson

from openclaw_rl.engine.types import Abilities, Adapter, Delta, Finish, Scores
from openclaw_rl.errors import ContextOverflow, EngineError, EngineRefused, EngineUnavailable

IDS = range(2**31)
"""What can be a token id: journals keep 32 bits."""
_ROUNDING = 1e-3
"""A log-prob may exceed 0 by rounding, not by more."""


class Reader(Protocol):
    """Reads the events of one reply, in order."""

    def read(self, payload: bytes) -> Delta:
        """The new tokens of one event. Raises EngineError or Lost."""
        ...


class EngineAPI(Protocol):
    """Paths are those below the engine's address. `sampling` has SGLang's names."""

    abilities: Abilities
    path: str
    """Where texts are generated and scored."""
    info_paths: tuple[str, ...]
    """Where the model is told, newest first."""
    load_path: str
    unload_path: str

    def generation(
        self,
        ids: Sequence[int],
        sampling: Mapping[str, Any],
        rid: str,
        adapter: Adapter | None,
        top: int,
        interval: int | None = 1,
    ) -> tuple[dict[str, Any], Reader]:
        """The request for a reply, and the reader of what it brings. `interval`: tokens of an
        event after the first, None for few large events, as far as the engine lets one choose.
        Raises EngineRefused for parameters that the engine lacks."""
        ...

    def scoring(
        self, ids: Sequence[int], start: int, top: int, adapter: Adapter | None
    ) -> dict[str, Any]:
        """The request that scores `ids[start:]`, with the `top` likeliest tokens of each place."""
        ...

    def scores(self, data: bytes, ids: Sequence[int], start: int, top: int) -> Scores | None:
        """The values of its answer, one for each of `ids[start:]`, named by that id; None if the
        engine aborted it. Raises EngineError."""
        ...

    def info(self, answer: Any) -> dict[str, Any]:
        """Of an answer from `info_paths`: `model_path` and `context_length`, where told."""
        ...


# --- what all answers are made of ---------------------------------------------------------------


def read_event(payload: bytes, prompt_tokens: int) -> dict[str, Any]:
    """The object in an event. Raises the error that it brings instead of tokens."""
    try:
        event = orjson.loads(payload)
    except ValueError:
        raise EngineError("the engine sent an event that is no JSON") from None
    if not isinstance(event, dict):
        raise EngineError("the engine sent an event that is no JSON object")
    if "error" not in event:
        return event
    reason = reason_of(payload)
    if passing(reason):
        raise Lost("the engine has not loaded the adapter, or is about to end")
    code = event["error"].get("code") if isinstance(event["error"], dict) else None
    if isinstance(code, int) and code >= 500:
        raise EngineUnavailable(f"the engine broke off ({code}): {reason}")
    raise refusal(400, reason, prompt_tokens)


def checked_ids(ids: Any) -> list[int]:
    """`ids`, if they are token ids. Raises EngineError: a reply with a hole would be trained as if
    the tokens behind it had followed at once."""
    if not isinstance(ids, list) or not are_ids(ids):
        raise EngineError("the engine sent what is no token id")
    return ids


def finish_of(kind: Any, matched: Any) -> Finish:
    """The end that the engine names. Raises EngineError for one that is not known."""
    if kind not in ("stop", "length", "abort"):
        raise EngineError(f"the engine ended with an unknown finish reason {str(kind)[:40]!r}")
    return Finish(kind, matched if isinstance(matched, int | str) else None)


def are_ids(values: Iterable[Any]) -> bool:
    """Whether all `values` can be token ids."""
    return all(type(value) is int and value in IDS for value in values)


def is_log_prob(value: Any) -> bool:
    """Whether it is a finite number that can be a natural-log probability."""
    return type(value) in (int, float) and -math.inf < value <= _ROUNDING


def models_of(answer: Any) -> list[dict[str, Any]]:
    """The entries of an OpenAI-style list of models."""
    data = answer.get("data") if isinstance(answer, dict) else None
    return [entry for entry in data or () if isinstance(entry, dict) and "id" in entry]


# --- what a refusal means -----------------------------------------------------------------------

RETRIED_STATUS = frozenset({408, 425, 429, 502, 503, 504})
"""The engine (or the router before it) is away or busy: the same request may succeed later."""
NO_REASON = "no reason given"
_LIMIT = re.compile(
    r"context length(?: of| is|\s)*\(?(\d+)|maximum allowed length \((\d+) tokens\)|"
    r"maximum model length of (\d+)|max_model_len=(\d+)|context (?:holds|window of|length:) (\d+)"
)
_TOTAL = re.compile(r"requested a total of (\d+) tokens")
_OVERFLOW = re.compile(
    r"context length|maximum allowed length|maximum model length|max_model_len|prompt is too long|"
    # vLLM cuts max_tokens to what is left of the context, then says this; we never ask for less.
    r"context window|max_tokens must be at least 1, got 0",
    re.IGNORECASE,
)
_PASSING = re.compile(
    # An adapter that is not there (yet): vLLM, SGLang, SGLang since 0.5.
    r"^The model `[^`]*` does not exist|requested LoRA adapters are not loaded|"
    r"LoRA adapter that has never been loaded|"
    # vLLM ends itself: its core died, its server still answers for a moment.
    r"EngineCore encountered an issue",
    re.IGNORECASE,
)


class Lost(Exception):
    """No finish came, but the same request may succeed elsewhere or later.

    `faulty`: the engine answered with an error of its own (status 500), which may well be the
    request's fault.
    """

    def __init__(self, reason: str, *, faulty: bool = False) -> None:
        super().__init__(reason)
        self.faulty = faulty


def refusal(status: int, message: str, prompt_tokens: int) -> EngineRefused:
    """The error for a request that the engine will not serve (status 4xx)."""
    if status not in (400, 413, 422) or not _OVERFLOW.search(message):
        return EngineRefused(status, f"the engine refused the request ({status}): {message}")
    total, limit = _TOTAL.search(message), _LIMIT.search(message)
    if limit is not None:
        tokens = int(total.group(1)) if total else prompt_tokens
        return ContextOverflow(tokens, int(limit.group(limit.lastindex or 0)))
    return EngineRefused(
        400, f"prompt is too long: {prompt_tokens} tokens are more than the engine takes"
    )


def passing(message: str) -> bool:
    """Whether the engine says so between two lives: it lacks the adapter asked for (started anew,
    or about to load it), or is about to end. The same request is then tried again, not counted
    among those at which it fails."""
    return _PASSING.search(message) is not None


def reason_of(body: bytes) -> str:
    """The reason in an error body, at most 300 characters."""
    try:
        value: Any = orjson.loads(body)
    except ValueError:
        return NO_REASON
    for key in ("error", "message", "detail", "error_message"):
        if isinstance(value, dict) and key in value:
            value = value[key]
    if isinstance(value, list):  # FastAPI's validation errors: their "input" echoes the request
        fields = [
            ".".join(map(str, item.get("loc", ()))) + ": " + str(item.get("type", "invalid"))
            for item in value
            if isinstance(item, dict)
        ]
        value = ", ".join(fields)
    return value[:300] if isinstance(value, str) and value else NO_REASON
