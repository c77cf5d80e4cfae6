"""A disk that fails while the journal is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from openclaw_rl.errors import JournalError
from openclaw_rl.journal import Journal
from tests.journal.build import record


def test_a_read_that_the_disk_fails_is_a_journal_error(tmp_path: Path) -> None:
    """SQLite rolls back by itself then: there is nothing left to roll back."""
    path = tmp_path / "journal.db"
    turn = record()
    with Journal.open(path) as journal:
        journal.record_turn(turn)
    with Journal.open(path) as journal:
        (descriptor,) = [
            int(name)
            for name in os.listdir("/proc/self/fd")
            if os.path.realpath(f"/proc/self/fd/{name}") == str(path.resolve())
        ]
        kept = os.dup(descriptor)
        unreadable = os.open(path, os.O_WRONLY)
        os.dup2(unreadable, descriptor)
        try:
            with pytest.raises(JournalError, match="disk I/O error"):
                journal.turn(turn.turn_id)
        finally:
            os.dup2(kept, descriptor)
            os.close(kept)
            os.close(unreadable)
        found = journal.turn(turn.turn_id)
    assert found is not None
    assert found.turn_id == turn.turn_id
