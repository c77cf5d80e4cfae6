"""Log-probabilities and entropies of response tokens from packed logits, without a copy of them.

Guarantees: the forward pass holds one chunk of rows in float32 at a time; the backward pass
allocates the gradient of the logits once and nothing else of that size. Results are float32
(float64 for float64 logits) whatever the dtype of the logits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Backend = Callable[..., tuple[Tensor, dict[str, list[Tensor]]]]

_CHUNK_ELEMENTS = 1 << 24  # 64 MiB of float32: large enough that the loop costs nothing


def backend_for(args: Any) -> Backend:
    """The function that computes log-probs: slime's own inside slime's trainer, else the plain one.

    slime's is aware of tensor and context parallelism. Inside its training process the module is
    always loaded, because it is what calls the loss; elsewhere it is never imported from here.
    """
    module = sys.modules.get("slime.backends.megatron_utils.loss")
    mpu = getattr(module, "mpu", None)
    if mpu is not None and mpu.model_parallel_is_initialized():
        return module.get_log_probs_and_entropy  # type: ignore[no-any-return,union-attr]
    return get_log_probs_and_entropy


def get_log_probs_and_entropy(
    logits: Tensor,
    *,
    args: Any,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Log-prob of every response token given all before it, per sample. slime's signature.

    `logits` is `[1, T, V]` over the samples laid end to end, `T >= sum(total_lengths)` (what
    follows is padding). Returns `(empty, {"log_probs": [R_i ...], "entropy": [R_i ...]})`.
    Logits are divided by `args.rollout_temperature`, as the engine did when it sampled. The
    entropy carries a gradient only where `args.entropy_coef` is not 0. `args.log_probs_chunk_size`
    is the number of rows at a time (not positive: chosen by size).
    """
    if logits.dim() != 3 or logits.size(0) != 1:
        raise ValueError(f"logits must be [1, T, V], not {list(logits.shape)}")
    flat = logits[0]
    rows: list[Tensor] = []
    targets: list[Tensor] = []
    begin = 0
    for tokens, total, response in zip(
        unconcat_tokens, total_lengths, response_lengths, strict=True
    ):
        if not 0 <= response < total and total > 0:
            raise ValueError(f"a response of {response} tokens needs a prompt; total is {total}")
        end = begin + total
        rows.append(torch.arange(end - response - 1, end - 1, device=flat.device))
        targets.append(tokens[total - response : total].to(flat.device, torch.long))
        begin = end
    if begin > flat.size(0):
        raise ValueError(f"logits hold {flat.size(0)} positions, the samples {begin}")

    temperature = float(getattr(args, "rollout_temperature", 1.0) or 1.0)
    entropy_grad = with_entropy and float(getattr(args, "entropy_coef", 0.0) or 0.0) != 0
    chunk = int(getattr(args, "log_probs_chunk_size", 0) or 0)
    if chunk <= 0:
        chunk = max(1, _CHUNK_ELEMENTS // max(1, flat.size(1)))
    if rows:
        row, target = torch.cat(rows), torch.cat(targets)
    else:
        row = target = torch.empty(0, dtype=torch.long, device=flat.device)
    log_probs, entropy = token_log_probs(
        flat, row, target, temperature, chunk, with_entropy, entropy_grad
    )
    lengths = list(response_lengths)
    result = {"log_probs": list(torch.split(log_probs, lengths)) if lengths else []}
    if with_entropy:
        result["entropy"] = list(torch.split(entropy, lengths)) if lengths else []
    return log_probs.new_empty(0), result


def token_log_probs(
    logits: Tensor,
    rows: Tensor,
    targets: Tensor,
    temperature: float,
    chunk: int,
    with_entropy: bool,
    entropy_grad: bool,
) -> tuple[Tensor, Tensor]:
    """`log softmax(logits[rows] / temperature)[targets]` and the entropies (zeros if not asked).

    `logits` is `[T, V]`; `rows` are distinct. Both results are `[len(rows)]`.
    """
    log_probs, entropy = _TokenLogProbs.apply(  # type: ignore[no-untyped-call]
        logits, rows, targets, temperature, chunk, with_entropy, entropy_grad
    )
    return log_probs, entropy if entropy_grad else entropy.detach()


class _TokenLogProbs(torch.autograd.Function):
    """With z = logits / tau, p = softmax(z): d log p_y / dz = e_y - p, dH / dz = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        rows: Tensor,
        targets: Tensor,
        temperature: float,
        chunk: int,
        with_entropy: bool,
        entropy_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        log_norm = torch.empty(rows.numel(), dtype=dtype, device=logits.device)
        log_probs = torch.empty_like(log_norm)
        entropy = torch.zeros_like(log_norm)
        for a in range(0, rows.numel(), chunk):
            part = slice(a, a + chunk)
            z = logits[rows[part]].to(dtype)
            if temperature != 1.0:
                z = z.div_(temperature)
            norm = torch.logsumexp(z, dim=-1)
            log_norm[part] = norm
            log_probs[part] = z.gather(1, targets[part, None])[:, 0] - norm
            if with_entropy:
                log_p = z.sub_(norm[:, None])
                # p = 0 where log p = -inf: 0 * -inf must be 0
                entropy[part] = -(log_p.exp() * log_p.nan_to_num(neginf=0.0)).sum(dim=-1)
        ctx.save_for_backward(logits, rows, targets, log_norm, entropy)
        ctx.settings = (temperature, chunk, dtype, entropy_grad)
        return log_probs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Any, ...]:
        logits, rows, targets, log_norm, entropy = ctx.saved_tensors
        temperature, chunk, dtype, entropy_grad = ctx.settings
        grad = torch.zeros_like(logits)
        for a in range(0, rows.numel(), chunk):
            part = slice(a, a + chunk)
            z = logits[rows[part]].to(dtype)
            if temperature != 1.0:
                z = z.div_(temperature)
            log_p = z.sub_(log_norm[part, None])
            g = grad_log_probs[part, None]
            if entropy_grad:
                p = log_p.exp()
                scale = log_p.nan_to_num_(neginf=0.0).add_(entropy[part, None])
                out = p.mul_(scale.mul_(-grad_entropy[part, None]).sub_(g))
            else:
                out = log_p.exp_().mul_(-g)
            out.scatter_add_(1, targets[part, None], g)
            if temperature != 1.0:
                out.div_(temperature)
            grad[rows[part]] = out.to(grad.dtype)
        return grad, None, None, None, None, None, None
