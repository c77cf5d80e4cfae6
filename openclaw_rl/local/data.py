"""From slime's train data to what a loss hook sees, level by level: see `learner.py`.

Guarantees: no token is padded into a loss, cut or moved; the turns of one call of the loss were
sampled at one temperature; a turn that comes in pieces weighs what it would weigh whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from openclaw_rl.errors import HookError
from openclaw_rl.losses.signals import SIGNALS, TokenSignals
from openclaw_rl.rollout.train_data import TurnRange

RolloutData = dict[str, Any]
"""What `rollout.train_data.convert` gives, with `total_lengths`, and tensors, one entry a sample:
`tokens`, `loss_masks`, the `PER_TOKEN` values of its response `[R]`, and `topk`, the teacher's
candidates as `(ids, log-probs)` `[R, K]`, or None for a sample without."""

PER_TOKEN = (
    *("log_probs", "ref_log_probs", "rollout_log_probs"),
    *("teacher_log_probs", "advantages", "returns"),
)


def to_tensors(data: Mapping[str, Any], device: torch.device | str = "cpu") -> RolloutData:
    """Train data as tensors: ids int64, per-token values float32, None teacher values NaN."""

    def rows(values: Any, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
        values = [math.nan] * length if values is None else values
        tensor = torch.as_tensor(values, dtype=dtype, device=device)
        if len(tensor) != length:
            raise HookError(f"{len(tensor)} per-token values for a response of {length} tokens")
        return tensor

    out, lengths = dict(data), data["response_lengths"]
    out["tokens"] = [torch.as_tensor(t, dtype=torch.long, device=device) for t in data["tokens"]]
    out["total_lengths"] = [len(tokens) for tokens in out["tokens"]]
    for i, (total, response) in enumerate(zip(out["total_lengths"], lengths, strict=True)):
        if response >= total:
            raise HookError(f"sample {i}: a response of {response} in {total} tokens has no prompt")
    for key in ("loss_masks", "rollout_log_probs", "teacher_log_probs"):
        if out.get(key) is not None:
            out[key] = [rows(v, n) for v, n in zip(out[key], lengths, strict=True)]
    if out.get("topk") is not None:
        out["topk"] = [
            None if topk is None else (rows(topk.ids, n, torch.long), rows(topk.log_probs, n))
            for topk, n in zip(out["topk"], lengths, strict=True)
        ]
    return out


def default_advantages(data: RolloutData, turns: Sequence[TurnRange]) -> None:
    """Set `advantages` and `returns`: each turn's reward on its own tokens, 0 between them."""
    data["advantages"] = [torch.zeros_like(mask) for mask in data["loss_masks"]]
    for turn in turns:
        data["advantages"][turn.sample][turn.start : turn.end] = turn.reward
    data["returns"] = [values.clone() for values in data["advantages"]]


def steps_of(data: RolloutData, turns: Sequence[TurnRange], steps: int) -> list[list[TurnRange]]:
    """The turns of each optimiser step: as the rollout split them (`data["steps"]`), before it
    merged them into samples; where it does not say, of `steps` even parts of the samples."""
    count = len(data["tokens"])
    step = data.get("steps") or [i * steps // count for i in range(count)]
    return [[turn for turn in turns if step[turn.sample] == one] for one in sorted(set(step))]


def micro_batches(data: RolloutData, turns: Sequence[TurnRange], budget: int) -> list[list[int]]:
    """The samples that `turns` are in, longest first, in groups whose padded size (longest times
    number) fits `budget` tokens. One that exceeds the budget goes alone."""
    lengths = data["total_lengths"]
    groups: list[list[int]] = []
    for i in sorted({turn.sample for turn in turns}, key=lambda i: (-lengths[i], i)):
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= budget:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def loss_calls(turns: Sequence[TurnRange], rows: int) -> Iterator[tuple[float, list[TurnRange]]]:
    """For each call a temperature, and turns that were sampled at it. A turn needs a row of logits
    for each of its tokens and one more; what needs more than `rows` (at least 2) is cut."""
    ordered = sorted(turns, key=lambda turn: turn.temperature)
    for temperature, same in itertools.groupby(ordered, lambda turn: turn.temperature):
        call: list[TurnRange] = []
        room = rows
        for turn in same:
            for start in range(turn.start, turn.end, rows - 1):
                piece = turn._replace(start=start, end=min(start + rows - 1, turn.end))
                needs = piece.end - piece.start + 1
                if needs > room:
                    yield temperature, call
                    call, room = [], rows
                call.append(piece)
                room -= needs
        yield temperature, call


def loss_batch(data: RolloutData, turns: Sequence[TurnRange]) -> dict[str, Any]:
    """The `batch` of slime's loss contract with one entry a turn (or piece of one).

    Of what precedes a turn just the one token before it is kept: `total_lengths` is the response
    plus 1, the logits are as short, and no prompt row goes through the output layer.
    """

    def parts(values: Sequence[Tensor]) -> list[Tensor]:
        return [values[turn.sample][turn.start : turn.end] for turn in turns]

    masks = parts(data["loss_masks"])
    batch: dict[str, Any] = {
        "unconcat_tokens": [data["tokens"][turn.sample][token_span(data, turn)] for turn in turns],
        "total_lengths": [len(mask) + 1 for mask in masks],
        "response_lengths": [len(mask) for mask in masks],
        "loss_masks": masks,
        "rollout_mask_sums": list(masks[0].new_tensor([turn.tokens for turn in turns])),
    }
    batch |= {key: parts(data[key]) for key in PER_TOKEN if data.get(key) is not None}
    if data.get("topk") is not None:
        teacher = batch.get("teacher_log_probs") or [None] * len(turns)
        batch[SIGNALS] = []
        for turn, mask, values in zip(turns, masks, teacher, strict=True):
            topk = data["topk"][turn.sample] or ()  # a turn's tokens all weigh the same
            own = (values[turn.start : turn.end] for values in topk)
            batch[SIGNALS].append(TokenSignals(torch.ones_like(mask), values, *own))
    return batch


def token_span(data: RolloutData, turn: TurnRange) -> slice:
    """Where a turn is in its sample's tokens, from the token before it to its last."""
    prompt = data["total_lengths"][turn.sample] - data["response_lengths"][turn.sample]
    return slice(prompt + turn.start - 1, prompt + turn.end)


def reducer(turns: Sequence[TurnRange], masks: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    """`sum_of_sample_mean` of these turns: the sum of `mask * x / tokens`."""

    def sum_of_sample_mean(x: Tensor) -> Tensor:
        total = x.new_zeros(())
        parts = torch.split(x, [len(mask) for mask in masks])
        for part, turn, mask in zip(parts, turns, masks, strict=True):
            # Not a product: a NaN on a masked token stays out of the sum.
            total = total + torch.where(mask > 0, part * mask.to(x.dtype), 0).sum() / turn.tokens
        return total

    return sum_of_sample_mean
