"""Write turns, with all that was said, to a file of JSON lines.

The file is readable by its owner only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from typing import Any, TextIO

from openclaw_rl.config import Config
from openclaw_rl.errors import ConfigError
from openclaw_rl.journal import Journal
from openclaw_rl.types import Turn

_AS_IT_IS = (
    "turn_id", "session_id", "source", "owner", "kind", "created", "state", "drop_reason",
    "trained_version", "off_policy", "tools", "sampling", "template_kwargs", "prompt_ids",
    "output_ids", "output_logprobs", "output_versions", "finish_reason",
)  # fmt: skip
"""Fields of a turn that a line has under the same name."""


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
        ids = journal.turn_ids(session_id=options.session, owner=options.owner)
        with _opened(options.file) as file:
            for turn_id in ids:
                if (turn := journal.turn(turn_id)) is not None:
                    print(json.dumps(exported(turn), ensure_ascii=False), file=file)
    if options.file != "-":
        print(f"{len(ids)} turns written to {options.file}")
    return 0


def _opened(name: str) -> contextlib.AbstractContextManager[TextIO]:
    if name == "-":
        return contextlib.nullcontext(sys.stdout)
    try:
        # Conversations: nobody else's business, and no older file is lost by a slip.
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise ConfigError(f"export: {name} exists already; name another file") from error
    except OSError as error:
        raise ConfigError(f"export: cannot write {name}: {error.strerror}") from error
    return open(descriptor, "w", encoding="utf-8", errors="backslashreplace")


def exported(turn: Turn) -> dict[str, Any]:
    """A turn as plain values. `messages` ends with the reply and what followed it, so that a line
    is a conversation that `openclaw-rl replay` reads."""
    return {
        **{name: getattr(turn, name) for name in _AS_IT_IS},
        "messages": [*turn.messages, turn.reply, *(turn.next_state or ())],
        "reply_index": len(turn.messages),
        **{name: getattr(turn.verdict, name, None) for name in ("score", "votes", "hint")},
    }
