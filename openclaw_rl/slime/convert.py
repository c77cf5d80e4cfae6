"""slime's conversion and advantage hooks: what a turn is worth, for each of its tokens.

Guarantees: a turn weighs the same as a sample of its own, however turns are merged into samples;
each turn's reward is the advantage of its own tokens; everything per token is cut for context
parallelism exactly as slime cuts its own values.

slime divides the masked sum of sample s by `D_s` (its `rollout_mask_sums`), or, with
`--calculate-per-token-loss`, the sum over a step by its number of tokens. So a token of a turn of
n tokens gets the weight `D_s / n`, or one that takes out what fillers add to the number of tokens.

slime carries one object a sample to the trainer untouched under `source_names`; the signals
travel there. `teacher_log_probs` stays out of slime's own key, where NaN would poison a mean.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from openclaw_rl.errors import ConfigError, HookError
from openclaw_rl.hooks import Sample
from openclaw_rl.rollout.train_data import convert, flatten, turn_ranges
from openclaw_rl.slime.samples import is_filler

if TYPE_CHECKING:
    from torch import Tensor

    from openclaw_rl.losses.signals import TokenSignals


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
    import torch

    flat = flatten(samples)
    data = convert(args, flat)
    turns = turn_ranges(data)
    for key in ("turns", "teacher_log_probs", "topk"):
        data.pop(key, None)
    if any(math.isnan(value) for values in data.get("rollout_log_probs", ()) for value in values):
        # Replayed replies: slime would carry the NaN into its means. Without the key its own
        # old log-probs are used; --use-rollout-logprobs then says what it misses.
        data.pop("rollout_log_probs")
    scales: list[float | None] = [None] * len(flat)
    if getattr(args, "calculate_per_token_loss", False):
        scales = list(_token_scales(flat, data, getattr(args, "global_batch_size", None)))
    rewards = [torch.zeros(sample.response_length) for sample in flat]
    weights = [torch.zeros(sample.response_length) for sample in flat]
    for turn in turns:
        i, here = turn.sample, slice(turn.start, turn.end)
        scale = scales[i]
        rewards[i][here] = turn.reward
        weights[i][here] = data["rollout_mask_sums"][i] / turn.tokens if scale is None else scale
    with_teacher = any(sample.teacher_log_probs is not None for sample in flat)
    widths = [sample.metadata["topk"].width for sample in flat if sample.metadata.get("topk")]
    data["source_names"] = [
        SampleSignals(own, _signals(sample, own_weights, with_teacher, max(widths, default=0)))
        for sample, own, own_weights in zip(flat, rewards, weights, strict=True)
    ]
    return data


def _signals(sample: Sample, weights: Tensor, with_teacher: bool, top_k: int) -> TokenSignals:
    import torch

    from openclaw_rl.losses.signals import TokenSignals

    length, topk = sample.response_length, sample.metadata.get("topk")
    teacher = (
        torch.tensor(sample.teacher_log_probs or [math.nan] * length) if with_teacher else None
    )
    if not top_k:
        return TokenSignals(weights, teacher)
    ids, log_probs = torch.full((length, top_k), -1), torch.full((length, top_k), math.nan)
    if topk is not None:
        ids[:, : topk.width] = torch.tensor(topk.ids, dtype=torch.long)
        log_probs[:, : topk.width] = torch.tensor(topk.log_probs)
    return TokenSignals(weights, teacher, ids, log_probs)


def _token_scales(
    samples: Sequence[Sample], data: dict[str, Any], step_size: int | None
) -> Iterator[float]:
    """For each sample `(T + F) / T`: slime counts T trained tokens and one for each of the F
    fillers of its step. Steps are `step_size` distinct rollouts, in order of appearance."""
    order = {rollout: n for n, rollout in enumerate(dict.fromkeys(data["rollout_ids"]))}
    steps = [order[rollout] // (step_size or len(order)) for rollout in data["rollout_ids"]]
    trained: Counter[int] = Counter()
    fillers: Counter[int] = Counter()
    for step, sample, mask in zip(steps, samples, data["loss_masks"], strict=True):
        trained[step] += sum(mask)
        fillers[step] += is_filler(sample)
    for step in steps:
        yield (trained[step] + fillers[step]) / max(trained[step], 1)


def compute_advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """Set `advantages`, `returns` (float32 tensors) and `values` (`TokenSignals`), one a sample.

    Runs on last-stage ranks, once a rollout. There is no group to normalise over, so the reward
    itself is the advantage; its weight `w_rl` is applied by the loss. Raises `HookError` where the
    batch was not converted by `convert_samples_to_train_data`.
    """
    from openclaw_rl.losses.signals import TokenSignals

    signals = rollout_data.get("source_names")
    if not signals or not all(isinstance(one, SampleSignals) for one in signals):
        raise HookError(
            "openclaw_rl.slime.compute_advantages needs "
            "--custom-convert-samples-to-train-data-path "
            "openclaw_rl.slime.convert_samples_to_train_data"
        )
    if getattr(args, "use_critic", False):
        raise ConfigError("a critic's values and the signals of openclaw_rl.losses share one key")
    device = rollout_data["loss_masks"][0].device
    lengths = zip(rollout_data["total_lengths"], rollout_data["response_lengths"], strict=True)
    kept = [_kept(int(total), int(response)) for total, response in lengths]
    advantages = [one.rewards[here].to(device) for one, here in zip(signals, kept, strict=True)]
    rollout_data["advantages"] = advantages
    rollout_data["returns"] = [advantage.clone() for advantage in advantages]
    rollout_data["values"] = [
        TokenSignals(
            *(
                None if tensor is None else tensor[here].to(device)
                for tensor in (
                    *(one.tokens.weights, one.tokens.teacher_log_probs),
                    *(one.tokens.topk_ids, one.tokens.topk_log_probs),
                )
            )  # type: ignore[arg-type]  # weights are always there
        )
        for one, here in zip(signals, kept, strict=True)
    ]


def _kept(total: int, response: int) -> Tensor:
    """Which response tokens this context-parallel rank holds. slime's own function says so; in
    its training process that module is always loaded, elsewhere there is nothing to cut."""
    import torch

    everything = torch.arange(response)
    slime = sys.modules.get("slime.backends.megatron_utils.cp_utils")
    if slime is None or not slime.mpu.model_parallel_is_initialized():
        return everything
    kept: Tensor = slime.slice_log_prob_with_cp(everything, total, response)
    return kept
