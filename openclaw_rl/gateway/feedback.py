"""Explicit feedback on a turn: `POST /v1/feedback`, and what its body may hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from openclaw_rl.types import Message
from openclaw_rl.wire.errors import invalid
from openclaw_rl.wire.request import read_object

_REPLY_PREFIXES = ("chatcmpl-", "msg_")
"""What stands before the turn's id in the id of a reply, by dialect."""


@dataclass(frozen=True, slots=True)
class Feedback:
    """Names a turn, or a session (then its newest main turn is meant), and what to say of it."""

    turn_id: str | None
    session_id: str | None
    message: Message
    """The next state that the judge reads: role `feedback`, `thumb`, `score`, `content`."""


def turn_of_reply(reply_id: str) -> str:
    """The turn's id in the id of a reply, as clients see it; a bare one stays as it is."""
    for prefix in _REPLY_PREFIXES:
        if reply_id.startswith(prefix):
            return reply_id.removeprefix(prefix)
    return reply_id


def parse_feedback(body: bytes) -> Feedback:
    """Read a body; `WireError` 400 names the field that is wrong."""
    data = read_object(body)
    turn_id, session_id = _text(data, "turn_id"), _text(data, "session_id")
    if (turn_id is None) == (session_id is None):
        raise invalid("turn_id", "give either turn_id or session_id")
    score, thumb, text = data.get("score"), data.get("thumb"), _text(data, "text")
    if isinstance(score, bool) or not isinstance(score, int | float | None):
        raise invalid("score", "must be a number from -1 to 1")
    if score is not None and not -1 <= score <= 1:  # nor is NaN
        raise invalid("score", "must be a number from -1 to 1")
    if thumb not in (None, "up", "down"):
        raise invalid("thumb", "must be 'up' or 'down'")
    if score is None and thumb is None and text is None:
        raise invalid(None, "give at least one of score, thumb and text")
    if turn_id is not None:
        turn_id = turn_of_reply(turn_id)
    message = {"role": "feedback", "thumb": thumb, "score": score, "content": text or ""}
    return Feedback(turn_id, session_id, message)


def _text(data: dict[str, Any], key: str) -> str | None:
    value = data.get(key)
    if value is not None and not isinstance(value, str):
        raise invalid(key, "must be a string")
    return value or None
