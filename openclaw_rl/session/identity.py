"""Who is speaking: the first explicit name that a request carries.

Guarantees: a placeholder (`unknown`, `undefined`, ...) is no name; OpenClaw's `UUID:N` (N rises at
each compaction) names the session `UUID`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openclaw_rl.types import Message

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

_CLAUDE_CODE = re.compile(r"_session_([0-9a-fA-F-]{36})\Z")
"""How older releases of Claude Code end `metadata.user_id`; newer ones put JSON there."""

_PLACEHOLDERS = frozenset(("", "unknown", "undefined", "null", "none"))
_COUNTED = re.compile(r"([0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}):\d+\Z")
_LONGEST = 512


@dataclass(frozen=True, slots=True)
class Identity:
    """Who is speaking, and how we know (`source`: `header:x-session-id`, `body:user`, `key`)."""

    session_id: str
    source: str


@dataclass(frozen=True, slots=True)
class RequestView:
    """What the tracker needs of one request.

    `headers` have lower-case names. `owner` separates API keys: histories are never shared
    across owners. `hints` holds body fields that can name a session (`prompt_cache_key`, `user`,
    `metadata`). `key_session` is the session named inside the API key (`KEY:SESSION`), if any.
    """

    messages: tuple[Message, ...]
    headers: Mapping[str, str]
    owner: str = ""
    hints: Mapping[str, Any] | None = None
    key_session: str | None = None
    has_tools: bool = False


def identify(view: RequestView) -> Identity | None:
    """The explicit name of the session, or None: then only the history can tell."""
    hints = view.hints or {}
    metadata = hints.get("metadata")
    if not isinstance(metadata, Mapping):
        metadata = {}
    for source, value in (
        *((f"header:{name}", view.headers.get(name)) for name in HEADERS),
        ("body:prompt_cache_key", hints.get("prompt_cache_key")),
        *((f"body:metadata.{name}", metadata.get(name)) for name in METADATA),
        ("body:metadata.user_id", _session_in(metadata.get("user_id"))),
        ("body:user", hints.get("user")),
        ("body:user", metadata.get("user_id")),
        ("key", view.key_session),
    ):
        if name := _name(value):
            return Identity(name, source)
    return None


def is_named(source: str) -> bool:
    """Whether `source` is an explicit name rather than a guess from the history."""
    return source == "key" or source.startswith(("header:", "body:"))


def is_conversation(source: str) -> bool:
    """Whether the name is that of one conversation. `user` names a person, who may say the same
    thing in several conversations."""
    return is_named(source) and source != "body:user"


def _session_in(user_id: Any) -> Any:
    """The session that Claude Code puts into `metadata.user_id`, if it is one of its."""
    if not isinstance(user_id, str) or len(user_id) > _LONGEST:
        return None
    if user_id.startswith("{"):
        try:
            value = json.loads(user_id)
        except (ValueError, RecursionError):
            return None
        return value.get("session_id") if isinstance(value, dict) else None
    found = _CLAUDE_CODE.search(user_id)
    return found.group(1) if found else None


def _name(value: Any) -> str | None:
    if not isinstance(value, str):
        return None
    value = value.strip()
    if value.lower() in _PLACEHOLDERS or len(value) > _LONGEST or not value.isprintable():
        return None
    counted = _COUNTED.match(value)
    return counted.group(1) if counted else value
