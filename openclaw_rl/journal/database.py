"""One SQLite file as the journal: its tables, its connection, its transactions.

Guarantees: files that only their owner can read; after `batch()` has left its block, the change
survives the death of any process; one connection may be shared by threads; who finds another
process writing waits for it. One number says which layout a file has; older ones are changed into
ours when they are opened.

`turns` holds what is searched, `payloads` the bulk, so that counting and choosing touch little. A
message (or a tool list) is stored once per session, keyed by the digest of its JSON text; turns
list the row numbers. A prompt is stored as the tail beyond the parent's tokens.
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
from typing import Any, Self, TypeVar

from openclaw_rl.errors import JournalError

T = TypeVar("T")

APPLICATION_ID = 0x0C1A3721  # tells our files from other SQLite files
LAYOUT = 5

_TABLES = """
CREATE TABLE turns (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  turn_id TEXT NOT NULL UNIQUE,
  session_id TEXT NOT NULL,
  source TEXT NOT NULL,
  owner TEXT NOT NULL,
  kind TEXT NOT NULL,
  kind_reason TEXT NOT NULL,
  state TEXT NOT NULL,
  reason TEXT NOT NULL DEFAULT '',
  parent_id TEXT,
  matched INTEGER NOT NULL,
  prompt_base INTEGER NOT NULL,     -- prompt tokens taken from the parent (all it has), or 0
  prompt_len INTEGER NOT NULL,
  output_len INTEGER NOT NULL,
  tokens_sha BLOB NOT NULL,         -- of prompt and output ids, to check what a child claims
  history_sha BLOB NOT NULL,        -- of messages and reply, likewise, without the system text
  created REAL NOT NULL,
  min_version TEXT NOT NULL,
  max_version TEXT NOT NULL,
  off_policy INTEGER NOT NULL,
  truncated INTEGER NOT NULL,
  finish_reason TEXT NOT NULL,
  request_hash TEXT NOT NULL,
  node_hash TEXT NOT NULL,
  rendered_len INTEGER NOT NULL,
  rendered_sha TEXT NOT NULL,
  next_ids BLOB,
  attempts INTEGER NOT NULL DEFAULT 0,
  claim_worker TEXT,
  claim_until REAL NOT NULL DEFAULT 0,
  retry_at REAL NOT NULL DEFAULT 0,
  lease_host TEXT,
  lease_rollout INTEGER,
  trained_version TEXT
);
CREATE INDEX turns_state ON turns (state, reason, source);
CREATE INDEX turns_session ON turns (session_id, seq);
CREATE INDEX turns_parent ON turns (parent_id);
CREATE TABLE payloads (
  seq INTEGER PRIMARY KEY,
  prompt_tail BLOB NOT NULL,
  output_ids BLOB NOT NULL,
  output_logprobs BLOB NOT NULL,
  output_versions TEXT NOT NULL,
  message_ids BLOB NOT NULL,
  reply_id INTEGER NOT NULL,
  tools_id INTEGER,
  template_kwargs TEXT NOT NULL,
  sampling TEXT NOT NULL,
  topk_ids BLOB,                    -- the policy's candidates, as many a token as it gave
  topk_logprobs BLOB
);
CREATE TABLE messages (
  id INTEGER PRIMARY KEY,
  session_id TEXT NOT NULL,
  digest BLOB NOT NULL,
  body BLOB NOT NULL,
  UNIQUE (session_id, digest)
);
CREATE TABLE verdicts (
  seq INTEGER PRIMARY KEY,
  score REAL,
  hint TEXT,
  teacher BLOB,
  votes TEXT NOT NULL,
  topk_ids BLOB,                    -- the teacher's
  topk_logprobs BLOB
);
CREATE TABLE counters (scope TEXT, name TEXT, n INTEGER NOT NULL, PRIMARY KEY (scope, name));
CREATE TABLE purged (             -- turns that were purged: still counted
  state TEXT, reason TEXT, source TEXT, n INTEGER NOT NULL, PRIMARY KEY (state, reason, source)
);
CREATE TABLE fingerprint (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE endpoints (role TEXT PRIMARY KEY, url TEXT NOT NULL, info TEXT NOT NULL,
                        published REAL NOT NULL);
"""

_VERSIONS = """
CREATE TABLE versions (           -- of the weights: served ones, and candidates that were refused
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  version INTEGER NOT NULL,
  state TEXT NOT NULL,
  reason TEXT NOT NULL,
  rollout INTEGER NOT NULL,
  restored INTEGER,
  created REAL NOT NULL,
  figures TEXT NOT NULL
);
CREATE TABLE requests (name TEXT PRIMARY KEY, value TEXT NOT NULL, asked REAL NOT NULL)
"""

_CHANGES: Mapping[int, str] = {
    1: """
ALTER TABLE payloads ADD COLUMN topk_ids BLOB;
ALTER TABLE payloads ADD COLUMN topk_logprobs BLOB;
ALTER TABLE verdicts ADD COLUMN topk_ids BLOB;
ALTER TABLE verdicts ADD COLUMN topk_logprobs BLOB
""",
    2: """
ALTER TABLE past RENAME TO purged;
CREATE TABLE fingerprint (name TEXT PRIMARY KEY, value TEXT NOT NULL)
""",
    3: """
ALTER TABLE turns DROP COLUMN temperature;
ALTER TABLE turns DROP COLUMN leased_at;
ALTER TABLE turns DROP COLUMN changed;
ALTER TABLE verdicts DROP COLUMN reason;
ALTER TABLE verdicts DROP COLUMN created
""",
    4: _VERSIONS,
}
"""layout -> what makes the next one of it, keeping all that anybody reads."""

_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_PATIENCE = 30.0
"""How many seconds to wait for another process that is writing."""


class Database:
    def __init__(self, path: Path, create: bool) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._depth = 0
        self._last_state: tuple[int, int] | None = None
        if create:
            _touch_private(path)
        elif not path.is_file():
            raise JournalError(f"no journal at {path}")
        self._file = _identity(path)
        try:
            # timeout=0: waiting is ours, in steps much finer than SQLite's own.
            self._db = sqlite3.connect(
                path, timeout=0, isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise JournalError(f"cannot open the journal {path}: {error}") from error
        try:
            self._prepare(create)
        except BaseException:
            self._db.close()
            raise
        for suffix in ("", "-wal", "-shm"):  # the log and its index hold conversation text as well
            _make_private(Path(f"{path}{suffix}"))

    @classmethod
    def open(cls, path: str | Path, create: bool = True) -> Self:
        """Open the journal at `path` (made with mode 0600 if `create`). Raises `JournalError` where
        the file is missing, is no journal, or has a layout that this version cannot read."""
        return cls(Path(path).expanduser(), create)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(self, create: bool) -> None:
        with self._read():
            found = self._layout()
        if not found and not create:
            raise JournalError(f"the journal {self.path} is empty: nothing was recorded yet")
        if not found:
            # Before any table: give pages back to the system when turns are purged.
            self._retry(lambda: self._db.execute("PRAGMA auto_vacuum = INCREMENTAL"))
        self._retry(lambda: self._db.execute("PRAGMA journal_mode = WAL"))
        # Purged text is overwritten, not only unlinked.
        self._db.execute("PRAGMA secure_delete = ON")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA journal_size_limit = 67108864")
        if found != LAYOUT:
            with self.batch() as db:
                found = self._layout()  # another process may have been faster
                changes = (
                    [_CHANGES[at] for at in range(found, LAYOUT)] if found else [_TABLES, _VERSIONS]
                )
                for statement in ";".join(changes).split(";"):
                    db.execute(statement)
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {LAYOUT}")

    def _layout(self) -> int:
        """The layout of the file, 0 where it is empty; in a transaction, so that nobody makes
        tables meanwhile. Raises `JournalError` where it is something else, or of a layout that
        cannot be made into ours."""
        version = self._pragma("user_version")
        if not version and not self._db.execute("SELECT 1 FROM sqlite_master").fetchone():
            return 0
        if self._pragma("application_id") != APPLICATION_ID:
            raise JournalError(f"{self.path} is an SQLite file, but not an openclaw-rl journal")
        if version != LAYOUT and version not in _CHANGES:
            age = "a newer" if version > LAYOUT else "an older"
            raise JournalError(
                f"the journal {self.path} was written by {age} openclaw-rl (layout {version}, this "
                f"one reads {LAYOUT}): use that version, or move the file elsewhere to start fresh"
            )
        return version

    @contextmanager
    def batch(self) -> Iterator[sqlite3.Connection]:
        """Commit everything inside at once; an error inside undoes all of it. Inside another one of
        this thread it is a part of that, committed with it and undone alone."""
        with self._lock:
            begin, commit, undo = "BEGIN IMMEDIATE", "COMMIT", ["ROLLBACK"]
            if self._depth:
                name = f"level{self._depth}"
                begin, commit = f"SAVEPOINT {name}", f"RELEASE {name}"
                undo = [f"ROLLBACK TO {name}", commit]
            elif self._file != _identity(self.path):
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
                self._undo(*undo)
                if isinstance(error, sqlite3.Error):
                    raise JournalError(f"journal {self.path}: {error}") from error
                raise

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
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
                self._undo("ROLLBACK")

    def _undo(self, *statements: str) -> None:
        for statement in statements:
            if self._db.in_transaction:  # a full or failing disk may have rolled back
                self._db.execute(statement)

    def _rows(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        """All that one query answers."""
        with self._read() as db:
            return db.execute(sql, values).fetchall()

    def _change(self, sql: str, values: Sequence[Any] = ()) -> int:
        """Carry out one statement; how many rows it changed."""
        with self.batch() as db:
            return db.execute(sql, values).rowcount

    def _pragma(self, statement: str) -> int:
        """The number a PRAGMA answers with."""
        with self._lock:
            row = self._retry(lambda: self._db.execute(f"PRAGMA {statement}").fetchone())
            return int(row[0])

    def _vacuum(self) -> None:
        """Return free pages to the system, and empty the write-ahead log, which may still hold
        deleted text. Not possible inside a transaction, and a reader of another process can hold
        the log up: then a later call does it."""
        with self._lock:
            if self._depth > 0:
                return
            self._retry(lambda: self._db.execute("PRAGMA incremental_vacuum").fetchall())
            deadline = time.monotonic() + 2.0  # readers are done within milliseconds
            while self._pragma("wal_checkpoint(TRUNCATE)") and time.monotonic() < deadline:
                time.sleep(0.01)

    def changed(self) -> bool:
        """Whether anything was committed since the last call (or ever): cheap, for pollers."""
        last = self._last_state
        self._last_state = self._pragma("data_version"), self._db.total_changes
        return last != self._last_state

    def _retry(self, action: Callable[[], T]) -> T:
        """Run `action` again while another process is writing. Its transactions take
        milliseconds, so the pauses are short and random. SQLite's own grow to 100 ms: beside a
        purge (30 ms at work, 10 ms pause) a write then waits 1.9 s (p99) instead of 0.16."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                return action()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF not in _LOCKED:
                    raise JournalError(f"journal {self.path}: {error}") from error
                if time.monotonic() > deadline:
                    raise JournalError(
                        f"the journal {self.path} stayed locked by another process for "
                        f"{_PATIENCE:g} seconds"
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
