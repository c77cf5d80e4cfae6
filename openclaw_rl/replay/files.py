"""Files of past conversations: which there are, and what stands in them.

Read are JSONL with one conversation a line (`{"messages": [...]}`, with `tools` and `session_id`
where there are any, or a bare list), JSONL with one message a line (one conversation a file, or
one for each `session_id`), and OpenClaw's own sessions (`openclaw/sessions.py`). A line that is
none of these is an error that names file and line; in a session it is left out, counted and named.
No message quotes the text.
"""

from __future__ import annotations

import codecs
import os
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from openclaw_rl.errors import OpenClawRLError
from openclaw_rl.openclaw import sessions
from openclaw_rl.types import Message
from openclaw_rl.wire.chat import parse_messages
from openclaw_rl.wire.dialect import WireError, read_json

_IS_PAST = re.compile(rf".*\.jsonl(?:\.(?:reset|deleted)\..*)?|{re.escape(sessions.DATABASE)}")


class ReplayError(OpenClawRLError):
    """A file that cannot be read as conversations; the message begins with `file:line`."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """`messages` as clients send them. Replies before `begin` are history only (what a compaction
    kept of it). `left_out` counts replies of the source that are not in it, by reason."""

    where: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    session_id: str | None = None
    begin: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)


def find(path: Path) -> list[Path]:
    """The file at `path`, or the JSONL files below a folder: links followed, each folder once,
    `checkpoints` left out. Of OpenClaw's state folder its sessions, and the JSONL files at its top.

    Raises `ReplayError` where a folder cannot be looked into.
    """
    if path.is_file():
        return [path]
    if not path.exists():
        raise ReplayError(f"{path}: no such file or folder")

    def refused(error: OSError) -> None:
        raise ReplayError(f"{error.filename}: cannot be read: {error.strerror}") from error

    found, seen = {*path.glob("*.jsonl")}, {os.path.realpath(path / "checkpoints")}
    for root in sessions.session_folders(path) or [path]:
        for folder, folders, names in os.walk(root, onerror=refused, followlinks=True):
            if (real := os.path.realpath(folder)) in seen:
                folders.clear()
                continue
            seen.add(real)
            found |= {Path(folder, name) for name in names if _IS_PAST.fullmatch(name)}
    return sorted(found)


def check(paths: Iterable[Path]) -> None:
    """Read each file to its end. Raises `ReplayError`."""
    for path in paths:
        for _ in read(path):
            pass


def read(path: Path) -> Iterator[Conversation]:
    """The conversations in a file. Raises `ReplayError` with file and line."""
    if path.suffix == ".sqlite":
        yield from _database(path)
        return
    lines, broken = _lines(path)
    first = lines[0][1] if lines else None
    session = isinstance(first, dict) and first.get("type") == "session"
    if broken and not session:
        number, what = broken[0]
        raise ReplayError(f"{path}:{number}: is not JSON: {what}")
    if session:
        for number, _ in broken:  # nobody wrote it by hand, and the rest is as it was said
            yield Conversation(f"{path}:{number}", (), left_out={"unreadable_line": 1})
        yield from _session([line for _, line in lines], f"{path}:1")
    elif isinstance(first, dict) and "role" in first:
        yield from _by_message(path, lines)
    else:
        for number, line in lines:
            yield _conversation(f"{path}:{number}", line)


def _lines(path: Path) -> tuple[list[tuple[int, Any]], list[tuple[int, str]]]:
    """The values of a file's lines with their numbers, and which lines are not JSON, and why."""
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        raise ReplayError(f"{path}: cannot be read: {error.strerror}") from error
    found: list[tuple[int, Any]] = []
    broken: list[tuple[int, str]] = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                found.append((number, read_json(line.decode())))
        except (ValueError, RecursionError) as error:
            if number == len(lines) > 1:
                break  # without its line break: still being written, or torn by a crash
            broken.append((number, getattr(error, "msg", type(error).__name__)))
    return found, broken


def _conversation(where: str, line: Any) -> Conversation:
    fields = {"messages": line} if isinstance(line, list) else line
    if not isinstance(fields, dict) or "messages" not in fields:
        raise ReplayError(
            f'{where}: must be {{"messages": [...]}}, a list of messages, or one message '
            "with a role"
        )
    tools = fields.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ReplayError(f"{where}: tools must be a list of objects")
    messages = _parsed(where, fields["messages"])
    return _until_image(where, messages, _session_id(fields), tools=tuple(tools))


def _by_message(path: Path, lines: Sequence[tuple[int, Any]]) -> Iterator[Conversation]:
    found: dict[str | None, tuple[str, list[Message]]] = {}
    for number, line in lines:
        where = f"{path}:{number}"
        if not isinstance(line, dict) or "role" not in line:
            raise ReplayError(f"{where}: must be a message with a role, as the lines above")
        found.setdefault(_session_id(line), (where, []))[1].extend(_parsed(where, [line]))
    for session_id, (where, messages) in found.items():
        yield _until_image(where, messages, session_id)


def _session_id(fields: Mapping[str, Any]) -> str | None:
    value = fields.get("session_id")
    return str(value) if isinstance(value, str | int) and value != "" else None


def _parsed(where: str, messages: Any) -> tuple[Message, ...]:
    try:
        return parse_messages(messages, image_ok=True)
    except WireError as error:
        raise ReplayError(f"{where}: {error.message}") from None


def _database(path: Path) -> Iterator[Conversation]:
    try:
        found = list(sessions.read_database(path))
    except sqlite3.Error as error:
        raise ReplayError(f"{path}: cannot be read as OpenClaw's sessions: {error}") from error
    for session_id, events in found:
        where = f"{path}:{session_id}"
        if None in events:  # zstd, which Python reads from 3.14 on
            yield Conversation(where, (), left_out={"compressed_session": 1})
            continue
        try:
            entries = [read_json(event) for event in events]
        except (TypeError, ValueError, RecursionError):
            raise ReplayError(f"{where}: an event is not JSON") from None
        yield from _session(entries, where)


def _session(entries: Sequence[Any], where: str) -> Iterator[Conversation]:
    """One of OpenClaw's sessions, whose fields may hold anything."""
    if not all(isinstance(entry, dict) for entry in entries):
        raise ReplayError(f"{where}: an entry of a session must be an object")
    head = entries[0].get("id") if entries[0].get("type") == "session" else None
    session_id = head if isinstance(head, str) else None
    try:
        found = sessions.histories(entries)
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise ReplayError(
            f"{where}: is not a session as OpenClaw writes it ({type(error).__name__})"
        ) from None
    for one in found:
        made = _until_image(where, one.messages, session_id, begin=one.begin)
        yield replace(made, left_out={**one.left_out, **made.left_out})


def _until_image(
    where: str,
    messages: Sequence[Message],
    session_id: str | None,
    *,
    tools: tuple[Mapping[str, Any], ...] = (),
    begin: int = 0,
) -> Conversation:
    """A conversation as far as a text model can be shown it: to its first image."""
    images = (i for i, message in enumerate(messages) if isinstance(message["content"], list))
    end = next(images, len(messages))
    unseen = sum(message["role"] == "assistant" for message in messages[max(begin, end) :])
    left_out = {"image": unseen} if unseen else {}
    return Conversation(where, tuple(messages[:end]), tools, session_id, begin, left_out)
