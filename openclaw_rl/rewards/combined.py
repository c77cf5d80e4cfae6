"""Both signals in one sample: the PRM's votes and, where there is a hint, the teacher's values.

Guarantees: PRM and judge are asked at the same time; a sample carries whichever signals it has; the
signal of one does not wait for the other where that was only too slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from openclaw_rl.errors import EngineTooSlow
from openclaw_rl.hooks import Sample
from openclaw_rl.rewards import hindsight, prm

_TOO_SLOW: Mapping[str, Any] = {"score": None, "votes": [], "hint": None, "abstained": True}


async def custom_rm(args: Any, sample: Sample, **kwargs: Any) -> dict[str, Any]:
    """`prm` and `hindsight` together: score and votes of one, hint and values of the other.

    `abstained` where neither gave a signal and one of them might have. Raises `EngineUnavailable`
    where any of the endpoints is away, or the only one that might have told something was too slow.
    """
    answers = await asyncio.gather(
        prm.custom_rm(args, sample), hindsight.custom_rm(args, sample), return_exceptions=True
    )
    found = [answer for answer in answers if isinstance(answer, dict)]
    told = any(answer.get("score") or answer.get("hint") for answer in found)
    for answer in answers:
        if isinstance(answer, BaseException) and not (isinstance(answer, EngineTooSlow) and told):
            raise answer
    verdict, hint = (answer if isinstance(answer, dict) else _TOO_SLOW for answer in answers)
    abstained = verdict["abstained"] or hint["abstained"]
    return {
        "score": verdict["score"],
        "votes": verdict["votes"],
        "hint": hint["hint"],
        "teacher_log_probs": hint.get("teacher_log_probs"),
        "teacher_topk": hint.get("teacher_topk"),
        "abstained": abstained and not (verdict["score"] or hint["hint"]),
    }
