"""Pause training; serving and judging go on.

Any host stops leasing batches until `openclaw-rl resume`; one that it has leased is still trained.
"""

from __future__ import annotations

import argparse
import time

from openclaw_rl.config import Config
from openclaw_rl.journal import Journal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that are no settings."""
    parser.add_argument(
        "reason", nargs="?", default="by hand", help="why, for `status` and the log"
    )


def run(config: Config, options: argparse.Namespace) -> int:
    """Ask for it; who paused first keeps the word. Raises `JournalError`."""
    with Journal.open(config.journal_path, create=False) as journal, journal.batch():
        reason = journal.asked().get("pause")
        if reason is not None:
            print(f"training is paused already ({reason}); openclaw-rl resume ends that")
            return 0
        journal.ask("pause", options.reason, time.time())
    print(
        f"training is paused ({options.reason}); serving and judging go on, a batch under way is "
        "still trained, openclaw-rl resume ends the pause"
    )
    return 0
