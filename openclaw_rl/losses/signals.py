"""What a loss reads of a micro-batch: per-token tensors and `TokenSignals`.

Guarantees: a missing value is NaN (id -1), never a number; what does not line up with the
response raises instead of being ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

SIGNALS = "values"
"""A batch's key of its `TokenSignals`, one a sample: a critic's, as slime passes no key of ours."""


class TokenSignals(float):
    """Per-token signals of one sample's response, cut for context parallelism like the batch.

    slime logs what it passes on: entries that are no tensors as the mean of numbers. So this is a
    `float` (of how many tokens a teacher said something) that carries tensors as attributes.

    `weights` `[R]` multiplies every term of a token's loss; 1 weighs it as slime would.
    `teacher_log_probs` `[R]` holds NaN where there is no teacher value; None: nowhere.
    `topk_ids` `[R, K]` holds global vocabulary ids, -1 where none, and `topk_log_probs` `[R, K]`
    the teacher's log-probs of them at temperature 1, NaN where none; both or neither are given.
    """

    weights: Tensor
    teacher_log_probs: Tensor | None
    topk_ids: Tensor | None
    topk_log_probs: Tensor | None

    def __new__(
        cls,
        weights: Tensor,
        teacher_log_probs: Tensor | None = None,
        topk_ids: Tensor | None = None,
        topk_log_probs: Tensor | None = None,
    ) -> TokenSignals:
        has = torch.zeros_like(weights, dtype=torch.bool)
        for values in (teacher_log_probs, topk_ids, topk_log_probs):
            if values is not None and len(values) != len(weights):
                raise ValueError(f"signals of {len(values)} tokens with {len(weights)} weights")
        for values in (teacher_log_probs, topk_log_probs):
            if values is not None:
                has |= values[..., None].isfinite().flatten(1).any(dim=-1)
        self = super().__new__(cls, int(has.sum()))
        self.weights = weights
        self.teacher_log_probs = teacher_log_probs
        self.topk_ids = topk_ids
        self.topk_log_probs = topk_log_probs
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:  # float's own ones are the number
        return self.weights, self.teacher_log_probs, self.topk_ids, self.topk_log_probs


class Inputs:
    """Per-token tensors of one micro-batch, joined over its samples, `[N]` like `current`.

    `per_sample` are the current log-probs of each sample's response, which fix the lengths (under
    context parallelism: of the part that lies here). No tensor carries a gradient.
    """

    def __init__(self, batch: Mapping[str, Any], per_sample: Sequence[Tensor], current: Tensor):
        self.batch, self.per_sample, self.current = batch, per_sample, current
        values = batch.get(SIGNALS) or ()  # or a critic's
        self.signals = [one for one in values if isinstance(one, TokenSignals)]
        if self.signals and len(self.signals) < len(values):
            raise ValueError(f"{len(self.signals)} of {len(values)} samples have TokenSignals")

    def joined(self, key: str) -> Tensor | None:
        """The key's values, None where the batch has no such key; a sample's None becomes NaN."""
        values = self.batch.get(key)
        return None if values is None else self._join(values)

    def weights(self) -> Tensor | None:
        """Weights of the tokens; None: all 1."""
        return self._join([one.weights for one in self.signals]) if self.signals else None

    def teacher(self) -> Tensor | None:
        """The teacher's log-probs of the sampled tokens, NaN where none."""
        if not self.signals:
            return self.joined("teacher_log_probs")
        return self._join([one.teacher_log_probs for one in self.signals])

    def topk(self) -> tuple[list[Tensor], Tensor] | None:
        """Ids per sample (`[R_i, K]`, -1 where none) and the teacher's log-probs `[N, K]` of them.

        K is the largest of the samples. None where no sample of the batch has any.
        """
        found = [one.topk_ids for one in self.signals if one.topk_ids is not None]
        k = max((ids.size(1) for ids in found), default=0)
        if k == 0:
            return None
        ids, values = [], []
        for one, like in zip(self.signals, self.per_sample, strict=True):
            own = like.new_empty(len(like), 0) if one.topk_ids is None else one.topk_ids
            known = own if one.topk_log_probs is None else one.topk_log_probs
            _check_length(len(own), len(like))
            room = (0, k - own.size(1))
            ids.append(pad(own.to(like.device, torch.long), room, value=-1))
            values.append(pad(known.to(self.current), room, value=math.nan))
        return ids, torch.cat(values)

    def _join(self, values: Sequence[Any]) -> Tensor:
        like = self.current
        parts = [like[:0]]
        for value, reference in zip(values, self.per_sample, strict=True):
            if value is None:
                value = torch.full_like(reference, math.nan)
            part = torch.as_tensor(value, dtype=like.dtype, device=like.device).detach().flatten()
            _check_length(part.numel(), reference.numel())
            parts.append(part)
        return torch.cat(parts)


def _check_length(got: int, wanted: int) -> None:
    if got != wanted:
        raise ValueError(f"{got} values for a response of {wanted} tokens")
