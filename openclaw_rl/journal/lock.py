"""One trainer and one gateway a journal, whatever program each of them is.

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


def trainer_lock(journal: str | Path) -> IO[bytes]:
    """Be the only trainer of `journal` until the returned file is closed or this process dies.

    Raises `ConfigError` where another one is at work, and where the file cannot be locked at all (a
    file system without locks, a file of another user).
    """
    return _lock(Path(journal).expanduser(), "trainer")


def gateway_lock(journal: str | Path) -> IO[bytes]:
    """Be the only gateway of `journal`; as `trainer_lock`."""
    return _lock(Path(journal).expanduser(), "gateway")


def _lock(journal: Path, role: str) -> IO[bytes]:
    path = journal.with_suffix(f".{role}.lock")
    try:
        journal.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise
        return lock
    except BlockingIOError:
        raise ConfigError(
            f"another {role} is already running on {journal}: stop it, or give another --data"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot lock {path}: {error.strerror}") from error
