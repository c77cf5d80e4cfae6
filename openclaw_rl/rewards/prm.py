"""Reward by votes: m independent verdicts of a process reward model on what happened next.

Guarantees: the score is the majority's; a tie is 0; abstentions (no verdict, cut off, too slow)
are left out, and where all abstain there is no score (`abstained`: the worker asks again later).
"""

from __future__ import annotations

from typing import Any

from openclaw_rl.hooks import Sample
from openclaw_rl.judge.models import models_of
from openclaw_rl.judge.votes import majority


async def custom_rm(args: Any, sample: Sample, **kwargs: Any) -> dict[str, Any]:
    """`{"score": -1.0 | 0.0 | 1.0 | None, "votes": [...], "abstained": bool}`.

    Raises `EngineUnavailable` where the PRM is away or answers no vote in time.
    """
    scores = [vote.score for vote in await models_of(args).verdicts(sample)]
    score = majority(scores)
    return {"score": score, "votes": scores, "abstained": score is None}
