"""From segments to the samples of a rollout in the shape that slime expects, and its classes.

Guarantees: each step gets exactly `step_size` distinct `rollout_id`s and at least `dp_size`
samples; what merging turns leaves open is filled with masked two-token samples that weigh nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from openclaw_rl.errors import ConfigError, HookError
from openclaw_rl.hooks import Sample
from openclaw_rl.rollout import RolloutFnTrainOutput


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """What slime makes of a rollout: `steps` of `step_size` rollouts, in groups of `group`."""

    step_size: int
    steps: int
    group: int
    dp_size: int

    @classmethod
    def of(cls, args: Any) -> Shape:
        group = int(getattr(args, "n_samples_per_prompt", None) or 1)
        turns = int(args.rollout_batch_size) * group
        step_size = int(getattr(args, "global_batch_size", None) or turns)
        if turns % step_size:
            raise ConfigError(
                f"{turns} turns a rollout are not a multiple of --global-batch-size {step_size}: "
                "slime would drop the rest"
            )
        return cls(step_size, turns // step_size, group, _dp_size(args))

    @property
    def turns(self) -> int:
        return self.step_size * self.steps


def _dp_size(args: Any) -> int:
    nodes = int(getattr(args, "actor_num_nodes", None) or 1)
    world = nodes * int(getattr(args, "actor_num_gpus_per_node", None) or 1)
    for kind in ("tensor", "pipeline", "context"):
        name = "context_parallel_size" if kind == "context" else f"{kind}_model_parallel_size"
        world //= int(getattr(args, name, None) or 1)
    return max(1, world)


def is_filler(sample: Sample) -> bool:
    """Whether the sample only fills a step up to the number of rollouts that slime expects."""
    return bool(sample.metadata and sample.metadata.get("filler"))


def fill(segments: Sequence[Sample], rollout_id: int, shape: Shape) -> list[Sample]:
    """`segments` step by step, each step filled up and all numbered.

    A filler is two tokens of the batch, its one response token masked. Where a step has fewer
    rollouts than `dp_size`, fillers share the id of the last one.
    """
    filled: list[Sample] = []
    base = rollout_id * shape.turns
    for step in range(shape.steps):
        own = [sample for sample in segments if sample.metadata["step"] == step]
        if len(own) > shape.step_size:
            raise HookError(f"a step has {len(own)} samples for {shape.step_size} rollouts")
        for place in range(max(shape.step_size, shape.dp_size)):
            sample = own[place] if place < len(own) else _filler(segments[0])
            sample.rollout_id = base + step * shape.step_size + min(place, shape.step_size - 1)
            sample.index = sample.rollout_id
            sample.group_index = sample.rollout_id // shape.group
            filled.append(sample)
    return filled


def _filler(like: Sample) -> Sample:
    return Sample(
        tokens=like.tokens[:2],
        response_length=1,
        loss_mask=[0],
        reward=0.0,
        rollout_log_probs=[0.0],
        status=Sample.Status.COMPLETED,
        metadata={"filler": True, "turns": []},
    )


def slimes_output(
    samples: Sequence[Sample], metrics: dict[str, float], reward_key: str | None
) -> Any:
    """What slime's rollout functions return, of slime's own classes; without slime of ours, which
    have the same fields."""
    kind: Any = Sample
    output: Any = RolloutFnTrainOutput
    try:
        from slime.rollout import base_types
        from slime.utils import types

        kind, output = types.Sample, base_types.RolloutFnTrainOutput
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "slime":
            raise
    groups: dict[int | None, list[Any]] = {}
    for sample in samples:
        values = {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample)}
        values["status"] = kind.Status(sample.status.value)
        if reward_key:  # slime's own metrics look the reward up by it
            values["reward"] = {reward_key: sample.reward}
        groups.setdefault(sample.group_index, []).append(kind(**values))
    return output(list(groups.values()), metrics)
