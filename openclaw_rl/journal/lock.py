"""One trainer and one gateway a journal.

A second trainer would take the leases of the first for a dead one's, and train their turns twice.
A second gateway would know nothing of the first one's conversations, and its word on the adapters
in use would stand for both.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

from openclaw_rl.errors import ConfigError


def hold(journal: Path, name: str, what: str) -> IO[bytes]:
    """Be the only `what` ("trainer", "gateway") of `journal` under `name`, until the returned file
    is closed or this process dies. Raises `ConfigError` where another process is."""
    journal = journal.expanduser()
    journal.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = journal.with_suffix(f".{name}.lock")
    lock = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ConfigError(
            f"another {what} is at work on {journal}: stop it, or give another --data"
        ) from None
    return lock
