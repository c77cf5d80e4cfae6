"""Who is speaking: the first explicit name that a request carries.

Guarantees: a placeholder (`unknown`, `undefined`, ...) is no name; OpenClaw's `UUID:N` (N rises at
each compaction) names the session `UUID`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from openclaw_rl.session.types import Identity, RequestView

HEADERS = (
    "x-session-id",
    "session_id",
    "session-id",
    "x-session-affinity",
    "x-claude-code-session-id",
    "x-conversation-id",
    "conversation_id",
)
"""Headers that name a session, the most explicit first. `x-client-request-id` is not among them:
most clients send another one with each request."""

METADATA = ("session_id", "sessionId", "conversation_id", "thread_id")

_PLACEHOLDERS = frozenset(("", "unknown", "undefined", "null", "none"))
_COUNTED = re.compile(r"([0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}):\d+\Z")
_LONGEST = 512


def identify(view: RequestView) -> Identity | None:
    """The explicit name of the session, or None: then only the history can tell."""
    for name in HEADERS:
        found = _name(view.headers.get(name))
        if found:
            return Identity(found, f"header:{name}")
    hints = view.hints or {}
    found = _name(hints.get("prompt_cache_key"))
    if found:
        return Identity(found, "body:prompt_cache_key")
    metadata = hints.get("metadata")
    if isinstance(metadata, Mapping):
        for name in METADATA:
            found = _name(metadata.get(name))
            if found:
                return Identity(found, f"body:metadata.{name}")
    found = _name(hints.get("user"))
    if found:
        return Identity(found, "body:user")
    found = _name(view.key_session)
    if found:
        return Identity(found, "key")
    return None


def is_named(source: str) -> bool:
    """Whether `source` is an explicit name rather than a guess from the history."""
    return source == "key" or source.startswith(("header:", "body:"))


def is_conversation(source: str) -> bool:
    """Whether the name is that of one conversation. `user` names a person, who may say the same
    thing in several conversations."""
    return is_named(source) and source != "body:user"


def _name(value: Any) -> str | None:
    if not isinstance(value, str):
        return None
    value = value.strip()
    if value.lower() in _PLACEHOLDERS or len(value) > _LONGEST or not value.isprintable():
        return None
    counted = _COUNTED.match(value)
    return counted.group(1) if counted else value
