"""Checks before anything starts: each misuse is one clear line (`ConfigError`)."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from openclaw_rl.config import Config, hook_args, is_loopback
from openclaw_rl.engine.survey import survey
from openclaw_rl.engine.transport import connections, listens
from openclaw_rl.errors import ConfigError, EngineUnavailable
from openclaw_rl.hooks import load_hook
from openclaw_rl.journal import Journal
from openclaw_rl.journal.lock import gateway_lock, trainer_lock
from openclaw_rl.local.checkpoint import fingerprint_of
from openclaw_rl.local.device import device_of
from openclaw_rl.local.external import needs_of
from openclaw_rl.replay.files import ReplayError, check
from openclaw_rl.replay.run import new_files
from openclaw_rl.wire.formats import find_format

INSTALL_LOCAL = "pip install -e '.[local]' in the project's folder"
"""What brings the packages of the embedded engine and of training."""


def check_loops(config: Config, loops: Sequence[str]) -> None:
    """What these of `train`, `judge` and `serve` need must be there. Raises `ConfigError`,
    `HookError`."""
    check_model(config)
    check_data(config)
    if "train" in loops:
        check_training(config)
    if "judge" in loops:
        load_hook(config.reward_path, default_name="custom_rm", flag="--custom-rm-path")
        rule = config.judge.standing_rule_path
        load_hook(rule, default_name="standing_rule", flag="--standing-rule-path")
    if "serve" in loops:
        check_reply_format(config)
        check_port(config.gateway.host, config.gateway.port, "--port")


def check_model(config: Config) -> None:
    """The base model's folder must be there and be one."""
    if not config.model.path:
        raise ConfigError("no model: give --model FOLDER (or MODEL_PATH), a Hugging Face folder")
    path = Path(config.model.path).expanduser()
    if not path.is_dir():
        raise ConfigError(f"--model: no such folder: {path}")
    if not (path / "config.json").is_file():
        raise ConfigError(f"--model: {path} has no config.json, so it is not a Hugging Face model")


def check_data(config: Config) -> None:
    """The folder of the journal must be ours to write; it is made."""
    path = Path(config.data.path).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"--data: cannot make {path}: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"--data: {path} is not writable")


def check_journal(config: Config, loops: Sequence[str]) -> None:
    """Nobody else may serve or train from the journal, and its turns must be of this model: a
    journal that has none yet is tied to it. Raises `ConfigError`, `JournalError`."""
    for name, lock in (("serve", gateway_lock), ("train", trainer_lock)):
        if name in loops:
            lock(config.journal_path).close()
    if "train" in loops:
        with Journal.open(config.journal_path) as journal:
            train = config.train
            journal.bind(fingerprint_of(config.model.path, train.lora_rank, train.lora_alpha))


def check_conversations(config: Config) -> list[Path]:
    """The files of past conversations in the data folder that were not read yet as they are now,
    which must be readable; none where they are not wanted."""
    if not config.data.replay:
        return []
    try:
        found = new_files(Path(config.data.path).expanduser(), config.journal_path)
        check(found)
    except ReplayError as error:
        raise ConfigError(
            f"{error}; fix or move the file, or --replay off (DATA_REPLAY)"
        ) from error
    return found


def check_reply_format(config: Config) -> None:
    """The reply format must be one that there is."""
    if config.gateway.reply_format != "auto":
        find_format(config.gateway.reply_format)


def check_port(host: str, port: int, flag: str) -> None:
    """Nobody may be listening on the port yet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"{flag} {port}: cannot listen on {host}: {error.strerror}; choose another port"
            ) from error


def check_engine_address(config: Config) -> None:
    """Nobody may answer yet where --engine-cmd starts an engine on this machine: whatever it is, it
    would be taken for that engine."""
    url = config.engine.url
    # Not by binding: that fails as well while old connections to an engine linger.
    if config.engine.command and is_loopback(urlsplit(url).hostname or "") and listens(url, 1.0):
        raise ConfigError(
            f"--engine-cmd: something listens at {url} already: stop it, or omit --engine-cmd to "
            "use what runs there"
        )


def check_training(config: Config) -> None:
    """The embedded host's packages and hooks must load, its numbers must fit together."""
    for package in ("torch", "peft"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"training on this machine needs {package}: {INSTALL_LOCAL}")
    if config.train.device and config.engine.url:
        device_of(config.train.device, "--train-device")
    else:
        device_of(config.model.device, "--device")
    check_engine(config)
    loss, rollout = config.loss_path, config.rollout.function_path
    load_hook(loss, default_name="custom_loss", flag="--custom-loss-function-path")
    load_hook(rollout, default_name="generate_rollout", flag="--rollout-function-path")
    if not config.engine.url:
        check_port("127.0.0.1", config.engine.port, "--engine-port")


def check_engine(config: Config) -> None:
    """An engine outside must be named in full; where it answers already, it must be able to do what
    the settings ask for (the host asks again, and waits for it)."""
    engine = config.engine
    if not engine.url:
        for value, flag in (
            (engine.kind != "auto", "--engine"),
            (engine.command, "--engine-cmd"),
            (engine.adapter_dir_at_engine, "--adapter-dir-at-engine"),
            (config.train.device, "--train-device"),
        ):
            if value:
                raise ConfigError(f"{flag} is for an external engine: set --engine-url")
        return

    async def ask() -> None:
        needs = needs_of(hook_args(config))
        async with connections(engine.api_key) as http:
            found = await survey(engine.kind, engine.url, http, needs.candidates)
        found.check(needs)

    with contextlib.suppress(EngineUnavailable):
        asyncio.run(ask())
