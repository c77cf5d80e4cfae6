"""OpenClaw's sessions as messages of a model.

A session is a header and entries that name their parent; the last entry is where the conversation
stands, and the path from there to the root is what was said. A compaction or a reset begins
another history: it is another conversation here, as it is at the gateway.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from openclaw_rl.types import Message

Entry = Mapping[str, Any]

DATABASE = "openclaw-agent.sqlite"
"""The file that holds an agent's sessions from 2026.9 on; before, each is a JSONL file."""

_NO_MODEL = ("delivery-mirror", "gateway-injected")
"""What OpenClaw calls the model of a message that it wrote itself; no request holds them."""

_SUMMARY = "{}:\n\n<summary>\n{}\n</summary>"
_COMPACTED = "The conversation history before this point was compacted into the following summary"
_BRANCH = "The following is a summary of a branch that this conversation came back from"


@dataclass
class PastHistory:
    """One history of a session, as messages of a request; an image is a part of its type. Replies
    before `begin` are in another history too. `left_out` counts what is no model's reply, by
    reason."""

    messages: list[Message] = field(default_factory=list)
    begin: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


def session_folders(state_dir: Path) -> list[Path]:
    """The folders of a state folder in which sessions lie; none where it is no state folder."""
    return sorted(state_dir.glob("agents/*/sessions")) + sorted(state_dir.glob("agents/*/agent"))


def read_database(path: Path) -> Iterator[tuple[str, list[Any]]]:
    """Each session's id and its entries as JSON texts (None where it is compressed). Raises
    `sqlite3.Error`."""
    db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    try:
        rows = db.execute(
            "SELECT session_id, seq, event_json FROM transcript_events ORDER BY session_id, seq"
        ).fetchall()
    finally:
        db.close()
    for session_id, events in groupby(rows, key=lambda row: row[0]):
        yield session_id, [event for _, _, event in events]


def histories(entries: Sequence[Entry]) -> list[PastHistory]:
    """The histories of one session, in their order. Fields of other kinds than OpenClaw writes
    raise `AttributeError`, `TypeError` or `ValueError`."""
    found: list[PastHistory] = []
    for path in _paths([entry for entry in entries if entry.get("type") != "session"]):
        lost = Counter(broken_link=1) if found else Counter[str]()
        found += _histories(path, lost)
    return [history for history in found if history.messages or history.left_out]


def _histories(path: Sequence[Entry], left_out: Counter[str]) -> list[PastHistory]:
    """Those of one path; `left_out` is what is already known of the first."""
    found = [PastHistory(left_out=left_out)]
    for at, entry in enumerate(path):
        kind = entry.get("type")
        if kind in ("compaction", "reset"):
            first = entry.get("firstKeptEntryId")
            kept = next((i for i in range(at) if first and path[i].get("id") == first), at)
            summary = [_summary(_COMPACTED, entry)] if kind == "compaction" else []
            messages = [*summary, *filter(None, map(_message, path[kept:at]))]
            found.append(PastHistory(messages, len(messages)))
        elif reason := _no_reply(entry):
            found[-1].left_out[reason] += 1
        elif (message := _message(entry)) is not None:
            found[-1].messages.append(message)
    return found


def _paths(entries: Sequence[Entry]) -> list[list[Entry]]:
    """From the root to the last entry; where a link in between names nothing, the path that ends
    before it comes first. Entries without ids (old files) are taken in order."""
    by_id = {entry["id"]: entry for entry in entries if isinstance(entry.get("id"), str)}
    if len(by_id) < len(entries):
        return [list(entries)]
    paths: list[list[Entry]] = []
    known, left = set(by_id), list(entries)
    while left:
        path, parent = [], left[-1]["id"]
        while (entry := by_id.pop(parent or "", None)) is not None:  # a cycle ends it
            path.append(entry)
            # A `leaf` only says where the conversation went back to.
            parent = entry.get("targetId" if entry.get("type") == "leaf" else "parentId")
        paths.append(path[::-1])
        begin = next(at for at, entry in enumerate(left) if entry is path[-1])
        # What stands before a root, or before where a cycle closes, was given up by the person.
        lost = parent and parent not in known
        left = [entry for entry in left[:begin] if entry["id"] in by_id] if lost else []
    return paths[::-1]


def _said(entry: Entry) -> Message:
    """The message of an entry; empty where it is another kind of entry."""
    return (entry.get("message") if entry.get("type") == "message" else None) or {}


def _no_reply(entry: Entry) -> str:
    """Why an assistant's message is no reply of a model; "" where it is one."""
    message = _said(entry)
    if message.get("role") != "assistant":
        return ""
    if message.get("model") in _NO_MODEL:
        return "not_a_model"
    return "failed_reply" if message.get("stopReason") in ("error", "aborted") else ""


def _message(entry: Entry) -> Message | None:
    """The entry as a message of a request; None where it is not shown to the model."""
    if entry.get("type") == "custom_message":
        return {"role": "user", "content": _content(entry)}
    if entry.get("type") == "branch_summary":
        return _summary(_BRANCH, entry)
    message = _said(entry)
    match message.get("role"):
        case "user":
            return {"role": "user", "content": _content(message)}
        case "toolResult":
            call_id = str(message.get("toolCallId") or "")
            return {"role": "tool", "tool_call_id": call_id, "content": _content(message)}
        case "assistant" if not _no_reply(entry):
            return _reply(message)
    return None


def _summary(words: str, entry: Entry) -> Message:
    return {"role": "user", "content": _SUMMARY.format(words, entry.get("summary") or "")}


def _reply(message: Message) -> Message:
    calls = [
        {
            "id": str(block.get("id") or ""),
            "type": "function",
            "function": {
                "name": str(block.get("name") or ""),
                "arguments": json.dumps(block.get("arguments") or {}, ensure_ascii=False),
            },
        }
        for block in _blocks(message)
        if block.get("type") == "toolCall"
    ]
    text = _join(message, "text", "")
    reply: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
    if thoughts := _join(message, "thinking", "\n"):
        reply["reasoning_content"] = thoughts
    if calls:
        reply["tool_calls"] = calls
    return reply


def _content(message: Message) -> Any:
    """Its texts as one, or its blocks where there is an image among them."""
    blocks = _blocks(message)
    if any(block.get("type") == "image" for block in blocks):
        return list(blocks)
    return _join(message, "text", "\n")


def _blocks(message: Message) -> Sequence[Mapping[str, Any]]:
    content = message.get("content") or ""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _join(message: Message, kind: str, glue: str) -> str:
    """The texts of its blocks of one kind, which have the text under the same name."""
    return glue.join(block.get(kind) or "" for block in _blocks(message)
                     if block.get("type") == kind)  # fmt: skip
