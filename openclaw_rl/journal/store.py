"""`Journal`: the durable record of every turn, shared by several processes.

Guarantees: a method that returned has committed (unless inside `batch()`: then its end has).
A turn changes its state only by the guarded steps of `State`, so two processes can never both take
one. `fates()` always adds up. Thread-safe; one instance is one connection, and a thread that waits
for another holds nothing up outside this instance. Not to be carried over a fork.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openclaw_rl.errors import JournalError
from openclaw_rl.journal import codec, retention, turns
from openclaw_rl.journal.database import Database
from openclaw_rl.journal.records import (
    Endpoint,
    Fates,
    Lease,
    Lineage,
    Output,
    ReadyTurn,
    State,
    Turn,
    TurnRecord,
    Verdict,
)
from openclaw_rl.session.types import Message, NodeState

MAX_ATTEMPTS = 20
"""How often a turn is given to a judge before it is dropped; with growing pauses, hours."""


class Journal:
    def __init__(self, db: Database) -> None:
        self._db = db
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

    def record_turn(self, rec: TurnRecord) -> None:
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
        """End a turn that is not leased yet. False where it is, or has ended, or is a side turn."""
        where = "turn_id = ? AND state IN ('waiting', 'judging', 'ready')"
        return self._end(where, (turn_id,), reason, now) > 0

    def drop_leased(
        self, rollout_id: int, host: str, turn_ids: Iterable[str], reason: str, now: float
    ) -> int:
        """End turns of an unfinished lease that cannot be trained; how many there were."""
        return self._end(
            "state = 'leased' AND lease_host = ? AND lease_rollout = ? "
            "AND turn_id IN (SELECT value FROM json_each(?))",
            (host, rollout_id, json.dumps(list(turn_ids))),
            reason,
            now,
        )

    def _end(self, where: str, values: tuple[Any, ...], reason: str, now: float) -> int:
        if not reason:
            raise JournalError("a turn is dropped for a reason")
        with self._db.write() as db:
            return db.execute(
                "UPDATE turns SET state = 'dropped', reason = ?, changed = ?, claim_worker = NULL "
                f"WHERE {where}",
                (reason, now, *values),
            ).rowcount

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
        """The newest `limit` turns, parents first, for `Tracker.restore`."""
        with self._db.read() as db:
            rows = db.execute(
                "SELECT turn_id, session_id, source, owner, kind, parent_id, node_hash, "
                "request_hash, next_ids IS NOT NULL, created, reason = 'retried' "
                "FROM turns ORDER BY seq DESC LIMIT ?",
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

    def tokens(self, turn_id: str) -> list[int]:
        """Prompt and output ids of a turn. Raises `JournalError` for an unknown turn."""
        with self._db.read() as db:
            prompt, output = turns.load_tokens(db, turn_id)
        return prompt + output

    def turn_ids(self, *, session_id: str | None = None, owner: str | None = None) -> list[str]:
        """Ids of all turns (of a session, an owner), oldest first."""
        with self._db.read() as db:
            rows = db.execute(
                "SELECT turn_id FROM turns WHERE (?1 IS NULL OR session_id = ?1) "
                "AND (?2 IS NULL OR owner = ?2) ORDER BY seq",
                (session_id, owner),
            )
            return [row[0] for row in rows]

    # -- judge -----------------------------------------------------------------------------

    def claim(self, worker: str, limit: int, now: float, lease_seconds: float) -> list[Turn]:
        """Up to `limit` turns to judge, oldest first, reserved for `worker` until
        `now + lease_seconds`. A turn whose judge died too often is dropped as `judge_lost`."""
        with self._db.write() as db:
            db.execute(
                "UPDATE turns SET state = 'dropped', reason = 'judge_lost', changed = ? "
                "WHERE state = 'judging' AND claim_until <= ? AND attempts >= ?",
                (now, now, MAX_ATTEMPTS),
            )
            ids = [
                row[0]
                for row in db.execute(
                    "SELECT turn_id FROM turns WHERE state = 'judging' AND claim_until <= ? "
                    "AND retry_at <= ? ORDER BY created, seq LIMIT ?",
                    (now, now, limit),
                )
            ]
            db.executemany(
                "UPDATE turns SET claim_worker = ?, claim_until = ?, attempts = attempts + 1 "
                "WHERE turn_id = ?",
                [(worker, now + lease_seconds, turn_id) for turn_id in ids],
            )
        with self._db.read() as db:
            found = [turns.load_turn(db, turn_id) for turn_id in ids]
        return [turn for turn in found if turn is not None]

    def extend_claims(self, worker: str, until: float) -> None:
        """A slow judge is still at work: keep its claims until then."""
        with self._db.write() as db:
            db.execute(
                "UPDATE turns SET claim_until = ? WHERE state = 'judging' AND claim_worker = ?",
                (until, worker),
            )

    def release_claims(self, worker: str) -> int:
        """A judge stops in good order: its turns are free at once, the attempt does not count."""
        with self._db.write() as db:
            return db.execute(
                "UPDATE turns SET claim_worker = NULL, claim_until = 0, attempts = attempts - 1 "
                "WHERE state = 'judging' AND claim_worker = ?",
                (worker,),
            ).rowcount

    def write_verdict(
        self, turn_id: str, worker: str, verdict: Verdict, now: float
    ) -> State | None:
        """The turn is READY, or DROPPED as `no_signal` where nothing could be learnt: no score or
        0, and no teacher value. None (and nothing changed) where the claim was lost.

        Raises `JournalError` for a score that is no finite number, or teacher values that are not
        one for each output token.
        """
        teacher = verdict.teacher_log_probs
        if verdict.score is not None and not math.isfinite(verdict.score):
            raise JournalError(f"turn {turn_id}: the score must be a finite number or None")
        with self._db.write() as db:
            row = _claimed(db, turn_id, worker)
            if row is None:
                return None
            seq, output_len, _ = row
            if teacher is not None and len(teacher) != output_len:
                raise JournalError(
                    f"turn {turn_id}: {len(teacher)} teacher values for {output_len} tokens"
                )
            taught = teacher is not None and any(map(math.isfinite, teacher))
            state = State.READY if verdict.score or taught else State.DROPPED
            turns.store_verdict(db, seq, verdict, now)
            db.execute(
                "UPDATE turns SET state = ?, reason = ?, changed = ?, claim_worker = NULL "
                "WHERE seq = ?",
                (state, "" if state is State.READY else "no_signal", now, seq),
            )
            return state

    def postpone(
        self,
        turn_id: str,
        worker: str,
        reason: str,
        retry_at: float,
        *,
        max_attempts: int = MAX_ATTEMPTS,
    ) -> State | None:
        """The judge could not be asked: JUDGING again from `retry_at` on, or DROPPED for `reason`
        after `max_attempts`. Counted as `postponed:<reason>`. None where the claim was lost."""
        with self._db.write() as db:
            row = _claimed(db, turn_id, worker)
            if row is None:
                return None
            seq, _, attempts = row
            turns.add_count(db, "count", f"postponed:{reason}")
            if attempts >= max_attempts:
                self._end("seq = ?", (seq,), reason, retry_at)
                return State.DROPPED
            db.execute(
                "UPDATE turns SET claim_worker = NULL, claim_until = 0, retry_at = ? WHERE seq = ?",
                (retry_at, seq),
            )
            return State.JUDGING

    # -- rollout ---------------------------------------------------------------------------

    def ready(self, limit: int = 4096) -> list[ReadyTurn]:
        """Ready turns, oldest first; of any one session no more than its fair part of `limit`
        while others have some, so that a long queue of one hides nobody."""
        with self._db.read() as db:
            rows = db.execute(
                "SELECT turn_id, session_id, owner, created, min_version, max_version, "
                "temperature, output_len, off_policy FROM (SELECT *, row_number() OVER "
                "(PARTITION BY session_id ORDER BY created, seq) AS place FROM turns "
                "WHERE state = 'ready') ORDER BY place LIMIT ?",
                (limit,),
            ).fetchall()
        found = [
            ReadyTurn(
                turn_id=row[0],
                session_id=row[1],
                owner=row[2],
                created=row[3],
                min_version=row[4],
                max_version=row[5],
                temperature=row[6],
                output_len=row[7],
                off_policy=bool(row[8]),
            )
            for row in rows
        ]
        return sorted(found, key=lambda turn: (turn.created, turn.turn_id))

    def lease(self, rollout_id: int, host: str, turn_ids: Iterable[str], now: float) -> bool:
        """Take ready turns for one rollout: all of them, or none and False.

        Raises `JournalError` while an earlier lease of this host and rollout is unfinished.
        """
        ids = list(dict.fromkeys(turn_ids))
        if not ids:
            return False
        with self._db.write() as db:
            if db.execute(
                "SELECT 1 FROM turns WHERE state = 'leased' AND lease_host = ? "
                "AND lease_rollout = ?",
                (host, rollout_id),
            ).fetchone():
                raise JournalError(
                    f"rollout {rollout_id} of {host} has an unfinished lease: train it or give "
                    "it back"
                )
            wanted = json.dumps(ids)
            ready = db.execute(
                "SELECT count(*) FROM turns WHERE state = 'ready' "
                "AND turn_id IN (SELECT value FROM json_each(?))",
                (wanted,),
            ).fetchone()[0]
            if ready != len(ids):
                return False
            db.execute(
                "UPDATE turns SET state = 'leased', lease_host = ?, lease_rollout = ?, "
                "leased_at = ?, changed = ? WHERE state = 'ready' "
                "AND turn_id IN (SELECT value FROM json_each(?))",
                (host, rollout_id, now, now, wanted),
            )
            return True

    def leases(self, host: str) -> list[Lease]:
        """Unfinished leases of a host, lowest rollout first; turns oldest first."""
        with self._db.read() as db:
            rows = db.execute(
                "SELECT lease_rollout, turn_id, leased_at FROM turns WHERE state = 'leased' "
                "AND lease_host = ? ORDER BY lease_rollout, created, turn_id",
                (host,),
            ).fetchall()
        ids: dict[int, list[str]] = {}
        times: dict[int, float] = {}
        for rollout_id, turn_id, leased_at in rows:
            ids.setdefault(rollout_id, []).append(turn_id)
            times.setdefault(rollout_id, leased_at)
        return [
            Lease(host=host, rollout_id=key, turn_ids=tuple(value), created=times[key])
            for key, value in ids.items()
        ]

    def give_back(self, rollout_id: int, host: str, now: float) -> int:
        """The turns of an unfinished lease are ready again; how many."""
        return self._settle(
            "state = 'ready', lease_host = NULL, lease_rollout = NULL, leased_at = NULL",
            (), rollout_id, host, now,
        )  # fmt: skip

    def mark_trained(self, rollout_id: int, host: str, version: str, now: float) -> int:
        """The weights `version` have learnt from this lease; how many turns. Again: 0."""
        return self._settle(
            "state = 'trained', trained_version = ?", (version,), rollout_id, host, now
        )

    def _settle(
        self, change: str, values: tuple[Any, ...], rollout_id: int, host: str, now: float
    ) -> int:
        with self._db.write() as db:
            return db.execute(
                f"UPDATE turns SET {change}, changed = ? "
                "WHERE state = 'leased' AND lease_host = ? AND lease_rollout = ?",
                (*values, now, host, rollout_id),
            ).rowcount

    def lineage(self, turn_ids: Iterable[str]) -> list[Lineage]:
        """These turns and all whose tokens their prompts begin with, oldest first."""
        with self._db.read() as db:
            return turns.load_lineage(db, turn_ids)

    def outputs(self, turn_ids: Iterable[str]) -> list[Output]:
        """Sampled tokens and verdicts, oldest first; unknown ids are left out."""
        with self._db.read() as db:
            return turns.load_outputs(db, turn_ids)

    # -- endpoints -------------------------------------------------------------------------

    def publish(self, role: str, url: str, info: Mapping[str, Any], now: float) -> None:
        """Say where the engine of a role (`policy`, `judge`, `prm`, `teacher`) is now."""
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
        """Delete turns with all their text; how many. Conditions are joined by "and".

        `session_id` and `owner` delete what they name, leased turns included. `older_than` (a
        time) and `max_bytes` (of the file's content) leave leased turns alone and go from the
        oldest on, finished ones first. Deleted turns that had not ended count as dropped
        `purged`; the space is overwritten and returned to the system.
        """
        if session_id is None and owner is None and older_than is None and max_bytes is None:
            raise JournalError("purge needs to be told what to delete")
        removed = 0
        with self._db.write() as db:
            if session_id is not None or owner is not None or older_than is not None:
                removed += retention.purge(db, session_id, owner, older_than)
            if max_bytes is not None:
                removed += retention.shrink(db, max_bytes)
        if removed:
            self._db.give_space_back()
        return removed

    def size(self) -> int:
        """Bytes of content in the file, without free pages."""
        with self._db.read() as db:
            return retention.size(db)

    def changed(self) -> bool:
        """Whether anything was committed since the last call (or ever): cheap, for pollers."""
        now = (self._db.pragma("data_version"), self._db.own_changes())
        changed, self._seen_change = now != self._seen_change, now
        return changed


def _claimed(db: sqlite3.Connection, turn_id: str, worker: str) -> tuple[int, int, int] | None:
    row: tuple[int, int, int] | None = db.execute(
        "SELECT seq, output_len, attempts FROM turns "
        "WHERE turn_id = ? AND state = 'judging' AND claim_worker = ?",
        (turn_id, worker),
    ).fetchone()
    return row
