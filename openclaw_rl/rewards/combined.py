"""Both signals in one sample: the PRM's votes and, where there is a hint, the teacher's values.

Guarantees: PRM and judge are asked at the same time; a sample carries whichever signals it has; the
one's signal does not wait for the other where that was only too slow.
"""

from __future__ import annotations

import asyncio
from typing import Any

from openclaw_rl.errors import EngineTooSlow
from openclaw_rl.hooks import Sample
from openclaw_rl.rewards import hindsight, prm

Answer = dict[str, Any] | Exception
_PARTS = ("score", "hint", "teacher_log_probs", "teacher_topk")


async def custom_rm(args: Any, sample: Sample, **kwargs: Any) -> dict[str, Any]:
    """`prm` and `hindsight` together: score and votes of one, hint and values of the other.

    `abstained` where neither gave a signal and one of them might have. Raises `EngineUnavailable`
    where any of the endpoints is away, or the only one that might have told something was too slow.
    """
    async with asyncio.TaskGroup() as group:
        voting = group.create_task(_quiet(prm.custom_rm(args, sample)))
        hinting = group.create_task(_quiet(hindsight.custom_rm(args, sample)))
    verdict = _result(voting.result(), beside=hinting.result())
    hindsights = _result(hinting.result(), beside=verdict)
    signal = verdict["score"] or hindsights["hint"]
    return {
        "score": verdict["score"],
        "votes": verdict["votes"],
        "hint": hindsights["hint"],
        "teacher_log_probs": hindsights["teacher_log_probs"],
        "teacher_topk": hindsights["teacher_topk"],
        "abstained": not signal and (verdict["abstained"] or hindsights["abstained"]),
    }


async def _quiet(reward: Any) -> Answer:
    """So that the error of one is raised as itself, after the other has ended."""
    try:
        return await reward  # type: ignore[no-any-return]
    except Exception as error:
        return error


def _result(value: Answer, *, beside: Answer) -> dict[str, Any]:
    told = isinstance(beside, dict) and (beside.get("score") or beside.get("hint"))
    if isinstance(value, EngineTooSlow) and told:
        return dict.fromkeys(_PARTS) | {"votes": [], "abstained": True}
    if isinstance(value, Exception):
        raise value
    return value
