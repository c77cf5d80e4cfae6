"""What a turn is worth, for each of its tokens, on the way through slime's trainer.

Guarantees: a turn weighs the same as a sample of its own, however turns are merged into samples;
each turn's reward is the advantage of its own tokens; everything per token is cut for context
parallelism exactly as slime cuts its own values.

slime divides the masked sum of sample s by `D_s` (its `rollout_mask_sums`), or, with
`--calculate-per-token-loss`, the sum over a step by its number of tokens. So a token of a turn of
n tokens gets the weight `D_s / n`, or one that takes out what fillers add to the number of tokens.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from openclaw_rl.errors import ConfigError, HookError
from openclaw_rl.hooks import Sample
from openclaw_rl.rollout.train_data import convert, flatten, turn_ranges
from openclaw_rl.slime.samples import is_filler

if TYPE_CHECKING:
    from torch import Tensor

_CARRIER = "source_names"
"""The one key of which slime brings any object a sample to the trainer, and makes nothing of it."""


class SampleSignals(NamedTuple):
    """What is carried of a sample: of its response tokens the rewards, and what is to become
    `losses.signals.TokenSignals` once the tokens are cut."""

    rewards: Tensor
    weights: Tensor
    teacher_log_probs: Tensor | None = None
    topk_ids: Tensor | None = None
    topk_log_probs: Tensor | None = None


def convert_samples_to_train_data(args: Any, samples: Sequence[Any]) -> dict[str, Any]:
    """`rollout.train_data.convert` for slime: what slime has no key for goes into `SampleSignals`.
    Its own `teacher_log_probs` stays unused: NaN ("no teacher here") would poison its mean.

    Reads `reward_key`, `calculate_per_token_loss`, `global_batch_size`. Samples without
    `metadata["turns"]` are trained as slime would. Raises `HookError` where lengths do not line up.
    """
    import torch

    flat = flatten(samples)
    data = convert(args, flat)
    turns = turn_ranges(data)
    del data["turns"]
    teachers, topks = data.pop("teacher_log_probs", None), data.pop("topk", None)
    if any(math.isnan(value) for values in data.get("rollout_log_probs", ()) for value in values):
        # Replayed replies: slime would carry the NaN into its means. Without the key its own
        # old log-probs are used; --use-rollout-logprobs then says what it misses.
        data.pop("rollout_log_probs")
    scales = None
    if getattr(args, "calculate_per_token_loss", False):
        scales = list(_token_scales(flat, data, getattr(args, "global_batch_size", None)))
    signals = []
    for i, length in enumerate(data["response_lengths"]):
        optional: list[Tensor | None] = [None]
        if teachers is not None:
            optional = [torch.tensor(teachers[i] or [math.nan] * length)]
        if topks is not None and (topk := topks[i]) is not None:
            optional += torch.tensor(topk.ids, dtype=torch.long), torch.tensor(topk.log_probs)
        signals.append(SampleSignals(torch.zeros(length), torch.zeros(length), *optional))
    for turn in turns:
        i, here = turn.sample, slice(turn.start, turn.end)
        alone = data["rollout_mask_sums"][i] / turn.tokens
        signals[i].rewards[here] = turn.reward
        signals[i].weights[here] = alone if scales is None else scales[i]
    data[_CARRIER] = signals
    return data


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
    """Set `advantages`, `returns` (float32 tensors) and the loss's `TokenSignals`, one a sample.

    Runs on last-stage ranks, once a rollout. There is no group to normalise over, so the reward
    itself is the advantage; its weight `w_rl` is applied by the loss. Raises `HookError` where the
    batch was not converted by `convert_samples_to_train_data`.
    """
    from openclaw_rl.losses.signals import SIGNALS, TokenSignals

    carried = rollout_data.get(_CARRIER)
    if not carried or not all(isinstance(one, SampleSignals) for one in carried):
        raise HookError(
            "openclaw_rl.slime.compute_advantages needs "
            "--custom-convert-samples-to-train-data-path "
            "openclaw_rl.slime.convert_samples_to_train_data"
        )
    if getattr(args, "use_critic", False):
        raise ConfigError("a critic's values and the signals of openclaw_rl.losses share one key")
    device = rollout_data["loss_masks"][0].device
    lengths = zip(rollout_data["total_lengths"], rollout_data["response_lengths"], strict=True)
    rollout_data["advantages"], rollout_data[SIGNALS] = [], []
    for sample, (total, response) in zip(carried, lengths, strict=True):
        here = _kept(int(total), int(response))
        cut: list[Any] = [None if one is None else one[here].to(device) for one in sample]
        rollout_data["advantages"].append(cut[0])
        rollout_data[SIGNALS].append(TokenSignals(*cut[1:]))
    rollout_data["returns"] = [advantage.clone() for advantage in rollout_data["advantages"]]


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
