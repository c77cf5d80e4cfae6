"""`Journal`: the durable record of every turn, shared by several processes.

Guarantees: a method that returned has committed (unless inside `batch()`: then its end has).
A turn changes its state only by the guarded steps of `State`, so two processes can never both take
one. `outcomes()` always adds up. Thread-safe; one instance is one connection, and a thread that
waits for another holds nothing up outside this instance. Not to be carried over a fork.
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openclaw_rl.errors import JournalError
from openclaw_rl.journal import retention, turns
from openclaw_rl.journal.database import Database
from openclaw_rl.journal.outcomes import Outcomes, load_outcomes
from openclaw_rl.journal.turns import PRACTICE, Opinion
from openclaw_rl.journal.versions import Version, insert_version, load_versions
from openclaw_rl.types import Message, State, Turn, Verdict

_BREATH = 0.01
"""Seconds between the transactions of a purge, in which others get to write."""

MAX_ATTEMPTS = 20
"""How often a turn is given to a judge before it is dropped; with growing pauses, hours."""

_LEASED = "state = 'leased' AND lease_host = ? AND lease_rollout = ?"
_CLAIMED = "state = 'judging' AND claim_worker = ?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Address of an engine, published at a time. `info["weight_version"]`, where given for the
    policy, is the version that is served now."""

    role: str
    url: str
    info: Mapping[str, Any]
    published: float


class Journal(Database):
    # -- gateway ---------------------------------------------------------------------------

    def record_turn(self, rec: Turn) -> None:
        """Keep a finished turn. Raises `JournalError` if its id is known already."""
        with self.batch() as db:
            turns.insert_turn(db, rec)

    def set_next_state(self, turn_id: str, messages: Sequence[Message]) -> bool:
        """What followed a waiting turn: it can be judged now. The first next state stays; False
        where there is one already, the turn is no longer waiting, or `messages` is empty."""
        if not messages:
            return False
        with self.batch() as db:
            row = db.execute(
                "SELECT session_id FROM turns WHERE turn_id = ? AND state = 'waiting'", (turn_id,)
            ).fetchone()
            if row is None:
                return False
            ids = turns.store_messages(db, row[0], messages)
            db.execute(
                "UPDATE turns SET state = 'judging', next_ids = ? WHERE turn_id = ?",
                (turns.pack_ints(ids), turn_id),
            )
            return True

    def drop(self, turn_id: str, reason: str, now: float) -> bool:
        """End a turn that nobody holds. False where a judge or a trainer has it, or it has ended,
        or it is a side turn."""
        where = (
            "turn_id = ? AND (state IN ('waiting', 'ready') "
            "OR state = 'judging' AND (claim_worker IS NULL OR claim_until <= ?))"
        )
        return self._end(where, (turn_id, now), reason) > 0

    def supersede(self, turn_ids: Iterable[str]) -> int:
        """End those turns that still wait, as `retried`; how many."""
        where = "turn_id = ? AND state = 'waiting'"  # found by its id, not among all that wait
        return sum(self._end(where, (turn_id,), "retried") for turn_id in turn_ids)

    def count(self, name: str, n: int = 1) -> None:
        """Add to a named counter of `outcomes().counters`."""
        with self.batch() as db:
            turns.add_count(db, "count", name, n)

    def end_session(self, session_id: str, *, owner: str | None = None) -> int:
        """Nothing follows any more: drop the waiting turns of the session; how many."""
        where = "session_id = ? AND state = 'waiting' AND (? IS NULL OR owner = ?)"
        return self._end(where, (session_id, owner, owner), "session_ended")

    def heads(self, limit: int) -> list[Turn]:
        """Heads of the newest `limit` turns that were served, parents first, for `Tracker.restore`.
        Replayed and practice ones are kept apart: no live conversation goes on from them."""
        with self._read() as db:
            clause = "WHERE t.off_policy = 0 AND t.source != ? ORDER BY t.seq DESC LIMIT ?"
            return turns.load_heads(db, clause, (PRACTICE, limit))[::-1]

    def turn(self, turn_id: str) -> Turn | None:
        """A turn with everything that is known of it."""
        with self._read() as db:
            return turns.load_turn(db, turn_id)

    def known(self) -> set[str]:
        """What was said already: the `node_hash` of every turn that was served, the id of every one
        that was replayed; also of those that were trained, or replayed, and went by age or size."""
        rows = self._rows(
            "SELECT CASE WHEN off_policy THEN turn_id ELSE node_hash END FROM turns UNION ALL "
            "SELECT name FROM counters WHERE scope IN ('learnt', 'replayed')"
        )
        return {row[0] for row in rows}

    def tokens(self, turn_id: str) -> list[int]:
        """Prompt and output ids of a turn. Raises `JournalError` for an unknown turn."""
        with self._read() as db:
            prompt, output = turns.load_tokens(db, turn_id)
        return prompt + output

    def turn_ids(
        self,
        *,
        session_id: str | None = None,
        owner: str | None = None,
        before: float | None = None,
    ) -> list[str]:
        """Ids of all turns (of a session, an owner, made before a time and held by nobody: what
        `purge` would delete), oldest first."""
        sql = f"SELECT turn_id FROM turns WHERE {retention.NAMED} ORDER BY seq"
        return [row[0] for row in self._rows(sql, (session_id, owner, before))]

    def first_prompts(self, limit: int, max_tokens: int) -> list[list[int]]:
        """The prompt ids with which the newest sessions began, each once: of main turns that were
        served, offered no tools and are not longer than `max_tokens`."""
        rows = self._rows(
            "SELECT p.prompt_tail FROM turns t JOIN payloads p USING (seq) WHERE kind = 'main' "
            "AND parent_id IS NULL AND off_policy = 0 AND prompt_len <= ? AND tools_id IS NULL "
            "GROUP BY p.prompt_tail ORDER BY max(t.seq) DESC LIMIT ?",
            (max_tokens, limit),
        )
        return [turns.unpack_ints(blob) for (blob,) in rows]

    def sessions(self, limit: int) -> list[tuple[str, str, float, dict[str, int]]]:
        """The sessions that were used last: id, owner, when their newest turn was made, and how
        many turns are in which state."""
        rows = self._rows(
            "SELECT session_id, owner, max(last), json_group_object(state, n) FROM ("
            "SELECT session_id, owner, state, max(created) AS last, count(*) AS n FROM turns "
            "GROUP BY session_id, owner, state) "
            "GROUP BY session_id, owner ORDER BY max(last) DESC LIMIT ?",
            (limit,),
        )
        return [(*row[:3], json.loads(row[3])) for row in rows]

    # -- judge -----------------------------------------------------------------------------

    def claim(
        self,
        worker: str,
        limit: int,
        now: float,
        claim_seconds: float,
        *,
        but_not: Sequence[str] = (),
    ) -> list[Turn]:
        """Up to `limit` turns to judge, oldest first, reserved for `worker` until
        `now + claim_seconds`; none of `but_not`, which it is still judging. A turn whose judge
        died too often is dropped as `judge_lost`."""
        with self.batch() as db:
            db.execute(
                "UPDATE turns SET state = 'dropped', reason = 'judge_lost' "
                "WHERE state = 'judging' AND claim_until <= ? AND attempts >= ?",
                (now, MAX_ATTEMPTS),
            )
            rows = db.execute(
                "UPDATE turns SET claim_worker = ?, claim_until = ?, attempts = attempts + 1 "
                "WHERE seq IN (SELECT seq FROM turns WHERE state = 'judging' "
                "AND max(claim_until, retry_at) <= ? "
                "AND turn_id NOT IN (SELECT value FROM json_each(?)) "
                "ORDER BY created, seq LIMIT ?) RETURNING turn_id",
                (worker, now + claim_seconds, now, json.dumps(but_not), limit),
            ).fetchall()
        with self._read() as db:
            found = [turn for (turn_id,) in rows if (turn := turns.load_turn(db, turn_id))]
        return sorted(found, key=lambda turn: turn.created)

    def extend_claims(self, worker: str, until: float) -> list[str]:
        """A slow judge is still at work: keep its claims until then. The turns it still holds."""
        with self.batch() as db:
            extend = f"UPDATE turns SET claim_until = ? WHERE {_CLAIMED} RETURNING turn_id"
            return [row[0] for row in db.execute(extend, (until, worker))]

    def release_claims(self, worker: str) -> int:
        """A judge stops in good order: its turns are free at once, the attempt does not count."""
        return self._change(
            "UPDATE turns SET claim_worker = NULL, claim_until = 0, attempts = attempts - 1 "
            f"WHERE {_CLAIMED}",
            (worker,),
        )

    def write_verdict(
        self, turn_id: str, worker: str, verdict: Verdict, *, use_score: bool = True
    ) -> State | None:
        """The turn is READY, or DROPPED as `no_signal` where nothing could be learnt: no score or
        0, and no teacher value. None (and nothing changed) where the claim was lost.

        `use_score=False`: the method learns from teacher values alone, a score is only recorded.

        Raises `JournalError` for a score that is no finite number, or teacher values (or rows of
        candidates) that are not one for each output token.
        """
        topk = verdict.teacher_topk
        if verdict.score is not None and not math.isfinite(verdict.score):
            raise JournalError(f"turn {turn_id}: the score must be a finite number or None")
        with self.batch() as db:
            row = _claimed(db, turn_id, worker)
            if row is None:
                return None
            seq, output_len, _ = row
            for values in (verdict.teacher_log_probs, topk.ids if topk else None):
                if values is not None and len(values) != output_len:
                    raise JournalError(
                        f"turn {turn_id}: {len(values)} teacher values for {output_len} tokens"
                    )
            rewarded = use_score and bool(verdict.score)
            state = State.READY if rewarded or verdict.has_teacher else State.DROPPED
            turns.store_verdict(db, seq, verdict)
            db.execute(
                "UPDATE turns SET state = ?, reason = ?, claim_worker = NULL WHERE seq = ?",
                (state, "" if state is State.READY else "no_signal", seq),
            )
            return state

    def drop_claimed(self, turn_id: str, claim: str, reason: str) -> bool:
        """End a turn that cannot be judged. False (and nothing changed) where the claim was
        lost: another worker may have judged the turn meanwhile."""
        return self._end(f"turn_id = ? AND {_CLAIMED}", (turn_id, claim), reason) > 0

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
        with self.batch() as db:
            row = _claimed(db, turn_id, worker)
            if row is None:
                return None
            seq, _, attempts = row
            turns.add_count(db, "count", f"postponed:{reason}")
            if attempts >= max_attempts:
                self._end("seq = ?", (seq,), reason)
                return State.DROPPED
            db.execute(
                "UPDATE turns SET claim_worker = NULL, claim_until = 0, retry_at = ? WHERE seq = ?",
                (retry_at, seq),
            )
            return State.JUDGING

    # -- practice --------------------------------------------------------------------------

    def openings(self, owner: str, limit: int, max_tokens: int) -> list[str]:
        """Ids of live turns that opened a session of `owner`, each question once, newest first:
        prompts of at most `max_tokens` that can be answered again as they are."""
        rows = self._rows(
            "SELECT turn_id, max(seq) FROM turns WHERE kind = 'main' AND owner = ? "
            "AND source != ? AND parent_id IS NULL AND off_policy = 0 AND prompt_len <= ? "
            "GROUP BY request_hash ORDER BY max(seq) DESC LIMIT ?",
            (owner, PRACTICE, max_tokens, limit),
        )
        return [row[0] for row in rows]

    def opinions(self, limit: int) -> list[Opinion]:
        """The newest verdicts on live turns that praise, blame or correct, newest first."""
        rows = self._rows(
            "SELECT owner, score, hint FROM verdicts JOIN turns USING (seq) "
            "WHERE source != ? AND (ifnull(score, 0) != 0 OR hint != '') ORDER BY seq DESC LIMIT ?",
            (PRACTICE, limit),
        )
        return [Opinion(*row) for row in rows]

    def practised(self, recent: int) -> tuple[int, int]:
        """How many of the newest `recent` live turns with a verdict there are, and how many
        practice turns were made since the oldest of them."""
        [found] = self._rows(
            "WITH live AS (SELECT seq FROM verdicts JOIN turns USING (seq) WHERE source != ?1 "
            "ORDER BY seq DESC LIMIT ?2) SELECT (SELECT count(*) FROM live), (SELECT count(*) "
            "FROM turns WHERE source = ?1 AND seq > (SELECT min(seq) FROM live))",
            (PRACTICE, recent),
        )
        return found[0], found[1]

    def newest_turn(self) -> float:
        """When the newest live turn was made; 0.0 where there is none."""
        [(newest,)] = self._rows(
            "SELECT ifnull(max(created), 0.0) FROM turns WHERE source != ?", (PRACTICE,)
        )
        return float(newest)

    def record_practice(self, turn: Turn, verdict: Verdict) -> None:
        """Keep a practice turn with its verdict: it is READY. Raises `JournalError` where there is
        neither a score nor a teacher's value for each token."""
        values = verdict.teacher_log_probs
        if (not verdict.score and values is None) or len(
            values or turn.output_ids
        ) != turn.output_len:
            raise JournalError(f"turn {turn.turn_id}: not one teacher value for each token")
        with self.batch() as db:
            turns.insert_turn(db, turn)
            [(seq,)] = db.execute("SELECT seq FROM turns WHERE turn_id = ?", (turn.turn_id,))
            turns.store_verdict(db, seq, verdict)
            db.execute(
                "UPDATE turns SET state = 'ready' WHERE seq = ? AND state = 'waiting'", (seq,)
            )

    # -- rollout and trainer ---------------------------------------------------------------

    def ready(self, limit: int = 4096) -> list[Turn]:
        """Ready turns, oldest first; of any one session no more than its fair part of `limit`
        while others have some, so that a long queue of one hides nobody."""
        with self._read() as db:
            return turns.load_heads(
                db,
                "JOIN (SELECT seq AS ready, row_number() OVER (PARTITION BY owner, session_id "
                "ORDER BY created, seq) AS place FROM turns WHERE state = 'ready' ORDER BY place "
                "LIMIT ?) ON ready = t.seq ORDER BY t.created, t.turn_id",
                (limit,),
            )

    def lease(self, rollout_id: int, host: str, turn_ids: Iterable[str]) -> bool:
        """Take ready turns for one rollout: all of them, or none and False.

        Raises `JournalError` while an earlier lease of this host and rollout is unfinished.
        """
        ids = list(dict.fromkeys(turn_ids))
        with self.batch():
            if rollout_id in self.leases(host):
                raise JournalError(
                    f"rollout {rollout_id} of {host} has an unfinished lease: train it or give "
                    "it back"
                )
            ready = "state = 'ready' AND turn_id IN (SELECT value FROM json_each(?3))"
            leased = self._change(
                f"UPDATE turns SET state = 'leased', lease_host = ?1, lease_rollout = ?2 "
                f"WHERE {ready} AND (SELECT count(*) FROM turns WHERE {ready}) = ?4",
                (host, rollout_id, json.dumps(ids), len(ids)),
            )
            return leased > 0

    def leases(self, host: str) -> dict[int, list[str]]:
        """The turns that a host has leased and neither trained nor given back, oldest first, by
        rollout, the lowest first."""
        rows = self._rows(
            "SELECT lease_rollout, turn_id FROM turns WHERE state = 'leased' "
            "AND lease_host = ? ORDER BY lease_rollout, created, turn_id",
            (host,),
        )
        found: dict[int, list[str]] = {}
        for rollout_id, turn_id in rows:
            found.setdefault(rollout_id, []).append(turn_id)
        return found

    def give_back(self, rollout_id: int, host: str) -> int:
        """The turns of an unfinished lease are ready again; how many."""
        return self._change(
            "UPDATE turns SET state = 'ready', lease_host = NULL, lease_rollout = NULL "
            f"WHERE {_LEASED}",
            (host, rollout_id),
        )

    def mark_trained(self, rollout_id: int, host: str, version: str) -> int:
        """The weights `version` have learnt from this lease; how many turns. Again: 0."""
        return self._change(
            f"UPDATE turns SET state = 'trained', trained_version = ? WHERE {_LEASED}",
            (version, host, rollout_id),
        )

    def lineage(self, turn_ids: Iterable[str]) -> list[Turn]:
        """These turns and all whose tokens their prompts begin with, oldest first: heads, of these
        turns with what was sampled and their verdicts. Unknown ids are left out."""
        with self._read() as db:
            return turns.load_lineage(db, set(turn_ids))

    def drop_leased(self, rollout_id: int, host: str, turn_ids: Iterable[str], reason: str) -> int:
        """End turns of an unfinished lease that cannot be trained; how many there were."""
        where = f"{_LEASED} AND turn_id IN (SELECT value FROM json_each(?))"
        return self._end(where, (host, rollout_id, json.dumps(list(turn_ids))), reason)

    # -- the model -------------------------------------------------------------------------

    def bind(self, fingerprint: Mapping[str, str | int | float]) -> None:
        """Tie the journal to the model that its turns are of: facts by name, each kept when it is
        first given. Raises `JournalError` in one line where one differs from what was kept: turns
        of one model must not train another."""
        with self.batch() as db:
            rows = db.execute("SELECT name, value FROM fingerprint")
            kept = {name: json.loads(value) for name, value in rows}
            wrong = [
                f"{name} {kept[name]} in the journal, {value} now"
                for name, value in fingerprint.items()
                if kept.get(name, value) != value
            ]
            if wrong:
                raise JournalError(
                    f"the journal {self.path} belongs to another model ({'; '.join(wrong)}): "
                    "use that one, or another journal"
                )
            db.executemany(
                "INSERT OR IGNORE INTO fingerprint VALUES (?, ?)",
                [(name, turns.to_json(value)) for name, value in fingerprint.items()],
            )

    # -- versions and requests -------------------------------------------------------------

    def record_version(self, v: Version) -> None:
        """Keep what became of a version. The same number may come again: after a refusal the next
        candidate has it."""
        with self.batch() as db:
            insert_version(db, v)

    def versions(self, limit: int = 100) -> list[Version]:
        """The versions that were recorded last, newest first."""
        with self._read() as db:
            return load_versions(db, limit)

    def ask(self, name: str, value: str, now: float) -> None:
        """Ask the trainer for something: "pause" (`value`: why), which stands until it is answered
        by `resume`, or "rollback" (`value`: the version). A later request of that name replaces
        an earlier one."""
        self._change("INSERT OR REPLACE INTO requests VALUES (?, ?, ?)", (name, value, now))

    def asked(self) -> dict[str, str]:
        """Requests that stand, by name."""
        return dict(self._rows("SELECT name, value FROM requests ORDER BY asked"))

    def answered(self, name: str, value: str) -> None:
        """A request was carried out (or taken back); one that was changed meanwhile stays."""
        self._change("DELETE FROM requests WHERE name = ? AND value = ?", (name, value))

    # -- endpoints -------------------------------------------------------------------------

    def publish(self, role: str, url: str, info: Mapping[str, Any], now: float) -> None:
        """Say where the engine of a role (`policy`, `judge`, `prm`, `teacher`), or the `gateway`,
        is now; or what the `trainer`, `rollout` or `replay` has to say, without an address."""
        values = (role, url, turns.to_json(info), now)
        self._change("INSERT OR REPLACE INTO endpoints VALUES (?, ?, ?, ?)", values)

    def endpoint(self, role: str) -> Endpoint | None:
        """What was published last for a role."""
        for url, info, published in self._rows(
            "SELECT url, info, published FROM endpoints WHERE role = ?", (role,)
        ):
            return Endpoint(role=role, url=url, info=json.loads(info), published=published)
        return None

    # -- status ----------------------------------------------------------------------------

    def outcomes(self) -> Outcomes:
        """Where all turns ever seen are, in one consistent view."""
        with self._read() as db:
            return load_outcomes(db)

    def judged(self, recent: int) -> tuple[int, float | None]:
        """How many turns have a verdict, and the mean score of the newest `recent` scored ones."""
        [(total, mean)] = self._rows(
            "SELECT (SELECT count(*) FROM verdicts), (SELECT avg(score) FROM (SELECT score "
            "FROM verdicts WHERE score IS NOT NULL ORDER BY seq DESC LIMIT ?))",
            (recent,),
        )
        return total, mean

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
        file's content) stands alone. What is named by session or owner goes, leased turns included.
        By age and size what a judge or trainer holds stays, the oldest go first (by size, finished
        ones before others). All in transactions of a few dozen turns. Deleted turns that had not
        ended count as dropped `purged`; the space is overwritten and returned to the system.
        """
        what = session_id, owner, older_than, max_bytes
        if what == (None, None, None, None):
            raise JournalError("purge needs to be told what to delete")
        removed, more = 0, True
        while more:
            with self.batch() as db:
                n = retention.purge(db, *what)
            removed, more = removed + n, n == retention.CHUNK
            if more:
                time.sleep(_BREATH)
        if removed:
            self._vacuum()
        return removed

    def run_retention(
        self,
        now: float,
        *,
        next_state_ttl: float,
        max_age: float | None = None,
        max_bytes: int | None = None,
    ) -> dict[str, int]:
        """To be called every few minutes, from a thread and a connection of its own:
        drop turns that waited for a next state longer than `next_state_ttl` seconds, then `purge`
        by age in seconds and by size. How many turns, by what happened."""
        late = ("state = 'waiting' AND created < ?", (now - next_state_ttl,))
        done = {"no_next_state": self._end(*late, "no_next_state"), "purged": 0}
        if max_age is not None:
            done["purged"] += self.purge(older_than=now - max_age)
        if max_bytes is not None:
            done["purged"] += self.purge(max_bytes=max_bytes)
        return {what: n for what, n in done.items() if n}

    def _end(self, where: str, values: tuple[Any, ...], reason: str) -> int:
        return self._change(
            f"UPDATE turns SET state = 'dropped', reason = ?, claim_worker = NULL WHERE {where}",
            (reason, *values),
        )


def _claimed(db: sqlite3.Connection, turn_id: str, worker: str) -> tuple[int, int, int] | None:
    held = f"SELECT seq, output_len, attempts FROM turns WHERE turn_id = ? AND {_CLAIMED}"
    return db.execute(held, (turn_id, worker)).fetchone()  # type: ignore[no-any-return]
