"""From samples to slime's train data, in plain lists: what every host's conversion begins with.

Guarantees: lengths are checked, nothing is padded or cut; samples of one rollout share its
denominator, as in slime's own conversion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openclaw_rl.errors import HookError
from openclaw_rl.hooks import Sample


def flatten(samples: Sequence[Any]) -> list[Sample]:
    """Samples of all groups in order (slime's rollouts return a list of groups)."""
    flat: list[Sample] = []
    for item in samples:
        flat.extend(item if isinstance(item, list | tuple) else [item])
    return flat


def turn_ids(samples: Sequence[Sample]) -> list[str]:
    """The turns whose signals these samples carry, in order, each once."""
    found = {t["turn_id"]: None for s in samples for t in s.metadata.get("turns", ())}
    return list(found)


def convert(args: Any, samples: Sequence[Any]) -> dict[str, Any]:
    """Default conversion (the contract of `--custom-convert-samples-to-train-data-path`).

    slime's keys, `turns`: for each sample the list of `{"start", "end", "reward"}` in response
    coordinates (None where a sample names none: then its reward covers its response), `steps` where
    the rollout says whose optimiser step each sample is, and where a sample has one, `topk`: each
    sample's `metadata["topk"]`. Raises `HookError` where lengths do not line up: nothing is padded
    or cut.
    """
    flat = flatten(samples)
    for s in flat:
        try:
            Sample.validate(s)  # slime's samples have none of their own
        except ValueError as error:
            raise HookError(f"a sample of the rollout does not line up: {error}") from error
    masks = [_mask(s) for s in flat]
    ids = [s.rollout_id if s.rollout_id is not None else -1 - i for i, s in enumerate(flat)]
    sums: dict[int, int] = {}
    for rollout, mask in zip(ids, masks, strict=True):
        sums[rollout] = sums.get(rollout, 0) + sum(mask)
    rewards = [_reward(args, s) for s in flat]
    data: dict[str, Any] = {
        "tokens": [s.tokens for s in flat],
        "response_lengths": [s.response_length for s in flat],
        "rewards": rewards,
        "raw_reward": rewards,
        "truncated": [int(s.status.value == Sample.Status.TRUNCATED.value) for s in flat],
        "sample_indices": [s.index for s in flat],
        "rollout_ids": ids,
        "loss_masks": masks,
        "rollout_mask_sums": [sums[i] for i in ids],
        "turns": [s.metadata.get("turns") for s in flat],
    }
    if all("step" in s.metadata for s in flat):
        data["steps"] = [s.metadata["step"] for s in flat]
    if flat and all(s.rollout_log_probs is not None for s in flat):
        data["rollout_log_probs"] = [s.rollout_log_probs for s in flat]
    if any(s.teacher_log_probs is not None for s in flat):
        data["teacher_log_probs"] = [s.teacher_log_probs for s in flat]
    if any(s.metadata.get("topk") for s in flat):
        data["topk"] = [s.metadata.get("topk") for s in flat]
    return data


def _mask(sample: Sample) -> list[int]:
    if sample.remove_sample:
        return [0] * sample.response_length
    return [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask


def _reward(args: Any, sample: Sample) -> float:
    reward = sample.reward
    if isinstance(reward, dict):
        reward = reward[getattr(args, "reward_key", None) or "score"]
    return 0.0 if reward is None else float(reward)
