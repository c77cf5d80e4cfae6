"""What a loss reads: settings from `args`, per-token tensors from `batch`.

Guarantees: a missing value is NaN (id -1), never a number; what does not line up with the
response, or is not implemented, raises instead of being ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from openclaw_rl.errors import ConfigError
from openclaw_rl.losses.signals import TokenSignals

_UNSUPPORTED = (
    "custom_tis_function_path",
    "use_opsm",
    "get_mismatch_metrics",  # slime weighs the loss by it, not only its metrics
    "custom_pg_loss_reducer_function_path",
)


class Inputs:
    """Per-token tensors of one micro-batch, joined over its samples, `[N]` like `current`.

    `per_sample` are the current log-probs of each sample's response, which fix the lengths (under
    context parallelism: of the part that lies here). No tensor carries a gradient.
    """

    def __init__(self, batch: Mapping[str, Any], per_sample: Sequence[Tensor], current: Tensor):
        self.batch, self.per_sample, self.current = batch, per_sample, current
        self.signals = _signals(batch.get("values"))

    def joined(self, key: str) -> Tensor | None:
        """The key's values, None where the batch has no such key; a sample's None becomes NaN."""
        return self._join(self.batch.get(key))

    def weights(self) -> Tensor | None:
        """Weights of the tokens; None: all 1."""
        return None if self.signals is None else self._join([s.weights for s in self.signals])

    def teacher(self) -> Tensor | None:
        """The teacher's log-probs of the sampled tokens, NaN where none."""
        if self.signals is None:
            return self.joined("teacher_log_probs")
        return self._join([s.teacher_log_probs for s in self.signals])

    def topk(self) -> tuple[list[Tensor], Tensor] | None:
        """Ids per sample (`[R_i, K]`, -1 where none) and the teacher's log-probs `[N, K]` of them.

        K is the largest of the samples. None where no sample of the batch has any.
        """
        given = [(s.topk_ids, s.topk_log_probs) for s in self.signals or ()]
        k = max((i.size(1) for i, _ in given if i is not None), default=0)
        if k == 0:
            return None
        ids, values = [], []
        for (own_ids, own_values), like in zip(given, self.per_sample, strict=True):
            place = torch.full((like.numel(), k), -1, device=like.device)
            value = torch.full(place.shape, math.nan, dtype=self.current.dtype, device=like.device)
            if own_ids is not None and own_values is not None:
                _check_length(own_ids.size(0), like.numel())
                place[:, : own_ids.size(1)] = own_ids.to(place)
                value[:, : own_ids.size(1)] = own_values.to(value)
            ids.append(place)
            values.append(value)
        return ids, torch.cat(values)

    def _join(self, values: Any) -> Tensor | None:
        if values is None or (len(values) == 0 and len(self.per_sample)):
            return None
        like = self.current
        parts = []
        for value, reference in zip(values, self.per_sample, strict=True):
            if value is None:
                value = torch.full_like(reference, math.nan, dtype=like.dtype)
            elif not isinstance(value, Tensor):
                value = [math.nan if v is None else v for v in value]
            part = torch.as_tensor(value, dtype=like.dtype, device=like.device).detach().flatten()
            _check_length(part.numel(), reference.numel())
            parts.append(part)
        return torch.cat(parts) if parts else torch.empty_like(like)


def number(args: Any, name: str, default: float) -> float:
    """`args.name` as a float, `default` where it is absent or None."""
    value = getattr(args, name, None)
    return default if value is None else float(value)


def optional(args: Any, name: str) -> float | None:
    """`args.name` as a float, None where it is absent or None."""
    value = getattr(args, name, None)
    return None if value is None else float(value)


def refuse_unsupported(args: Any, *, opd: bool) -> None:
    """Raise ConfigError for settings of slime that these losses would silently ignore."""
    for name in _UNSUPPORTED:
        if getattr(args, name, False):
            raise ConfigError(f"openclaw_rl.losses does not implement {name}; unset it")
    if opd and getattr(args, "use_opd", False):
        raise ConfigError("use_opd adds slime's own distillation to the advantages; unset it")
    estimator = getattr(args, "advantage_estimator", None)
    if estimator in ("gspo", "cispo"):
        raise ConfigError(
            f"openclaw_rl.losses uses the token-level ratio; advantage_estimator {estimator} "
            "belongs to slime's policy_loss"
        )


def _signals(values: Any) -> list[TokenSignals] | None:
    """The batch's signals; None where `values` is absent or something else (a critic's values)."""
    found = [value for value in values or () if isinstance(value, TokenSignals)]
    if not found:
        return None
    if len(found) != len(values):
        raise ValueError(f"{len(found)} of {len(values)} samples of a batch have TokenSignals")
    return found


def _check_length(got: int, wanted: int) -> None:
    if got != wanted:
        raise ValueError(f"{got} values for a response of {wanted} tokens")
