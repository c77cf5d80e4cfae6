"""Hooks of a system under test: the usual reward and the usual loss, each behind a gate. A closed
gate holds its process at a known moment until a test opens it, or kills the process.

The gates are files in the data folder, which is all that the test and the hooks share.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from openclaw_rl.rewards import feedback

_LOOK_SECONDS = 0.01


class Gate:
    def __init__(self, data: Path, name: str) -> None:
        self._closed, self._reached = data / f"{name}.closed", data / f"{name}.reached"

    def close(self) -> None:
        self._reached.unlink(missing_ok=True)
        self._closed.touch()

    def open(self) -> None:
        self._closed.unlink(missing_ok=True)

    def reached(self) -> bool:
        """Whether somebody stands before it since it was closed."""
        return self._reached.exists()

    def holds(self) -> bool:
        """Asked by the hook, again and again."""
        if not self._closed.exists():
            return False
        self._reached.touch()
        return True


def verdict_gate(data: Path) -> Gate:
    return Gate(data, "verdict")


def step_gate(data: Path) -> Gate:
    return Gate(data, "step")


async def custom_rm(args: Any, sample: Any, **kwargs: Any) -> dict[str, Any]:
    gate = verdict_gate(Path(args.journal_path).parent)
    while gate.holds():  # noqa: ASYNC110 - the event is in another process
        await asyncio.sleep(_LOOK_SECONDS)
    return await feedback.custom_rm(args, sample)


def custom_loss(args: Any, batch: Any, logits: Any, sum_of_sample_mean: Any) -> Any:
    from openclaw_rl.losses.policy import grpo_loss  # the judge loads this file too, without torch

    gate = step_gate(Path(args.journal_path).parent)
    while gate.holds():
        time.sleep(_LOOK_SECONDS)
    return grpo_loss(args, batch, logits, sum_of_sample_mean)
