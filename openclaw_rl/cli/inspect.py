"""The sessions in the journal, or one of them, or one turn, or a version of the weights.

What people said is printed only where --text asks for it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from datetime import datetime

from openclaw_rl.cli.status import version_line
from openclaw_rl.config import Config
from openclaw_rl.errors import ConfigError
from openclaw_rl.journal import Journal
from openclaw_rl.types import Message, Turn
from openclaw_rl.wire.dialect import turn_of_reply

_COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Characters that command a terminal, and halves of characters, which it cannot print."""


_ALL = 10_000
"""Versions to look through."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that are no settings."""
    parser.add_argument(
        "id", nargs="?", help="a session's or a turn's id (default: list the sessions)"
    )
    parser.add_argument("--version", type=int, metavar="N", help="what became of this version")
    parser.add_argument("--text", action="store_true", help="also print what was said")
    parser.add_argument(
        "--limit", type=int, default=50, help="number of sessions to list (default 50)"
    )


def run(config: Config, options: argparse.Namespace) -> int:
    """Print what is asked for. Raises `JournalError`, `ConfigError`."""
    with Journal.open(config.journal_path, create=False) as journal:
        if options.version is not None:
            found = [one for one in journal.versions(_ALL) if one.version == options.version]
            if not found:
                raise ConfigError(f"inspect: the journal has no version {options.version}")
            for one in reversed(found):
                words = version_line(one, all_figures=True)
                print(f"{_when(one.created)}  {words} · rollout {one.rollout}")
            return 0
        if options.id is None:
            for session_id, owner, last, states in journal.sessions(options.limit):
                counts = ", ".join(f"{n} {state}" for state, n in sorted(states.items()))
                of = f" · owner {owner}" if owner else ""
                print(f"{_when(last)}  {session_id}{of} · {counts}")
            return 0
        ids = journal.turn_ids(session_id=options.id) or [turn_of_reply(options.id)]
        turns = [turn for one in ids if (turn := journal.turn(one)) is not None]
    if not turns:
        raise ConfigError(f"inspect: the journal has neither a turn nor a session {options.id!r}")
    for turn in turns:
        print("\n".join(_lines(turn, options.text)))
    return 0


def _lines(turn: Turn, text: bool) -> Iterator[str]:
    outcome = f"{turn.state} ({turn.drop_reason})" if turn.drop_reason else str(turn.state)
    if turn.trained_version is not None:
        outcome += f" into version {turn.trained_version}"
    versions = ", ".join(dict.fromkeys(turn.output_versions))
    sampled = f"version {versions}" if versions else "no version"
    yield f"turn {turn.turn_id} · {_when(turn.created)} · {outcome}"
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
    verdict, followed = turn.verdict, turn.next_state or ()
    if verdict is not None:
        score = "no score" if verdict.score is None else f"reward {verdict.score:+g}"
        votes = ", ".join("-" if vote is None else f"{vote:g}" for vote in verdict.votes)
        hint = f"hint of {len(verdict.hint)} characters" if verdict.hint else "no hint"
        teacher = "teacher's values" if verdict.has_teacher else "no teacher"
        yield f"  {score}{f' (votes {votes})' if votes else ''} · {hint} · {teacher}"
    roles = ", ".join(str(message.get("role")) for message in followed)
    yield f"  next state: {roles or 'none yet'}"
    if text:
        yield from map(_said, (*turn.messages, turn.reply))
        yield from (_said(message, "next: ") for message in followed)
        if verdict is not None and verdict.hint:
            yield f"  | hint: {_indented(verdict.hint)}"


def _said(message: Message, prefix: str = "") -> str:
    content = message.get("content")
    words = content or ""
    if not isinstance(words, str):
        words = json.dumps(words, ensure_ascii=False)
    if message.get("reasoning_content"):
        words = f"({message['reasoning_content']}) {words}"
    for call in message.get("tool_calls") or ():
        words += f" {call['function']['name']}({call['function']['arguments']})"
    return f"  | {prefix}{message.get('role')}: {_indented(words.strip())}"


def _indented(text: str) -> str:
    """Several lines as one entry; what would command the terminal (a web page that a tool fetched
    may hold it) is named instead."""
    return _COMMANDS.sub(lambda m: ascii(m[0])[1:-1], text).replace("\n", "\n  |   ")


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
