"""`convert_samples_to_train_data`: slime's conversion hook, with per-token signals.

Guarantees: a turn weighs the same as a sample of its own, however turns are merged into samples.
slime divides the masked sum of sample s by `D_s` (its `rollout_mask_sums`), or, with
`--calculate-per-token-loss`, the sum over a step by its number of tokens. So a token of a turn of
n tokens gets the weight `D_s / n`, or one that takes out what fillers add to the number of tokens.

slime carries one object a sample to the trainer untouched under `source_names`; the signals
travel there. `teacher_log_probs` stays out of slime's own key, where NaN would poison a mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from openclaw_rl.errors import HookError
from openclaw_rl.hooks import Sample
from openclaw_rl.rollout.train_data import convert, flatten
from openclaw_rl.slime.samples import is_filler

if TYPE_CHECKING:
    from torch import Tensor

    from openclaw_rl.losses.signals import TokenSignals

_Span = tuple[int, int, float]  # start, end (in the response), reward


@dataclass(frozen=True, slots=True)
class SampleSignals:
    """What one sample carries through `source_names`: `rewards` `[R]` and the loss's signals."""

    rewards: Tensor
    tokens: TokenSignals


def convert_samples_to_train_data(args: Any, samples: Sequence[Any]) -> dict[str, Any]:
    """slime's train data for `samples` (flat, or in groups).

    Reads `reward_key`, `calculate_per_token_loss`, `global_batch_size`. Samples without
    `metadata["turns"]` are trained as slime would. Raises `HookError` where lengths do not line up.
    """
    flat = flatten(samples)
    data = convert(args, flat)
    data.pop("turns")
    data.pop("steps", None)
    data.pop("teacher_log_probs", None)
    data.pop("topk", None)
    if any(math.isnan(value) for values in data.get("rollout_log_probs", ()) for value in values):
        # Replayed replies: slime would carry the NaN into its means. Without the key its own
        # old log-probs are used; --use-rollout-logprobs then says what it misses.
        data.pop("rollout_log_probs")
    if getattr(args, "calculate_per_token_loss", False):
        scales = list(_token_scales(flat, data, getattr(args, "global_batch_size", None)))
    else:
        scales = [1.0] * len(flat)
    taught = any(sample.teacher_log_probs is not None for sample in flat)
    top_k = max((_top_k(sample) for sample in flat), default=0)
    data["source_names"] = [
        _signals(args, sample, data, i, scales[i], taught, top_k) for i, sample in enumerate(flat)
    ]
    return data


def _signals(
    args: Any, sample: Sample, data: dict[str, Any], i: int, scale: float, taught: bool, top_k: int
) -> SampleSignals:
    import torch

    from openclaw_rl.losses.signals import TokenSignals

    mask, length = data["loss_masks"][i], sample.response_length
    denominator = max(data["rollout_mask_sums"][i], 1)
    per_token = bool(getattr(args, "calculate_per_token_loss", False))
    turns = sample.metadata.get("turns") if sample.metadata else None
    rewards = torch.zeros(length)
    weights = torch.zeros(length)
    for start, end, reward in _spans(turns, length, data["rewards"][i]):
        own = sum(mask[start:end])
        if own:
            rewards[start:end] = reward
            # Without turns a sample has slime's own weight in its rollout.
            weights[start:end] = scale if per_token or turns is None else denominator / own
    teacher = None
    if taught:
        teacher = torch.tensor(sample.teacher_log_probs or [math.nan] * length)
    ids = values = None
    if top_k:
        ids = torch.full((length, top_k), -1)
        values = torch.full((length, top_k), math.nan)
        topk = (sample.metadata or {}).get("topk")
        if topk is not None:
            ids[:, : topk.width] = torch.tensor(topk.ids, dtype=torch.long)
            values[:, : topk.width] = torch.tensor(topk.log_probs)
    return SampleSignals(rewards, TokenSignals(weights, teacher, ids, values))


def _spans(turns: Any, length: int, reward: float) -> Iterator[_Span]:
    if turns is None:
        yield 0, length, reward
        return
    for turn in turns:
        start, end = int(turn["start"]), int(turn["end"])
        if not 0 <= start <= end <= length:
            raise HookError(f"a turn at [{start}, {end}) is outside a response of {length} tokens")
        yield start, end, float(turn["reward"] or 0.0)


def _token_scales(
    samples: Sequence[Sample], data: dict[str, Any], step_size: int | None
) -> Iterator[float]:
    """For each sample `(T + F) / T`: slime counts T trained tokens and one for each of the F
    fillers of its step. Steps are `step_size` distinct rollouts, in order of appearance."""
    order = {rollout: n for n, rollout in enumerate(dict.fromkeys(data["rollout_ids"]))}
    steps = [order[rollout] // (step_size or len(order)) for rollout in data["rollout_ids"]]
    trained: dict[int, int] = {}
    fillers: dict[int, int] = {}
    for step, sample, mask in zip(steps, samples, data["loss_masks"], strict=True):
        trained[step] = trained.get(step, 0) + sum(mask)
        fillers[step] = fillers.get(step, 0) + is_filler(sample)
    for step in steps:
        yield (trained[step] + fillers[step]) / max(trained[step], 1)


def _top_k(sample: Sample) -> int:
    topk = (sample.metadata or {}).get("topk")
    return topk.width if topk is not None else 0
