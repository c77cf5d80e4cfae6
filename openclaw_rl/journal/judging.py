"""The judge's part of `Journal`: reserve turns that have a next state, write verdicts.

Guarantees: a turn is reserved for one worker at a time, and only that worker can end it; a worker
that dies keeps nothing from being judged; every attempt is counted.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Sequence

from openclaw_rl.errors import JournalError
from openclaw_rl.journal import turns
from openclaw_rl.journal.part import JournalPart
from openclaw_rl.types import State, Turn, Verdict

MAX_ATTEMPTS = 20
"""How often a turn is given to a judge before it is dropped; with growing pauses, hours."""


class Judging(JournalPart):
    def claim(
        self,
        worker: str,
        limit: int,
        now: float,
        lease_seconds: float,
        *,
        but_not: Sequence[str] = (),
    ) -> list[Turn]:
        """Up to `limit` turns to judge, oldest first, reserved for `worker` until
        `now + lease_seconds`; none of `but_not`, which it still has in hand. A turn whose judge
        died too often is dropped as `judge_lost`."""
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
                    "AND retry_at <= ? AND turn_id NOT IN (SELECT value FROM json_each(?)) "
                    "ORDER BY created, seq LIMIT ?",
                    (now, now, json.dumps(but_not), limit),
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

    def extend_claims(self, worker: str, until: float) -> list[str]:
        """A slow judge is still at work: keep its claims until then. The turns it still holds."""
        with self._db.write() as db:
            rows = db.execute(
                "UPDATE turns SET claim_until = ? WHERE state = 'judging' AND claim_worker = ? "
                "RETURNING turn_id",
                (until, worker),
            )
            return [row[0] for row in rows]

    def release_claims(self, worker: str) -> int:
        """A judge stops in good order: its turns are free at once, the attempt does not count."""
        with self._db.write() as db:
            return db.execute(
                "UPDATE turns SET claim_worker = NULL, claim_until = 0, attempts = attempts - 1 "
                "WHERE state = 'judging' AND claim_worker = ?",
                (worker,),
            ).rowcount

    def write_verdict(
        self, turn_id: str, worker: str, verdict: Verdict, now: float, *, use_score: bool = True
    ) -> State | None:
        """The turn is READY, or DROPPED as `no_signal` where nothing could be learnt: no score or
        0, and no teacher value. None (and nothing changed) where the claim was lost.

        `use_score=False`: the method learns from teacher values alone, a score is only recorded.

        Raises `JournalError` for a score that is no finite number, or teacher values (or rows of
        candidates) that are not one for each output token.
        """
        teacher, topk = verdict.teacher_log_probs, verdict.teacher_topk
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
            if topk is not None and len(topk.ids) != output_len:
                raise JournalError(
                    f"turn {turn_id}: {len(topk.ids)} rows of candidates for {output_len} tokens"
                )
            rewarded = use_score and bool(verdict.score)
            state = State.READY if rewarded or verdict.taught else State.DROPPED
            turns.store_verdict(db, seq, verdict, now)
            db.execute(
                "UPDATE turns SET state = ?, reason = ?, changed = ?, claim_worker = NULL "
                "WHERE seq = ?",
                (state, "" if state is State.READY else "no_signal", now, seq),
            )
            return state

    def drop_claimed(self, turn_id: str, claim: str, reason: str, now: float) -> bool:
        """End a turn that cannot be judged. False (and nothing changed) where the claim was
        lost: another worker may have judged the turn meanwhile."""
        where = "turn_id = ? AND state = 'judging' AND claim_worker = ?"
        return self._end(where, (turn_id, claim), reason, now) > 0

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


def _claimed(db: sqlite3.Connection, turn_id: str, worker: str) -> tuple[int, int, int] | None:
    row: tuple[int, int, int] | None = db.execute(
        "SELECT seq, output_len, attempts FROM turns "
        "WHERE turn_id = ? AND state = 'judging' AND claim_worker = ?",
        (turn_id, worker),
    ).fetchone()
    return row
