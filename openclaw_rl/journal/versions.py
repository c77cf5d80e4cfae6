"""Versions of the weights that were made, served or refused, and what a person asks of the trainer.

Both are rows, so that any process may read what became of a version, or ask for a pause or a
rollback; the trainer answers when it comes to it.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """One version of the policy's weights."""

    version: int
    """Its number; of a refused candidate the one that it would have had."""
    state: Literal["served", "refused"]
    reason: str = ""
    """Why it was refused; of a restored one "rollback", or what asked for it."""
    rollout: int = -1
    """The rollout that it learnt from."""
    restored: int | None = None
    """The version whose weights it has again."""
    created: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)
    """What the probes measured, by name; figures that are not finite are not kept."""


def insert_version(db: sqlite3.Connection, v: Version) -> None:
    figures = {name: value for name, value in v.figures.items() if math.isfinite(value)}
    db.execute(
        "INSERT INTO versions (version, state, reason, rollout, restored, created, figures) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        (v.version, v.state, v.reason, v.rollout, v.restored, v.created, json.dumps(figures)),
    )


def load_versions(db: sqlite3.Connection, limit: int) -> list[Version]:
    """The `limit` that were recorded last, newest first."""
    rows = db.execute(
        "SELECT version, state, reason, rollout, restored, created, figures FROM versions "
        "ORDER BY seq DESC LIMIT ?",
        (limit,),
    )
    return [
        Version(
            version=version, state=state, reason=reason, rollout=rollout, restored=restored,
            created=created, figures=json.loads(figures),
        )
        for version, state, reason, rollout, restored, created, figures in rows
    ]  # fmt: skip
