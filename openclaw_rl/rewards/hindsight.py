"""Distillation from hindsight: a judge turns what happened next into a hint, and the teacher says
how likely the same reply would have been with that hint in view.

Guarantees: no score; a hint only where the judge's verdict is positive and the hint is longer than
`args.min_hint_chars`; one teacher value (and one row of candidates) for each response token, or
None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openclaw_rl.hooks import Sample
from openclaw_rl.judge.models import models_of
from openclaw_rl.judge.votes import accepted_hints


async def custom_rm(args: Any, sample: Sample, **kwargs: Any) -> dict[str, Any]:
    """`{"score": None, "hint": str | None, "teacher_log_probs": list | None, "teacher_topk": dict |
    None, "abstained": bool}`.

    With `args.opd_top_k` up to `args.opd_hints` hints are tried, and `hint` is the one chosen
    (`judge.teacher`). Raises `EngineUnavailable` where the judge or the teacher is away.
    """
    models = models_of(args)
    votes = await models.hints(sample)
    hints = accepted_hints(votes, args.min_hint_chars, models.max_hints)
    models.count("hint_accepted" if hints else "hint_none")
    values = await models.teach(sample, hints) if hints else None
    topk = values.topk if values is not None else None
    return {
        "score": None,
        "hint": values.hint if values is not None else next(iter(hints), None),
        "teacher_log_probs": values.log_probs if values is not None else None,
        "teacher_topk": topk.as_dict() if topk is not None else None,
        "abstained": all(vote.score is None for vote in votes),
    }


async def standing_rule(args: Any, corrections: Sequence[str], **kwargs: Any) -> str | None:
    """What the judge makes of a person's corrections (newest first) for every reply to come; None
    where nothing in them holds for every reply. Raises `EngineError`."""
    return await models_of(args).standing_rule(corrections)
