"""What is looked at before a launch: folders, files, hooks, and what the train script can do.

Guarantees: each mistake is one `ConfigError` that names the variable to mend.
"""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from openclaw_rl.config import Config, SlimeConfig
from openclaw_rl.errors import ConfigError
from openclaw_rl.hooks import load_hook


def option(flags: Sequence[str], name: str) -> str | None:
    """The value of `--name value` or `--name=value` in `flags`; the last one, as argparse takes."""
    found = None
    for place, word in enumerate(flags):
        if word == name and place + 1 < len(flags):
            found = flags[place + 1]
        elif word.startswith(name + "="):
            found = word.partition("=")[2]
    return found


def check_values(flags: Sequence[str]) -> None:
    """A flag that has a value in one place must have one in each (`--lr 1e-5 ... --lr`)."""
    follows = [*flags[1:], "--"]
    bare = [place for place, word in enumerate(flags) if word.startswith("--") and "=" not in word]
    valued = {flags[place] for place in bare if not follows[place].startswith("--")}
    for place in bare:
        if flags[place] in valued and follows[place].startswith("--"):
            raise ConfigError(f"{flags[place]} has no value")


def absolute(value: str, name: str) -> Path:
    """`value` of the variable `name` as a path, which must be absolute."""
    path = Path(value)
    if not path.is_absolute():
        raise ConfigError(
            f"{name} is a relative path ({value}): a job starts in another folder; give it as "
            f"{Path.cwd() / value}"
        )
    return path


def folder(value: str, name: str, *, holds: str) -> Path:
    """A folder that is there and has `holds` in it."""
    if not value:
        raise ConfigError(f"{name} is not set: give the absolute path of a folder with {holds}")
    path = absolute(value, name)
    if not path.is_dir():
        raise ConfigError(f"{name}: there is no folder {path}")
    if not (path / holds).exists():
        raise ConfigError(f"{name}: {path} has no {holds}")
    return path


def train_script(slime: SlimeConfig) -> Path:
    """What is submitted: slime's `train_async.py`, or what TRAIN_SCRIPT names."""
    if slime.slime_dir:
        part = "slime" if slime.train_script else "train_async.py"
        folder(slime.slime_dir, "SLIME_DIR", holds=part)
    if slime.megatron_dir:
        folder(slime.megatron_dir, "MEGATRON_DIR", holds="megatron")
    if slime.train_script:
        script = absolute(slime.train_script, "TRAIN_SCRIPT")
        if not script.is_file():
            raise ConfigError(f"TRAIN_SCRIPT: there is no file {script}")
        return script
    if not slime.slime_dir:
        raise ConfigError("SLIME_DIR is not set: the folder of a clone of slime")
    if not slime.megatron_dir and not _has_megatron():
        raise ConfigError("MEGATRON_DIR is not set: the folder of a clone of Megatron-LM")
    return Path(slime.slime_dir) / "train_async.py"


def _has_megatron() -> bool:
    try:
        return importlib.util.find_spec("megatron.training") is not None
    except ModuleNotFoundError:
        return False


def place_hooks(flags: Sequence[str]) -> tuple[list[str], list[Path]]:
    """`flags` with hooks as the train script loads them from anywhere, and folders for its path.

    slime loads dotted paths only, so a loss in `./file.py` becomes `file.function` with its folder
    on the path; a reward in a file is loaded by our own loader, which needs its absolute path.
    """
    flags = list(flags)
    folders: list[Path] = []
    loss = option(flags, "--custom-loss-function-path")
    if loss is not None:
        file, _, function = loss.partition(":")
        if file.endswith(".py"):
            path = _hook_file(file, "CUSTOM_LOSS_FUNCTION_PATH")
            if not path.stem.isidentifier():
                raise ConfigError(
                    f"CUSTOM_LOSS_FUNCTION_PATH: {path.name} cannot be imported, rename it"
                )
            folders.append(path.parent)
            dotted = f"{path.stem}.{function or 'custom_loss'}"
            flags += ["--custom-loss-function-path", dotted]
        elif "." not in loss or importlib.util.find_spec(loss.partition(".")[0]) is None:
            raise ConfigError(f"CUSTOM_LOSS_FUNCTION_PATH: there is no module for {loss}")
        else:
            folders += _own_folder(loss)
    reward = option(flags, "--custom-rm-path")
    if reward is not None:
        file, separator, function = reward.partition(":")
        if file.endswith(".py"):
            reward = str(_hook_file(file, "CUSTOM_RM_PATH")) + separator + function
            flags += ["--custom-rm-path", reward]
        else:
            folders += _own_folder(reward)
        load_hook(reward, default_name="custom_rm", flag="CUSTOM_RM_PATH")
    return flags, folders


def _own_folder(dotted: str) -> list[Path]:
    """This folder, if the module lies in it: we can import it from here, a job could not."""
    here, top = Path.cwd(), dotted.partition(".")[0]
    return [here] if (here / top).is_dir() or (here / f"{top}.py").is_file() else []


def _hook_file(file: str, name: str) -> Path:
    path = Path(file).resolve()
    if not path.is_file():
        raise ConfigError(f"{name}: there is no file {path}")
    return path


def whole(flags: Sequence[str], name: str, default: int) -> int:
    """The whole number above 0 that `name` has in `flags`, or `default`."""
    value = option(flags, name)
    if value is None:
        return default
    if not value.isdecimal() or not int(value):
        raise ConfigError(f"{name}: {value!r} is not a whole number above 0")
    return int(value)


def lora_flags(config: Config, train: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The adapter's flags, where the train script's own parser has them."""
    known = known_flags(train, environ)
    if "--lora-rank" not in known:
        raise ConfigError(
            "USE_LORA=1: this slime has no --lora-rank (stock slime trains all weights). Two ways "
            "work: `openclaw-rl up` trains an adapter on one machine, or point SLIME_DIR to a "
            "slime with LoRA flags, such as miles"
        )
    flags = ["--lora-rank", str(config.train.lora_rank)]
    flags += ["--lora-alpha", f"{config.train.lora_alpha:g}"]
    return [*flags, "--target-modules", "all-linear"] if "--target-modules" in known else flags


def known_flags(train: Sequence[str], environ: Mapping[str, str]) -> set[str]:
    """The flags that `--help` of the train script lists."""
    try:
        done = subprocess.run(
            [*train, "--help"],
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{shlex.join(train)} --help: {type(error).__name__}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(f"{shlex.join(train)} --help failed: {last}")
    words = done.stdout.replace(",", " ").replace("[", " ").replace("]", " ").split()
    return {word for word in words if word.startswith("--")}
