"""What runs beside slime: engines' addresses into the journal, gateway and judge as children.

Guarantees: a gateway that answers is left alone, only own children are ever ended, and they do
not outlive this process, whatever ends it. A child that says it is misconfigured ends the wait
for a batch with its own words instead of starving it.

Settings are read from slime's `args` (`--custom-config-path`): the names of `hook_args` for the
judge, `gateway_<name>` for those of `[gateway]`; keys come from the environment,
which slime does not print.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openclaw_rl.cli.supervisor import MISCONFIGURED, STOP_SECONDS, Loop, supervise
from openclaw_rl.config import Config, GatewayConfig, environment, load_config, settings
from openclaw_rl.errors import ConfigError

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
        self._config = ""
        if self._wanted:
            self._config = services_config(args, environment()).model_dump_json()

    def ensure(self) -> None:
        """Start what is wanted and neither ours nor answering. Raises as `check`."""
        self.check()
        for name in self._wanted:
            if name in self._children:
                continue
            if name == "serve" and "engine" in _ask(gateway_url(self._args) + "/healthz"):
                log.info("[slime] a gateway answers at %s: it is used", gateway_url(self._args))
                continue
            command = [sys.executable, "-m", "openclaw_rl.cli", name, "--supervised"]
            loop = Loop(name, command, self._config, once=name == "replay")
            self._children[name] = _Child(loop)

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
    return default.model_copy(update={"host": host, "port": port}).url


def services_config(args: Any, environ: Mapping[str, str]) -> Config:
    """The configuration of gateway, judge and replay as `args` have it, secrets from `environ`.
    Raises `ConfigError`."""
    journal = Path(args.journal_path)
    if journal.name != "journal.db":
        raise ConfigError(f"journal_path: the file must be called journal.db, not {journal.name}")
    given = {
        "model.path": args.hf_checkpoint,
        "data.path": journal.parent,
        "gateway.temperature": getattr(args, "rollout_temperature", None),
    }
    for setting in settings("gateway", "judge", "train"):
        # Of training, what judge and gateway need: which signals count, and over what candidates.
        if setting.flag and (setting.section != "train" or setting.name.startswith(("w_", "opd_"))):
            gateway = setting.section == "gateway"
            name = f"gateway_{setting.name}" if gateway else setting.attribute
            if (value := getattr(args, name, None)) is not None:
                given[setting.key] = value
    keys = {
        setting.env: environ.get(setting.env, "")
        for setting in settings()
        if setting.env and not setting.flag
    }
    return load_config(
        {name: str(value) for name, value in given.items() if value is not None}, keys
    )
