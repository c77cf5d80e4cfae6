"""What a launch on slime comes to: the files it writes and the command it starts.

Guarantees: everything that can be known to be wrong before a GPU is touched is one `ConfigError`
here; nothing is written or started by this module. Flags that the user gave win over computed
ones, because they come last.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from openclaw_rl.config import Config, DataConfig, Setting, hook_args, settings
from openclaw_rl.errors import ConfigError
from openclaw_rl.slime import engines
from openclaw_rl.slime.checks import (
    absolute,
    check_values,
    folder,
    lora_flags,
    option,
    place_hooks,
    train_script,
    whole,
)
from openclaw_rl.slime.model_args import model_args, read_config
from openclaw_rl.slime.services import SERVICES
from openclaw_rl.slime.vocabulary import check_tokenizer, difference

HOOKS = (
    *("--rollout-function-path", "openclaw_rl.slime.generate_rollout"),
    *("--eval-function-path", "openclaw_rl.slime.generate_rollout"),
    *(
        "--custom-convert-samples-to-train-data-path",
        "openclaw_rl.slime.convert_samples_to_train_data",
    ),
    *("--custom-advantage-function-path", "openclaw_rl.slime.compute_advantages"),
)

ROLES: Mapping[str, tuple[str, ...]] = {
    # our own reward hooks -> who they ask; "teacher" only where hints are distilled
    "openclaw_rl.rewards.prm": ("prm",),
    "openclaw_rl.rewards.hindsight": ("judge", "teacher"),
    "openclaw_rl.rewards.combined": ("prm", "judge", "teacher"),
    "openclaw_rl.rewards.feedback": ("teacher",),
    "openclaw_rl.rewards.exit_code": (),
}

PASSED_ON = ("NCCL_", "GLOO_", "HF_", "WANDB_")
"""Variables of the caller's environment that the job gets too, by their beginning."""

USED = (
    *("model.path", "data.path", "data.replay", "rollout.", "gateway.", "judge.", "slime."),
    *("train.method", "train.w_rl", "train.w_opd", "train.opd_"),
    *("train.lora_rank", "train.lora_alpha"),
)
"""Settings that a launch reads (names, and beginnings of names). The rest are slime's own flags."""

NOT_USED = (
    *("rollout.batch_size", "rollout.function_path", "judge.custom_rm_path", "judge.reward_key"),
    *("gateway.temperature", "gateway.context_length", "gateway.max_tokens"),
)
"""Of these, what the flags for slime say: --rollout-batch-size, --rollout-function-path,
--custom-rm-path, --reward-key, --rollout-temperature, --sglang-context-length,
--rollout-max-response-len."""

_LAUNCH_ONLY = ("method", "lora_rank", "lora_alpha")
"""Of these, what hooks are not told."""


def is_used(setting: Setting) -> bool:
    """Whether a launch reads a setting."""
    return setting.key.startswith(USED) and setting.key not in NOT_USED


_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Plan:
    """A launch, ready to be shown or started."""

    train: list[str]
    """The command that slime's train script is started with."""
    files: dict[Path, str]
    """What it reads: path -> content. Holds no secret."""
    variables: dict[str, str]
    """Environment of the job."""
    secrets: dict[str, str] = field(repr=False)
    """Keys that services and trackers take from the environment; never shown."""
    layout: engines.Layout

    @property
    def picture(self) -> list[str]:
        return engines.picture(self.layout)


def make_plan(
    config: Config, flags: Sequence[str], environ: Mapping[str, str], *, python: str
) -> Plan:
    """The plan for `config` and the train script's own `flags`. `python` starts the script.

    Raises `ConfigError` (one line).
    """
    model = folder(config.model.path, "MODEL_PATH", holds="config.json")
    check_tokenizer(model)
    check_values(flags)
    if config.data.path == DataConfig().path:
        raise ConfigError("DATA_PATH is not set: the folder for conversations, as an absolute path")
    data = absolute(config.data.path, "DATA_PATH")
    for flag in ("--hf-checkpoint", "--ref-load", "--load", "--save"):
        if (value := option(flags, flag)) is not None:
            absolute(value, "CKPT_SAVE_DIR" if flag == "--save" else flag)
    script = train_script(config.slime)
    flags, hook_folders = place_hooks(flags)
    _check_top_k(option(flags, "--custom-loss-function-path") or "", config.train.opd_top_k)
    reward = option(flags, "--custom-rm-path") or config.reward_path
    frozen = _frozen(config, model, reward)
    layout = _layout(config, model, frozen)
    _check_parallel(flags, layout, read_config(model))
    folders = [_ROOT, *hook_folders]
    for setting in (config.slime.slime_dir, config.slime.megatron_dir):
        folders += [Path(setting)] if setting else []
    variables = _variables(environ, folders)
    context, limits = _context(flags), _limits(layout)
    if context and context > limits.get(str(model), context):
        raise ConfigError(
            f"--sglang-context-length {context} is more than the policy's config.json allows "
            f"({limits[str(model)]} tokens)"
        )
    home = data / "slime"
    files = {
        home / "engines.yaml": _yaml(engines.sglang_config(layout, context, limits)),
        home / "hooks.yaml": _yaml(_hook_settings(config, flags, layout, data)),
    }
    computed = [
        *([] if config.slime.model_args_file else model_args(read_config(model))),
        *HOOKS,
        *_cluster_flags(layout),
        *("--sglang-config", str(home / "engines.yaml")),
        *("--custom-config-path", str(home / "hooks.yaml")),
    ]
    if config.slime.use_lora:
        computed += lora_flags(config, [python, str(script)], {**environ, **variables})
    return Plan(
        train=[python, str(script), *computed, *flags],
        files=files,
        variables=variables,
        secrets=_secrets(environ),
        layout=layout,
    )


def _check_top_k(loss: str, top_k: int) -> None:
    """A loss of ours and OPD_TOP_K must mean the same."""
    name = loss.removeprefix("openclaw_rl.losses.")
    if name == "topk_opd_loss" and not top_k:
        raise ConfigError(f"{loss} needs OPD_TOP_K, the candidates of each token (such as 4)")
    if name in ("opd_loss", "grpo_loss") and top_k:
        raise ConfigError(f"OPD_TOP_K={top_k} means nothing to {loss}: use topk_opd_loss")


# --- who is served where ----------------------------------------------------------------------


def _frozen(config: Config, model: Path, reward: str) -> list[engines.Frozen]:
    """The frozen models that this cluster has to serve."""
    slime, judge = config.slime, config.judge
    asked = {
        "prm": judge.prm_model_path or slime.prm_gpus,
        "judge": judge.judge_model_path or slime.judge_gpus,
    }
    own = next((roles for name, roles in ROLES.items() if reward.startswith(name)), None)
    # A hook of the user's asks whom its author says; hints that it returns are scored.
    wanted = (*(role for role in asked if asked[role]), "teacher") if own is None else own
    args = hook_args(config)
    found = []
    for role in ("prm", "judge"):
        if role in wanted and not getattr(judge, f"{role}_url"):
            path = getattr(judge, f"{role}_model_path")
            name = f"{role.upper()}_MODEL_PATH"
            place = folder(path, name, holds="config.json") if path else model
            found.append(_share(config, role, place))
    if "teacher" in wanted and args.w_opd and not judge.teacher_url and slime.teacher != "policy":
        place = model
        if slime.teacher != "base":
            place = folder(slime.teacher, "TEACHER", holds="config.json")
            if reason := difference(model, place):
                raise ConfigError(
                    f"TEACHER: {place} has another tokenizer than the policy ({reason}), so it "
                    "cannot score the policy's tokens"
                )
        found.append(_share(config, "teacher", place))
    return found


def _share(config: Config, role: str, place: Path) -> engines.Frozen:
    return engines.Frozen(
        role,
        str(place),
        getattr(config.slime, f"{role}_gpus"),
        getattr(config.slime, f"{role}_gpus_per_engine"),
    )


def _layout(config: Config, model: Path, frozen: Sequence[engines.Frozen]) -> engines.Layout:
    slime = config.slime
    if slime.num_nodes > 1 and slime.master_addr in ("", "localhost", "127.0.0.1", "::1"):
        raise ConfigError(
            f"NUM_NODES={slime.num_nodes} needs MASTER_ADDR, this machine's address that the "
            "others reach"
        )
    return engines.split(
        nodes=slime.num_nodes,
        gpus_per_node=slime.num_gpus,
        actor_gpus=slime.actor_gpus,
        rollout_gpus=slime.rollout_gpus,
        policy_path=str(model),
        policy_per_engine=slime.rollout_gpus_per_engine,
        frozen=frozen,
    )


def _cluster_flags(layout: engines.Layout) -> list[str]:
    return [
        *("--actor-num-nodes", str(layout.actor_nodes)),
        *("--actor-num-gpus-per-node", str(layout.actor_per_node)),
        *("--num-gpus-per-node", str(layout.gpus_per_node)),
        *("--rollout-num-gpus", str(layout.rollout_gpus)),
        *("--rollout-num-gpus-per-engine", str(layout.engines[0].per_engine)),
    ]


def _check_parallel(flags: Sequence[str], layout: engines.Layout, model: dict[str, Any]) -> None:
    sizes = {}
    for kind in ("tensor-model", "pipeline-model", "context"):
        flag = f"--{kind}-parallel-size"
        sizes[kind] = whole(flags, flag, 1)
    product = sizes["tensor-model"] * sizes["pipeline-model"] * sizes["context"]
    if layout.actor_gpus % product:
        words = " x ".join(str(size) for size in sizes.values())
        raise ConfigError(
            f"ACTOR_GPUS={layout.actor_gpus} is no multiple of {product}, the tensor x pipeline x "
            f"context parallel sizes ({words}) of PERF_ARGS"
        )
    heads = (model.get("text_config") or model).get("num_attention_heads")
    if isinstance(heads, int) and heads % sizes["tensor-model"]:
        raise ConfigError(
            f"--tensor-model-parallel-size {sizes['tensor-model']} does not divide the model's "
            f"{heads} attention heads"
        )


def _context(flags: Sequence[str]) -> int | None:
    return whole(flags, "--sglang-context-length", 0) or None


def _limits(layout: engines.Layout) -> dict[str, int]:
    limits = {}
    for engine in layout.engines:
        config = read_config(Path(engine.path))
        limit = (config.get("text_config") or config).get("max_position_embeddings")
        if isinstance(limit, int):
            limits[engine.path] = limit
    return limits


# --- what hooks and services are told ---------------------------------------------------------


def _hook_settings(
    config: Config, flags: Sequence[str], layout: engines.Layout, data: Path
) -> dict[str, Any]:
    """`--custom-config-path`: names as `hook_args` has them, `gateway_<name>` for the gateway's
    (see `openclaw_rl/slime/README.md`). Keys are not among them: slime logs its arguments."""
    args = hook_args(config)
    values: dict[str, Any] = {"journal_path": str(data / "journal.db")}
    for setting in settings("rollout", "train", "judge"):
        if is_used(setting) and setting.flag and setting.name not in _LAUNCH_ONLY:
            values[setting.attribute] = getattr(args, setting.attribute)
    for setting in settings("gateway"):
        if is_used(setting) and setting.flag:
            values[f"gateway_{setting.name}"] = setting.of(config)
    values["gateway_context_length"] = _context(flags)
    values["gateway_max_tokens"] = whole(flags, "--rollout-max-response-len", 0) or None
    if not config.data.replay:
        values["start_services"] = [name for name in SERVICES if name != "replay"]
    for role in ("prm", "judge", "teacher"):
        values[f"{role}_engine"] = layout.engine_of(role)
    if config.slime.teacher == "policy":
        values["teacher_engine"] = engines.POLICY
    return {name: value for name, value in values.items() if value is not None}


def _variables(environ: Mapping[str, str], folders: Sequence[Path]) -> dict[str, str]:
    path = [str(folder) for folder in folders]
    for one in path:
        if os.pathsep in one:
            raise ConfigError(
                f"{one}: a folder for PYTHONPATH cannot have {os.pathsep!r} in its name"
            )
    path += [part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    passed = {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(PASSED_ON) and not _is_secret(name)
    }
    return {
        **passed,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        "PYTHONUNBUFFERED": "1",
        # Megatron asks for it with tensor or sequence parallelism; slime's scripts set it too.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }


def _is_secret(name: str) -> bool:
    return name.endswith(("_KEY", "_TOKEN", "_SECRET", "_PASSWORD"))


def _secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Our own keys and those of the passed-on families."""
    own = {setting.env for setting in settings("gateway", "judge") if not setting.flag}
    return {
        name: value
        for name, value in sorted(environ.items())
        if value and (name in own or (name.startswith(PASSED_ON) and _is_secret(name)))
    }


def _yaml(content: dict[str, Any]) -> str:
    text: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=1000)
    return text


def runtime_env(plan: Plan) -> str:
    """Ray's runtime environment of the job, with the secrets: for a file of mode 0600."""
    return json.dumps({"env_vars": {**plan.variables, **plan.secrets}}, indent=1)
