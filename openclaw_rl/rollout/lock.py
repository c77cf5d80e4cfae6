"""One trainer a journal.

A second one would take the leases of the first for a dead one's, and train their turns twice.
"""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

from openclaw_rl.errors import ConfigError


def hold_leases(journal: Path, host: str) -> IO[bytes]:
    """Hold the leases of `host` in `journal` for this process; free again when the returned file
    is closed, or at any death. Raises `ConfigError` where another process holds them."""
    journal = journal.expanduser()
    journal.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = journal.with_name(f"{host}.lock").open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ConfigError(
            f"another trainer is at work on {journal.parent}: stop it, or give another --data"
        ) from None
    return lock
