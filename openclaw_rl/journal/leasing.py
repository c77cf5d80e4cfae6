"""The rollout's part of `Journal`: what is ready, who has taken it, what became of it.

Guarantees: a turn is in one lease at most, a lease takes all its turns or none, and each of them
is marked trained once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from openclaw_rl.errors import JournalError
from openclaw_rl.journal import turns
from openclaw_rl.journal.part import JournalPart
from openclaw_rl.journal.records import Lease, Lineage, Output, ReadyTurn


class Leasing(JournalPart):
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
