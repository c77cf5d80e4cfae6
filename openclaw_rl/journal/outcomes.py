"""How many turns ended where."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from openclaw_rl.types import State

_OPEN = ("no_next_state", "session_ended", "retried")
"""Ends of turns of which nothing followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """How many turns ended where. Turns that were purged since are still counted.

    `by_source`, for each way in which sessions were recognised: `bound` (main turns that belong to
    a conversation), `side`, and `unbound` (main turns without any name of which nothing followed
    yet).
    """

    seen: int = 0
    main: int = 0
    side: int = 0
    waiting: int = 0
    judging: int = 0
    ready: int = 0
    leased: int = 0
    trained: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    by_source: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def unbound(self) -> int:
        """Main turns that nothing ties to a conversation."""
        return sum(count["unbound"] for count in self.by_source.values())

    def states(self) -> dict[str, int]:
        """Main turns by state."""
        names = ("waiting", "judging", "ready", "leased", "trained")
        return {name: getattr(self, name) for name in names} | {
            "dropped": sum(self.dropped.values())
        }

    def balanced(self) -> bool:
        """Whether `seen == main + side` and `main` is the sum of its outcomes: it always is."""
        return self.seen == self.main + self.side and self.main == sum(self.states().values())


def load_outcomes(db: sqlite3.Connection) -> Outcomes:
    """In the caller's transaction."""
    states: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    by_source: dict[str, dict[str, int]] = {}
    for state, reason, source, n in db.execute(
        "SELECT state, reason, source, n FROM purged UNION ALL "
        "SELECT state, reason, source, count(*) FROM turns GROUP BY state, reason, source "
        "ORDER BY reason, source"
    ):
        states[state] += n
        if state == State.DROPPED:
            dropped[reason] += n
        # A nameless turn that opens a conversation is bound as soon as something follows.
        unbound = source == "new" and (state == State.WAITING or reason in _OPEN)
        kind = "side" if state == State.SIDE else "unbound" if unbound else "bound"
        by_source.setdefault(source, {"bound": 0, "side": 0, "unbound": 0})[kind] += n
    side = states.pop(State.SIDE, 0)
    main = sum(states.values())
    states.pop(State.DROPPED, 0)
    counters = db.execute("SELECT name, n FROM counters WHERE scope = 'count' ORDER BY name")
    [(seen,)] = db.execute("SELECT ifnull(sum(n), 0) FROM counters WHERE scope = 'seen'")
    return Outcomes(
        seen=seen,
        main=main,
        side=side,
        dropped=dict(dropped),
        counters=dict(counters),
        by_source=dict(sorted(by_source.items())),
        **states,
    )
