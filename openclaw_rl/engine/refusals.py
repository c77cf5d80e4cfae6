"""What an engine's refusal means, in one place: context overflow, bad request, or away for now.

Messages keep the engine's own words, shortened; bodies that may echo the request (validation
errors) are reduced to the names of the fields, so no conversation text reaches logs or clients.
"""

from __future__ import annotations

import json
import re
from typing import Any

from openclaw_rl.errors import ContextOverflow, EngineRefused

RETRIED_STATUS = frozenset({408, 425, 429, 502, 503, 504})
"""The engine (or the router before it) is away or busy: the same request may succeed later."""

NO_REASON = "no reason given"
NO_SUCH_PATH = frozenset({"Not Found", NO_REASON})
"""Reasons beside a 404 that speak of the path (FastAPI's words, or none), not of what was asked."""

_LIMITS = (
    re.compile(r"context length(?: of| is|\s)*\(?(\d+) ?(?:tokens)?"),
    re.compile(r"maximum allowed length \((\d+) tokens\)"),
    re.compile(r"maximum model length of (\d+)"),
    re.compile(r"max_model_len=(\d+)"),
    re.compile(r"context (?:holds|window of|length:) (\d+)"),
)
_PASSING = re.compile(
    # An adapter that is not there (yet): vLLM, SGLang, SGLang since 0.5.
    r"^The model `[^`]*` does not exist|requested LoRA adapters are not loaded|"
    r"LoRA adapter that has never been loaded|"
    # vLLM ends itself: its core died, its server still answers for a moment.
    r"EngineCore encountered an issue",
    re.IGNORECASE,
)
_TOTAL = re.compile(r"requested a total of (\d+) tokens")
_OVERFLOW = re.compile(
    r"context length|maximum allowed length|maximum model length|max_model_len|prompt is too long|"
    # vLLM cuts max_tokens to what is left of the context, then says this; we never ask for less.
    r"context window|max_tokens must be at least 1, got 0",
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
    if status in (400, 413, 422) and _OVERFLOW.search(message):
        total = _TOTAL.search(message)
        for pattern in _LIMITS:
            if found := pattern.search(message):
                tokens = int(total.group(1)) if total else prompt_tokens
                return ContextOverflow(tokens, int(found.group(1)))
        return EngineRefused(
            400, f"prompt is too long: {prompt_tokens} tokens are more than the engine takes"
        )
    return EngineRefused(status, f"the engine refused the request ({status}): {message}")


def passing(message: str) -> bool:
    """Whether the engine says so between two lives: it lacks the adapter asked for (started anew,
    or about to load it), or is about to end. The same request is then tried again, not counted
    among those at which it fails."""
    return _PASSING.search(message) is not None


def reason_of(body: bytes) -> str:
    """The reason in an error body, at most 300 characters."""
    try:
        value: Any = json.loads(body)
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
