"""`grpo_loss`, `opd_loss`, `topk_opd_loss`, `combined_loss`: slime's signature, one arithmetic.

Advantage of token t: `A = w_rl * r + w_opd * (log pi_T - log pi)`, each term only where its
signal exists; then the clipped surrogate, the KL to the reference and the entropy. The top-K form
has, in place of the second term, a reverse KL to the teacher over K ids a token. Guarantees: a
token without a teacher value (missing key, None, NaN) has an exactly zero distillation term; a
token's weight multiplies every term of it; an empty micro-batch returns a zero loss that still
reaches the logits; the metric names depend on the arguments only, never on the content of a
micro-batch.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from openclaw_rl.errors import ConfigError
from openclaw_rl.losses.backends import Backend, backend_for
from openclaw_rl.losses.inputs import Inputs, number, optional, refuse_unsupported
from openclaw_rl.losses.terms import (
    approx_kl,
    clipped_surrogate,
    combined_advantage,
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
    """Top-K distillation: `w_opd * KL(pi || pi_T)` over K ids a token. Rewards are not looked at.

    Ids and teacher values are those of the `TokenSignals` in `batch["values"]`.
    """
    if getattr(args, "opd_top_k", None) == 0:
        raise ConfigError("topk_opd_loss needs opd_top_k > 0 (with 0 nobody collects top-K values)")
    return _policy_loss(args, batch, logits, sum_of_sample_mean, rl=False, opd="topk")


def combined_loss(
    args: Any, batch: Batch, logits: Tensor, sum_of_sample_mean: Reducer
) -> tuple[Tensor, Metrics]:
    """Both: `grpo_loss`'s term, and `topk_opd_loss`'s where `opd_top_k` > 0, else `opd_loss`'s."""
    opd: Distillation = "topk" if number(args, "opd_top_k", 0) > 0 else "sampled"
    return _policy_loss(args, batch, logits, sum_of_sample_mean, rl=True, opd=opd)


def _policy_loss(
    args: Any, batch: Batch, logits: Tensor, reduce: Reducer, *, rl: bool, opd: Distillation
) -> tuple[Tensor, Metrics]:
    """The one loss. `logits` is `[1, T, V]`; per-sample tensors of `batch` cover responses only.

    Arguments read, with the value where absent: w_rl 1.0, w_opd 1.0, opd_clip None, opd_baseline
    "current", opd_tail False, eps_clip 0.2, eps_clip_high 0.28, eps_clip_c None, use_kl_loss
    False, kl_loss_coef 0.0, kl_loss_type "k3", use_unbiased_kl False, entropy_coef 0.0,
    use_rollout_logprobs False, use_tis False, tis_clip 2.0, tis_clip_low 0.0, rollout_temperature
    1.0, log_probs_chunk_size.
    """
    refuse_unsupported(args, opd=opd != "none")
    backend = backend_for(args)
    per_sample, entropies = backend.sampled(args, batch, logits, with_entropy=True)
    log_probs = torch.cat(per_sample) if per_sample else logits.new_empty(0)
    entropy = torch.cat(entropies) if per_sample else logits.new_empty(0)
    current = log_probs.detach()
    inputs = Inputs(batch, per_sample, current)
    total = _reducer(reduce, inputs.weights(), logits if not log_probs.numel() else None)

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

    w_rl, w_opd = number(args, "w_rl", 1.0), number(args, "w_opd", 1.0)
    gap = distilled = None
    metrics: Metrics = {}
    rewards = inputs.joined("advantages") if rl else None
    if rl and rewards is None:
        raise ConfigError("the batch has no advantages; set an advantage estimator or hook")
    if rewards is not None:
        metrics["rl_advantage"] = total(w_rl * rewards)
    if opd == "sampled":
        unscaled = functools.partial(_unscaled, backend, args, batch, logits, current)
        gap, has = _sampled_gap(args, inputs, unscaled, recomputed, rollout)
        metrics["opd_share"] = total(has)
        metrics["opd_advantage"] = total(w_opd * gap)
        metrics["opd_advantage_abs"] = total(w_opd * gap.abs())
    elif opd == "topk":
        distilled, has, mass = _topk_kl(args, inputs, batch, backend, logits)
        metrics["opd_share"] = total(has)
        metrics["opd_kl"] = total(distilled)
        metrics["opd_mass"] = total(mass)

    advantages = torch.zeros_like(current)
    if rewards is not None or gap is not None:
        advantages = combined_advantage(rewards, gap, w_rl, w_opd)
    token_loss, clipped = clipped_surrogate(
        log_ratio,
        advantages,
        number(args, "eps_clip", 0.2),
        number(args, "eps_clip_high", 0.28),
        optional(args, "eps_clip_c"),
    )
    if bool(getattr(args, "use_tis", False)):
        if rollout is None or wants_rollout:
            raise ConfigError(
                "use_tis needs rollout_log_probs in the batch, and use_rollout_logprobs unset: "
                "that one puts the same difference into the ratio"
            )
        weights, cut = truncated_weights(
            old - rollout, number(args, "tis_clip", 2.0), number(args, "tis_clip_low", 0.0)
        )
        token_loss = token_loss * weights
        metrics["tis"] = total(weights)
        metrics["tis_clipfrac"] = total(cut)
    if distilled is not None:
        token_loss = token_loss + w_opd * distilled
    pg_loss = total(token_loss)
    entropy_loss = total(entropy)
    loss = pg_loss - number(args, "entropy_coef", 0.0) * entropy_loss
    metrics["pg_loss"] = pg_loss
    metrics["entropy_loss"] = entropy_loss
    metrics["pg_clipfrac"] = total(clipped)
    metrics["ppo_kl"] = total(-log_ratio)
    if getattr(args, "use_kl_loss", False):
        reference = inputs.joined("ref_log_probs")
        if reference is None:
            raise ConfigError("use_kl_loss is set, but the batch has no ref_log_probs")
        unbiased = bool(getattr(args, "use_unbiased_kl", False))
        kind = getattr(args, "kl_loss_type", None) or "k3"
        ratio = log_ratio.exp() if unbiased else None
        kl_loss = total(approx_kl(log_probs, reference, kind, ratio))
        loss = loss + number(args, "kl_loss_coef", 0.0) * kl_loss
        metrics["kl_loss"] = kl_loss
    if rollout is not None:
        mine = current if wants_rollout else old
        metrics["train_rollout_logprob_abs_diff"] = total((mine - rollout).abs())
    metrics["loss"] = loss
    return loss, {name: value.detach().clone() for name, value in metrics.items()}


def _reducer(reduce: Reducer, weights: Tensor | None, empty: Tensor | None) -> Reducer:
    """The host's reducer over weighted values; `empty` are the logits of an empty micro-batch.

    Such a one must still reach its logits, or ranks that wait for its backward hang. The empty
    slice does so without a product (0 * inf is NaN). What it reduces stays in the graph beside
    it: collective calls in there wait for this rank too.
    """

    def total(values: Tensor) -> Tensor:
        value = reduce(values if weights is None else weights * values)
        return value if empty is None else value + empty[:, :0].sum()

    return total


def _sampled_gap(
    args: Any,
    inputs: Inputs,
    unscaled: Callable[[], Tensor],
    recomputed: Tensor | None,
    rollout: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`log pi_T - log pi` of the sampled tokens, and 1.0 where the teacher has a value."""
    teacher = inputs.teacher()
    if teacher is None:
        none = torch.zeros_like(inputs.current)
        return none, none
    baseline = _baseline(args, unscaled, recomputed, rollout)
    return distillation_advantage(teacher, baseline, optional(args, "opd_clip"))


def _topk_kl(
    args: Any, inputs: Inputs, batch: Batch, backend: Backend, logits: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The KL over each token's ids, 1.0 where it has any, the policy's probability of them."""
    topk = inputs.topk()
    if topk is None:
        none = torch.zeros_like(inputs.current)
        return none, none, none
    ids, teacher = topk
    student = backend.at(args, batch, logits, ids)
    tail = bool(getattr(args, "opd_tail", False))
    return subset_reverse_kl(student, teacher, optional(args, "opd_clip"), tail)


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


def _unscaled(backend: Backend, args: Any, batch: Batch, logits: Tensor, current: Tensor) -> Tensor:
    """The current log-probs of the whole softmax at temperature 1, as engines score the teacher's.

    At another `rollout_temperature` the two would belong to different distributions, and their
    difference would be there even where teacher and policy agree.
    """
    if number(args, "rollout_temperature", 1.0) == number(args, "rollout_top_p", 1.0) == 1.0:
        return current
    plain = copy.copy(args)
    plain.rollout_temperature = plain.rollout_top_p = 1.0
    with torch.no_grad():
        parts, _ = backend.sampled(plain, batch, logits.detach(), with_entropy=False)
    return torch.cat(parts) if parts else current
