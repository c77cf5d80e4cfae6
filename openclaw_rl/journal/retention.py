"""Deleting turns. Every function runs in the caller's transaction.

Guarantees: a deleted turn takes its text with it (messages no other turn of its session uses),
the turns that remain stay whole (a prompt that was stored as a tail of a deleted one is stored in
full first), and the outcomes still add up.
"""

from __future__ import annotations

import json
import sqlite3

from openclaw_rl.journal import turns

CHUNK = 64
"""Turns deleted in one transaction: tens of milliseconds, for which others wait."""

_FREE = (
    "state != 'leased' AND (state != 'judging' OR claim_worker IS NULL "
    "OR ifnull(claim_until <= ?3, 0))"
)
"""Held by no judge and no trainer (at the time ?3, where there is one)."""

NAMED = (
    f"(?1 IS NULL OR session_id = ?1 OR kind_reason = '{turns.PRACTICE} of ' || ?1) "
    "AND (?2 IS NULL OR owner = ?2) "
    f"AND (?3 IS NULL OR created < ?3 AND {_FREE})"
)
"""Turns of a session (and practice on its questions), of an owner, older than a time (and held by
nobody): each condition counts where it is given."""

_DOOMED = "(SELECT value FROM json_each(?1))"


def purge(
    db: sqlite3.Connection,
    session_id: str | None,
    owner: str | None,
    older_than: float | None,
    max_bytes: int | None,
) -> int:
    """Delete the oldest `CHUNK` turns that fit all conditions, or, where the content is larger than
    `max_bytes`, of those that nobody holds, finished ones before others; how many."""
    where, order = NAMED, "created, seq"
    if max_bytes is not None:
        if size(db) <= max_bytes:
            return 0
        where, order = f"{NAMED} AND {_FREE}", f"state IN ('waiting', 'judging', 'ready'), {order}"
    rows = db.execute(
        f"SELECT seq FROM turns WHERE {where} ORDER BY {order} LIMIT {CHUNK}",
        (session_id, owner, older_than),
    )
    if seqs := [row[0] for row in rows]:
        doomed = (json.dumps(seqs),)
        if session_id is None and owner is None:
            _mark_learnt(db, doomed)
        _delete(db, doomed)
    return len(seqs)


def size(db: sqlite3.Connection) -> int:
    """Bytes of content, without free pages."""
    [(n,)] = db.execute(
        "SELECT (page_count - freelist_count) * page_size "
        "FROM pragma_page_count, pragma_freelist_count, pragma_page_size"
    )
    return int(n)


def _mark_learnt(db: sqlite3.Connection, doomed: tuple[str]) -> None:
    """Keep digests, and nothing else, of what was replayed or trained and now goes by age or size:
    its file may still lie in the data folder, and nothing trains twice."""
    db.execute(
        "INSERT OR IGNORE INTO counters "
        "SELECT 'learnt', CASE WHEN off_policy THEN turn_id ELSE node_hash END, 1 FROM turns "
        f"WHERE seq IN {_DOOMED} AND (off_policy OR state = 'trained')",
        doomed,
    )


def _delete(db: sqlite3.Connection, doomed: tuple[str]) -> None:
    _keep_children_whole(db, doomed)
    db.execute(
        "INSERT INTO purged SELECT "
        "CASE WHEN state IN ('side', 'trained', 'dropped') THEN state ELSE 'dropped' END AS ended, "
        "CASE WHEN state IN ('side', 'trained', 'dropped') THEN reason ELSE 'purged' END AS why, "
        f"source, count(*) FROM turns WHERE seq IN {_DOOMED} GROUP BY ended, why, source "
        "ON CONFLICT (state, reason, source) DO UPDATE SET n = n + excluded.n",
        doomed,
    )
    sessions = f"SELECT DISTINCT session_id FROM turns WHERE seq IN {_DOOMED}"
    touched = db.execute(sessions, doomed).fetchall()
    for table in ("turns", "payloads", "verdicts"):
        db.execute(f"DELETE FROM {table} WHERE seq IN {_DOOMED}", doomed)
    for (session_id,) in touched:
        _sweep_messages(db, session_id)


def _keep_children_whole(db: sqlite3.Connection, doomed: tuple[str]) -> None:
    children = db.execute(
        "SELECT child.seq, child.turn_id FROM turns child "
        "JOIN turns parent ON parent.turn_id = child.parent_id WHERE child.prompt_base > 0 "
        f"AND parent.seq IN {_DOOMED} AND child.seq NOT IN {_DOOMED}",
        doomed,
    ).fetchall()
    for seq, turn_id in children:
        prompt, _ = turns.load_tokens(db, turn_id)
        db.execute(
            "UPDATE payloads SET prompt_tail = ? WHERE seq = ?", (turns.pack_ints(prompt), seq)
        )
        db.execute("UPDATE turns SET prompt_base = 0 WHERE seq = ?", (seq,))


def _sweep_messages(db: sqlite3.Connection, session_id: str) -> None:
    used: set[int | None] = set()
    for message_ids, reply_id, tools_id, next_ids in db.execute(
        "SELECT p.message_ids, p.reply_id, p.tools_id, t.next_ids "
        "FROM turns t JOIN payloads p USING (seq) WHERE t.session_id = ?",
        (session_id,),
    ):
        used.update(turns.unpack_ints(message_ids + (next_ids or b"")), (reply_id, tools_id))
    db.execute(
        "DELETE FROM messages WHERE session_id = ? AND id NOT IN (SELECT value FROM json_each(?))",
        (session_id, json.dumps(sorted(used - {None}))),
    )
