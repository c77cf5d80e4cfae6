"""Write turns, with all that was said, to a file of JSON lines.

The file is readable by its owner only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any, TextIO

from openclaw_rl.config import Config
from openclaw_rl.errors import ConfigError
from openclaw_rl.journal import Journal
from openclaw_rl.types import Turn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that are no settings."""
    parser.add_argument("file", help="the file to write, one turn a line; - for the output")
    add_selection(parser)


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say which turns are meant."""
    parser.add_argument("--session", help="only turns of this session")
    parser.add_argument("--owner", help="only turns of this owner, as `inspect` names it")


def run(config: Config, options: argparse.Namespace) -> int:
    """Write the file. Raises `JournalError`, `ConfigError`."""
    with Journal.open(config.journal_path, create=False) as journal:
        return _export(journal, options)


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
        "messages": [dict(message) for message in said],
        "reply_index": len(turn.messages),
        "tools": [dict(tool) for tool in turn.tools],
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
