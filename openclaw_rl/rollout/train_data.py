"""From samples to train data, in slime's keys and plain lists. The local host's conversion is
`convert`; slime's hook (`slime/signals.py`) begins with it and takes out what slime has no key for.

Guarantees: lengths are checked, nothing is padded or cut; a turn weighs what it would weigh as a
sample of its own, however turns are merged; samples without turns share the denominator of their
rollout, as in slime's own conversion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from openclaw_rl.errors import HookError
from openclaw_rl.hooks import Sample


class TurnRange(NamedTuple):
    """Response tokens `[start, end)` of a sample that share a reward, a mean and a temperature.

    `tokens` is the denominator of the mean: the turn's unmasked tokens, or those of the rollout
    where a sample names no turns; `share` is then its part of the rollout, else 1.
    """

    sample: int
    start: int
    end: int
    tokens: float
    reward: float = 0.0
    share: float = 1.0
    temperature: float = 1.0
    turn_id: str = ""


def turn_ranges(data: Mapping[str, Any], temperature: float = 1.0) -> list[TurnRange]:
    """What is trained of train data: each turn with an unmasked token, in order.

    A sample without turns is one, with its own reward. `temperature` is that of turns that name
    none. Raises `HookError` for a turn outside of its response.
    """
    found = []
    of_sample = data.get("turns") or [None] * len(data["loss_masks"])
    for i, (mask, named) in enumerate(zip(data["loss_masks"], of_sample, strict=True)):
        whole = {"start": 0, "end": len(mask), "reward": data["rewards"][i]}
        for turn in [whole] if named is None else named:
            start, end, at = turn["start"], turn["end"], turn.get("temperature")
            if not 0 <= start <= end <= len(mask):
                raise HookError(
                    f"a turn at [{start}, {end}) is outside a response of {len(mask)} tokens"
                )
            if own := sum(mask[start:end]):
                tokens = data["rollout_mask_sums"][i] if named is None else own
                found.append(
                    TurnRange(
                        sample=i,
                        start=start,
                        end=end,
                        tokens=tokens,
                        reward=float(turn["reward"] or 0.0),
                        share=own / tokens,
                        temperature=temperature if at is None else at,
                        turn_id=turn.get("turn_id", ""),
                    )
                )
    return found


def flatten(samples: Sequence[Any]) -> list[Sample]:
    """Samples of all groups in order (slime's rollouts return a list of groups)."""
    return [s for one in samples for s in (one if isinstance(one, list | tuple) else [one])]


def turn_ids(samples: Sequence[Sample]) -> list[str]:
    """The turns whose signals these samples carry, in order, each once."""
    found = {t["turn_id"]: None for s in samples for t in s.metadata.get("turns", ())}
    return list(found)


def convert(args: Any, samples: Sequence[Any]) -> dict[str, Any]:
    """The contract is that of `--custom-convert-samples-to-train-data-path`.

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
