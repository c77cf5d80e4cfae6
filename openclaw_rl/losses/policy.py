"""`grpo_loss`, `opd_loss`, `combined_loss`: slime's custom-loss signature, one arithmetic.

Advantage of token t: `A = w_rl * r + w_opd * (log pi_T - log pi)`, each term only where its
signal exists; then the clipped surrogate, the KL to the reference and the entropy. Guarantees: a
token without a teacher value (missing key, None, NaN) has an exactly zero distillation term; an
empty micro-batch returns a zero loss that still reaches the logits; the metric names depend on
the arguments only, never on the content of a micro-batch.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from openclaw_rl.errors import ConfigError
from openclaw_rl.losses.logprobs import backend_for
from openclaw_rl.losses.terms import (
    approx_kl,
    clipped_surrogate,
    combined_advantage,
    distillation_advantage,
)

Batch = Mapping[str, Any]
Reducer = Callable[[Tensor], Tensor]
Metrics = dict[str, Tensor]

_UNSUPPORTED = ("use_tis", "use_opsm")


def grpo_loss(
    args: Any, batch: Batch, logits: Tensor, sum_of_sample_mean: Reducer
) -> tuple[Tensor, Metrics]:
    """Binary RL: `A = w_rl * batch["advantages"]`. Teacher values are not looked at."""
    return _policy_loss(args, batch, logits, sum_of_sample_mean, rl=True, opd=False)


def opd_loss(
    args: Any, batch: Batch, logits: Tensor, sum_of_sample_mean: Reducer
) -> tuple[Tensor, Metrics]:
    """On-policy distillation: `A = w_opd * (log pi_T - log pi)`. Rewards are not looked at."""
    return _policy_loss(args, batch, logits, sum_of_sample_mean, rl=False, opd=True)


def combined_loss(
    args: Any, batch: Batch, logits: Tensor, sum_of_sample_mean: Reducer
) -> tuple[Tensor, Metrics]:
    """Both: `A = w_rl * batch["advantages"] + w_opd * (log pi_T - log pi)`."""
    return _policy_loss(args, batch, logits, sum_of_sample_mean, rl=True, opd=True)


def _policy_loss(
    args: Any, batch: Batch, logits: Tensor, reduce: Reducer, *, rl: bool, opd: bool
) -> tuple[Tensor, Metrics]:
    """The one loss. `logits` is `[1, T, V]`; per-sample tensors of `batch` cover responses only.

    Arguments read, with the value where absent: w_rl 1.0, w_opd 1.0, opd_clip None, opd_baseline
    "current", eps_clip 0.2, eps_clip_high 0.28, eps_clip_c None, use_kl_loss False, kl_loss_coef
    0.0, kl_loss_type "k3", use_unbiased_kl False, entropy_coef 0.0, use_rollout_logprobs False,
    rollout_temperature 1.0, log_probs_chunk_size.
    """
    _refuse_unsupported(args)
    _, computed = backend_for(args)(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
    )
    per_sample = list(computed["log_probs"])
    log_probs = torch.cat(per_sample) if per_sample else logits.new_empty(0)
    entropy = torch.cat(list(computed["entropy"])) if per_sample else logits.new_empty(0)
    current = log_probs.detach()
    # An empty micro-batch must still reach the logits, or ranks that wait for its backward hang.
    # The empty slice does so without a product (0 * inf is NaN).
    empty = None if log_probs.numel() else logits[:, :0].sum()

    def total(values: Tensor) -> Tensor:
        return reduce(values) if empty is None else empty

    def joined(key: str) -> Tensor | None:
        return _join(batch.get(key), per_sample, current)

    recomputed = joined("log_probs")
    rollout = joined("rollout_log_probs")
    wants_rollout = bool(getattr(args, "use_rollout_logprobs", False))
    if wants_rollout and rollout is None:
        raise ConfigError("use_rollout_logprobs is set, but the batch has no rollout_log_probs")
    old = rollout if wants_rollout else recomputed
    old = current if old is None else old
    log_ratio = log_probs - old

    rewards = joined("advantages") if rl else None
    if rl and rewards is None:
        raise ConfigError("the batch has no advantages; set an advantage estimator or hook")
    teacher = joined("teacher_log_probs") if opd else None
    gap, has_teacher = torch.zeros_like(current), torch.zeros_like(current)
    if teacher is not None:
        plain = functools.partial(_at_temperature_1, args, batch, logits, current)
        baseline = _baseline(args, plain, recomputed, rollout)
        gap, has_teacher = distillation_advantage(teacher, baseline, _optional(args, "opd_clip"))
    w_rl, w_opd = _number(args, "w_rl", 1.0), _number(args, "w_opd", 1.0)
    advantages = combined_advantage(rewards, gap if opd else None, w_rl, w_opd)

    token_loss, clipped = clipped_surrogate(
        log_ratio,
        advantages,
        _number(args, "eps_clip", 0.2),
        _number(args, "eps_clip_high", 0.28),
        _optional(args, "eps_clip_c"),
    )
    pg_loss = total(token_loss)
    entropy_loss = total(entropy)
    loss = pg_loss - _number(args, "entropy_coef", 0.0) * entropy_loss
    metrics = {
        "pg_loss": pg_loss,
        "entropy_loss": entropy_loss,
        "pg_clipfrac": total(clipped),
        "ppo_kl": total(-log_ratio),
    }
    if rl and rewards is not None:
        metrics["rl_advantage"] = total(w_rl * rewards)
    if opd:
        metrics["opd_share"] = total(has_teacher)
        metrics["opd_advantage"] = total(w_opd * gap)
        metrics["opd_advantage_abs"] = total(w_opd * gap.abs())
    if getattr(args, "use_kl_loss", False):
        reference = joined("ref_log_probs")
        if reference is None:
            raise ConfigError("use_kl_loss is set, but the batch has no ref_log_probs")
        unbiased = bool(getattr(args, "use_unbiased_kl", False))
        kind = getattr(args, "kl_loss_type", None) or "k3"
        ratio = log_ratio.exp() if unbiased else None
        kl_loss = total(approx_kl(log_probs, reference, kind, ratio))
        loss = loss + _number(args, "kl_loss_coef", 0.0) * kl_loss
        metrics["kl_loss"] = kl_loss
    if rollout is not None:
        mine = current if wants_rollout else old
        metrics["train_rollout_logprob_abs_diff"] = total((mine - rollout).abs())
    metrics["loss"] = loss
    return loss, {name: value.detach().clone() for name, value in metrics.items()}


def _baseline(
    args: Any, current: Callable[[], Tensor], old: Tensor | None, rollout: Tensor | None
) -> Tensor:
    """`log pi` of the distillation term; README.md tells why "current" is the default."""
    source = getattr(args, "opd_baseline", None) or "current"
    if source == "current":
        return current()
    if source == "old":
        return current() if old is None else old
    if source == "rollout" and rollout is not None:
        return rollout
    raise ConfigError(f"opd_baseline {source!r} is not one of current, old, rollout (or not there)")


def _at_temperature_1(args: Any, batch: Batch, logits: Tensor, current: Tensor) -> Tensor:
    """The current log-probs at temperature 1, at which engines score the teacher's.

    At another `rollout_temperature` the two would belong to different distributions, and their
    difference would be there even where teacher and policy agree.
    """
    if _number(args, "rollout_temperature", 1.0) == 1.0:
        return current
    plain = copy.copy(args)
    plain.rollout_temperature = 1.0
    with torch.no_grad():
        _, computed = backend_for(args)(
            logits.detach(),
            args=plain,
            unconcat_tokens=batch["unconcat_tokens"],
            total_lengths=batch["total_lengths"],
            response_lengths=batch["response_lengths"],
            with_entropy=False,
        )
    parts = list(computed["log_probs"])
    return torch.cat(parts) if parts else current


def _join(values: Any, per_sample: Sequence[Tensor], like: Tensor) -> Tensor | None:
    """One tensor of a per-sample key, None if the key is absent; a sample's None becomes NaN."""
    if values is None or (len(values) == 0 and len(per_sample)):
        return None
    parts = []
    for value, reference in zip(values, per_sample, strict=True):
        if value is None:
            value = torch.full_like(reference, math.nan, dtype=like.dtype)
        elif not isinstance(value, Tensor):
            value = [math.nan if v is None else v for v in value]
        part = torch.as_tensor(value, dtype=like.dtype, device=like.device).detach().flatten()
        if part.numel() != reference.numel():
            raise ValueError(f"{part.numel()} values for a response of {reference.numel()} tokens")
        parts.append(part)
    return torch.cat(parts) if parts else torch.empty_like(like)


def _refuse_unsupported(args: Any) -> None:
    for name in _UNSUPPORTED:
        if getattr(args, name, False):
            raise ConfigError(f"openclaw_rl.losses does not implement {name}; unset it")
    estimator = getattr(args, "advantage_estimator", None)
    if estimator in ("gspo", "cispo"):
        raise ConfigError(
            f"openclaw_rl.losses uses the token-level ratio; advantage_estimator {estimator} "
            "belongs to slime's policy_loss"
        )


def _number(args: Any, name: str, default: float) -> float:
    value = getattr(args, name, None)
    return default if value is None else float(value)


def _optional(args: Any, name: str) -> float | None:
    value = getattr(args, name, None)
    return None if value is None else float(value)
