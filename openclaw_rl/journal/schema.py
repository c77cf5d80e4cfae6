"""The tables of the journal, and what makes a file one. One number says which layout it has.

`turns` holds what is searched, `payloads` the bulk, so that counting and choosing touch little.
A message (or a tool list) is stored once per session, keyed by the digest of its JSON text;
turns list the row numbers. A prompt is stored as the tail beyond the parent's tokens.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

from openclaw_rl.errors import JournalError

APPLICATION_ID = 0x0C1A3721  # tells our files from other SQLite files
SCHEMA_VERSION = 3

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
  temperature REAL NOT NULL,
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
  leased_at REAL,
  trained_version TEXT,
  changed REAL NOT NULL
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
  reason TEXT NOT NULL,
  created REAL NOT NULL,
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
}
"""layout -> what makes the next one of it. Each must be quick (it runs while others wait) and keep
every stored value."""


def layout(db: sqlite3.Connection, path: str) -> int:
    """The layout of a journal, 0 for an empty file. Raises `JournalError` where the file is
    something else, or of a layout that cannot be made into ours."""
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version == 0 and db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
        return 0
    if db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise JournalError(f"{path} is an SQLite file, but not an openclaw-rl journal")
    if version != SCHEMA_VERSION and version not in _CHANGES:
        age = "a newer" if version > SCHEMA_VERSION else "an older"
        raise JournalError(
            f"the journal {path} was written by {age} openclaw-rl (layout {version}, this one "
            f"reads {SCHEMA_VERSION}): use that version, or move the file elsewhere to start fresh"
        )
    return int(version)


def bring_up_to_date(db: sqlite3.Connection, path: str) -> None:
    """Make the tables, or change older ones into ours; the caller holds the write transaction.
    Changes nothing where another process was faster. Raises as `layout`."""
    found = layout(db, path)
    if found == SCHEMA_VERSION:
        return
    changes = [_TABLES] if found == 0 else [_CHANGES[at] for at in range(found, SCHEMA_VERSION)]
    for statement in ";".join(changes).split(";"):
        db.execute(statement)
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
