"""Who gets which GPUs: trainer, policy, PRM, judge and teacher, and slime's `--sglang-config`.

Guarantees: every split that slime or SGLang would refuse late (or hang on) is refused here in one
line; the shares add up to `--rollout-num-gpus` exactly; frozen roles with the same model share one
engine. Pure arithmetic: nothing is read or started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openclaw_rl.config import SlimeConfig
from openclaw_rl.errors import ConfigError

POLICY = "policy"

MOST = 100_000
"""GPUs in a cluster; more is a typing error, and every engine is looked at."""


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
    actor_gpus: int
    engines: tuple[EngineGroup, ...]

    def engine_of(self, role: str) -> str | None:
        """The name of the model that serves `role`, if this cluster does."""
        return next((engine.name for engine in self.engines if role in engine.roles), None)

    def flags(self) -> list[str]:
        """slime's flags for this split."""
        actor_nodes = max(1, self.actor_gpus // self.gpus_per_node)
        values = {
            "--actor-num-nodes": actor_nodes,
            "--actor-num-gpus-per-node": self.actor_gpus // actor_nodes,
            "--num-gpus-per-node": self.gpus_per_node,
            "--rollout-num-gpus": sum(engine.gpus for engine in self.engines),
            "--rollout-num-gpus-per-engine": self.engines[0].per_engine,
        }
        return [word for flag, value in values.items() for word in (flag, str(value))]

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


def split(slime: SlimeConfig, policy: str, frozen: Mapping[str, str]) -> Layout:
    """The layout for the shares that `slime` asks for; 0 is what the other side leaves, for both
    sides half. `policy` is the policy's folder, `frozen` that of each frozen role.

    Raises `ConfigError` where they do not fit.
    """
    per_node, policy_size = slime.num_gpus, slime.rollout_gpus_per_engine
    total = slime.num_nodes * per_node
    if total > MOST:
        raise ConfigError(
            f"NUM_GPUS={per_node} on NUM_NODES={slime.num_nodes} is more than {MOST} GPUs"
        )
    actor = slime.actor_gpus or (total - slime.rollout_gpus if slime.rollout_gpus else total // 2)
    rollout = slime.rollout_gpus or total - actor
    if actor < 1 or rollout < 1 or actor + rollout > total:
        nodes = f" on each of NUM_NODES={slime.num_nodes}" if slime.num_nodes > 1 else ""
        raise ConfigError(
            f"ACTOR_GPUS={actor} and ROLLOUT_GPUS={rollout} are {actor + rollout} GPUs, but there "
            f"are {total} (NUM_GPUS={per_node}{nodes}); each side needs at least one"
        )
    if actor > per_node and actor % per_node:
        raise ConfigError(
            f"ACTOR_GPUS={actor} fills no whole machines of {per_node} GPUs: use a multiple"
        )
    roles: dict[str, list[str]] = {}
    for role, path in frozen.items():
        roles.setdefault(path, []).append(role)
    gpus = {role: getattr(slime, f"{role}_gpus") for role in frozen}
    sizes = {role: getattr(slime, f"{role}_gpus_per_engine") for role in frozen}
    asked = {path: max(gpus[role] for role in group) for path, group in roles.items()}
    # Where nobody asks: an equal part of what the policy's half and the asked shares leave.
    silent = list(asked.values()).count(0)
    spare = max(0, rollout // 2 - sum(asked.values())) // max(1, silent)
    engines = []
    for path, group in roles.items():
        size = max(sizes[role] for role in group) or policy_size
        share = asked[path] or max(1, spare // size) * size
        engines.append(EngineGroup(group[0], path, share, size, tuple(group)))
    left = rollout - sum(engine.gpus for engine in engines)
    if engines and left < policy_size:
        shares = " + ".join(
            f"{max(engine.roles, key=gpus.__getitem__).upper()}_GPUS={engine.gpus}"
            for engine in engines
        )
        raise ConfigError(
            f"{shares} leave {max(0, left)} of ROLLOUT_GPUS={rollout} to the policy, which needs "
            f"{policy_size}: give ROLLOUT_GPUS more, or serve that model elsewhere "
            "(PRM_URL, JUDGE_URL)"
        )
    engines.insert(0, EngineGroup(POLICY, policy, left, policy_size, (POLICY,)))
    _check_whole(engines, actor, per_node)
    return Layout(slime.num_nodes, per_node, actor, tuple(engines))


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
