"""From slime's train data to what a loss hook sees: turns as units, micro-batches, the reducer.

Guarantees: every trained token belongs to exactly one `Unit`; a unit weighs the masked mean of
its own tokens, so a turn inside a merged segment has the value and the gradient it would have as
a sample of its own; no token is padded into a loss, cut or moved; the units of one call of the
loss were sampled at one temperature.

Pure: tensors in, tensors out; the model is elsewhere (`forward.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openclaw_rl.errors import HookError
from openclaw_rl.losses.signals import TokenSignals
from openclaw_rl.types import TopK

RolloutData = dict[str, Any]
"""slime's names, one entry a sample: `tokens`, `total_lengths`, `response_lengths`, `loss_masks`,
`rewards`, `rollout_ids`, `sample_indices`, `rollout_mask_sums`, and per-response-token tensors such
as `rollout_log_probs`, `teacher_log_probs`, `advantages`, `log_probs`. Ours: `turns` and `steps`
(see `rollout.train_data.convert`), and `topk`, the teacher's candidates as `(ids, log-probs)`
`[R, K]`, or None for a sample without."""

PER_TOKEN = ("log_probs", "ref_log_probs", "advantages", "returns", "rollout_log_probs",
             "teacher_log_probs")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Unit:
    """Response tokens `[start, end)` of a sample that share one mean, or a piece of them.

    `denominator` is the mask sum of the whole turn (or, where a conversion hook gave no turns, of
    the whole rollout): pieces of a long turn add up to its mean. `temperature`: that at which they
    were sampled. `turn_id`: "" without turns.
    """

    sample: int
    start: int
    end: int
    denominator: float
    temperature: float = 1.0
    turn_id: str = ""

    @property
    def rows(self) -> int:
        """Rows of logits it needs: one before each token, and one after the last (unused)."""
        return self.end - self.start + 1


def to_tensors(data: dict[str, Any], device: torch.device | str = "cpu") -> RolloutData:
    """Train data as tensors: ids int64, per-token values float32, None teacher values NaN."""
    lengths = [int(n) for n in data["response_lengths"]]
    out: RolloutData = dict(data)
    out["tokens"] = [torch.as_tensor(t, dtype=torch.long, device=device) for t in data["tokens"]]
    out["total_lengths"] = [t.numel() for t in out["tokens"]]
    out["response_lengths"] = lengths
    for i, (total, response) in enumerate(zip(out["total_lengths"], lengths, strict=True)):
        if response and not 0 < response < total:
            raise HookError(f"sample {i}: a response of {response} in {total} tokens has no prompt")
    out["loss_masks"] = data.get("loss_masks") or [[1] * n for n in lengths]
    for key in ("loss_masks", "rollout_log_probs", "teacher_log_probs"):
        if out.get(key) is not None:
            out[key] = [_values(v, n, device) for v, n in zip(out[key], lengths, strict=True)]
    if data.get("topk") is not None:
        out["topk"] = [_topk(v, n, device) for v, n in zip(data["topk"], lengths, strict=True)]
    out.setdefault("turns", [None] * len(lengths))
    return out


def _values(values: Any, length: int, device: torch.device | str) -> Tensor:
    if values is None:
        values = [math.nan] * length
    elif not isinstance(values, Tensor):
        values = [math.nan if v is None else v for v in values]
    tensor = torch.as_tensor(values, dtype=torch.float32, device=device).flatten()
    if tensor.numel() != length:
        raise HookError(f"{tensor.numel()} per-token values for a response of {length} tokens")
    return tensor


def _topk(
    given: TopK | None, length: int, device: torch.device | str
) -> tuple[Tensor, Tensor] | None:
    if given is None:
        return None
    try:
        topk = TopK.of(given.ids, given.log_probs, length)
    except (ValueError, TypeError, AttributeError) as error:
        raise HookError(f"the candidates of a sample do not line up: {error}") from error
    shape = (length, topk.width)
    ids = torch.tensor(topk.ids, dtype=torch.long, device=device).reshape(shape)
    return ids, torch.tensor(topk.log_probs, dtype=torch.float32, device=device).reshape(shape)


def default_advantages(data: RolloutData) -> None:
    """Set `advantages` and `returns`: each turn's reward on its own tokens, 0 between them.

    One sample a turn has no group to normalise over, so the reward is the advantage (Binary RL).
    """
    data["advantages"] = [torch.zeros_like(mask) for mask in data["loss_masks"]]
    for values, turns, reward in zip(
        data["advantages"], data["turns"], data["rewards"], strict=True
    ):
        whole = {"start": 0, "end": values.numel(), "reward": reward}
        for turn in [whole] if turns is None else turns:
            values[turn["start"] : turn["end"]] = float(turn["reward"] or 0.0)
    data["returns"] = [values.clone() for values in data["advantages"]]


def steps_of(data: RolloutData, steps: int) -> list[list[int]]:
    """The samples of each optimiser step: as the rollout split its turns (`data["steps"]`), before
    it merged them into samples; where it does not say, `steps` even parts."""
    count = len(data["tokens"])
    of_sample = data.get("steps") or [i * min(steps, count) // count for i in range(count)]
    found: dict[int, list[int]] = {}
    for i, step in enumerate(of_sample):
        found.setdefault(step, []).append(i)
    return [found[step] for step in sorted(found)]


def units_of(
    data: RolloutData, samples: Sequence[int], piece: int, temperature: float = 1.0
) -> tuple[list[Unit], int]:
    """`(units, count)` of the given samples: what is trained, and how many shares the loss has.

    A unit is a turn with at least one unmasked token; without turns, a sample, whose denominator
    is that of its rollout (slime's rule), and `count` is the number of rollouts. Units of more
    than `piece` tokens are cut into pieces of one denominator. `temperature` is that of turns that
    name none. Raises `HookError` for a turn outside of its response.
    """
    units: list[Unit] = []
    shares: set[Any] = set()

    def add(i: int, start: int, end: int, denominator: float, at: Any, turn_id: str) -> None:
        at = temperature if at is None else float(at)
        for a in range(start, end, piece):
            units.append(Unit(i, a, min(a + piece, end), denominator, at, turn_id))

    for i in samples:
        mask, turns = data["loss_masks"][i], data["turns"][i]
        if turns is None:
            if mask.any():
                shares.add((data.get("rollout_ids") or range(len(data["tokens"])))[i])
                sums = data.get("rollout_mask_sums")
                total = float(sums[i]) if sums else float(mask.sum())
                add(i, 0, mask.numel(), max(total, 1.0), None, "")
            continue
        for n, turn in enumerate(turns):
            start, end = int(turn["start"]), int(turn["end"])
            if not 0 <= start <= end <= mask.numel():
                raise HookError(f"sample {i}: a turn at [{start}, {end}) is outside the response")
            weight = float(mask[start:end].sum())
            if weight > 0:
                shares.add((i, n))
                add(i, start, end, weight, turn.get("temperature"), turn["turn_id"])
    return units, len(shares)


def micro_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Groups of indices whose padded size (longest times number) fits `budget`.

    Longest first, so that neighbours are of like length. One that exceeds the budget goes alone.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    groups: list[list[int]] = []
    for i in order:
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= budget:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def loss_groups(units: Sequence[Unit], rows: int) -> Iterator[list[Unit]]:
    """Consecutive units of one temperature, at most `rows` rows of logits together (a single one
    may need more)."""
    group: list[Unit] = []
    for unit in units:
        full = sum(u.rows for u in group) + unit.rows > rows
        if group and (full or group[-1].temperature != unit.temperature):
            yield group
            group = []
        group.append(unit)
    if group:
        yield group


def hidden_rows(data: RolloutData, samples: list[int], units: list[Unit], hidden: Tensor) -> Tensor:
    """Rows `[sum of unit.rows, H]` of `hidden` `[B, L, H]`, the states of `samples`: of each unit
    from the token before it to its last."""
    batch_index: list[Tensor] = []
    position: list[Tensor] = []
    for u in units:
        prompt = data["total_lengths"][u.sample] - data["response_lengths"][u.sample]
        span = torch.arange(prompt + u.start - 1, prompt + u.end, device=hidden.device)
        position.append(span)
        batch_index.append(torch.full_like(span, samples.index(u.sample)))
    return hidden[torch.cat(batch_index), torch.cat(position)]


def loss_batch(data: RolloutData, units: Sequence[Unit]) -> dict[str, Any]:
    """The `batch` of slime's loss contract with one entry a unit.

    Only response tokens enter a loss, so of what precedes a unit just the one token before it is
    kept: `total_lengths` is the response plus 1, and the logits are as short. Everything is
    consistent in itself, and no prompt row goes through the output layer.
    """
    batch: dict[str, Any] = {
        "unconcat_tokens": [],
        "total_lengths": [u.rows for u in units],
        "response_lengths": [u.end - u.start for u in units],
        "loss_masks": [data["loss_masks"][u.sample][u.start : u.end] for u in units],
        "rollout_mask_sums": [
            torch.tensor(u.denominator, device=data["loss_masks"][u.sample].device) for u in units
        ],
    }
    for u in units:
        prompt = data["total_lengths"][u.sample] - data["response_lengths"][u.sample]
        batch["unconcat_tokens"].append(
            data["tokens"][u.sample][prompt + u.start - 1 : prompt + u.end]
        )
    for key in PER_TOKEN:
        if data.get(key) is not None:
            batch[key] = [data[key][u.sample][u.start : u.end] for u in units]
    if data.get("topk") is not None:
        batch["values"] = [_signals(data, u) for u in units]
    return batch


def _signals(data: RolloutData, unit: Unit) -> TokenSignals:
    """The signals of a unit, whose tokens all weigh the same: it has a denominator of its own."""
    teacher, topk = data.get("teacher_log_probs"), data["topk"][unit.sample]
    part = slice(unit.start, unit.end)
    return TokenSignals(
        torch.ones_like(data["loss_masks"][unit.sample][part]),
        None if teacher is None else teacher[unit.sample][part],
        None if topk is None else topk[0][part],
        None if topk is None else topk[1][part],
    )


def reducer(units: Sequence[Unit], masks: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    """`sum_of_sample_mean` of these units: the sum of `mask * x / denominator`.

    `where` rather than a product, so that a NaN on a masked token stays out of the sum.
    """
    lengths = [u.end - u.start for u in units]

    def sum_of_sample_mean(x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for part, unit, mask in zip(torch.split(x, lengths), units, masks, strict=True):
            weighted = torch.where(mask > 0, part * mask.to(part.dtype), part.new_zeros(()))
            total = total + weighted.sum() / unit.denominator
        return total

    return sum_of_sample_mean
