"""Who is in the next batch. Pure: ready turns and rules in, a choice out.

Guarantees: never more than `session_cap` turns of one session; older turns before newer ones;
a turn that can no longer be trained honestly (too old, another temperature) is named for dropping
with its reason, never trained; whatever else is left out is counted by reason.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from openclaw_rl.journal.records import ReadyTurn

_SAME_TEMPERATURE = 1e-6


@dataclass(frozen=True, slots=True)
class Rules:
    """`batch_size` in turns. `max_staleness` in weight versions (None: no limit). `temperature`:
    that at which the trainer computes log-probs; turns sampled at another do not fit it (None:
    any)."""

    batch_size: int
    session_share: float = 0.25
    max_staleness: int | None = 8
    temperature: float | None = None

    @property
    def session_cap(self) -> int:
        """Turns one session may give: one that floods the batch would teach nothing else."""
        return max(1, math.floor(self.batch_size * self.session_share))


@dataclass(frozen=True, slots=True)
class Choice:
    """`take`: ids for the batch, oldest first, at most `batch_size` (fewer: it is not full).
    `drop`: id -> reason. `held`: how many stay ready, by reason."""

    take: tuple[str, ...]
    drop: Mapping[str, str]
    held: Mapping[str, int]
    sessions: int
    """Sessions that have a turn which could be trained."""


def choose(ready: Iterable[ReadyTurn], rules: Rules, version: str | None) -> Choice:
    """Choose from `ready` what the next batch trains, while `version` is served."""
    take: list[str] = []
    drop: dict[str, str] = {}
    held: Counter[str] = Counter()
    given: Counter[tuple[str, str]] = Counter()
    sessions: set[tuple[str, str]] = set()
    for turn in sorted(ready, key=lambda turn: (turn.created, turn.turn_id)):
        session = (turn.owner, turn.session_id)
        reason = _unfit(turn, rules, version)
        if reason is not None:
            drop[turn.turn_id] = reason
            continue
        sessions.add(session)
        if given[session] >= rules.session_cap:
            held["session_share"] += 1
        elif len(take) >= rules.batch_size:
            held["next_batch"] += 1
        else:
            given[session] += 1
            take.append(turn.turn_id)
    return Choice(tuple(take), drop, dict(held), len(sessions))


def age(turn: ReadyTurn, version: str | None) -> int | None:
    """How many versions ago the first token of `turn` was sampled; None where versions are no
    numbers. Weights that started to count anew make old turns look young, never the reverse."""
    if version is None or not (version.isdecimal() and turn.min_version.isdecimal()):
        return None
    return max(0, int(version) - int(turn.min_version))


def _unfit(turn: ReadyTurn, rules: Rules, version: str | None) -> str | None:
    if turn.off_policy:
        return None  # has neither a version nor a temperature that could be too far away
    if (
        rules.temperature is not None
        and abs(turn.temperature - rules.temperature) > _SAME_TEMPERATURE
    ):
        return "temperature"
    old = age(turn, version)
    if rules.max_staleness is not None and old is not None and old > rules.max_staleness:
        return "stale"
    return None
