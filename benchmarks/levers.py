"""Levers that `benchmarks.learning` tries one by one, as hooks that anybody could pass.

    --set judge.custom_rm_path=benchmarks.levers.routed
    --set train.custom_loss_function_path=benchmarks.levers.centred

They are here, and not in the package, because they did not help: docs/learning.md has the figures.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch

from openclaw_rl.hooks import Sample
from openclaw_rl.judge.models import models_of
from openclaw_rl.losses import backends, combined_loss
from openclaw_rl.rewards import feedback


async def routed(args: Any, sample: Sample, **kwargs: Any) -> dict[str, Any]:
    """A reward only where the reply pleased; where a correction says what would have been better
    the distillation alone; a small push where nobody says (SRPO, arXiv 2604.02288)."""
    found = await feedback.custom_rm(args, sample)
    if found["score"] < 0:
        found["score"] = 0.0 if found["hint"] else 0.1 * found["score"]
    return found


class Baseline:
    """A person's usual reward, V: what pleases as usual teaches nothing (SPO, arXiv 2509.13232).
    Decayed counts of praise and blame, less 0.1, so that V stays below the mean."""

    def __init__(self) -> None:
        self.praise = self.blame = 1.0

    async def custom_rm(self, args: Any, sample: Sample, **kwargs: Any) -> dict[str, Any]:
        found = await feedback.custom_rm(args, sample)
        score = found["score"]
        usual = 2 * self.praise / (self.praise + self.blame) - 1 - 0.1
        if score:
            self.praise = 0.97 * self.praise + (score > 0)
            self.blame = 0.97 * self.blame + (score < 0)
            found["score"] = score - usual
        return found


baseline = Baseline().custom_rm


async def clean(args: Any, sample: Sample, **kwargs: Any) -> dict[str, Any]:
    """The teacher's history without the exchanges that displeased: it does not read the student's
    own bad replies."""
    found = await feedback.custom_rm(args, sample)
    if not found["hint"]:
        return found
    messages = sample.metadata["messages"]
    kept = [m for m in messages[:1] if m["role"] == "system"]
    exchanges = messages[len(kept) : -1]
    for asked, reply, after in zip(
        exchanges[::2], exchanges[1::2], [*exchanges[2::2], messages[-1]], strict=False
    ):
        if feedback.read_words(str(after["content"]))[0] >= 0:
            kept += [asked, reply]
    kept.append(messages[-1])
    shown = Sample(
        tokens=sample.tokens,
        response_length=sample.response_length,
        metadata={**sample.metadata, "messages": kept},
    )
    values = await models_of(args).teach(shown, [found["hint"]])
    return {**found, "teacher_log_probs": None if values is None else values.log_probs}


def centred(args: Any, batch: Any, logits: Any, reduce: Any) -> Any:
    """The distillation term less its mean over the sample: no blanket push of a whole reply (as
    user_interactions, arXiv 2603.12273). The teacher's values are shifted by that mean, which is
    taken at temperature 1, as the teacher's are."""
    teacher = batch.get("teacher_log_probs")
    if teacher is None:
        return combined_loss(args, batch, logits, reduce)
    plain = copy.copy(args)
    plain.rollout_temperature = 1.0
    with torch.no_grad():
        own, _ = backends.sampled(plain, batch, logits.detach())
    bound = args.opd_clip or math.inf
    shifted = []
    for values, student in zip(teacher, own, strict=True):
        gap = (torch.as_tensor(values).to(student) - student).clamp(-bound, bound)
        known = gap[gap.isfinite()]
        shifted.append(student + gap - (known.mean() if known.numel() else 0.0))
    return combined_loss(args, {**batch, "teacher_log_probs": shifted}, logits, reduce)
