"""Plain per-token tensor functions of the losses. They know no host, no batch and no arguments.

Tensors are `[N]`, one entry a token (those of `subset_reverse_kl` `[N, K]`), of one floating dtype.
Advantages carry no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

# exp(20) is past every clip, and times an advantage of 0 it is still 0, not NaN
MAX_LOG_RATIO = 20.0


def approx_kl(log_probs: Tensor, base: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || base) from sampled tokens.

    Estimators k1, k2, k3 of J. Schulman, "Approximating KL Divergence" (2020), with
    `d = log pi - log pi_base`: `k1 = d`, `k2 = d^2 / 2`, `k3 = exp(-d) - 1 + d`; `low_var_kl` is
    k3 held within [-10, 10].
    """
    d = log_probs - base
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    if kind not in ("k3", "low_var_kl"):
        raise ValueError(f"kl_loss_type {kind!r} is unknown; it is k1, k2, k3 or low_var_kl")
    kl = torch.expm1(-d) + d
    return kl.clamp(-10, 10) if kind == "low_var_kl" else kl


def clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate (Schulman et al. 2017, eq. 7) as a loss, with separate bounds.

    `log_ratio` is `log pi - log pi_old`. Returns `(loss, clipped)`: per token
    `-min(rho A, clip(rho, 1 - eps_clip, 1 + eps_clip_high) A)`, and 1.0 where the clip took the
    gradient. `eps_clip_c > 1` bounds the loss of a negative advantage by `eps_clip_c |A|`
    (dual clip, Ye et al. 2020).
    """
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    free = -ratio * advantages
    bounded = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    loss = torch.maximum(free, bounded)
    clipped = (bounded > free).to(loss.dtype)
    if eps_clip_c is not None:
        if eps_clip_c <= 1:
            raise ValueError(f"eps_clip_c must be greater than 1, not {eps_clip_c}")
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return loss, clipped


def truncated_weights(log_ratio: Tensor, high: float, low: float = 0.0) -> tuple[Tensor, Tensor]:
    """Truncated importance weights `clip(exp(log_ratio), low, high)`, and 1.0 where truncated.

    `log_ratio` is `log pi - log mu` of trainer and engine for the sampled token, without gradient.
    Ionides 2008, "Truncated importance sampling"; against the mismatch of engine and trainer: Yao
    et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    """
    if not 0 <= low <= high:
        raise ValueError(f"the bounds of importance weights must be 0 <= {low} <= {high}")
    free = log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weights = free.clamp(low, high)
    return weights, (weights != free).to(free.dtype)


def distillation_advantage(
    teacher: Tensor, student: Tensor, clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """`(log pi_T - log pi, has)` per token: exactly 0 where the teacher has no value.

    `teacher` says "no value" by NaN or an infinity. The difference is held within ±`clip` where
    one is given. Neither result carries a gradient.
    """
    has = teacher.isfinite()
    known = torch.where(has, teacher.detach(), torch.zeros_like(teacher))
    gap = _held(known - student.detach(), clip)
    return torch.where(has, gap, torch.zeros_like(gap)), has.to(student.dtype)


def subset_reverse_kl(
    student: Tensor, teacher: Tensor, clip: float | None = None, tail: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Reverse KL from policy to teacher over K ids a token, as a loss: `(kl, has, mass)`, `[N]`.

    With p the policy, q the teacher, S the ids of a token that have a teacher value, and
    `d_k = log q_k - log p_k`, held within ±`clip` where one is given and without a gradient:

        kl = -sum_{k in S} p_k d_k          gradient: -sum_{k in S} p_k d_k * grad log p_k

    `tail` adds everything outside S as one more id, `log p_tail = log(1 - sum_{k in S} p_k)`.
    Source: the top-K form of OpenClaw-RL (arXiv 2603.10165 v2) with its clip of the log-prob
    difference; the tail as in SDPO (arXiv 2601.20802). Over all ids, or with the tail, the
    gradient without a clip is exactly that of KL(p || q); over a bare subset it is the part of it
    that belongs to S (README.md: why the difference carries no gradient).

    `student` and `teacher` are `[N, K]` log-probs; `teacher` says "no value" by NaN or an
    infinity. Where a token has none, `kl` is exactly 0 and its gradient untouched. `has` is 1.0
    where it has one, `mass` the policy's probability of S (no gradient).
    """
    has = teacher.isfinite().any(dim=-1)
    # An id the policy cannot give (log p = -inf) has p d = 0; the product would be NaN.
    known = teacher.isfinite() & student.detach().isfinite()
    zero = torch.zeros_like(student)
    p = torch.where(known, student, zero).exp() * known
    log_q = torch.where(known, teacher.detach(), zero)
    gap = _held(torch.where(known, log_q - student.detach(), zero), clip)
    kl = -(p * gap).sum(dim=-1)
    mass = p.detach().sum(dim=-1)
    if tail:
        q_mass = torch.where(teacher.isfinite(), teacher.detach(), -torch.inf).exp().sum(dim=-1)
        gap = torch.where(has, _held(_log_rest(q_mass) - _log_rest(mass), clip), 0.0)
        kl = kl - (1 - p.sum(dim=-1)) * gap
    return kl, has.to(student.dtype), mass


def _log_rest(mass: Tensor) -> Tensor:
    """log(1 - mass); what rounding cannot tell from 0 counts as one rounding step."""
    return (1 - mass).clamp_min(torch.finfo(mass.dtype).eps).log()


def _held(gap: Tensor, clip: float | None) -> Tensor:
    return gap if clip is None else gap.clamp(-clip, clip)
