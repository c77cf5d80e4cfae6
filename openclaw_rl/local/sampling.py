"""Draws one token a row, and says how likely it was: a few operations for all rows together.

Guarantees: the token is drawn from softmax(logits / temperature) after penalties, cut to top_k,
top_p and min_p where asked; the log-prob is that of softmax(logits / temperature) over the whole
vocabulary, as SGLang reports it (before the cut). Temperature 0 is argmax, with the log-prob at
temperature 1.

The draw inverts the cumulative distribution in two levels (blocks, then inside one block) in
double precision: one uniform number a row, no noise over the vocabulary, and the normaliser comes
out of the same pass, so no log_softmax of the vocabulary is ever made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from openclaw_rl.local.request import SamplingParams

_BLOCK = 256
_SHORTLIST = 256  # candidates looked at before the whole vocabulary is sorted


@dataclass(slots=True)
class RowSettings:
    """The settings of a step's rows as tensors; made anew only when the rows change."""

    params: Sequence[SamplingParams]
    inverse_temperature: Tensor | None  # [R, 1]; None: all are 1
    greedy: Tensor | None  # [R] bool; None: no row is greedy
    all_greedy: bool
    filtered: list[int]
    penalised: list[int] = field(default_factory=list)
    top_k: Tensor | None = None  # [F, 1]
    top_p: Tensor | None = None
    min_p: Tensor | None = None

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> RowSettings:
        inverse = [1.0 / p.temperature if p.temperature > 0 else 1.0 for p in params]
        greedy = [p.temperature <= 0 or p.top_k == 1 for p in params]
        filtered = [i for i, p in enumerate(params) if p.filtered and not greedy[i]]

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, device=device)[:, None]

        return cls(
            params=params,
            inverse_temperature=None if all(t == 1.0 for t in inverse) else column(inverse),
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            all_greedy=all(greedy),
            filtered=filtered,
            penalised=[i for i, p in enumerate(params) if p.penalised],
            top_k=column([params[i].top_k if params[i].top_k > 0 else 1e9 for i in filtered]),
            top_p=column([params[i].top_p for i in filtered]),
            min_p=column([params[i].min_p for i in filtered]),
        )


@dataclass(frozen=True, slots=True)
class Drawn:
    """ids [R], logprobs [R] (float32), scaled logits [R, V] and their normaliser [R, 1]."""

    ids: Tensor
    logprobs: Tensor
    scaled: Tensor
    normaliser: Tensor


def penalise(row: Tensor, counts: Tensor, params: SamplingParams) -> None:
    """Applies the penalties of one row in place. `counts` [V]: how often each token was output."""
    if params.repetition_penalty != 1.0:
        factor = torch.where(row > 0, 1.0 / params.repetition_penalty, params.repetition_penalty)
        row.mul_(torch.where(counts > 0, factor, torch.ones_like(row)))
    row.sub_(counts, alpha=params.frequency_penalty)
    row.sub_((counts > 0).to(row.dtype), alpha=params.presence_penalty)


def draw(
    logits: Tensor, settings: RowSettings, uniforms: Sequence[float], counts: dict[int, Tensor]
) -> Drawn:
    """logits [R, V] in any dtype and layout; uniforms in [0, 1), one a row; counts by row."""
    z = logits.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    rows, vocab = z.shape
    for i in settings.penalised:
        penalise(z[i], counts[i], settings.params[i])
    if settings.inverse_temperature is not None:
        z.mul_(settings.inverse_temperature)
    top, best = z.max(-1, keepdim=True)
    # Only the tail of the last block is cleared; the rest is overwritten below.
    blocks = -(-vocab // _BLOCK)
    weights = z.new_empty(rows, blocks * _BLOCK)
    weights[:, vocab:] = 0
    torch.sub(z, top, out=weights[:, :vocab])
    weights[:, :vocab].exp_()
    grid = weights.view(rows, blocks, _BLOCK)
    mass = grid.sum(-1).double().cumsum(-1)  # [R, blocks]
    total = mass[:, -1:]
    normaliser = top + total.log().float()
    if settings.all_greedy:
        ids = best[:, 0]
    else:
        u = torch.tensor(uniforms, dtype=torch.float64, device=z.device)[:, None]
        ids = _invert(grid, mass, u)
        if settings.filtered:
            at = torch.tensor(settings.filtered, device=z.device)
            ids[at] = _draw_filtered(weights[at, :vocab], total[at], u[at], settings)
        if settings.greedy is not None:
            ids = torch.where(settings.greedy, best[:, 0], ids)
    logprobs = (z.gather(-1, ids[:, None]) - normaliser)[:, 0]
    return Drawn(ids, logprobs, z, normaliser)


def _pick(cumulative: Tensor, u: Tensor) -> Tensor:
    """First index whose cumulative weight exceeds u * total: never one of weight zero."""
    target = (u * cumulative[:, -1:]).clamp(max=math.inf)
    index = (cumulative <= target).sum(-1, keepdim=True)
    # Rounding can lift the target to the total itself: then the last index with weight.
    last = (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum(index, last)


def _invert(grid: Tensor, mass: Tensor, u: Tensor) -> Tensor:
    block = _pick(mass, u)  # [R, 1]
    before = torch.where(block > 0, mass.gather(-1, (block - 1).clamp(min=0)), 0.0)
    share = (u * mass[:, -1:] - before) / (mass.gather(-1, block) - before)
    rows = torch.arange(grid.shape[0], device=grid.device)
    inside = grid[rows, block[:, 0]].double().cumsum(-1)
    return (block * _BLOCK + _pick(inside, share.clamp(0.0, 1.0)))[:, 0]


def _draw_filtered(weights: Tensor, total: Tensor, u: Tensor, settings: RowSettings) -> Tensor:
    """Rows with a cut. A token stays if it is among the top_k, if the tokens before it (most
    likely first) hold at most top_p, and if it has at least min_p of the most likely one."""
    assert settings.top_k is not None
    assert settings.top_p is not None
    assert settings.min_p is not None
    size = min(_SHORTLIST, weights.shape[-1])
    while True:
        values, ids = weights.topk(size, dim=-1)  # sorted
        share = values.double() / total
        before = share.cumsum(-1) - share
        rank = torch.arange(size, device=weights.device)
        keep = (before <= settings.top_p) & (rank < settings.top_k)
        keep &= share >= share[:, :1] * settings.min_p
        # The cut is inside the shortlist when its last candidate falls to it.
        if size == weights.shape[-1] or not bool(keep[:, -1].any()):
            break
        size = weights.shape[-1]
    cumulative = torch.where(keep, share, 0.0).cumsum(-1)
    return ids.gather(-1, _pick(cumulative, u))[:, 0]


def score(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs [R] of `targets` [R] under logits [R, V] at temperature 1, with the float32
    logits and their normaliser [R, 1]."""
    z = logits.to(torch.float32, memory_format=torch.contiguous_format)
    normaliser = z.logsumexp(-1, keepdim=True)
    return (z.gather(-1, targets[:, None]) - normaliser)[:, 0], z, normaliser
