"""Files of past conversations: which there are, and what stands in them.

Read are JSONL with one conversation a line (`{"messages": [...]}`, with `tools` and `session_id`
where there are any, or a bare list), JSONL with one message a line (one conversation a file, or
one for each `session_id`), and OpenClaw's own sessions (`openclaw/sessions.py`). A line that is
none of these is an error that names file and line; no message quotes the text.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openclaw_rl.errors import OpenClawRLError
from openclaw_rl.openclaw import sessions
from openclaw_rl.types import Message
from openclaw_rl.wire.chat import parse_messages
from openclaw_rl.wire.dialect import WireError, read_json

_NAMES = ("*.jsonl", "*.jsonl.reset.*", "*.jsonl.deleted.*", sessions.DATABASE)


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
    """The files at `path`, a file or a folder. Of OpenClaw's state folder only its sessions."""
    if not path.exists():
        raise ReplayError(f"{path}: no such file or folder")
    if path.is_file():
        return [path]
    files = {file for root in sessions.session_folders(path) or [path] for file in _walk(root)}
    return sorted(file for file in files if any(map(file.match, _NAMES)) and file.is_file())


def in_data(folder: Path) -> list[Path]:
    """The files of conversations in a data folder: its own beside OpenClaw's, too. What trainers
    write beside their checkpoints is not among them."""
    checkpoints = folder / "checkpoints"
    found = (file for file in find(folder) if checkpoints not in file.parents)
    return [*sorted(folder.glob("*.jsonl")), *found]


def check(paths: Iterable[Path]) -> list[Path]:
    """The files at `paths`, each once and read to its end. Raises `ReplayError`."""
    found = list(dict.fromkeys(file for path in paths for file in find(path)))
    for file in found:
        for _ in read(file):
            pass
    return found


def _walk(root: Path) -> Iterator[Path]:
    """All files below `root`, links to folders followed, each folder once. One that cannot be
    looked into is an error: what lies there would be missed for months."""

    def refused(error: OSError) -> None:
        raise ReplayError(f"{error.filename}: cannot be read: {error.strerror}") from error

    seen: set[str] = set()
    for folder, folders, names in os.walk(root, onerror=refused, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        yield from (Path(folder, name) for name in names)


def read(path: Path) -> Iterator[Conversation]:
    """The conversations in a file. Raises `ReplayError` with file and line."""
    if path.name.endswith(".sqlite"):
        yield from _database(path)
        return
    lines = list(_lines(path))
    first = lines[0][1] if lines else None
    if isinstance(first, dict) and first.get("type") == "session":
        for number, line in lines:
            if not isinstance(line, dict):
                raise ReplayError(f"{path}:{number}: an entry of a session must be an object")
        yield from _session([line for _, line in lines], f"{path}:1")
    elif isinstance(first, dict) and "role" in first:
        yield from _by_message(path, lines)
    else:
        for number, line in lines:
            yield _conversation(f"{path}:{number}", line)


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        # The last line may be torn within a character.
        text = data[:whole].decode("utf-8-sig")
        text += data[whole:].decode("utf-8-sig", "replace" if whole else "strict")
    except UnicodeDecodeError as error:
        raise ReplayError(f"{path}: is not UTF-8 text ({error.reason})") from error
    except OSError as error:
        raise ReplayError(f"{path}: cannot be read: {error.strerror}") from error
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield number, read_json(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines) and number > 1:
                return  # without its line break: still being written, or torn by a crash
            deep = isinstance(error, RecursionError)
            what = getattr(error, "msg", "nested too deeply" if deep else "a number too long")
            raise ReplayError(f"{path}:{number}: is not JSON: {what}") from None


def _conversation(where: str, line: Any) -> Conversation:
    fields = {"messages": line} if isinstance(line, list) else line
    if not isinstance(fields, Mapping) or "messages" not in fields:
        raise ReplayError(
            f'{where}: must be {{"messages": [...]}}, a list of messages, or one message '
            "with a role"
        )
    tools = fields.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ReplayError(f"{where}: tools must be a list of objects")
    messages = _parsed(where, fields["messages"])
    return _until_image(where, messages, tuple(tools), _session_id(fields))


def _by_message(path: Path, lines: Sequence[tuple[int, Any]]) -> Iterator[Conversation]:
    found: dict[str | None, tuple[str, list[Message]]] = {}
    for number, line in lines:
        where = f"{path}:{number}"
        if not isinstance(line, dict) or "role" not in line:
            raise ReplayError(f"{where}: must be a message with a role, as the lines above")
        found.setdefault(_session_id(line), (where, []))[1].extend(_parsed(where, [line]))
    for session_id, (where, messages) in found.items():
        yield _until_image(where, messages, (), session_id)


def _until_image(
    where: str,
    messages: Sequence[Message],
    tools: tuple[Mapping[str, Any], ...] = (),
    session_id: str | None = None,
    begin: int = 0,
    left_out: Mapping[str, int] | None = None,
) -> Conversation:
    """A conversation as far as a text model can be shown it: to its first image."""
    images = (i for i, message in enumerate(messages) if isinstance(message["content"], list))
    end = next(images, len(messages))
    unseen = sum(message["role"] == "assistant" for message in messages[max(begin, end) :])
    counts = {**(left_out or {}), **({"image": unseen} if unseen else {})}
    return Conversation(where, tuple(messages[:end]), tools, session_id, begin, counts)


def _parsed(where: str, messages: Any) -> tuple[Message, ...]:
    try:
        return parse_messages(messages, image_ok=True)
    except WireError as error:
        raise ReplayError(f"{where}: {error.message}") from None


def _session_id(fields: Mapping[str, Any]) -> str | None:
    for name in ("session_id", "conversation_id"):
        value = fields.get(name)
        if isinstance(value, str | int) and str(value):
            return str(value)
    return None


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
        except (AttributeError, TypeError, ValueError, RecursionError):
            raise ReplayError(f"{where}: an event is not JSON") from None
        yield from _session(entries, where)


def _session(entries: Sequence[Any], where: str) -> Iterator[Conversation]:
    """One of OpenClaw's sessions, whose fields may hold anything."""
    if not all(isinstance(entry, dict) for entry in entries):
        raise ReplayError(f"{where}: an entry of a session must be an object")
    head = entries[0] if entries and entries[0].get("type") == "session" else {}
    session_id = head.get("id") if isinstance(head.get("id"), str) else None
    try:
        found = sessions.histories(entries)
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise ReplayError(
            f"{where}: is not a session as OpenClaw writes it ({type(error).__name__})"
        ) from None
    for one in found:
        yield _until_image(where, one.messages, (), session_id, one.begin, one.left_out)
