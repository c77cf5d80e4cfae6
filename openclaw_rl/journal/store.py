"""`Journal`: the durable record of every turn, shared by several processes.

Guarantees: a method that returned has committed (unless inside `batch()`: then its end has).
A turn changes its state only by the guarded steps of `State`, so two processes can never both take
one. `fates()` always adds up. Thread-safe; one instance is one connection, and a thread that waits
for another holds nothing up outside this instance. Not to be carried over a fork.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openclaw_rl.errors import JournalError
from openclaw_rl.journal import codec, retention, turns
from openclaw_rl.journal.database import Database
from openclaw_rl.journal.judging import Judging
from openclaw_rl.journal.leasing import Leasing
from openclaw_rl.journal.records import Endpoint, Fates, SessionRow
from openclaw_rl.session.types import NodeState
from openclaw_rl.types import Message, Turn


class Journal(Judging, Leasing):
    def __init__(self, db: Database) -> None:
        super().__init__(db)
        self._seen_change: tuple[int, int] | None = None

    @classmethod
    def open(
        cls,
        path: str | Path,
        create: bool = True,
        *,
        durable: bool = False,
        busy_seconds: float = 30.0,
    ) -> Journal:
        """Open the journal at `path` (made with mode 0600 if `create`).

        `durable` also survives a power cut, at one disk flush a commit; without it a commit
        survives the death of any process. Raises `JournalError` where the file is missing, is no
        journal, or has another layout.
        """
        return cls(Database.open(path, create=create, durable=durable, busy_seconds=busy_seconds))

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Commit everything inside at once; an error inside undoes all of it."""
        with self._db.write():
            yield

    # -- gateway ---------------------------------------------------------------------------

    def record_turn(self, rec: Turn) -> None:
        """Keep a finished turn. Raises `JournalError` if its id is known already."""
        with self._db.write() as db:
            turns.insert_turn(db, rec)

    def set_next_state(self, turn_id: str, messages: Sequence[Message], now: float) -> bool:
        """What followed a waiting turn: it can be judged now. The first next state stays; False
        where there is one already, the turn is no longer waiting, or `messages` is empty."""
        if not messages:
            return False
        with self._db.write() as db:
            row = db.execute(
                "SELECT session_id FROM turns WHERE turn_id = ? AND state = 'waiting'", (turn_id,)
            ).fetchone()
            if row is None:
                return False
            ids = turns.store_messages(db, row[0], messages)
            db.execute(
                "UPDATE turns SET state = 'judging', next_ids = ?, changed = ? "
                "WHERE turn_id = ? AND state = 'waiting'",
                (codec.pack_ints(ids), now, turn_id),
            )
            return True

    def drop(self, turn_id: str, reason: str, now: float) -> bool:
        """End a turn that nobody holds. False where a judge or a trainer has it, or it has ended,
        or it is a side turn."""
        where = (
            "turn_id = ? AND (state IN ('waiting', 'ready') "
            "OR state = 'judging' AND (claim_worker IS NULL OR claim_until <= ?))"
        )
        return self._end(where, (turn_id, now), reason, now) > 0

    def count(self, name: str, n: int = 1) -> None:
        """Add to a named counter of `fates().counters`."""
        with self._db.write() as db:
            turns.add_count(db, "count", name, n)

    def end_session(self, session_id: str, now: float, *, owner: str | None = None) -> int:
        """Nothing follows any more: drop the waiting turns of the session; how many."""
        return self._end(
            "session_id = ? AND state = 'waiting' AND (? IS NULL OR owner = ?)",
            (session_id, owner, owner),
            "session_ended",
            now,
        )

    def nodes(self, limit: int) -> list[NodeState]:
        """The newest `limit` turns that were served, parents first, for `Tracker.restore`.
        Replayed ones are kept apart: no live conversation goes on from them."""
        with self._db.read() as db:
            rows = db.execute(
                "SELECT turn_id, session_id, source, owner, kind, parent_id, node_hash, "
                "request_hash, next_ids IS NOT NULL, created, reason = 'retried' "
                "FROM turns WHERE off_policy = 0 ORDER BY seq DESC LIMIT ?",
                (limit,),
            ).fetchall()
        return [
            NodeState(
                turn_id=row[0],
                session_id=row[1],
                source=row[2],
                owner=row[3],
                kind=row[4],
                parent_id=row[5],
                node_hash=row[6],
                request_hash=row[7],
                has_next_state=bool(row[8]),
                created=row[9],
                retried=bool(row[10]),
            )
            for row in reversed(rows)
        ]

    def turn(self, turn_id: str) -> Turn | None:
        with self._db.read() as db:
            return turns.load_turn(db, turn_id)

    def knows(self, turn_id: str) -> bool:
        """Whether a turn of this id is there, or was replayed and went by age or size."""
        with self._db.read() as db:
            found = db.execute(
                "SELECT 1 FROM turns WHERE turn_id = ?1 UNION ALL "
                "SELECT 1 FROM counters WHERE scope = 'replayed' AND name = ?1",
                (turn_id,),
            )
            return found.fetchone() is not None

    def served(self) -> set[str]:
        """The `node_hash` of every turn that was served: what was said up to its reply. Also of
        those that were trained and went by age or size."""
        with self._db.read() as db:
            rows = db.execute(
                "SELECT node_hash FROM turns WHERE off_policy = 0 UNION ALL "
                "SELECT name FROM counters WHERE scope = 'learnt'"
            )
            return {row[0] for row in rows}

    def tokens(self, turn_id: str) -> list[int]:
        """Prompt and output ids of a turn. Raises `JournalError` for an unknown turn."""
        with self._db.read() as db:
            prompt, output = turns.load_tokens(db, turn_id)
        return prompt + output

    def turn_ids(
        self,
        *,
        session_id: str | None = None,
        owner: str | None = None,
        before: float | None = None,
    ) -> list[str]:
        """Ids of all turns (of a session, an owner, made before a time and not leased: what `purge`
        would delete), oldest first."""
        with self._db.read() as db:
            rows = db.execute(
                f"SELECT turn_id FROM turns WHERE {retention.NAMED} ORDER BY seq",
                (session_id, owner, before),
            )
            return [row[0] for row in rows]

    def sessions(self, limit: int) -> list[SessionRow]:
        """The sessions that were used last, with how many turns of them are in which state."""
        with self._db.read() as db:
            rows = db.execute(
                "SELECT session_id, owner, max(created) AS last FROM turns "
                "GROUP BY session_id, owner ORDER BY last DESC LIMIT ?",
                (limit,),
            ).fetchall()
            return [
                SessionRow(
                    session_id=session_id,
                    owner=owner,
                    last=last,
                    states=dict(
                        db.execute(
                            "SELECT state, count(*) FROM turns WHERE session_id = ? AND owner = ? "
                            "GROUP BY state",
                            (session_id, owner),
                        )
                    ),
                )
                for session_id, owner, last in rows
            ]

    # -- the model -------------------------------------------------------------------------

    def bind(self, fingerprint: Mapping[str, str | int | float]) -> None:
        """Tie the journal to the model that its turns are of: facts by name, each kept when it is
        first given. Raises `JournalError` in one line where one differs from what was kept: turns
        of one model must not train another."""
        with self._db.write() as db:
            rows = db.execute("SELECT name, value FROM fingerprint")
            kept = {name: json.loads(value) for name, value in rows}
            wrong = [
                f"{name} {kept[name]} in the journal, {value} now"
                for name, value in fingerprint.items()
                if kept.get(name, value) != value
            ]
            if wrong:
                raise JournalError(
                    f"the journal {self._db.path} belongs to another model ({'; '.join(wrong)}): "
                    "use that one, or another journal"
                )
            db.executemany(
                "INSERT OR IGNORE INTO fingerprint VALUES (?, ?)",
                [(name, codec.to_json(value)) for name, value in fingerprint.items()],
            )

    # -- endpoints -------------------------------------------------------------------------

    def publish(self, role: str, url: str, info: Mapping[str, Any], now: float) -> None:
        """Say where the engine of a role (`policy`, `judge`, `prm`, `teacher`), or the `gateway`,
        is now."""
        with self._db.write() as db:
            db.execute(
                "INSERT OR REPLACE INTO endpoints VALUES (?, ?, ?, ?)",
                (role, url, codec.to_json(info), now),
            )

    def endpoint(self, role: str) -> Endpoint | None:
        with self._db.read() as db:
            row = db.execute(
                "SELECT role, url, info, published FROM endpoints WHERE role = ?", (role,)
            ).fetchone()
        if row is None:
            return None
        return Endpoint(role=row[0], url=row[1], info=json.loads(row[2]), published=row[3])

    # -- status ----------------------------------------------------------------------------

    def fates(self) -> Fates:
        """Where all turns ever seen are, in one consistent view."""
        with self._db.read() as db:
            return retention.fates(db)

    def judged(self, recent: int) -> tuple[int, float | None]:
        """How many turns have a verdict, and the mean score of the newest `recent` scored ones."""
        with self._db.read() as db:
            total = db.execute("SELECT count(*) FROM verdicts").fetchone()[0]
            mean = db.execute(
                "SELECT avg(score) FROM (SELECT score FROM verdicts WHERE score IS NOT NULL "
                "ORDER BY seq DESC LIMIT ?)",
                (recent,),
            ).fetchone()[0]
        return total, mean

    def expire(
        self, now: float, next_state_ttl: float | None = None, *, ready_ttl: float | None = None
    ) -> dict[str, int]:
        """Drop turns that waited for a next state longer than `next_state_ttl` seconds
        (`no_next_state`), or ready ones older than `ready_ttl` (`expired`); how many by reason."""
        ended: dict[str, int] = {}
        with self._db.write():
            for state, ttl, reason in (
                ("waiting", next_state_ttl, "no_next_state"),
                ("ready", ready_ttl, "expired"),
            ):
                if ttl is not None:
                    ended[reason] = self._end(
                        f"state = '{state}' AND created < ?", (now - ttl,), reason, now
                    )
        return {reason: n for reason, n in ended.items() if n}

    def purge(
        self,
        *,
        session_id: str | None = None,
        owner: str | None = None,
        older_than: float | None = None,
        max_bytes: int | None = None,
    ) -> int:
        """Delete turns with all their text; how many.

        `session_id`, `owner` and `older_than` (a time) are joined by "and"; `max_bytes` (of the
        file's content) stands alone. What is named by session or owner goes at once, leased turns
        included. By age and size leased turns stay, the oldest go first (by size, finished ones
        before others), in transactions of a few dozen turns. Deleted turns that had not ended
        count as dropped `purged`; the space is overwritten and returned to the system.
        """
        named = session_id is not None or owner is not None
        if named or older_than is not None:
            limit = None if named else retention.CHUNK
            removed = self._purge_step(
                lambda db: retention.purge(db, session_id, owner, older_than, limit), limit
            )
        elif max_bytes is not None:
            removed = self._purge_step(lambda db: retention.shrink(db, max_bytes), retention.CHUNK)
        else:
            raise JournalError("purge needs to be told what to delete")
        if removed:
            self._db.give_space_back()
        return removed

    def _purge_step(self, step: Callable[[sqlite3.Connection], int], limit: int | None) -> int:
        removed = 0
        while True:
            with self._db.write() as db:
                n = step(db)
            removed += n
            if limit is None or n < limit:
                return removed

    def upkeep(
        self,
        now: float,
        *,
        next_state_ttl: float | None = None,
        ready_ttl: float | None = None,
        max_age: float | None = None,
        max_bytes: int | None = None,
    ) -> dict[str, int]:
        """What somebody should do every few minutes, from a thread and a connection of its own:
        `expire`, then `purge` by age in seconds and by size. How many turns, by what happened."""
        done = self.expire(now, next_state_ttl, ready_ttl=ready_ttl)
        purged = self.purge(older_than=now - max_age) if max_age is not None else 0
        if max_bytes is not None:
            purged += self.purge(max_bytes=max_bytes)
        return done | ({"purged": purged} if purged else {})

    def size(self) -> int:
        """Bytes of content in the file, without free pages."""
        with self._db.read() as db:
            return retention.size(db)

    def changed(self) -> bool:
        """Whether anything was committed since the last call (or ever): cheap, for pollers."""
        now = (self._db.pragma("data_version"), self._db.own_changes())
        changed, self._seen_change = now != self._seen_change, now
        return changed
