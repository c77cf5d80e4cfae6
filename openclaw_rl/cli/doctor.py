"""What is wrong, and how to fix it; exit status 1 where something is.

Looks at everything, changes nothing. Each check gives findings: `ok`, `warn` (it works, but not as
it could) or `fail`. A check that needs what an earlier one did not find says nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from openclaw_rl.cli import checks
from openclaw_rl.cli.status import read_status, render_sources
from openclaw_rl.config import Config, GatewayConfig, SlimeConfig, settings
from openclaw_rl.errors import ConfigError, JournalError
from openclaw_rl.journal import Journal
from openclaw_rl.openclaw.connect import (
    PROVIDER,
    TRIED,
    OpenClaw,
    Served,
    default_model,
    get,
    plan_connect,
)
from openclaw_rl.openclaw.gateway import Answer, GatewayClient
from openclaw_rl.slime.layout import Frozen, split

ROOMY_WINDOW = 16_000
"""Tokens of context below which OpenClaw's own prompt and tools may leave no room."""

_GPUS = ("num_nodes", "num_gpus", "actor_gpus", "rollout_gpus", "rollout_gpus_per_engine",
         "prm_gpus", "judge_gpus", "teacher_gpus")  # fmt: skip

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at and found; `fix` says what to do about it."""

    level: Level
    name: str
    words: str
    fix: str = ""

    def __str__(self) -> str:
        fix = f"\n      -> {self.fix}" if self.fix else ""
        return f"{self.level:4}  {self.name:9} {self.words}{fix}"


def run(config: Config, options: argparse.Namespace) -> int:
    """Print all findings."""
    if options.__dict__["gateway.port"] is None and not os.environ.get("PORT"):
        config = at_published_port(config)
    failed = False
    for finding in examine(config, os.environ):
        print(finding, flush=True)
        failed |= finding.level == "fail"
    return 1 if failed else 0


def served_at(url: str, config: Config) -> Served:
    """What the gateway at `url` serves; where none answers, what the settings say of it.

    Raises `ConfigError` where neither tells the model and its context.
    """
    url = url.rstrip("/").removesuffix("/v1")
    client = GatewayClient(url, config.gateway.api_key)
    served = client.served()
    if served is not None:
        return served
    gateway, model = config.gateway, config.model
    if not gateway.context_length or not (model.served_name or model.path):
        raise ConfigError(
            f"no openclaw-rl gateway answers at {url} with this key: start it (openclaw-rl up), "
            "set OPENCLAW_RL_API_KEY to its key, or give --served-name and --context-length"
        )
    longest = min(gateway.max_tokens, gateway.context_length)
    return Served(f"{url}/v1", config.served_name, gateway.context_length, longest, gateway.api_key)


def at_published_port(config: Config) -> Config:
    """`config` with the port at which a gateway that writes this journal was last seen, where the
    settings name none of their own."""
    if config.gateway.port != GatewayConfig().port:
        return config
    try:
        with Journal.open(config.journal_path, create=False) as journal:
            seen = journal.endpoint("gateway")
        port = urlsplit(seen.url).port if seen else None
    except (JournalError, ValueError):
        return config
    if not port:
        return config
    gateway = config.gateway.model_copy(update={"port": port})
    return config.model_copy(update={"gateway": gateway})


def examine(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    """All findings, in the order in which things depend on each other."""
    client = GatewayClient(config.gateway.url, config.gateway.api_key)
    served = client.served()
    yield from _python(config)
    if config.model.path or served is None:  # what runs has its model
        yield from _model(config)
    yield from gpu_shares(config.slime)
    yield from _gateway(config, client, served)
    yield from _journal(config)
    yield from _openclaw(environ, served)
    if served is not None:
        yield from _probe(client.probe(served.model))


def _python(config: Config) -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding("ok", "python", version)
    missing = [name for name in ("torch", "peft") if importlib.util.find_spec(name) is None]
    if missing:
        yield Finding(
            "warn",
            "packages",
            f"{' and '.join(missing)} missing: this machine can serve, but neither train nor run "
            "the model",
            checks.INSTALL_LOCAL,
        )


def _model(config: Config) -> Iterator[Finding]:
    try:
        checks.check_model(config)
    except ConfigError as error:
        yield Finding("fail", "model", str(error), "give the folder of a Hugging Face model")
    else:
        yield Finding("ok", "model", f"{config.served_name} in {config.model.path}")


def gpu_shares(slime: SlimeConfig) -> Iterator[Finding]:
    """Whether the GPU counts that the launch scripts read fit together, as the launch sees it."""
    counts = {
        setting.env: value
        for setting in settings("slime")
        if setting.name in _GPUS and (value := getattr(slime, setting.name)) != setting.default
    }
    if not counts:
        return
    try:
        split(
            nodes=slime.num_nodes,
            gpus_per_node=slime.num_gpus,
            actor_gpus=slime.actor_gpus,
            rollout_gpus=slime.rollout_gpus,
            policy_path="policy",
            policy_per_engine=slime.rollout_gpus_per_engine,
            frozen=[
                Frozen(role, role, gpus)
                for role in ("prm", "judge", "teacher")
                if (gpus := getattr(slime, f"{role}_gpus"))
            ],
        )
    except ConfigError as error:
        yield Finding("fail", "gpus", str(error), "change the shares")
    else:
        yield Finding("ok", "gpus", ", ".join(f"{name} {n}" for name, n in counts.items()))


def _gateway(config: Config, client: GatewayClient, served: Served | None) -> Iterator[Finding]:
    health = client.health()
    if health is None:
        host, port = config.gateway.host, config.gateway.port
        try:
            checks.check_port(host, port, "--port")
        except ConfigError as error:
            yield Finding("fail", "port", str(error), "stop what listens there, or choose another")
        else:
            words = f"nothing answers at {client.url}"
            yield Finding("fail", "gateway", words, "start it: openclaw-rl up --model FOLDER")
        return
    engine = get(health.body, "engine", "state")
    if engine is None:
        words = f"what answers at {client.url} is not an openclaw-rl gateway"
        yield Finding("fail", "port", words, "choose another --port")
        return
    if served is None:
        words = f"{client.url} refuses this key"
        yield Finding("fail", "key", words, "set OPENCLAW_RL_API_KEY to the gateway's key")
        return
    yield Finding("ok", "gateway", f"{client.url} serves {served.model}, weight version "
                  f"{get(health.body, 'engine', 'weight_version') or 0}")  # fmt: skip
    yield Finding("ok", "key", "accepted" if client.api_key else "none needed (loopback only)")
    if engine != "ok":
        words = "the engine does not answer" if engine == "waiting" else "no engine has come up"
        yield Finding("fail", "engine", words, "start it: openclaw-rl train, or look at its log")
    else:
        yield Finding("ok", "engine", "answers")
    if get(health.body, "journal", "state") != "ok":
        yield Finding("fail", "journal", "the gateway cannot write it", "is the disk full?")


def _journal(config: Config) -> Iterator[Finding]:
    try:
        status = read_status(config)
    except JournalError as error:
        yield Finding("warn", "journal", str(error), "--data names its folder; up makes it")
        return
    words = f"{config.journal_path}: {status['seen']} turns, {status['trained']} trained"
    yield Finding("ok", "journal", words)
    if status["by_source"]:
        yield Finding("ok", "sessions", "recognised by " + render_sources(status["by_source"]))
    for warning in status["warnings"]:
        yield Finding("warn", "journal", warning)


def _openclaw(environ: Mapping[str, str], served: Served | None) -> Iterator[Finding]:
    try:
        openclaw = OpenClaw.find(environ)
    except ConfigError as error:
        yield Finding("fail", "openclaw", str(error), "fix the file, or restore a backup")
        return
    fix = "openclaw-rl connect"
    if not openclaw.connected:
        words = f"not connected ({openclaw.config_path} has no provider {PROVIDER})"
        yield Finding("warn", "openclaw", words, fix)
        return
    try:
        _ = openclaw.release
    except ConfigError:
        words = f"its version is unknown: neither the PATH nor {openclaw.config_path} has it"
        yield Finding("warn", "openclaw", words, "put the command `openclaw` on the PATH")
        return
    words = f"{openclaw.version}, {openclaw.config_path}"
    if openclaw.version in TRIED:
        yield Finding("ok", "openclaw", words)
    else:
        fix_version = (
            f"if turns are not bound (`status`), take one that was tried: {', '.join(TRIED)}"
        )
        yield Finding("warn", "openclaw", words, fix_version)
    if served is None:
        return
    yield from window(openclaw, served)
    default = default_model(openclaw.config)
    if default != f"{PROVIDER}/{served.model}":
        words = f"its default model is {default}, so only chats that choose ours are learned from"
        yield Finding("warn", "openclaw", words, fix)
    try:
        change = plan_connect(openclaw, served, default=False)
    except ConfigError as error:
        yield Finding("fail", "openclaw", str(error), f"then: {fix}")
        return
    if change.empty:
        yield Finding("ok", "connected", "provider entry and plugin are as they should be")
    else:
        yield Finding("fail", "connected", "provider entry or plugin are not as they should be",
                      f"{fix} (shows what would change)")  # fmt: skip


def window(openclaw: OpenClaw, served: Served) -> Iterator[Finding]:
    """Whether OpenClaw takes a model with this context. Raises `ConfigError` where its version is
    not known."""
    length = served.context_length
    # As seen: what the oldest and the newest that we tried refuse.
    least = 4_000 if openclaw.release >= (2026, 9, 0) else 16_000
    if length < least:
        words = (f"OpenClaw {openclaw.version} refuses a model with a context of {length} tokens "
                 f"and answers nothing with it (at least {least})")  # fmt: skip
        yield Finding("fail", "context", words, f"a model with {max(least, ROOMY_WINDOW)} or more")
    elif length < ROOMY_WINDOW:
        words = f"{length} tokens of context are few: OpenClaw's own prompt may not leave room"
        yield Finding("warn", "context", words, f"a model with {ROOMY_WINDOW} or more")


def _probe(reply: Answer | None) -> Iterator[Finding]:
    if reply is None or reply.status != 200:
        status = "no answer" if reply is None else f"HTTP {reply.status}"
        yield Finding("fail", "probe", f"a request gets {status}", "look at the gateway's log")
        return
    source, kind = (reply.headers.get(name) for name in ("x-session-source", "x-turn-type"))
    words = f"answered; session recognised by {source}, taken as a {kind} turn"
    if (source, kind) == ("header:x-session-id", "side"):
        yield Finding("ok", "probe", words)
    else:
        yield Finding(
            "fail", "probe", words, "something between client and gateway removes the headers"
        )
