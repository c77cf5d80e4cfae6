"""Delete turns with all that was said in them.

Nothing is deleted without --yes.
"""

from __future__ import annotations

import argparse
import time

from openclaw_rl.cli.export import add_selection
from openclaw_rl.config import Config
from openclaw_rl.errors import ConfigError
from openclaw_rl.journal import Journal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that are no settings."""
    parser.add_argument("--yes", action="store_true", help="delete; without it, only count")
    parser.add_argument(
        "--older-than-days", type=float, metavar="DAYS", help="turns older than this"
    )
    add_selection(parser)


def run(config: Config, options: argparse.Namespace) -> int:
    """Delete, or count. Raises `JournalError`, `ConfigError`."""
    days = options.older_than_days
    if options.session is None and options.owner is None and days is None:
        raise ConfigError("purge: say what to delete: --session, --owner or --older-than-days")
    if days is not None and not days >= 0:
        raise ConfigError("purge: --older-than-days must be at least 0")
    before = None if days is None else time.time() - days * 86400
    with Journal.open(config.journal_path, create=False) as journal:
        if options.yes:
            n = journal.purge(session_id=options.session, owner=options.owner, older_than=before)
            print(f"{n} turns deleted, with all that was said in them")
        else:
            ids = journal.turn_ids(session_id=options.session, owner=options.owner, before=before)
            print(f"{len(ids)} turns would be deleted; --yes does it")
    return 0
