"""Main or side: which requests are turns of an agent, and which only serve its housekeeping."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from openclaw_rl.session.canonical import SYSTEM_ROLES, Trace, text_of, trace_of
from openclaw_rl.types import Kind, Message

_LINE = r"^(?:\[[^\]\n]{1,60}\]\s*)?"

_SYSTEM_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("compaction", re.compile(r"^You are a context summarization assistant", re.M)),
    ("btw", re.compile(r"^You are answering an ephemeral /btw side question", re.M)),
    ("title", re.compile(r"^You are naming a coding session", re.M)),
)
_USER_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("btw", re.compile(r"^<btw_side_question>", re.M)),
    ("memory-flush", re.compile(_LINE + r"Pre-compaction memory flush\b", re.M)),
    ("slug", re.compile(_LINE + r"Based on this conversation, generate a short 1-2 word", re.M)),
    ("greeting", re.compile(_LINE + r"A new session was started via /new or /reset", re.M)),
    ("heartbeat", re.compile(_LINE + r"Read HEARTBEAT\.md if it exists", re.M)),
    ("heartbeat", re.compile(_LINE + r"Follow the heartbeat monitor scratch context", re.M)),
    ("chat-ui-task", re.compile(r"\A### Task:\n.*<chat_history>", re.S)),
    ("compaction", re.compile(r"\ACRITICAL: Respond with TEXT ONLY\.")),
    ("compaction", re.compile(r"^Your task is to create a detailed summary of the conver", re.M)),
    ("btw", re.compile(r"^<system-reminder>This is a side question from the user", re.M)),
    ("suggestion", re.compile(r"^\[SUGGESTION MODE:", re.M)),
    ("recap", re.compile(r"^The user stepped away and is coming back\.", re.M)),
    ("memory", re.compile(r"^You are now acting as the memory extraction subagent", re.M)),
)
"""The words of OpenClaw's and Claude Code's own housekeeping, and of chat interfaces that name and
tag chats."""

ALWAYS_WITH_TOOLS = ("claude-cli/",)
"""Programs whose turns have tools: what they ask without any is a title, a probe, a summary."""


def named_kind(headers: Mapping[str, str]) -> Kind | None:
    """What an explicit `x-turn-type` header says; any word but `main` means side."""
    value = headers.get("x-turn-type", "").strip().lower()
    if value in ("", "unknown", "undefined", "null", "none"):
        return None
    return "main" if value == "main" else "side"


def side_pattern(messages: Sequence[Message]) -> str | None:
    """The name of the housekeeping that wrote this request, or None.

    Only system texts and the last lasting user message are read: what an earlier message said
    does not make a later turn housekeeping, but the tool results of a side request do not make
    it a turn either.
    """
    system = [message for message in messages if message.get("role") in SYSTEM_ROLES]
    user = last_user(messages)
    for texts, patterns in (
        (map(text_of, system), _SYSTEM_PATTERNS),
        ([text_of(user)] if user else [], _USER_PATTERNS),
    ):
        for text in texts:
            for name, pattern in patterns:
                if pattern.search(text):
                    return name
    return None


def last_user(messages: Sequence[Message]) -> Message | None:
    """The last user message that a user (or a housekeeper) wrote."""
    for message in reversed(messages):
        if message.get("role") == "user" and trace_of(message) is Trace.NORMAL:
            return message
    return None
