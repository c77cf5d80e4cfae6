"""What a launch on slime comes to: the files it writes and the command it starts.

Guarantees: everything that can be known to be wrong before a GPU is touched is one `ConfigError`
here, which names the variable to change; nothing is written or started by this module. Flags that
the user gave win over computed ones, because they come last.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer

from openclaw_rl.config import Config, DataConfig, Setting, hook_args, render_config, settings
from openclaw_rl.errors import ConfigError
from openclaw_rl.hooks import load_hook
from openclaw_rl.slime.layout import POLICY, Layout, split
from openclaw_rl.slime.model_args import model_args, read_config, text_config
from openclaw_rl.slime.services import FROM_SLIME

HOOKS = {
    "--rollout-function-path": "openclaw_rl.slime.generate_rollout",
    "--eval-function-path": "openclaw_rl.slime.generate_rollout",
    "--custom-convert-samples-to-train-data-path": (
        "openclaw_rl.slime.convert_samples_to_train_data"
    ),
    "--custom-advantage-function-path": "openclaw_rl.slime.compute_advantages",
}

ROLES: Mapping[str, tuple[str, ...]] = {
    # our own reward hooks -> who they ask; "teacher" only where hints are distilled
    "openclaw_rl.rewards.prm": ("prm",),
    "openclaw_rl.rewards.hindsight": ("judge", "teacher"),
    "openclaw_rl.rewards.combined": ("prm", "judge", "teacher"),
    "openclaw_rl.rewards.feedback": ("teacher",),
    "openclaw_rl.rewards.exit_code": (),
}

PASSED_ON = ("NCCL_", "GLOO_", "HF_", "WANDB_")
"""Variables of the caller's environment that the job gets too, by their beginning; and our keys."""

SECRET = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")
"""Ends of the names of those that are never shown."""

USED = (
    *("model.path", "data.path", "data.replay", "rollout.", "gateway.", "judge.", "guards."),
    *("slime.", "train.method", "train.w_rl", "train.w_opd", "train.opd_"),
)
"""Settings that a launch reads (names, and beginnings of names). The rest are slime's own flags."""

_FLAGS = ("rollout.batch_size", "rollout.function_path")
"""Of these, what slime's flags of the same names say, beside `FROM_SLIME`."""

_OF_OUR_TRAINER = "guards.max_batch_"
"""Of these, the beginning of what only the trainer of the local host looks at."""

_ROOT = Path(__file__).resolve().parents[2]


def is_used(setting: Setting) -> bool:
    """Whether a launch reads a setting."""
    key = setting.key
    ours = key.startswith(USED) and not key.startswith(_OF_OUR_TRAINER)
    return ours and key not in (*FROM_SLIME, *_FLAGS)


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
    layout: Layout

    @property
    def runtime_env(self) -> dict[str, Any]:
        """Ray's runtime environment of the job, with the secrets: for a file of mode 0600."""
        return {"env_vars": {**self.variables, **self.secrets}}


def make_plan(
    config: Config, flags: Sequence[str], environ: Mapping[str, str], *, python: str
) -> Plan:
    """The plan for `config` and the train script's own `flags`. `python` starts the script.

    Raises `ConfigError` (one line).
    """
    model = _folder(config.model.path, "MODEL_PATH", "config.json", "tokenizer.json")
    if config.data.path == DataConfig().path:
        raise ConfigError("DATA_PATH is not set: the folder for conversations, as an absolute path")
    data = _absolute(config.data.path, "DATA_PATH")
    for flag in ("--hf-checkpoint", "--ref-load", "--load", "--save"):
        if (value := option(flags, flag)) is not None:
            _absolute(value, "CKPT_SAVE_DIR" if flag == "--save" else flag)
    script = _train_script(config)
    flags, folders = _place_hooks(flags)
    for flag in {"--use-tis", "--use-rollout-logprobs"} & set(flags):
        if config.data.replay:
            raise ConfigError(
                f"{flag} needs the engine's log-probs, which past conversations do not have: "
                "leave it out, or set DATA_REPLAY=off"
            )
    _check_top_k(option(flags, "--custom-loss-function-path") or "", config.train.opd_top_k)
    reward = option(flags, "--custom-rm-path") or config.reward_path
    slime = config.slime
    layout = split(slime, str(model), _frozen(config, model, reward))
    _check_parallel(flags, layout.actor_gpus, text_config(read_config(model)))
    context = _whole(flags, "--sglang-context-length")
    limits = {
        engine.path: limit
        for engine in layout.engines
        if (limit := text_config(read_config(Path(engine.path))).get("max_position_embeddings"))
    }
    if context and context > limits.get(str(model), context):
        raise ConfigError(
            f"--sglang-context-length {context} is more than the policy's config.json allows "
            f"({limits[str(model)]} tokens)"
        )
    home = data / "slime"
    computed = [] if slime.model_args_file else model_args(read_config(model))
    computed += [word for pair in HOOKS.items() for word in pair] + layout.flags()
    computed += ["--sglang-config", str(home / "engines.yaml")]
    computed += ["--custom-config-path", str(home / "hooks.yaml")]
    keys = {setting.env for setting in settings("gateway", "judge") if not setting.flag}
    passed = {
        name: value
        for name, value in sorted(environ.items())
        if value and (name in keys or name.startswith(PASSED_ON))
    }
    folders = [_ROOT, *folders, *(Path(p) for p in (slime.slime_dir, slime.megatron_dir) if p)]
    return Plan(
        train=[python, str(script), *computed, *flags],
        files={
            home / "engines.yaml": _yaml(layout.sglang_config(context, limits)),
            home / "hooks.yaml": _yaml(_hook_settings(config, layout, data)),
            home / "openclaw_rl.toml": render_config(config),
        },
        variables={
            **{name: value for name, value in passed.items() if not name.endswith(SECRET)},
            "PYTHONPATH": _python_path(environ, folders),
            "PYTHONUNBUFFERED": "1",
            # Megatron asks for it with tensor or sequence parallelism; slime's scripts set it too.
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        },
        secrets={name: value for name, value in passed.items() if name.endswith(SECRET)},
        layout=layout,
    )


# -- folders and files -----------------------------------------------------------------------------


def _absolute(value: str, name: str) -> Path:
    path = Path(value)
    if not path.is_absolute():
        raise ConfigError(
            f"{name} is a relative path ({value}): a job starts in another folder; give it as "
            f"{Path.cwd() / value}"
        )
    return path


def _folder(value: str, name: str, *holds: str) -> Path:
    if not value:
        raise ConfigError(f"{name} is not set: give the absolute path of a folder with {holds[0]}")
    path = _absolute(value, name)
    if not path.is_dir():
        raise ConfigError(f"{name}: no such folder: {path}")
    for part in holds:
        if not (path / part).exists():
            raise ConfigError(f"{name}: {path} has no {part}")
    return path


def _train_script(config: Config) -> Path:
    """What is started: slime's `train_async.py`, or what TRAIN_SCRIPT names."""
    slime = config.slime
    if slime.megatron_dir:
        _folder(slime.megatron_dir, "MEGATRON_DIR", "megatron")
    if slime.train_script:
        script = _absolute(slime.train_script, "TRAIN_SCRIPT")
        if not script.is_file():
            raise ConfigError(f"TRAIN_SCRIPT: no such file: {script}")
        return script
    folder = _folder(slime.slime_dir, "SLIME_DIR", "train_async.py")
    if not slime.megatron_dir and importlib.util.find_spec("megatron") is None:
        raise ConfigError("MEGATRON_DIR is not set: the folder of a clone of Megatron-LM")
    return folder / "train_async.py"


# -- slime's flags ---------------------------------------------------------------------------------


def option(flags: Sequence[str], name: str) -> str | None:
    """The value of `--name value` or `--name=value` in `flags`; the last one, as argparse takes."""
    found = None
    for place, word in enumerate(flags):
        if word == name and place + 1 < len(flags):
            found = flags[place + 1]
        elif word.startswith(name + "="):
            found = word.partition("=")[2]
    return found


def _whole(flags: Sequence[str], name: str) -> int | None:
    value = option(flags, name)
    if value is not None and (not value.isdecimal() or not int(value)):
        raise ConfigError(f"{name}: {value!r} is not a whole number above 0")
    return None if value is None else int(value)


def _place_hooks(flags: Sequence[str]) -> tuple[list[str], list[Path]]:
    """`flags` with reward and loss as slime loads them from anywhere, and folders for its path.

    slime loads dotted paths only, so a hook in `./file.py` becomes `file.function` with its folder
    on the path, and so does the folder of a module that lies here.
    """
    flags, folders = list(flags), []
    for name, default in (
        ("CUSTOM_LOSS_FUNCTION_PATH", "custom_loss"),
        ("CUSTOM_RM_PATH", "custom_rm"),
    ):
        flag = f"--{name.lower().replace('_', '-')}"
        if (path := option(flags, flag)) is None:
            continue
        file, _, function = path.partition(":")
        if file.endswith(".py"):
            place = Path(file).resolve()
            if not place.is_file():
                raise ConfigError(f"{name}: no such file: {place}")
            if not place.stem.isidentifier():
                raise ConfigError(f"{name}: {place.name} cannot be imported, rename it")
            folders.append(place.parent)
            flags += [flag, f"{place.stem}.{function or default}"]
        else:
            top = path.partition(".")[0]
            if "." not in path or importlib.util.find_spec(top) is None:
                raise ConfigError(f"{name}: no module for {path}")
            if Path(top).is_dir() or Path(f"{top}.py").is_file():
                folders.append(Path.cwd())
        if default == "custom_rm":  # a loss may need slime to be loaded
            load_hook(path, default_name=default, flag=name)
    return flags, folders


def _check_top_k(loss: str, top_k: int) -> None:
    """A loss of ours and OPD_TOP_K must mean the same."""
    name = loss.removeprefix("openclaw_rl.losses.")
    if name == "topk_opd_loss" and not top_k:
        raise ConfigError(f"{loss} needs OPD_TOP_K, the candidates of each token (such as 4)")
    if name in ("opd_loss", "grpo_loss") and top_k:
        raise ConfigError(f"OPD_TOP_K={top_k} has no effect on {loss}: use topk_opd_loss")


def _check_parallel(flags: Sequence[str], actor_gpus: int, model: Mapping[str, Any]) -> None:
    kinds = ("tensor-model", "pipeline-model", "context")
    sizes = [_whole(flags, f"--{kind}-parallel-size") or 1 for kind in kinds]
    if actor_gpus % math.prod(sizes):
        raise ConfigError(
            f"ACTOR_GPUS={actor_gpus} is not a multiple of {math.prod(sizes)}, the tensor x "
            f"pipeline x context parallel sizes ({' x '.join(map(str, sizes))}) of PERF_ARGS"
        )
    if (heads := model.get("num_attention_heads", 0)) % sizes[0]:
        raise ConfigError(
            f"--tensor-model-parallel-size {sizes[0]} does not divide the model's {heads} "
            "attention heads"
        )


# -- who is served where ---------------------------------------------------------------------------


def _frozen(config: Config, model: Path, reward: str) -> dict[str, str]:
    """Role -> folder of the frozen models that this cluster has to serve."""
    slime, judge = config.slime, config.judge
    own = next((roles for name, roles in ROLES.items() if reward.startswith(name)), None)
    found = {}
    for role in ("prm", "judge"):
        path, gpus = getattr(judge, f"{role}_model_path"), getattr(slime, f"{role}_gpus")
        # A hook of the user's asks whom its author says; hints that it returns are scored.
        wanted = bool(path or gpus) if own is None else role in own
        if wanted and not getattr(judge, f"{role}_url"):
            name = f"{role.upper()}_MODEL_PATH"
            found[role] = str(_folder(path or str(model), name, "config.json"))
    teaches = (own is None or "teacher" in own) and hook_args(config).w_opd
    if teaches and not judge.teacher_url and slime.teacher != "policy":
        place = model
        if slime.teacher != "base":
            place = _folder(slime.teacher, "TEACHER", "config.json", "tokenizer.json")
            ours, theirs = (
                Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
                for folder in (model, place)
            )
            # A teacher scores the policy's ids as they are; more tokens of its own do no harm.
            if wrong := sum(theirs.get(token) != number for token, number in ours.items()):
                raise ConfigError(
                    f"TEACHER: {place} has another tokenizer than the policy ({wrong} of "
                    f"{len(ours)} tokens have another id or none), so it cannot score its tokens"
                )
        found["teacher"] = str(place)
    return found


# -- what hooks and services are told --------------------------------------------------------------


def _hook_settings(config: Config, layout: Layout, data: Path) -> dict[str, Any]:
    """`--custom-config-path`: what hooks read from slime's `args`. Keys are not among it: slime
    logs its arguments."""
    args = hook_args(config)
    sections = settings("rollout", "train", "guards")
    used = [setting.attribute for setting in sections if is_used(setting)]
    values = {
        "journal_path": str(data / "journal.db"),
        "openclaw_rl_config": str(data / "slime" / "openclaw_rl.toml"),
        **{name: getattr(args, name) for name in used},
        "probes": _probes(config.guards.probes),
        **{f"{role}_engine": layout.engine_of(role) for role in ("prm", "judge", "teacher")},
    }
    if config.slime.teacher == "policy":
        values["teacher_engine"] = POLICY
    return {name: value for name, value in values.items() if value is not None}


def _probes(name: str) -> str | None:
    """The file of the user's own probes, as the job finds it. Raises `ConfigError`."""
    if not name:
        return None
    if not Path(name).expanduser().is_file():
        raise ConfigError(f"--probes: no such file: {name}")
    return str(Path(name).expanduser().resolve())


def _python_path(environ: Mapping[str, str], folders: Sequence[Path]) -> str:
    for folder in folders:
        if os.pathsep in str(folder):
            raise ConfigError(
                f"{folder}: a folder for PYTHONPATH cannot have {os.pathsep!r} in its name"
            )
    path = [*map(str, folders), *environ.get("PYTHONPATH", "").split(os.pathsep)]
    return os.pathsep.join(dict.fromkeys(filter(None, path)))


def _yaml(content: dict[str, Any]) -> str:
    text: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=1000)
    return text
