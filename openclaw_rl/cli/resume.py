"""Let training go on after a pause, whoever asked for it."""

from __future__ import annotations

import argparse

from openclaw_rl.config import Config
from openclaw_rl.journal import Journal


def run(config: Config, _: argparse.Namespace) -> int:
    """End the pause. Raises `JournalError`."""
    with Journal.open(config.journal_path, create=False) as journal, journal.batch():
        reason = journal.asked().get("pause")
        if reason is not None:
            journal.answered("pause", reason)
    if reason is None:
        print("training was not paused")
    else:
        print(f"training goes on (it was paused: {reason})")
    return 0
