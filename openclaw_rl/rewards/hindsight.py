"""Distillation from hindsight: a judge turns what happened next into a hint, and the teacher says
how likely the same reply would have been with that hint in view.

Guarantees: no score; a hint only where the judge's verdict is positive and the hint is longer than
`args.min_hint_chars`; one teacher value for each response token, or None.
"""

from __future__ import annotations

from typing import Any

from openclaw_rl.judge.prompts import case_of
from openclaw_rl.judge.resources import get_resources
from openclaw_rl.judge.votes import choose_hint
from openclaw_rl.sample import Sample


async def custom_rm(args: Any, sample: Sample, **kwargs: Any) -> dict[str, Any]:
    """`{"score": None, "hint": str | None, "teacher_log_probs": list | None, "abstained": bool}`.

    Raises `EngineUnavailable` where the judge or the teacher is away.
    """
    resources = get_resources(args)
    votes = await (await resources.hints()).votes(case_of(sample))
    min_chars = getattr(args, "min_hint_chars", None)
    hint = choose_hint(votes, 10 if min_chars is None else min_chars)
    resources.count("hint_accepted" if hint else "hint_none")
    return {
        "score": None,
        "hint": hint,
        "teacher_log_probs": await resources.teach(sample, hint) if hint else None,
        "abstained": all(vote.score is None for vote in votes),
    }
