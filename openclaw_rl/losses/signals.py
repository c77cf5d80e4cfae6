"""What reaches a loss for each token beyond slime's own batch keys.

slime passes a fixed list of per-sample keys to a loss, and of those it logs the mean: a list whose
entries are no tensors is summed as numbers. `TokenSignals` is therefore a `float` (the number of
tokens with a teacher value, a figure worth logging) that carries tensors as attributes. It travels
as `batch["values"]`, one a sample.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class TokenSignals(float):
    """Per-token signals of one sample's response, cut for context parallelism like the batch.

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
        if weights.dim() != 1:
            raise ValueError(f"weights must be [R], not {list(weights.shape)}")
        if (topk_ids is None) != (topk_log_probs is None):
            raise ValueError("topk_ids and topk_log_probs come together or not at all")
        tokens = weights.numel()
        has = torch.zeros(tokens, dtype=torch.bool)
        if teacher_log_probs is not None:
            if teacher_log_probs.shape != weights.shape:
                raise ValueError(
                    f"{teacher_log_probs.numel()} teacher values for a response of {tokens} tokens"
                )
            has |= teacher_log_probs.isfinite().cpu()
        if topk_ids is not None and topk_log_probs is not None:
            if topk_ids.shape != topk_log_probs.shape or topk_ids.shape[:1] != weights.shape:
                raise ValueError(
                    f"top-K ids {list(topk_ids.shape)} and log-probs "
                    f"{list(topk_log_probs.shape)} must both be [{tokens}, K]"
                )
            has |= ((topk_ids >= 0) & topk_log_probs.isfinite()).any(dim=-1).cpu()
        self = super().__new__(cls, int(has.sum()))
        self.weights = weights
        self.teacher_log_probs = teacher_log_probs
        self.topk_ids = topk_ids
        self.topk_log_probs = topk_log_probs
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # float's own reduction would call __new__ with the number in place of the weights
        return type(self), (
            self.weights,
            self.teacher_log_probs,
            self.topk_ids,
            self.topk_log_probs,
        )
