"""Both signals in one sample: the PRM's votes and, where there is a hint, the teacher's values.

Guarantees: PRM and judge are asked at the same time; a sample carries whichever signals it has.
"""

from __future__ import annotations

import asyncio
from typing import Any

from openclaw_rl.rewards import hindsight, prm
from openclaw_rl.sample import Sample


async def custom_rm(args: Any, sample: Sample, **kwargs: Any) -> dict[str, Any]:
    """`prm` and `hindsight` together: score and votes of one, hint and values of the other.

    `abstained` where neither gave a signal and one of them might have. Raises `EngineUnavailable`
    where any of the endpoints is away.
    """
    async with asyncio.TaskGroup() as group:
        voting = group.create_task(_quiet(prm.custom_rm(args, sample)))
        hinting = group.create_task(_quiet(hindsight.custom_rm(args, sample)))
    verdict, hindsights = _result(voting.result()), _result(hinting.result())
    signal = verdict["score"] or hindsights["hint"]
    return {
        "score": verdict["score"],
        "votes": verdict["votes"],
        "hint": hindsights["hint"],
        "teacher_log_probs": hindsights["teacher_log_probs"],
        "teacher_topk": hindsights["teacher_topk"],
        "abstained": not signal and (verdict["abstained"] or hindsights["abstained"]),
    }


async def _quiet(reward: Any) -> dict[str, Any] | Exception:
    """So that the error of one is raised as itself, after the other has ended."""
    try:
        return await reward  # type: ignore[no-any-return]
    except Exception as error:
        return error


def _result(value: dict[str, Any] | Exception) -> dict[str, Any]:
    if isinstance(value, Exception):
        raise value
    return value
