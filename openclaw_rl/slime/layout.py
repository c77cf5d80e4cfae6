"""Who gets which GPUs: trainer, policy, PRM, judge and teacher, and slime's `--sglang-config`.

Guarantees: every split that slime or SGLang would refuse late (or hang on) is refused here in one
line; the shares add up to `--rollout-num-gpus` exactly; frozen roles with the same model share one
engine. Pure arithmetic: nothing is read or started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openclaw_rl.errors import ConfigError

POLICY = "policy"

MOST = 100_000
"""GPUs in a cluster; more is a typing error, and every engine is looked at."""


@dataclass(frozen=True, slots=True)
class Frozen:
    """A frozen model that a role asks for. `gpus` 0: computed; `per_engine` 0: the policy's."""

    role: str
    path: str
    gpus: int = 0
    per_engine: int = 0


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """One model of `--sglang-config`: `gpus` in all, `per_engine` for each of its engines."""

    name: str
    path: str
    gpus: int
    per_engine: int
    roles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The split of a cluster. `engines[0]` is the policy, the only one that is trained."""

    nodes: int
    gpus_per_node: int
    actor_nodes: int
    actor_per_node: int
    engines: tuple[EngineGroup, ...]

    @property
    def actor_gpus(self) -> int:
        return self.actor_nodes * self.actor_per_node

    @property
    def rollout_gpus(self) -> int:
        return sum(engine.gpus for engine in self.engines)

    def engine_of(self, role: str) -> str | None:
        """The name of the model that serves `role`, if this cluster does."""
        return next((engine.name for engine in self.engines if role in engine.roles), None)

    def flags(self) -> list[str]:
        """slime's flags for this split."""
        return [
            *("--actor-num-nodes", str(self.actor_nodes)),
            *("--actor-num-gpus-per-node", str(self.actor_per_node)),
            *("--num-gpus-per-node", str(self.gpus_per_node)),
            *("--rollout-num-gpus", str(self.rollout_gpus)),
            *("--rollout-num-gpus-per-engine", str(self.engines[0].per_engine)),
        ]

    def sglang_config(self, context: int | None, limits: Mapping[str, int]) -> dict[str, Any]:
        """The content of `--sglang-config`. `context` is what `--sglang-context-length` asks of
        every engine; a frozen model whose own limit (`limits`, by path) is smaller gets that."""
        models: list[dict[str, Any]] = []
        for engine in self.engines:
            group: dict[str, Any] = {"worker_type": "regular", "num_gpus": engine.gpus}
            limit = limits.get(engine.path)
            if engine.name != POLICY and context and limit and limit < context:
                group["overrides"] = {"context_length": limit}
            models.append(
                {
                    "name": engine.name,
                    "model_path": engine.path,
                    "update_weights": engine.name == POLICY,
                    "num_gpus_per_engine": engine.per_engine,
                    "server_groups": [group],
                }
            )
        return {"sglang": models}

    def picture(self) -> list[str]:
        """The partition in words, one line a part."""
        parts = [("trainer", self.actor_gpus, "")]
        for engine in self.engines:
            count = engine.gpus // engine.per_engine
            kind = "trained" if engine.name == POLICY else "frozen"
            plural = "s" if count > 1 else ""
            words = f"{kind} {engine.path}, {count} engine{plural} of {engine.per_engine}"
            parts.append((" + ".join(engine.roles), engine.gpus, words))
        lines, first = [], 0
        for name, gpus, words in parts:
            span = f"GPU {first}" if gpus == 1 else f"GPU {first}-{first + gpus - 1}"
            lines.append(f"{span:<10} {name:<22} {words}".rstrip())
            first += gpus
        idle = self.nodes * self.gpus_per_node - first
        return [*lines, f"{idle} GPU left idle"] if idle else lines


def split(
    *,
    nodes: int,
    gpus_per_node: int,
    actor_gpus: int,
    rollout_gpus: int,
    policy_path: str,
    policy_per_engine: int,
    frozen: Sequence[Frozen],
) -> Layout:
    """The layout for the asked shares; 0 is what the other side leaves, for both sides half.

    Raises `ConfigError` where they do not fit.
    """
    total = nodes * gpus_per_node
    if total > MOST:
        raise ConfigError(f"NUM_GPUS={gpus_per_node} on NUM_NODES={nodes} is more than {MOST} GPUs")
    actor = actor_gpus or (total - rollout_gpus if rollout_gpus else total // 2)
    rollout = rollout_gpus or total - actor
    have = f"NUM_GPUS={gpus_per_node}" + (f" on each of NUM_NODES={nodes}" if nodes > 1 else "")
    if actor < 1 or rollout < 1 or actor + rollout > total:
        raise ConfigError(
            f"ACTOR_GPUS={actor} and ROLLOUT_GPUS={rollout} are {actor + rollout} GPUs, but there "
            f"are {total} ({have}); each side needs at least one"
        )
    if actor > gpus_per_node and actor % gpus_per_node:
        raise ConfigError(
            f"ACTOR_GPUS={actor} fills no whole machines of {gpus_per_node} GPUs: use a multiple"
        )
    groups: dict[str, list[Frozen]] = {}
    for item in frozen:
        groups.setdefault(item.path, []).append(item)
    asked = [max(item.gpus for item in group) for group in groups.values()]
    # Where nobody asks: an equal part of what the policy's half and the asked shares leave.
    spare = max(0, rollout // 2 - sum(asked)) // max(1, asked.count(0))
    engines: list[EngineGroup] = []
    for (path, group), gpus in zip(groups.items(), asked, strict=True):
        size = max(item.per_engine for item in group) or policy_per_engine
        roles = tuple(item.role for item in group)
        share = gpus or max(1, spare // size) * size
        engines.append(EngineGroup(roles[0], path, share, size, roles))
    left = rollout - sum(engine.gpus for engine in engines)
    if left < policy_per_engine:
        names = [max(group, key=lambda item: item.gpus).role for group in groups.values()]
        shares = " + ".join(
            f"{name.upper()}_GPUS={engine.gpus}"
            for name, engine in zip(names, engines, strict=True)
        )
        raise ConfigError(
            f"{shares} leave {max(0, left)} of ROLLOUT_GPUS={rollout} to the policy, which needs "
            f"{policy_per_engine}: give ROLLOUT_GPUS more, or serve that model elsewhere "
            "(PRM_URL, JUDGE_URL)"
        )
    engines.insert(0, EngineGroup(POLICY, policy_path, left, policy_per_engine, (POLICY,)))
    _check_whole(engines, actor, gpus_per_node)
    actor_nodes = max(1, actor // gpus_per_node)
    return Layout(nodes, gpus_per_node, actor_nodes, actor // actor_nodes, tuple(engines))


def _check_whole(engines: Sequence[EngineGroup], offset: int, gpus_per_node: int) -> None:
    """Every engine is whole: it divides its share, and lies on one machine or on whole ones."""
    for engine in engines:
        name = "ROLLOUT" if engine.name == POLICY else engine.name.upper()
        if engine.gpus % engine.per_engine:
            raise ConfigError(
                f"the {engine.name}'s {engine.gpus} GPUs are not a multiple of "
                f"{name}_GPUS_PER_ENGINE={engine.per_engine}"
            )
        for first in range(offset, offset + engine.gpus, engine.per_engine):
            last = first + engine.per_engine - 1
            spans = first // gpus_per_node != last // gpus_per_node
            if spans and (engine.per_engine % gpus_per_node or first % gpus_per_node):
                raise ConfigError(
                    f"an engine of the {engine.name} would take GPUs {first} to {last} and so lie "
                    f"across machines of {gpus_per_node} GPUs: change ACTOR_GPUS, the shares, or "
                    f"{name}_GPUS_PER_ENGINE"
                )
        offset += engine.gpus
