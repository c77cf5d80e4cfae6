"""What runs beside slime: engines' addresses into the journal, gateway and judge as children.

Guarantees: a gateway that answers is left alone, only own children are ever ended, and they do
not outlive this process, whatever ends it. A child that says it is misconfigured ends the wait
for a batch with its own words instead of starving it.

Settings are read from slime's `args` (`--custom-config-path`): the names of `hook_args.py` for the
judge, `gateway_<name>` for those of `[gateway]` in `settings.py`; keys come from the environment,
which slime does not print.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import sys
import threading
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openclaw_rl.errors import ConfigError
from openclaw_rl.settings import GatewayConfig, JudgeConfig, TrainConfig
from openclaw_rl.supervisor import MISCONFIGURED, STOP_SECONDS, Loop, supervise

log = logging.getLogger("openclaw_rl.slime")

SERVICES = ("serve", "judge", "replay")
_ASK_SECONDS = 5.0


def addresses(args: Any) -> dict[str, str]:
    """Role -> address of its engine: the policy, and what `--sglang-config` serves as PRM, judge
    and teacher. `prm_engine`, `judge_engine`, `teacher_engine` name another model of that file
    than the one named like the role; "policy" is the policy. Raises `ConfigError`."""
    routers = dict(getattr(args, "sglang_model_routers", None) or {})
    if getattr(args, "sglang_router_ip", None):  # the first model, which slime trains
        routers.setdefault("policy", (args.sglang_router_ip, args.sglang_router_port))
    if "policy" not in routers:
        raise ConfigError("slime has published no router of the policy (args.sglang_router_ip)")
    found = {"policy": routers["policy"]}
    for role in ("prm", "judge", "teacher"):
        name = getattr(args, f"{role}_engine", None)
        if name and name not in routers:
            known = ", ".join(sorted(routers))
            raise ConfigError(f"{role}_engine: --sglang-config serves no {name!r}, only {known}")
        if (name or role) in routers:
            found[role] = routers[name or role]
    return {role: f"http://{ip}:{port}" for role, (ip, port) in found.items()}


def model_info(url: str) -> dict[str, Any]:
    """What the engine says of itself (`weight_version`, `model_path`); empty where it does not."""
    for path in ("/model_info", "/get_model_info"):
        body = _ask(url + path)
        if body:
            return body
    return {}


def _ask(url: str) -> dict[str, Any]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_ASK_SECONDS) as response:
            body = json.load(response)
    except (OSError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}


class Services:
    """Gateway, judge, and past conversations once, of one run. `args.start_services` names which to
    start (all)."""

    def __init__(self, args: Any) -> None:
        wanted = getattr(args, "start_services", None)
        self._wanted: Sequence[str] = SERVICES if wanted is None else (wanted or ())
        unknown = [name for name in self._wanted if name not in SERVICES]
        if unknown or isinstance(wanted, str):
            raise ConfigError(f"start_services: a list of {', '.join(SERVICES)}, not {wanted!r}")
        self._args = args
        self._children: dict[str, _Child] = {}
        self._commands = {name: command(args, name) for name in self._wanted}

    def ensure(self) -> None:
        """Start what is wanted and neither ours nor answering. Raises as `check`."""
        self.check()
        for name in self._wanted:
            if name in self._children:
                continue
            if name == "serve" and "engine" in _ask(gateway_url(self._args) + "/healthz"):
                log.info("[slime] a gateway answers at %s: it is used", gateway_url(self._args))
                continue
            self._children[name] = _Child(Loop(name, self._commands[name], once=name == "replay"))

    def check(self) -> None:
        """Raise `ConfigError` where a child has ended for good."""
        for child in self._children.values():
            child.check()

    def close(self) -> None:
        """End the children that were started here."""
        for child in self._children.values():
            child.stop()
        self._children.clear()


class _Child:
    """One supervised process, kept by a thread of its own."""

    def __init__(self, loop: Loop) -> None:
        self._loop, self._last, self._status = loop, "", 0
        self._event_loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=loop.name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        work = supervise([self._loop], self._emit, stop=self._stop)
        try:
            self._status = self._event_loop.run_until_complete(work)
        except ConfigError as error:
            self._last, self._status = str(error), MISCONFIGURED
        finally:
            self._event_loop.close()

    def _emit(self, line: str) -> None:
        self._last = line
        log.info("%s", line)

    def check(self) -> None:
        if not self._thread.is_alive() and self._status == MISCONFIGURED:
            raise ConfigError(f"{self._loop.name} cannot run: {self._last}")

    def stop(self) -> None:
        if self._thread.is_alive():
            self._event_loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(2 * STOP_SECONDS)


def gateway_url(args: Any) -> str:
    """Where the gateway listens, seen from this machine."""
    default = GatewayConfig()
    host = getattr(args, "gateway_host", None) or default.host
    port = getattr(args, "gateway_port", None) or default.port
    return dataclasses.replace(default, host=host, port=port).url


def command(args: Any, name: str) -> list[str]:
    """The command of one service: `openclaw-rl serve`, `judge` or `replay` with the settings of
    `args`."""
    journal = Path(args.journal_path)
    if journal.name != "journal.db":
        raise ConfigError(f"journal_path: the file must be called journal.db, not {journal.name}")
    flags = {"--model": args.hf_checkpoint, "--data": str(journal.parent)}
    if name == "serve":
        flags["--temperature"] = getattr(args, "rollout_temperature", None)
        # Its turns must hold the policy's candidates, or the judge has nothing to compare.
        flags["--opd-top-k"] = getattr(args, "opd_top_k", None)
    if name != "judge":
        flags |= _flags(args, GatewayConfig, "gateway_")
    else:
        # The weights of both signals too: the judge asks for none that counts nothing.
        flags |= _flags(args, JudgeConfig) | {
            flag: value
            for flag, value in _flags(args, TrainConfig).items()
            if flag.startswith(("--w-", "--opd-"))
        }
    words = [word for flag, value in flags.items() if value is not None
             for word in (flag, str(value))]  # fmt: skip
    return [sys.executable, "-m", "openclaw_rl.cli", name, "--supervised", *words]


def _flags(args: Any, section: type, prefix: str = "") -> dict[str, Any]:
    """Flags of a section of the settings that `args` has a value for: `prefix` and the setting's
    name, or without a prefix the flag's own (`--prm-url`: `args.prm_url`)."""
    found = {}
    for item in dataclasses.fields(section):
        flag = item.metadata["flag"]
        if flag is not None:
            name = prefix + item.name if prefix else flag.removeprefix("--").replace("-", "_")
            found[flag] = getattr(args, name, None)
    return {flag: value for flag, value in found.items() if value is not None}
