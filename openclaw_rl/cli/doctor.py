"""What is wrong, and how to fix it; exit status 1 where something is.

Looks at everything, changes nothing. Each check gives findings: `ok`, `warn` (it works, but not as
it could) or `fail`. A check that needs what an earlier one did not find says nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from openclaw_rl.cli import checks
from openclaw_rl.cli.status import read_status
from openclaw_rl.config import Config, GatewayConfig
from openclaw_rl.errors import ConfigError, JournalError
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

ROOMY_WINDOW = 16_000
"""Tokens of context below which OpenClaw's own prompt and tools may leave no room."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at and found; `fix` says what to do about it."""

    level: Literal["ok", "warn", "fail"]
    name: str
    words: str
    fix: str = ""

    def __str__(self) -> str:
        fix = f"\n      -> {self.fix}" if self.fix else ""
        return f"{self.level:4}  {self.name:9} {self.words}{fix}"


def run(config: Config, _: argparse.Namespace) -> int:
    """Print all findings."""
    failed = False
    for finding in examine(config, os.environ):
        print(finding, flush=True)
        failed |= finding.level == "fail"
    return 1 if failed else 0


def examine(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    """All findings, in the order in which things depend on each other."""
    try:
        status, missing = read_status(config), ""
    except JournalError as error:
        status, missing = {}, str(error)
    url = config.gateway.url
    if status.get("gateway") and config.gateway.port == GatewayConfig().port:
        url = status["gateway"]  # where the gateway of this journal was last seen
    client = GatewayClient(url, config.gateway.api_key)
    served = client.served()
    yield from _machine(config, served)
    yield from _gateway(config, client, served)
    if missing:
        yield Finding("warn", "journal", missing, "--data names its folder; up makes it")
    else:
        words = f"{config.journal_path}: {status['seen']} turns, {status['trained']} trained"
        yield Finding("ok", "journal", words)
        for warning in status["warnings"]:
            yield Finding("warn", "journal", warning)
    yield from _openclaw(environ, served)
    if served is not None:
        yield _probe(client.probe(served.model))


def _machine(config: Config, served: Served | None) -> Iterator[Finding]:
    packages = [name for name in ("torch", "peft") if importlib.util.find_spec(name) is None]
    if packages:
        words = f"no {' and no '.join(packages)}: this machine can serve, but not run or train"
        yield Finding("warn", "packages", words, checks.INSTALL_LOCAL)
    if not config.model.path and served is not None:  # what runs has its model
        return
    try:
        checks.check_model(config)
    except ConfigError as error:
        yield Finding("fail", "model", str(error), "give the folder of a Hugging Face model")
    else:
        yield Finding("ok", "model", f"{config.served_name} in {config.model.path}")


def _gateway(config: Config, client: GatewayClient, served: Served | None) -> Iterator[Finding]:
    answer = client.health()
    if answer is None:
        try:
            checks.check_port(config.gateway.host, config.gateway.port, "--port")
        except ConfigError as error:
            yield Finding("fail", "port", str(error), "stop what listens there, or choose another")
        else:
            words = f"nothing answers at {client.url}"
            yield Finding("fail", "gateway", words, "start it: openclaw-rl up --model FOLDER")
        return
    engine: Any = get(answer.body, "engine", "state")
    if engine is None:
        words = f"what answers at {client.url} is not an openclaw-rl gateway"
        yield Finding("fail", "port", words, "choose another --port")
        return
    if served is None:
        words = f"{client.url} refuses this key"
        yield Finding("fail", "key", words, "set OPENCLAW_RL_API_KEY to the gateway's key")
        return
    version = get(answer.body, "engine", "weight_version") or 0
    words = f"{client.url} serves {served.model}, weight version {version}"
    yield Finding("ok", "gateway", words)
    if engine != "ok":
        words = "the engine does not answer" if engine == "waiting" else "no engine has come up"
        yield Finding("fail", "engine", words, "start it: openclaw-rl train, or look at its log")
    if get(answer.body, "journal", "state") != "ok":
        yield Finding("fail", "journal", "the gateway cannot write it", "is the disk full?")


def _openclaw(environ: Mapping[str, str], served: Served | None) -> Iterator[Finding]:
    fix = "openclaw-rl connect"
    try:
        openclaw = OpenClaw.find(environ)
    except ConfigError as error:
        yield Finding("fail", "openclaw", str(error), "fix the file, or restore a backup")
        return
    if not openclaw.connected:
        words = f"not connected ({openclaw.config_path} has no provider {PROVIDER})"
        yield Finding("warn", "openclaw", words, fix)
        return
    words = f"{openclaw.version or 'unknown version'}, {openclaw.config_path}"
    if openclaw.version in TRIED:
        yield Finding("ok", "openclaw", words)
    else:
        tried = f"if turns are not bound (`status`), take one that was tried: {', '.join(TRIED)}"
        yield Finding("warn", "openclaw", words, tried)
    if served is None:
        return
    default = default_model(openclaw.config)
    if default != f"{PROVIDER}/{served.model}":
        words = f"its default model is {default}, so only chats that choose ours are learned from"
        yield Finding("warn", "openclaw", words, fix)
    try:
        yield from window(openclaw, served)
        change = plan_connect(openclaw, served, default=False)
    except ConfigError as error:
        yield Finding("fail", "openclaw", str(error), f"then: {fix}")
        return
    if change.empty:
        yield Finding("ok", "connected", "provider entry and plugin are as they should be")
    else:
        words = "provider entry or plugin are not as they should be"
        yield Finding("fail", "connected", words, f"{fix} (shows what would change)")


def window(openclaw: OpenClaw, served: Served) -> Iterator[Finding]:
    """Whether OpenClaw takes a model with this context. Raises `ConfigError` where its version is
    not known."""
    length = served.context_length
    # As seen: what the oldest and the newest that we tried refuse.
    least = 4_000 if openclaw.release >= (2026, 9, 0) else 16_000
    fix = f"a model with {ROOMY_WINDOW} or more"
    if length < least:
        words = (f"OpenClaw {openclaw.version} refuses a model with a context of {length} tokens "
                 f"and answers nothing with it (at least {least})")  # fmt: skip
        yield Finding("fail", "context", words, fix)
    elif length < ROOMY_WINDOW:
        words = f"{length} tokens of context are few: OpenClaw's own prompt may not leave room"
        yield Finding("warn", "context", words, fix)


def _probe(reply: Answer | None) -> Finding:
    if reply is None or reply.status != 200:
        status = "no answer" if reply is None else f"HTTP {reply.status}"
        return Finding("fail", "probe", f"a request gets {status}", "look at the gateway's log")
    source, kind = (reply.headers.get(name) for name in ("x-session-source", "x-turn-type"))
    words = f"answered; session recognised by {source}, taken as a {kind} turn"
    if (source, kind) == ("header:x-session-id", "side"):
        return Finding("ok", "probe", words)
    fix = "something between client and gateway removes the headers"
    return Finding("fail", "probe", words, fix)
