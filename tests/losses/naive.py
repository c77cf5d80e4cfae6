"""A second rendering of the losses, token by token in plain loops, to compare against."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def naive_loss(
    args: Any, batch: dict[str, Any], logits: Tensor, masks: list[Tensor], *, rl: bool, opd: bool
) -> Tensor:
    """Sum over samples of the masked mean of the per-token loss."""
    get = lambda name, default: getattr(args, name, default)  # noqa: E731
    temperature = get("rollout_temperature", 1.0)
    loss = torch.zeros((), dtype=logits.dtype)
    begin = 0
    for i, tokens in enumerate(batch["unconcat_tokens"]):
        total, response = batch["total_lengths"][i], batch["response_lengths"][i]
        sample = torch.zeros((), dtype=logits.dtype)
        for t in range(response):
            position = total - response + t
            log_p = torch.log_softmax(logits[0, begin + position - 1] / temperature, dim=-1)
            lp = log_p[tokens[position]]
            old_values = batch.get("log_probs")
            old = lp.detach() if old_values is None else old_values[i][t]
            advantage = torch.zeros((), dtype=logits.dtype)
            if rl:
                advantage = advantage + get("w_rl", 1.0) * batch["advantages"][i][t]
            teachers = batch.get("teacher_log_probs")
            signals = batch["values"][i] if batch.get("values") else None
            if opd and signals is None and teachers is not None and teachers[i] is not None:
                value = float(teachers[i][t])
                if not math.isnan(value):
                    plain = torch.log_softmax(logits[0, begin + position - 1], dim=-1)
                    gap = value - plain[tokens[position]].item()
                    clip = get("opd_clip", None)
                    if clip is not None:
                        gap = max(-clip, min(clip, gap))
                    advantage = advantage + get("w_opd", 1.0) * gap
            rho = torch.exp(lp - old)
            low, high = 1 - get("eps_clip", 0.2), 1 + get("eps_clip_high", 0.28)
            token = -torch.minimum(rho * advantage, rho.clamp(low, high) * advantage)
            token = token - get("entropy_coef", 0.0) * -(log_p.exp() * log_p).sum()
            if get("use_kl_loss", False):
                d = lp - batch["ref_log_probs"][i][t]
                token = token + get("kl_loss_coef", 0.0) * (torch.exp(-d) - 1 + d)
            if opd and signals is not None:
                plain = torch.log_softmax(logits[0, begin + position - 1], dim=-1)
                token = token + get("w_opd", 1.0) * _topk_kl(args, signals, plain, t)
            if signals is not None:
                token = token * signals.weights[t]
            sample = sample + masks[i][t] * token
        loss = loss + sample / max(float(masks[i].sum()), 1.0)
        begin += total
    return loss


def _topk_kl(args: Any, signals: Any, log_p: Tensor, t: int) -> Tensor:
    clip = getattr(args, "opd_clip", None) or math.inf
    pairs = [
        (log_p[k], float(q))
        for k, q in zip(signals.topk_ids[t].tolist(), signals.topk_log_probs[t], strict=True)
        if k >= 0 and not math.isnan(float(q))
    ]
    kl = torch.zeros((), dtype=log_p.dtype)
    for p, q in pairs:
        kl = kl - p.exp() * max(-clip, min(clip, q - p.item()))
    if pairs and getattr(args, "opd_tail", False):
        p_rest = 1 - sum(p.exp() for p, _ in pairs)
        q_rest = 1 - sum(math.exp(q) for _, q in pairs)
        gap = math.log(q_rest) - math.log(p_rest.item())
        kl = kl - p_rest * max(-clip, min(clip, gap))
    return kl


def sample_mean(lengths: list[int], masks: list[Tensor]):
    """slime's default reducer: the sum over samples of the masked mean."""

    def reduce(values: Tensor) -> Tensor:
        parts = values.split(lengths)
        return sum(
            ((x * m).sum() / m.sum().clamp_min(1) for x, m in zip(parts, masks, strict=True)),
            torch.zeros((), dtype=values.dtype),
        )

    return reduce
