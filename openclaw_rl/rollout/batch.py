"""Who is in the next batch. Pure: heads of ready turns and rules in, a choice out.

Guarantees: a batch is full as soon as there are enough turns that can be trained, whosesoever they
are; a session gives more than its share only where the others together cannot fill the batch, and
then the busiest give evenly; practice only fills up what live turns leave; older turns before newer
ones. A turn that the trainer cannot train as
it was sampled, or that is too old, is named for dropping with its reason, never trained.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from openclaw_rl.journal.turns import PRACTICE
from openclaw_rl.types import Turn

_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "top_p": (1.0,),
    "top_k": (-1, 0),
    "min_p": (0.0,),
    "min_new_tokens": (0,),
    **dict.fromkeys(("logit_bias", "json_schema", "regex", "ebnf", "structural_tag"), ({}, "")),
}
"""Parameters that change the distribution: penalties, cuts, biases and grammars; and the values
with which they do not (None is one of each)."""

_SAME_TEMPERATURE = 1e-6


@dataclass(frozen=True, slots=True)
class Rules:
    """`batch_size` in turns. `max_staleness` in weight versions (None: no limit). `temperature`:
    the only one that the trainer computes log-probs at (None: it takes each turn's own)."""

    batch_size: int
    session_share: float = 0.25
    max_staleness: int | None = 8
    temperature: float | None = None

    @property
    def session_cap(self) -> int:
        """Turns that one session may give while others have some to fill the batch."""
        return max(1, math.floor(self.batch_size * self.session_share))


@dataclass(frozen=True, slots=True)
class Choice:
    """`take`: ids for the batch, oldest first, at most `batch_size` (fewer: it is not full).
    `drop`: id -> reason. `held`: how many stay ready, by reason."""

    take: tuple[str, ...]
    drop: Mapping[str, str]
    held: Mapping[str, int]


def choose(ready: Iterable[Turn], rules: Rules, version: str | None) -> Choice:
    """Choose from `ready` what the next batch trains, while `version` is served."""
    ranked: list[tuple[tuple[bool, int], Turn]] = []
    drop: dict[str, str] = {}
    offered: Counter[tuple[str, str]] = Counter()
    for turn in sorted(ready, key=_age_order):
        if (reason := unfit(turn, rules, version)) is not None:
            drop[turn.turn_id] = reason
            continue
        offered[turn.owner, turn.session_id] += 1
        # How far beyond its session's share this turn is: these places are filled last, evenly.
        beyond = offered[turn.owner, turn.session_id] - rules.session_cap
        ranked.append(((turn.source == PRACTICE, max(0, beyond)), turn))
    ranked.sort(key=lambda one: one[0])  # stable: older ones first
    take = sorted((turn for _, turn in ranked[: rules.batch_size]), key=_age_order)
    rest = ranked[rules.batch_size :]
    held = Counter("session_share" if beyond else "next_batch" for (_, beyond), _ in rest)
    return Choice(tuple(turn.turn_id for turn in take), drop, held)


def _age_order(turn: Turn) -> tuple[float, str]:
    return turn.created, turn.turn_id


def unfit(turn: Turn, rules: Rules, version: str | None) -> str | None:
    """Why a turn is never trained: `sampling` or `stale`; None where it can be."""
    if turn.off_policy:
        return None  # nobody sampled it here, and it has no version
    if not sampled_as_trained(turn.sampling, rules.temperature):
        return "sampling"
    old = age(turn, version)
    if rules.max_staleness is not None and old is not None and old > rules.max_staleness:
        return "stale"
    return None


def sampled_as_trained(sampling: Mapping[str, Any], temperature: float | None) -> bool:
    """Whether the trainer computes log-probs of the distribution that a turn was sampled from.

    It does so from the logits divided by a temperature: `temperature`, or (None) the turn's own;
    at temperature 0 there is no distribution.
    """
    if any(sampling.get(name) not in (None, *same) for name, same in _HARMLESS.items()):
        return False
    own = sampling.get("temperature")
    own = 1.0 if own is None else float(own)
    return own > 0 and (temperature is None or abs(own - temperature) <= _SAME_TEMPERATURE)


def age(turn: Turn, version: str | None) -> int | None:
    """How many versions ago the first token of `turn` was sampled; None where versions are no
    numbers. Weights that started to count anew make old turns look young, never the reverse."""
    if version is None or not (version.isdecimal() and turn.min_version.isdecimal()):
        return None
    return max(0, int(version) - int(turn.min_version))
