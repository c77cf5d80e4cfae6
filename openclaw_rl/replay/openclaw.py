"""OpenClaw's session entries as conversations. Pure.

A session is a header and entries that name their parent; the last entry is where the conversation
stands, and the path from there to the root is what was said. A compaction or a reset begins
another history: it is another conversation here, as it is at the gateway.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openclaw_rl.replay.conversation import Conversation
from openclaw_rl.types import Message

Entry = Mapping[str, Any]

_NO_MODEL = ("delivery-mirror", "gateway-injected")
"""What OpenClaw calls the model of a message that it wrote itself; no request holds them."""

_SUMMARY = (
    "The conversation history before this point was compacted into the following summary:\n\n"
    "<summary>\n{}\n</summary>"
)
_BRANCH = (
    "The following is a summary of a branch that this conversation came back from:\n\n"
    "<summary>\n{}\n</summary>"
)


class _Unreadable(Exception):
    """A message that a text model cannot be shown."""


def conversations(entries: Sequence[Entry], where: str) -> list[Conversation]:
    """The conversations of one session, one for each history it had."""
    header = entries[0] if entries and entries[0].get("type") == "session" else {}
    session_id = header.get("id")
    path = _path([entry for entry in entries if entry.get("type") != "session"])
    parts = [_Part()]
    for entry in path:
        kind = entry.get("type")
        if kind in ("compaction", "reset"):
            kept = _kept(path, entry)
            parts.append(_Part())
            if kind == "compaction":
                parts[-1].say(_user(_SUMMARY.format(entry.get("summary") or "")))
            for old in kept:
                parts[-1].take(old, history=True)
            parts[-1].begin = len(parts[-1].messages)
        else:
            parts[-1].take(entry)
    return [
        Conversation(
            where=where,
            messages=tuple(part.messages),
            session_id=session_id if isinstance(session_id, str) else None,
            begin=part.begin,
            left_out=dict(part.left_out),
        )
        for part in parts
        if part.messages or part.left_out
    ]


@dataclass
class _Part:
    messages: list[Message] = field(default_factory=list)
    begin: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    cut: str = ""

    def say(self, message: Message) -> None:
        self.messages.append(message)

    def take(self, entry: Entry, *, history: bool = False) -> None:
        message = entry.get("message") if entry.get("type") == "message" else None
        reply = isinstance(message, Mapping) and message.get("role") == "assistant"
        if reply and message is not None and (reason := _no_reply(message)):
            self.left_out[reason] += not history
            return
        try:
            read = None if self.cut else _message(entry)
        except _Unreadable as error:
            self.cut = str(error)
            read = None
        if self.cut:
            self.left_out[self.cut] += reply and not history
        elif read is not None:
            self.say(read)


def _path(entries: Sequence[Entry]) -> list[Entry]:
    """From the root to the last entry. Entries without ids (old files) are taken in order."""
    by_id = {entry["id"]: entry for entry in entries if isinstance(entry.get("id"), str)}
    if len(by_id) < len(entries):
        return list(entries)
    path: list[Entry] = []
    entry = entries[-1] if entries else None
    while entry is not None and by_id.pop(entry["id"], None) is not None:  # a cycle ends it
        path.append(entry)
        # A `leaf` only says where the conversation went back to.
        parent = entry.get("targetId" if entry.get("type") == "leaf" else "parentId")
        entry = by_id.get(parent or "")
    return path[::-1]


def _kept(path: Sequence[Entry], entry: Entry) -> Sequence[Entry]:
    """What a compaction or reset kept of the path before it."""
    before = path[: next(i for i, other in enumerate(path) if other is entry)]
    first = entry.get("firstKeptEntryId")
    at = next((i for i, other in enumerate(before) if first and other.get("id") == first), None)
    return [] if at is None else before[at:]


def _no_reply(message: Message) -> str:
    """Why an assistant's message is no reply of a model; "" where it is one."""
    if message.get("model") in _NO_MODEL:
        return "not_a_model"
    return "failed_reply" if message.get("stopReason") in ("error", "aborted") else ""


def _message(entry: Entry) -> Message | None:
    """The entry as a message of a request; None where it is not shown to the model."""
    kind = entry.get("type")
    if kind == "custom_message":
        return _user(_text(entry.get("content")))
    if kind == "branch_summary":
        return _user(_BRANCH.format(entry.get("summary") or ""))
    message = entry.get("message")
    if kind != "message" or not isinstance(message, Mapping):
        return None
    role = message.get("role")
    if role == "user":
        return _user(_text(message.get("content")))
    if role == "toolResult":
        return {
            "role": "tool",
            "tool_call_id": str(message.get("toolCallId") or ""),
            "content": _text(message.get("content")),
        }
    return _reply(message) if role == "assistant" else None


def _reply(message: Message) -> Message:
    content = message.get("content")
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    texts = [block.get("text") or "" for block in blocks if block.get("type") == "text"]
    thoughts = [block.get("thinking") or "" for block in blocks if block.get("type") == "thinking"]
    calls = [_call(block) for block in blocks if block.get("type") == "toolCall"]
    text = "".join(texts)
    reply: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
    if any(thoughts):
        reply["reasoning_content"] = "\n".join(thoughts)
    if calls:
        reply["tool_calls"] = calls
    return reply


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(block.get("arguments") or {}, ensure_ascii=False)
    function = {"name": str(block.get("name") or ""), "arguments": arguments}
    return {"id": str(block.get("id") or ""), "type": "function", "function": function}


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else []
    if any(block.get("type") == "image" for block in blocks):
        raise _Unreadable("image")
    return "\n".join(block.get("text") or "" for block in blocks if block.get("type") == "text")
