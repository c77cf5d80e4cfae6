"""`grpo_loss`, `opd_loss`, `topk_opd_loss`, `combined_loss`: slime's signature, one arithmetic.

Advantage of token t: `A = w_rl * r + w_opd * (log pi_T - log pi)`, each term only where its
signal exists; then the clipped surrogate, the KL to the reference and the entropy. The top-K form
has, in place of the second term, a reverse KL to the teacher over K ids a token. Guarantees: see
README.md of this package.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from openclaw_rl.errors import ConfigError
from openclaw_rl.losses import backends
from openclaw_rl.losses.signals import Inputs
from openclaw_rl.losses.terms import (
    approx_kl,
    clipped_surrogate,
    distillation_advantage,
    subset_reverse_kl,
    truncated_weights,
)

Batch = Mapping[str, Any]
Reducer = Callable[[Tensor], Tensor]
Metrics = dict[str, Tensor]
Distillation = Literal["none", "sampled", "topk"]


def grpo_loss(
    args: Any, batch: Batch, logits: Tensor, sum_of_sample_mean: Reducer
) -> tuple[Tensor, Metrics]:
    """Binary RL: `A = w_rl * batch["advantages"]`. Teacher values are not looked at."""
    return _policy_loss(args, batch, logits, sum_of_sample_mean, rl=True, opd="none")


def opd_loss(
    args: Any, batch: Batch, logits: Tensor, sum_of_sample_mean: Reducer
) -> tuple[Tensor, Metrics]:
    """On-policy distillation: `A = w_opd * (log pi_T - log pi)`. Rewards are not looked at."""
    return _policy_loss(args, batch, logits, sum_of_sample_mean, rl=False, opd="sampled")


def topk_opd_loss(
    args: Any, batch: Batch, logits: Tensor, sum_of_sample_mean: Reducer
) -> tuple[Tensor, Metrics]:
    """Top-K distillation: `w_opd * KL(pi || pi_T)` over K ids a token, of the `TokenSignals` in
    `batch["values"]`. Rewards are not looked at."""
    if getattr(args, "opd_top_k", None) == 0:
        raise ConfigError("topk_opd_loss needs opd_top_k > 0 (with 0 nobody collects top-K values)")
    return _policy_loss(args, batch, logits, sum_of_sample_mean, rl=False, opd="topk")


def combined_loss(
    args: Any, batch: Batch, logits: Tensor, sum_of_sample_mean: Reducer
) -> tuple[Tensor, Metrics]:
    """Both: `grpo_loss`'s term, and `topk_opd_loss`'s where `opd_top_k` > 0, else `opd_loss`'s."""
    opd: Distillation = "topk" if _number(args, "opd_top_k", 0) > 0 else "sampled"
    return _policy_loss(args, batch, logits, sum_of_sample_mean, rl=True, opd=opd)


def _policy_loss(
    args: Any, batch: Batch, logits: Tensor, reduce: Reducer, *, rl: bool, opd: Distillation
) -> tuple[Tensor, Metrics]:
    """The one loss. `logits` is `[1, T, V]`; per-sample tensors of `batch` cover responses only.

    Arguments read, with the value where absent: w_rl 1.0, w_opd 1.0, opd_clip 0.0, opd_baseline
    "current", opd_tail False, eps_clip 0.2, eps_clip_high 0.28, eps_clip_c None, use_kl_loss
    False, kl_loss_coef 0.0, kl_loss_type "k3", entropy_coef 0.0, use_rollout_logprobs False,
    use_tis False, tis_clip 2.0, tis_clip_low 0.0, rollout_temperature 1.0, log_probs_chunk_size.
    """
    _refuse_unsupported(args, opd=opd != "none")
    per_sample, entropies = backends.sampled(args, batch, logits, with_entropy=True)
    log_probs = torch.cat(per_sample) if per_sample else logits.new_empty(0)
    entropy = torch.cat(entropies) if per_sample else logits.new_empty(0)
    current = log_probs.detach()
    inputs = Inputs(batch, per_sample, current)
    weights = inputs.weights()

    def total(values: Tensor) -> Tensor:
        value = reduce(values if weights is None else weights * values)
        # An empty micro-batch must still reach its logits, or ranks that wait for its backward
        # hang. The empty slice does so without a product (0 * inf is NaN).
        return value if log_probs.numel() else value + logits[:, :0].sum()

    recomputed = inputs.joined("log_probs")
    rollout = inputs.joined("rollout_log_probs")
    if rollout is not None:
        # Replayed replies were sampled elsewhere: the policy before the step stands in.
        own = current if recomputed is None else recomputed
        rollout = torch.where(rollout.isnan(), own, rollout)
    wants_rollout = bool(getattr(args, "use_rollout_logprobs", False))
    if wants_rollout and rollout is None:
        raise ConfigError("use_rollout_logprobs is set, but the batch has no rollout_log_probs")
    old = rollout if wants_rollout else recomputed
    old = current if old is None else old
    log_ratio = log_probs - old

    w_rl, w_opd = _number(args, "w_rl", 1.0), _number(args, "w_opd", 1.0)
    opd_clip = _number(args, "opd_clip", 0.0) or None
    advantages = torch.zeros_like(current)
    distilled = None
    metrics: Metrics = {}
    if rl:
        rewards = inputs.joined("advantages")
        if rewards is None:
            raise ConfigError("the batch has no advantages; set an advantage estimator or hook")
        advantages = w_rl * rewards
        metrics["rl_advantage"] = total(advantages)
    if opd == "sampled":
        gap = has = torch.zeros_like(current)
        if (teacher := inputs.teacher()) is not None:
            known = {"current": current, "old": recomputed, "rollout": rollout}
            student = _student(args, batch, logits, known)
            gap, has = distillation_advantage(teacher, student, opd_clip)
        advantages = advantages + w_opd * gap
        metrics["opd_share"] = total(has)
        metrics["opd_advantage"] = total(w_opd * gap)
        metrics["opd_advantage_abs"] = total(w_opd * gap.abs())
    elif opd == "topk":
        distilled = has = mass = torch.zeros_like(current)
        if (topk := inputs.topk()) is not None:
            found = backends.at(args, batch, logits, topk[0])
            tail = bool(getattr(args, "opd_tail", False))
            distilled, has, mass = subset_reverse_kl(found, topk[1], opd_clip, tail)
        metrics["opd_share"] = total(has)
        metrics["opd_kl"] = total(distilled)
        metrics["opd_mass"] = total(mass)

    token_loss, clipped = clipped_surrogate(
        log_ratio,
        advantages,
        _number(args, "eps_clip", 0.2),
        _number(args, "eps_clip_high", 0.28),
        _optional(args, "eps_clip_c"),
    )
    if getattr(args, "use_tis", False):
        if rollout is None or wants_rollout:
            raise ConfigError(
                "use_tis needs rollout_log_probs in the batch, and use_rollout_logprobs unset: "
                "that one puts the same difference into the ratio"
            )
        tis, cut = truncated_weights(
            old - rollout, _number(args, "tis_clip", 2.0), _number(args, "tis_clip_low", 0.0)
        )
        token_loss = token_loss * tis
        metrics["tis"] = total(tis)
        metrics["tis_clipfrac"] = total(cut)
    if distilled is not None:
        token_loss = token_loss + w_opd * distilled
    metrics["pg_loss"] = total(token_loss)
    metrics["entropy_loss"] = total(entropy)
    metrics["pg_clipfrac"] = total(clipped)
    metrics["ppo_kl"] = total(-log_ratio)
    loss = metrics["pg_loss"] - _number(args, "entropy_coef", 0.0) * metrics["entropy_loss"]
    if getattr(args, "use_kl_loss", False):
        reference = inputs.joined("ref_log_probs")
        if reference is None:
            raise ConfigError("use_kl_loss is set, but the batch has no ref_log_probs")
        kind = getattr(args, "kl_loss_type", None) or "k3"
        metrics["kl_loss"] = total(approx_kl(log_probs, reference, kind))
        loss = loss + _number(args, "kl_loss_coef", 0.0) * metrics["kl_loss"]
    if rollout is not None:
        mine = current if wants_rollout else old
        metrics["train_rollout_logprob_abs_diff"] = total((mine - rollout).abs())
    metrics["loss"] = loss
    return loss, {name: value.detach().clone() for name, value in metrics.items()}


def _student(args: Any, batch: Batch, logits: Tensor, known: Mapping[str, Tensor | None]) -> Tensor:
    """`log pi` of the distillation term; README.md tells why "current" is the default."""
    source = getattr(args, "opd_baseline", None) or "current"
    if source not in known or (source == "rollout" and known[source] is None):
        raise ConfigError(
            f"opd_baseline {source!r} is not one of {', '.join(known)} (or not there)"
        )
    chosen = known[source]
    if source != "current" and chosen is not None:
        return chosen
    current = known["current"]
    assert current is not None
    if _number(args, "rollout_temperature", 1.0) == 1.0:
        return current
    # Engines score the teacher at temperature 1. At another one the two would belong to different
    # distributions, and their difference would be there even where teacher and policy agree.
    plain = copy.copy(args)
    plain.rollout_temperature = 1.0
    with torch.no_grad():
        parts, _ = backends.sampled(plain, batch, logits.detach())
    return torch.cat(parts) if parts else current


_UNSUPPORTED = (
    "custom_tis_function_path",
    "use_opsm",
    "use_unbiased_kl",
    "get_mismatch_metrics",  # slime weighs the loss by it, not only its metrics
    "custom_pg_loss_reducer_function_path",
)


def _refuse_unsupported(args: Any, *, opd: bool) -> None:
    """Raise ConfigError for settings of slime that these losses would silently ignore."""
    for name in _UNSUPPORTED:
        if getattr(args, name, False):
            raise ConfigError(f"openclaw_rl.losses does not implement {name}; unset it")
    if opd and getattr(args, "use_opd", False):
        raise ConfigError("use_opd adds slime's own distillation to the advantages; unset it")
    if _number(args, "rollout_top_p", 1.0) != 1.0:
        raise ConfigError("openclaw_rl.losses learn over the whole softmax; unset rollout_top_p")
    if (estimator := getattr(args, "advantage_estimator", None)) in ("gspo", "cispo"):
        raise ConfigError(
            f"openclaw_rl.losses uses the token-level ratio; advantage_estimator {estimator} "
            "belongs to slime's policy_loss"
        )


def _number(args: Any, name: str, default: float) -> float:
    value = _optional(args, name)
    return default if value is None else value


def _optional(args: Any, name: str) -> float | None:
    """`args.name` as a float, None where it is absent or None."""
    value = getattr(args, name, None)
    return None if value is None else float(value)
