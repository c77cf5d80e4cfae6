"""One SQLite connection as the journal uses it: private files, short transactions, patient.

Owns: opening and its errors, the lock that makes a connection thread-safe, nesting of write
transactions, and waiting for other processes. Guarantees: after `write()` has left its block, the
change survives the death of any process (with `durable=True` also a power cut).
"""

from __future__ import annotations

import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from openclaw_rl.errors import JournalError
from openclaw_rl.journal import schema

T = TypeVar("T")

_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


class Database:
    def __init__(self, db: sqlite3.Connection, path: Path, busy_seconds: float) -> None:
        self._db = db
        self.path = path
        self._busy_seconds = busy_seconds
        self._lock = threading.RLock()
        self._depth = 0
        self._file = _identity(path)

    @classmethod
    def open(
        cls, path: str | Path, *, create: bool, durable: bool, busy_seconds: float
    ) -> Database:
        """Open or make the file; it and its companions are readable by their owner only."""
        path = Path(path).expanduser()
        if create:
            _touch_private(path)
        elif not path.is_file():
            raise JournalError(f"no journal at {path}")
        try:
            # timeout=0: waiting is ours, in steps much finer than SQLite's own.
            db = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise JournalError(f"cannot open the journal {path}: {error}") from error
        self = cls(db, path, busy_seconds)
        try:
            self._prepare(create, durable)
        except BaseException:
            db.close()
            raise
        for suffix in ("", "-wal", "-shm"):  # the log and its index hold conversation text as well
            _make_private(Path(f"{path}{suffix}"))
        return self

    def _prepare(self, create: bool, durable: bool) -> None:
        found = self._retry(lambda: schema.layout(self._db, str(self.path)))
        if not found:
            if not create:
                raise JournalError(f"the journal {self.path} is empty: nothing was recorded yet")
            # Before any table: give pages back to the system when turns are purged.
            self._retry(lambda: self._db.execute("PRAGMA auto_vacuum = INCREMENTAL"))
        self._retry(lambda: self._db.execute("PRAGMA journal_mode = WAL"))
        # Purged text is overwritten, not only unlinked.
        self._db.execute("PRAGMA secure_delete = ON")
        self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        self._db.execute("PRAGMA journal_size_limit = 67108864")
        if found != schema.SCHEMA_VERSION:
            with self.write() as db:
                schema.bring_up_to_date(db, str(self.path))

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """A write transaction; inside another one of this thread, a savepoint of it."""
        with self._lock:
            begin, commit, undo = self._verbs()
            if self._depth == 0 and self._file != _identity(self.path):
                # What SQLite wrote to it would be gone with the last process that has it open.
                raise JournalError(f"{self.path} was removed or replaced while it was in use")
            self._retry(lambda: self._db.execute(begin))
            self._depth += 1
            try:
                try:
                    yield self._db
                finally:
                    self._depth -= 1
                self._retry(lambda: self._db.execute(commit))
            except BaseException as error:
                self._undo(undo)
                if isinstance(error, sqlite3.Error):
                    raise JournalError(f"journal {self.path}: {error}") from error
                raise

    def _verbs(self) -> tuple[str, str, tuple[str, ...]]:
        if self._depth == 0:
            return "BEGIN IMMEDIATE", "COMMIT", ("ROLLBACK",)
        name = f"level{self._depth}"
        return f"SAVEPOINT {name}", f"RELEASE {name}", (f"ROLLBACK TO {name}", f"RELEASE {name}")

    def _undo(self, statements: tuple[str, ...]) -> None:
        for statement in statements:
            if self._db.in_transaction:  # a full or failing disk may have rolled back
                self._db.execute(statement)

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """One consistent view for all statements of the block."""
        with self._lock:
            if self._depth > 0:
                yield self._db
                return
            self._db.execute("BEGIN")
            try:
                # The view begins with the first statement: take it here, where waiting is easy.
                self._retry(lambda: self._db.execute("SELECT 1 FROM sqlite_master").fetchone())
                yield self._db
            except sqlite3.Error as error:
                raise JournalError(f"journal {self.path}: {error}") from error
            finally:
                self._undo(("ROLLBACK",))

    def rows(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[Any]:
        """All that one query answers."""
        with self.read() as db:
            return db.execute(sql, values).fetchall()

    def change(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> int:
        """Carry out one statement; how many rows it changed."""
        with self.write() as db:
            return db.execute(sql, values).rowcount

    def pragma(self, statement: str) -> int:
        """The number a PRAGMA answers with (0 where it answers nothing)."""
        with self._lock:
            row = self._retry(lambda: self._db.execute(f"PRAGMA {statement}").fetchone())
            return int(row[0]) if row else 0

    def vacuum(self) -> None:
        """Return free pages to the system, and empty the write-ahead log, which may still hold
        deleted text. Not possible inside a transaction, and a reader of another process can hold
        the log up: then a later call does it."""
        with self._lock:
            if self._depth > 0:
                return
            self._retry(lambda: self._db.execute("PRAGMA incremental_vacuum").fetchall())
            deadline = time.monotonic() + 2.0  # readers are done within milliseconds
            while self.pragma("wal_checkpoint(TRUNCATE)") and time.monotonic() < deadline:
                time.sleep(0.01)

    def state(self) -> tuple[int, int]:
        """Differs from an earlier one as soon as anybody has committed anything."""
        return self.pragma("data_version"), self._db.total_changes

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _retry(self, action: Callable[[], T]) -> T:
        """Run `action` again while another process is writing. Its transactions take
        milliseconds, so the pauses are short and random. SQLite's own grow to 100 ms: beside a
        purge (30 ms at work, 10 ms pause) a write then waits 1.9 s (p99) instead of 0.16."""
        deadline = time.monotonic() + self._busy_seconds
        while True:
            try:
                return action()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF not in _LOCKED:
                    raise JournalError(f"journal {self.path}: {error}") from error
                if time.monotonic() > deadline:
                    raise JournalError(
                        f"the journal {self.path} stayed locked by another process for "
                        f"{self._busy_seconds:g} seconds"
                    ) from error
            except sqlite3.DatabaseError as error:
                raise JournalError(f"{self.path} cannot be read as a journal: {error}") from error
            time.sleep(random.uniform(0.0005, 0.005))


def _touch_private(path: Path) -> None:
    """Make the file if there is none. One that is there must not be opened: closing it would
    cancel the POSIX locks of every connection that this process already has to it, and another
    process would then take away a write-ahead log that is still in use."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        pass
    except OSError as error:
        raise JournalError(f"cannot make the journal {path}: {error.strerror}") from error


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file is at `path`; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _make_private(path: Path) -> None:
    """SQLite gives companions the mode of the main file; this mends files that were opened up."""
    try:
        if path.stat().st_mode & 0o077:
            path.chmod(0o600)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise JournalError(f"others can read {path}, and it cannot be changed") from error
