"""What the parts of `Journal` share: the connection, and the end of a turn."""

from __future__ import annotations

from typing import Any

from openclaw_rl.errors import JournalError
from openclaw_rl.journal.database import Database


class JournalPart:
    def __init__(self, db: Database) -> None:
        self._db = db

    def _end(self, where: str, values: tuple[Any, ...], reason: str, now: float) -> int:
        if not reason:
            raise JournalError("a turn is dropped for a reason")
        with self._db.write() as db:
            return db.execute(
                "UPDATE turns SET state = 'dropped', reason = ?, changed = ?, claim_worker = NULL "
                f"WHERE {where}",
                (reason, now, *values),
            ).rowcount
