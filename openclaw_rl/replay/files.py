"""Files of past conversations: which there are, and what stands in them.

Read are JSONL with one conversation a line (`{"messages": [...]}`, with `tools` and `session_id`
where there are any, or a bare list), JSONL with one message a line (one conversation a file, or
one for each `session_id`), and OpenClaw's own: `agents/*/sessions/*.jsonl` (to 2026.4) and
`agents/*/agent/openclaw-agent.sqlite` (2026.9). A line that is none of these is an error that
names file and line; no message quotes the text.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any

from openclaw_rl.replay import openclaw
from openclaw_rl.replay.conversation import Conversation, ReplayError
from openclaw_rl.wire.chat import parse_messages
from openclaw_rl.wire.errors import WireError

_JSONL = ("*.jsonl", "*.jsonl.reset.*", "*.jsonl.deleted.*")
_SQLITE = "openclaw-agent.sqlite"


def find(path: Path) -> list[Path]:
    """The files at `path`, a file or a folder. Of OpenClaw's state folder only its sessions."""
    if not path.exists():
        raise ReplayError(f"{path}: there is no such file or folder")
    if path.is_file():
        return [path]
    roots = [path]
    if (path / "agents").is_dir():
        roots = sorted(path.glob("agents/*/sessions")) + sorted(path.glob("agents/*/agent"))
    found = {
        file
        for root in roots
        for file in _walk(root)
        if any(fnmatchcase(file.name, pattern) for pattern in (*_JSONL, _SQLITE))
    }
    return sorted(file for file in found if file.is_file())


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


def in_data(folder: Path) -> list[Path]:
    """Where conversations may lie in a data folder: files of its own beside OpenClaw's, too."""
    return [*sorted(folder.glob("*.jsonl")), folder]


def check(paths: Sequence[Path]) -> list[Path]:
    """The files at `paths`, each once and read to its end. Raises `ReplayError`."""
    found = list(dict.fromkeys(file for path in paths for file in find(path)))
    for file in found:
        for _ in read(file):
            pass
    return found


def read(path: Path) -> Iterator[Conversation]:
    """The conversations in a file. Raises `ReplayError` with file and line."""
    if path.name.endswith(".sqlite"):
        yield from _read_sqlite(path)
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
            yield _conversation(path, number, line)


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        # The last line may be torn within a character.
        text = data[:whole].decode("utf-8-sig")
        text += data[whole:].decode("utf-8-sig", "replace" if whole else "strict")
    except UnicodeDecodeError as error:
        raise ReplayError(f"{path}: is no UTF-8 text ({error.reason})") from error
    except OSError as error:
        raise ReplayError(f"{path}: cannot be read: {error.strerror}") from error
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield number, _loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines) and number > 1:
                return  # without its line break: still being written, or torn by a crash
            words = (
                "nested too deeply" if isinstance(error, RecursionError) else "a number too long"
            )
            what = getattr(error, "msg", words)
            raise ReplayError(f"{path}:{number}: is no JSON: {what}") from None


def _session(entries: Sequence[Any], where: str) -> list[Conversation]:
    """One of OpenClaw's sessions, whose fields may hold anything."""
    if not all(isinstance(entry, dict) for entry in entries):
        raise ReplayError(f"{where}: an entry of a session must be an object")
    try:
        return openclaw.conversations(entries, where)
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise ReplayError(
            f"{where}: is no session as OpenClaw writes it ({type(error).__name__})"
        ) from None


def _loads(text: str) -> Any:
    value = json.loads(text)
    if "\\ud" in text.lower():  # half a character (JavaScript cuts texts so): a mark in its place
        text = json.dumps(value, ensure_ascii=False)
        return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    return value


def _conversation(path: Path, number: int, line: Any) -> Conversation:
    where = f"{path}:{number}"
    fields: Mapping[str, Any] = {"messages": line} if isinstance(line, list) else line
    if not isinstance(fields, Mapping) or "messages" not in fields:
        raise ReplayError(
            f'{where}: must be {{"messages": [...]}}, a list of messages, or one message '
            "with a role"
        )
    tools = fields.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ReplayError(f"{where}: tools must be a list of objects")
    messages = _parsed(where, fields["messages"])
    return _shown(where, messages, tuple(tools), _session_id(fields))


def _by_message(path: Path, lines: Sequence[tuple[int, Any]]) -> Iterator[Conversation]:
    sessions: dict[str | None, list[tuple[int, Any]]] = {}
    for number, line in lines:
        if not isinstance(line, dict) or "role" not in line:
            raise ReplayError(f"{path}:{number}: must be a message with a role, as the lines above")
        _parsed(f"{path}:{number}", [line])  # so that a mistake is told by its own line
        sessions.setdefault(_session_id(line), []).append((number, line))
    for session_id, own in sessions.items():
        where = f"{path}:{own[0][0]}"
        messages = _parsed(where, [line for _, line in own])
        yield _shown(where, messages, (), session_id)


def _shown(
    where: str,
    messages: tuple[Mapping[str, Any], ...],
    tools: tuple[Mapping[str, Any], ...],
    session_id: str | None,
) -> Conversation:
    """A conversation as far as a text model can be shown it: to its first image."""
    images = (i for i, message in enumerate(messages) if isinstance(message["content"], list))
    end = next(images, len(messages))
    unseen = sum(message["role"] == "assistant" for message in messages[end:])
    left_out = {"image": unseen} if unseen else None
    return Conversation(where, messages[:end], tools, session_id, left_out=left_out)


def _parsed(where: str, messages: Any) -> tuple[Mapping[str, Any], ...]:
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


def _read_sqlite(path: Path) -> Iterator[Conversation]:
    try:
        db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        try:
            rows = db.execute(
                "SELECT session_id, seq, event_json FROM transcript_events ORDER BY session_id, seq"
            ).fetchall()
        finally:
            db.close()
    except sqlite3.Error as error:
        raise ReplayError(f"{path}: cannot be read as OpenClaw's sessions: {error}") from error
    for session_id, events in groupby(rows, key=lambda row: row[0]):
        own = list(events)
        where = f"{path}:{session_id}"
        if any(event is None for _, _, event in own):  # zstd, which Python reads from 3.14 on
            yield Conversation(where=where, messages=(), left_out={"compressed_session": 1})
            continue
        try:
            entries = [_loads(event) for _, _, event in own]
        except (AttributeError, TypeError, ValueError, RecursionError):
            raise ReplayError(f"{where}: an event is no JSON") from None
        yield from _session(entries, where)
