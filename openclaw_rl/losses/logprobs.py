"""Log-probs and entropies at chosen positions of packed logits, without a copy of them.

Guarantees: the forward pass holds one chunk of rows in float32 at a time; the backward pass
allocates the gradient of the logits once and nothing else of that size. Results are float32
(float64 for float64 logits). Where a process group is given, each of its ranks holds one slice of
the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 24  # 64 MiB of float32: large enough that the loop costs nothing


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
    flat = packed(logits)
    none = torch.empty(0, dtype=torch.long, device=flat.device)
    rows = torch.cat([none, *response_rows(flat, total_lengths, response_lengths)])
    spans = zip(unconcat_tokens, total_lengths, response_lengths, strict=True)
    responses = (tokens[total - n : total].to(none) for tokens, total, n in spans)
    target = torch.cat([none, *responses])
    temperature = float(getattr(args, "rollout_temperature", 1.0) or 1.0)
    entropy_grad = with_entropy and bool(getattr(args, "entropy_coef", 0.0))
    log_probs, entropy = _LogProbsAt.apply(  # type: ignore[no-untyped-call]
        flat, rows, target[:, None], temperature,
        rows_at_a_time(args), with_entropy, entropy_grad, None,
    )  # fmt: skip
    lengths = list(response_lengths)
    result = {"log_probs": list(log_probs[:, 0].split(lengths))}
    if with_entropy:
        result["entropy"] = list((entropy if entropy_grad else entropy.detach()).split(lengths))
    return log_probs.new_empty(0), result


def log_probs_at(
    logits: Tensor, rows: Tensor, ids: Tensor, chunk: int = 0, group: Any = None
) -> Tensor:
    """`log softmax(logits[rows])[ids]`, `[N, K]`: one pass over the logits for all K ids.

    `logits` is `[T, V]`; `rows` `[N]` are distinct; `ids` `[N, K]` are vocabulary ids, -1 where
    none: there the result is 0 without a gradient. A row without any id costs nothing. With a
    `group`, `logits` is this rank's slice of the vocabulary (all slices of one size, in rank
    order), ids are global, and every rank of the group must make the same call. The gradient of
    the result must be the same on all of them, as that of a loss computed by each is.
    """
    wanted = (ids >= 0).any(dim=-1).nonzero()[:, 0]
    some = ids[wanted]
    found, _ = _LogProbsAt.apply(  # type: ignore[no-untyped-call]
        logits, rows[wanted], some.clamp_min(0), 1.0, chunk, False, False, group
    )
    found = torch.where(some >= 0, found, torch.zeros_like(found))
    return found.new_zeros(ids.shape).index_copy(0, wanted, found)


def packed(logits: Tensor) -> Tensor:
    """`[1, T, V]` as `[T, V]`; raises ValueError for another shape."""
    if logits.dim() != 3 or logits.size(0) != 1:
        raise ValueError(f"logits must be [1, T, V], not {list(logits.shape)}")
    return logits[0]


def response_rows(
    flat: Tensor, total_lengths: Sequence[int], response_lengths: Sequence[int]
) -> list[Tensor]:
    """Per sample, the rows of `flat` `[T, V]` that predict its response tokens, `[R_i]`.

    The samples lie end to end; the row before a token predicts it, so a response needs a prompt.
    """
    rows: list[Tensor] = []
    end = 0
    for total, response in zip(total_lengths, response_lengths, strict=True):
        if not 0 <= response < total and total > 0:
            raise ValueError(f"a response of {response} tokens needs a prompt; total is {total}")
        end += total
        rows.append(torch.arange(end - response - 1, end - 1, device=flat.device))
    if end > flat.size(0):
        raise ValueError(f"logits hold {flat.size(0)} positions, the samples {end}")
    return rows


def rows_at_a_time(args: Any) -> int:
    """`args.log_probs_chunk_size`; not positive, or absent: chosen by size."""
    return int(getattr(args, "log_probs_chunk_size", None) or 0)


class _LogProbsAt(torch.autograd.Function):
    """With z = logits / tau, p = softmax(z): d log p_k / dz = e_k - p, dH / dz = -p (log p + H).

    With slices of the vocabulary, `log_norm` is the log of the sum of the slices' norms, a slice
    without the id adds 0 to its logit, and the entropy follows from the slices' own ones by the
    chain rule, H = sum_r w_r (H_r - log w_r), w_r being a slice's share of the probability.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        rows: Tensor,
        ids: Tensor,
        temperature: float,
        chunk: int,
        with_entropy: bool,
        entropy_grad: bool,
        group: Any,
    ) -> tuple[Tensor, Tensor]:
        width = logits.size(1)
        chunk = chunk if chunk > 0 else max(1, _CHUNK_ELEMENTS // max(1, width))
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        column, mine = ids, torch.ones_like(ids, dtype=torch.bool)
        if group is not None:
            column = ids - dist.get_rank(group) * width
            mine = (column >= 0) & (column < width)
            column = column.clamp(0, max(0, width - 1))
        log_norm = torch.empty(rows.numel(), dtype=dtype, device=logits.device)
        picked = log_norm.new_empty(ids.shape)
        entropy = torch.zeros_like(log_norm)
        for a in range(0, rows.numel(), chunk):
            part = slice(a, a + chunk)
            z = logits[rows[part]].to(dtype)
            if temperature != 1.0:
                z = z.div_(temperature)
            norm = torch.logsumexp(z, dim=-1)
            log_norm[part] = norm
            picked[part] = z.gather(1, column[part])
            if with_entropy:
                log_p = z.sub_(norm[:, None])
                # p = 0 where log p = -inf: 0 * -inf must be 0
                entropy[part] = -(log_p.exp() * log_p.nan_to_num(neginf=0.0)).sum(dim=-1)
        if group is not None and rows.numel():
            picked = picked.masked_fill_(~mine, 0.0)
            dist.all_reduce(picked, group=group)
            log_norm, share = _norm_of_slices(log_norm, group)
            if with_entropy:
                entropy = share * (entropy - share.log())
                entropy = entropy.masked_fill_(share == 0, 0.0)
                dist.all_reduce(entropy, group=group)
        ctx.save_for_backward(logits, rows, column, mine, log_norm, entropy)
        ctx.settings = (temperature, chunk, dtype, entropy_grad)
        return picked - log_norm[:, None], entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Any, ...]:
        logits, rows, column, mine, log_norm, entropy = ctx.saved_tensors
        temperature, chunk, dtype, entropy_grad = ctx.settings
        total = grad_log_probs.sum(dim=-1)
        direct = grad_log_probs.masked_fill(~mine, 0.0)
        grad = torch.zeros_like(logits)
        for a in range(0, rows.numel(), chunk):
            part = slice(a, a + chunk)
            z = logits[rows[part]].to(dtype)
            if temperature != 1.0:
                z = z.div_(temperature)
            log_p = z.sub_(log_norm[part, None])
            g = total[part, None]
            if entropy_grad:
                p = log_p.exp()
                scale = log_p.nan_to_num_(neginf=0.0).add_(entropy[part, None])
                out = p.mul_(scale.mul_(-grad_entropy[part, None]).sub_(g))
            else:
                out = log_p.exp_().mul_(-g)
            out.scatter_add_(1, column[part], direct[part])
            if temperature != 1.0:
                out.div_(temperature)
            grad[rows[part]] = out.to(grad.dtype)
        return grad, None, None, None, None, None, None, None


def _norm_of_slices(log_norm: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """`(log sum_r exp(log_norm_r), share of this rank)` over the slices of a group, `[N]` each."""
    largest = log_norm.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    own = (log_norm - largest).exp()
    whole = own.clone()
    dist.all_reduce(whole, group=group)
    return largest + whole.log(), own / whole
