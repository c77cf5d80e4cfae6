"""Looking into the journal by hand: `openclaw-rl inspect`, `export`, `purge`.

Guarantees: what people said is printed only where it was asked for (`--text`, `export`); an
exported file is readable by its owner only; nothing is deleted without `--yes`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from openclaw_rl.errors import ConfigError
from openclaw_rl.gateway.feedback import turn_of_reply
from openclaw_rl.journal import Journal
from openclaw_rl.types import Message, Turn

_COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Characters that command a terminal, and halves of characters, which it cannot print."""


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    """Add the arguments of one of the three commands."""
    if command == "inspect":
        parser.add_argument(
            "id", nargs="?", help="a session's or a turn's id (default: list the sessions)"
        )
        parser.add_argument("--text", action="store_true", help="also print what was said")
        parser.add_argument("--limit", type=int, default=50, help="so many sessions (default 50)")
        return
    if command == "export":
        parser.add_argument("file", help="the file to write, one turn a line; - for the output")
    else:
        parser.add_argument("--yes", action="store_true", help="delete; without it, only count")
        parser.add_argument(
            "--older-than-days", type=float, metavar="DAYS", help="turns older than this"
        )
    parser.add_argument("--session", help="only turns of this session")
    parser.add_argument("--owner", help="only turns of this owner, as `inspect` names it")


def run(options: argparse.Namespace, journal_path: Path) -> int:
    """Run the command that `options` hold. Raises `JournalError`, `ConfigError`."""
    with Journal.open(journal_path, create=False) as journal:
        if options.command == "inspect":
            return _inspect(journal, options)
        if options.command == "export":
            return _export(journal, options)
        return _purge(journal, options)


def _inspect(journal: Journal, options: argparse.Namespace) -> int:
    if options.id is None:
        for row in journal.sessions(options.limit):
            states = ", ".join(f"{n} {state}" for state, n in sorted(row.states.items()))
            owner = f" · owner {row.owner}" if row.owner else ""
            print(f"{_when(row.last)}  {row.session_id}{owner} · {states}")
        return 0
    turn = journal.turn(turn_of_reply(options.id))
    turn_ids = [turn.turn_id] if turn else journal.turn_ids(session_id=options.id)
    if not turn_ids:
        raise ConfigError(f"inspect: the journal has neither a turn nor a session {options.id!r}")
    for turn_id in turn_ids:
        if (found := journal.turn(turn_id)) is not None:
            print("\n".join(_lines(found, options.text)))
    return 0


def _lines(turn: Turn, text: bool) -> Iterator[str]:
    fate = f"{turn.state.value} ({turn.drop_reason})" if turn.drop_reason else turn.state.value
    if turn.trained_version is not None:
        fate += f" into version {turn.trained_version}"
    versions = list(dict.fromkeys(turn.output_versions))
    sampled = f"version {', '.join(versions)}" if versions else "no version"
    yield f"turn {turn.turn_id} · {_when(turn.created)} · {fate}"
    yield (
        f"  session {turn.session_id} by {turn.source}"
        f"{' · owner ' + turn.owner if turn.owner else ''} · {turn.kind} ({turn.kind_reason})"
        f"{' · off-policy' if turn.off_policy else ''}"
    )
    yield (
        f"  parent {turn.parent_id or '-'} · prompt {len(turn.prompt_ids)} tokens "
        f"({'continued' if turn.shares_tokens else 'new'}) · reply {len(turn.output_ids)} tokens, "
        f"{sampled}, {turn.finish_reason}"
    )
    verdict = turn.verdict
    if verdict is not None:
        score = "no score" if verdict.score is None else f"reward {verdict.score:+g}"
        votes = ", ".join("-" if vote is None else f"{vote:g}" for vote in verdict.votes)
        hint = f"hint of {len(verdict.hint)} characters" if verdict.hint else "no hint"
        teacher = "teacher's values" if verdict.has_teacher else "no teacher"
        yield f"  {score}{f' (votes {votes})' if votes else ''} · {hint} · {teacher}"
    followed = turn.next_state
    roles = ", ".join(str(message.get("role")) for message in followed or ())
    yield f"  next state: {roles or 'none yet'}"
    if text:
        for message in (*turn.messages, turn.reply):
            yield _said(message)
        for message in followed or ():
            yield _said(message, "next: ")
        if verdict is not None and verdict.hint:
            yield f"  | hint: {_indented(verdict.hint)}"


def _said(message: Message, prefix: str = "") -> str:
    content = message.get("content")
    words = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    if content is None:
        words = ""
    if message.get("reasoning_content"):
        words = f"({message['reasoning_content']}) {words}"
    for call in message.get("tool_calls") or ():
        words += f" {call['function']['name']}({call['function']['arguments']})"
    return f"  | {prefix}{message.get('role')}: {_indented(words.strip())}"


def _indented(text: str) -> str:
    """Several lines as one entry; what would command the terminal (a web page that a tool fetched
    may hold it) is named instead."""
    return _COMMANDS.sub(lambda m: ascii(m[0])[1:-1], text).replace("\n", "\n  |   ")


def _export(journal: Journal, options: argparse.Namespace) -> int:
    ids = journal.turn_ids(session_id=options.session, owner=options.owner)
    if options.file == "-":
        _write(journal, ids, sys.stdout)
        return 0
    try:
        # Conversations: nobody else's business, and no older file is lost by a slip.
        descriptor = os.open(options.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise ConfigError(f"export: {options.file} exists already; name another file") from error
    except OSError as error:
        raise ConfigError(f"export: cannot write {options.file}: {error.strerror}") from error
    with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        _write(journal, ids, file)
    print(f"{len(ids)} turns written to {options.file}")
    return 0


def _write(journal: Journal, turn_ids: list[str], file: TextIO) -> None:
    for turn_id in turn_ids:
        if (turn := journal.turn(turn_id)) is not None:
            print(json.dumps(exported(turn), ensure_ascii=False), file=file)


def exported(turn: Turn) -> dict[str, Any]:
    """A turn as plain values. `messages` ends with the reply and what followed it, so that a line
    is a conversation that `openclaw-rl replay` reads."""
    verdict = turn.verdict
    said = (*turn.messages, turn.reply, *(turn.next_state or ()))
    return {
        "turn_id": turn.turn_id,
        "session_id": turn.session_id,
        "source": turn.source,
        "owner": turn.owner,
        "kind": turn.kind,
        "created": turn.created,
        "state": turn.state.value,
        "drop_reason": turn.drop_reason,
        "trained_version": turn.trained_version,
        "off_policy": turn.off_policy,
        "messages": [_plain(message) for message in said],
        "reply_index": len(turn.messages),
        "tools": [_plain(tool) for tool in turn.tools],
        "sampling": dict(turn.sampling),
        "template_kwargs": dict(turn.template_kwargs),
        "prompt_ids": list(turn.prompt_ids),
        "output_ids": list(turn.output_ids),
        "output_logprobs": list(turn.output_logprobs),
        "output_versions": list(turn.output_versions),
        "finish_reason": turn.finish_reason,
        "score": verdict.score if verdict else None,
        "votes": list(verdict.votes) if verdict else [],
        "hint": verdict.hint if verdict else None,
    }


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    return dict(value)


def _purge(journal: Journal, options: argparse.Namespace) -> int:
    days = options.older_than_days
    if options.session is None and options.owner is None and days is None:
        raise ConfigError("purge: say what: --session, --owner or --older-than-days")
    if days is not None and not days >= 0:
        raise ConfigError("purge: --older-than-days must be at least 0")
    before = None if days is None else time.time() - days * 86400
    if options.yes:
        n = journal.purge(session_id=options.session, owner=options.owner, older_than=before)
        print(f"{n} turns deleted, with all that was said in them")
    else:
        ids = journal.turn_ids(session_id=options.session, owner=options.owner, before=before)
        print(f"{len(ids)} turns would be deleted; --yes does it")
    return 0


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
