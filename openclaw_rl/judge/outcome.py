"""What a reward function returned, checked.

Guarantees: an `Outcome` holds only finite scores, and teacher values (and rows of candidates) that
are one for each token of the response; everything else is a `BadReward` with the reason that the
turn is dropped for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openclaw_rl.errors import HookError
from openclaw_rl.types import TopK


class BadReward(HookError):
    """The reward cannot be used. `reason` is what the turn's fate says."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Outcome:
    """`asked_teacher`: the reward function has settled the teacher's part, even if with None.
    `abstained`: the judges could not tell; worth asking again."""

    score: float | None = None
    hint: str | None = None
    teacher_log_probs: Sequence[float] | None = None
    teacher_topk: TopK | None = None
    asked_teacher: bool = False
    votes: Sequence[float | None] = field(default=())
    abstained: bool = False


def read_outcome(result: Any, response_length: int, reward_key: str | None = None) -> Outcome:
    """Read a float, None, or a dict with `score` (or `reward_key`), `hint`, `teacher_log_probs`,
    `teacher_topk` (`{"ids": ..., "log_probs": ...}`, each [tokens][K]), and optionally `votes` and
    `abstained`. Raises `BadReward`."""
    if not isinstance(result, Mapping):
        return Outcome(score=_number(result))
    key = reward_key if reward_key and reward_key in result else "score"
    known = {key, "hint", "teacher_log_probs", "teacher_topk", "abstained"}
    if not known & result.keys():
        wanted = f"{reward_key!r} or 'score'" if reward_key else "'score'"
        raise BadReward("reward_invalid", f"the reward is a dict without {wanted}")
    hint = result.get("hint")
    if hint is not None and not isinstance(hint, str):
        raise BadReward("reward_invalid", f"the hint is {type(hint).__name__}, not text")
    return Outcome(
        score=_number(result.get(key)),
        hint=(hint or "").strip() or None,
        teacher_log_probs=_log_probs(result.get("teacher_log_probs"), response_length),
        teacher_topk=_topk(result.get("teacher_topk"), response_length),
        asked_teacher=not {"teacher_log_probs", "teacher_topk"}.isdisjoint(result),
        votes=tuple(_vote(vote) for vote in result.get("votes") or ()),
        abstained=bool(result.get("abstained", False)),
    )


def _topk(value: Any, length: int) -> TopK | None:
    if value is None:
        return None
    try:
        topk = TopK.of_mapping(value, length)
    except (TypeError, ValueError, KeyError, OverflowError, RuntimeError) as error:
        # The words of other errors are not ours: they may quote what was given.
        why = str(error) if type(error) is ValueError else "no lists of ids and log_probs"
        raise BadReward("reward_invalid", f"teacher_topk: {why}") from None
    return topk if topk.known else None


def _number(value: Any) -> float | None:
    """A score; None says "no opinion". Tensors and numpy numbers of one element are numbers."""
    if value is None:
        return None
    if isinstance(value, str | bytes):
        raise BadReward("reward_invalid", "the score is text, not a number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        kind = type(value).__name__
        raise BadReward("reward_invalid", f"the score is {kind}, not a number") from None
    if not math.isfinite(number):
        raise BadReward("reward_nan", "the score is not a finite number")
    return number


def _vote(value: Any) -> float | None:
    try:
        return _number(value)
    except BadReward:
        return None


def _log_probs(values: Any, length: int) -> list[float] | None:
    if values is None:
        return None
    try:
        # A value that is missing (None) is "no teacher for this token", as NaN is.
        numbers = [math.nan if value is None else float(value) for value in values]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise BadReward("reward_invalid", "teacher_log_probs are no list of numbers") from None
    if len(numbers) != length:
        raise BadReward(
            "reward_invalid", f"{len(numbers)} teacher_log_probs for {length} response tokens"
        )
    return [value if math.isfinite(value) else math.nan for value in numbers]
