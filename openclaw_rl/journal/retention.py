"""Counting and deleting. Every function runs in the caller's transaction.

Guarantees: a deleted turn takes its text with it (messages no other turn of its session uses),
the turns that remain stay whole (a prompt that was stored as a tail of a deleted one is stored in
full first), and the outcomes still add up.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Sequence

from openclaw_rl.journal import codec, turns
from openclaw_rl.journal.records import Outcomes
from openclaw_rl.types import State

CHUNK = 64
"""Turns deleted in one transaction: tens of milliseconds, for which others wait."""

NAMED = (
    "(?1 IS NULL OR session_id = ?1) AND (?2 IS NULL OR owner = ?2) "
    "AND (?3 IS NULL OR (created < ?3 AND state != 'leased' "
    "AND (state != 'judging' OR claim_until <= ?3)))"
)
"""Turns of a session, of an owner, older than a time (and held by nobody): each condition counts
where it is given."""


def outcomes(db: sqlite3.Connection) -> Outcomes:
    states: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    rows = db.execute(
        "SELECT state, reason, n FROM purged UNION ALL "
        "SELECT state, reason, count(*) FROM turns GROUP BY state, reason ORDER BY reason"
    )
    for state, reason, n in rows:
        states[state] += n
        if state == State.DROPPED:
            dropped[reason] += n
    side = states.pop(State.SIDE, 0)
    main = sum(states.values())
    states.pop(State.DROPPED, 0)
    counters = db.execute("SELECT name, n FROM counters WHERE scope = 'count' ORDER BY name")
    seen = db.execute("SELECT ifnull(sum(n), 0) FROM counters WHERE scope = 'seen'")
    return Outcomes(
        seen=seen.fetchone()[0],
        main=main,
        side=side,
        dropped=dict(dropped),
        counters=dict(counters),
        by_source=_by_source(db),
        **states,
    )


def _by_source(db: sqlite3.Connection) -> dict[str, dict[str, int]]:
    """A nameless turn that opens a conversation (`new`) is bound as soon as something follows."""
    open_ = (
        "source = 'new' AND (state = 'waiting' OR "
        "reason IN ('no_next_state', 'session_ended', 'retried'))"
    )
    rows = db.execute(
        f"SELECT source, sum(n * (state != 'side' AND NOT open)), sum(n * (state = 'side')), "
        f"sum(n * (state != 'side' AND open)) FROM (SELECT *, {open_} AS open FROM ("
        "SELECT source, state, reason, n FROM purged UNION ALL "
        "SELECT source, state, reason, count(*) FROM turns GROUP BY state, reason, source"
        ")) GROUP BY source ORDER BY source"
    )
    return {row[0]: dict(zip(("bound", "side", "unbound"), row[1:], strict=True)) for row in rows}


def purge(
    db: sqlite3.Connection,
    session_id: str | None,
    owner: str | None,
    older_than: float | None,
    limit: int = -1,
) -> int:
    """Delete what fits all conditions, the oldest `limit` of it (negative: all)."""
    rows = db.execute(
        f"SELECT seq FROM turns WHERE {NAMED} ORDER BY created, seq LIMIT ?4",
        (session_id, owner, older_than, limit),
    )
    seqs = [row[0] for row in rows]
    if session_id is None and owner is None:
        _mark_learnt(db, seqs)
    return _delete(db, seqs)


def shrink(db: sqlite3.Connection, max_bytes: int) -> int:
    """Delete up to `CHUNK` turns if the content is larger than `max_bytes`."""
    if size(db) <= max_bytes:
        return 0
    rows = db.execute(
        "SELECT seq FROM turns WHERE state != 'leased' "
        "AND (state != 'judging' OR claim_worker IS NULL) "
        "ORDER BY state IN ('waiting', 'judging', 'ready'), created, seq LIMIT ?",
        (CHUNK,),
    )
    seqs = [row[0] for row in rows]
    _mark_learnt(db, seqs)
    return _delete(db, seqs)


def _mark_learnt(db: sqlite3.Connection, seqs: Sequence[int]) -> None:
    """Keep digests, and nothing else, of what was replayed or trained and now goes by age or size:
    its file may still lie in the data folder, and nothing trains twice."""
    db.execute(
        "INSERT OR IGNORE INTO counters "
        "SELECT CASE WHEN off_policy THEN 'replayed' ELSE 'learnt' END, "
        "CASE WHEN off_policy THEN turn_id ELSE node_hash END, 1 FROM turns "
        "WHERE seq IN (SELECT value FROM json_each(?)) AND (off_policy OR state = 'trained')",
        (json.dumps(list(seqs)),),
    )


def size(db: sqlite3.Connection) -> int:
    pages, free, page = (
        db.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * page)


def _delete(db: sqlite3.Connection, seqs: Sequence[int]) -> int:
    if not seqs:
        return 0
    db.execute("CREATE TEMP TABLE IF NOT EXISTS doomed (seq INTEGER PRIMARY KEY)")
    db.execute("DELETE FROM doomed")
    db.executemany("INSERT INTO doomed VALUES (?)", [(seq,) for seq in seqs])
    _keep_children_whole(db)
    db.execute(
        "INSERT INTO purged SELECT "
        "CASE WHEN state IN ('side', 'trained', 'dropped') THEN state ELSE 'dropped' END AS ended, "
        "CASE WHEN state IN ('side', 'trained', 'dropped') THEN reason ELSE 'purged' END AS why, "
        "source, count(*) FROM turns WHERE seq IN doomed GROUP BY ended, why, source "
        "ON CONFLICT (state, reason, source) DO UPDATE SET n = n + excluded.n"
    )
    sessions = [
        row[0] for row in db.execute("SELECT DISTINCT session_id FROM turns WHERE seq IN doomed")
    ]
    for table in ("turns", "payloads", "verdicts"):
        db.execute(f"DELETE FROM {table} WHERE seq IN doomed")
    for session_id in sessions:
        _sweep_messages(db, session_id)
    db.execute("DELETE FROM doomed")
    return len(seqs)


def _keep_children_whole(db: sqlite3.Connection) -> None:
    children = db.execute(
        "SELECT child.seq, child.turn_id FROM turns child "
        "JOIN turns parent ON parent.turn_id = child.parent_id "
        "WHERE child.prompt_base > 0 AND parent.seq IN doomed AND child.seq NOT IN doomed"
    ).fetchall()
    for seq, turn_id in children:
        prompt, _ = turns.load_tokens(db, turn_id)
        db.execute(
            "UPDATE payloads SET prompt_tail = ? WHERE seq = ?", (codec.pack_ints(prompt), seq)
        )
        db.execute("UPDATE turns SET prompt_base = 0 WHERE seq = ?", (seq,))


def _sweep_messages(db: sqlite3.Connection, session_id: str) -> None:
    used: set[int] = set()
    for message_ids, reply_id, tools_id, next_ids in db.execute(
        "SELECT p.message_ids, p.reply_id, p.tools_id, t.next_ids "
        "FROM turns t JOIN payloads p USING (seq) WHERE t.session_id = ?",
        (session_id,),
    ):
        used.update(codec.unpack_ints(message_ids), (reply_id,), codec.unpack_ints(next_ids or b""))
        if tools_id is not None:
            used.add(tools_id)
    db.execute(
        "DELETE FROM messages WHERE session_id = ? AND id NOT IN (SELECT value FROM json_each(?))",
        (session_id, json.dumps(sorted(used))),
    )
