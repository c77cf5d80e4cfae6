"""What runs beside slime: engines' addresses for the journal, and gateway and judge as a child.

Guarantees: a gateway that answers is left alone, only the own child is ever ended, and it does not
outlive this process, whatever ends it. A child that dies is started again, also while a batch is
waited for; one that says it is misconfigured ends the wait with its own words.

Their configuration is a file (`openclaw_rl_config` in slime's `--custom-config-path`); keys come
from the environment, which slime does not print.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openclaw_rl.config import Config, environment, load_config, settings
from openclaw_rl.errors import MISCONFIGURED, ConfigError
from openclaw_rl.journal.lock import gateway_lock

log = logging.getLogger("openclaw_rl.slime")

LOOPS = ("serve", "judge")
FROM_SLIME = {
    "judge.custom_rm_path": "custom_rm_path",
    "judge.reward_key": "reward_key",
    "gateway.temperature": "rollout_temperature",
    "gateway.context_length": "sglang_context_length",
    "gateway.max_tokens": "rollout_max_response_len",
}
"""Settings of ours that a flag of slime says -> its name in slime's `args`."""
RESTART_SECONDS = 5.0
_ASK_SECONDS, _STOP_SECONDS = 5.0, 40.0


def addresses(args: Any) -> dict[str, str]:
    """Role -> address of its engine: the policy, and what `--sglang-config` serves as PRM, judge
    and teacher. `prm_engine`, `judge_engine`, `teacher_engine` name another model of that file
    than the one named like the role; "policy" is the policy. Raises `ConfigError`."""
    routers = dict(getattr(args, "sglang_model_routers", None) or {})
    if getattr(args, "sglang_router_ip", None):  # the first model, which slime trains
        routers.setdefault("policy", (args.sglang_router_ip, args.sglang_router_port))
    if "policy" not in routers:
        raise ConfigError("slime has published no router for the policy (args.sglang_router_ip)")
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
    """What the engine says of itself (`weight_version`, `model_path`); empty where it does not.

    SGLang calls the first form the old one; sglang-router 0.3 passes on only that.
    """
    return ask(url + "/get_model_info") or ask(url + "/model_info")


def ask(url: str) -> dict[str, Any]:
    """The JSON object that a GET of `url` gives; empty where there is none."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_ASK_SECONDS) as response:
            body = json.load(response)
    except (OSError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}


def services_config(args: Any, environ: Mapping[str, str]) -> Config:
    """The configuration of gateway and judge: the file that `args.openclaw_rl_config` names, over
    it what slime's own `args` say, secrets from `environ`. Raises `ConfigError`."""
    journal = Path(args.journal_path)
    if journal.name != "journal.db":
        raise ConfigError(f"journal_path: the file must be called journal.db, not {journal.name}")
    given = {
        "model.path": args.hf_checkpoint,
        "data.path": journal.parent,
        **{key: getattr(args, name, None) for key, name in FROM_SLIME.items()},
    }
    keys = {
        setting.env: environ.get(setting.env, "")
        for setting in settings()
        if setting.env and not setting.flag
    }
    flags = {key: str(value) for key, value in given.items() if value is not None}
    return load_config(flags, keys, getattr(args, "openclaw_rl_config", None))


class Services:
    """Gateway and judge of one run, kept up by one child (`openclaw-rl up serve judge`).
    `args.start_services` names which to start (both)."""

    def __init__(self, args: Any) -> None:
        wanted = getattr(args, "start_services", None)
        self._loops = list(LOOPS if wanted is None else wanted)
        if isinstance(wanted, str) or not set(self._loops) <= set(LOOPS):
            raise ConfigError(f"start_services: a list of {', '.join(LOOPS)}, not {wanted!r}")
        self.config = services_config(args, environment()) if self._loops else Config()
        self.child: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._last = ""
        self._next_start, self._serves = 0.0, False

    def ensure(self) -> None:
        """Start what is wanted and not there, also what has ended since, but not at once again.
        Raises `ConfigError` where it has ended for good."""
        status = None if self.child is None else self.child.poll()
        if status == MISCONFIGURED:
            assert self._reader is not None
            self._reader.join(_ASK_SECONDS)
            raise ConfigError(f"gateway or judge cannot run: {self._last}")
        if (self.child is not None and status is None) or time.monotonic() < self._next_start:
            return
        self._next_start = time.monotonic() + RESTART_SECONDS
        if status is not None:
            log.warning("[slime] gateway and judge ended with status %d: again", status)
        loops, url = list(self._loops), self.config.gateway.url
        if self._serves:
            try:
                gateway_lock(self.config.journal_path).close()
            except ConfigError:  # the last one's gateway is still ending
                return
        elif "serve" in loops and "engine" in ask(url + "/healthz"):
            loops.remove("serve")  # there is one
        if not loops:
            return
        self._serves = "serve" in loops
        command = [sys.executable, "-m", "openclaw_rl.cli", "up", *loops]
        command += ["--supervised", "--config", "-"]
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        assert self.child.stdin is not None
        # The child reads its configuration, secrets included, and ends when this pipe closes.
        self.child.stdin.write(self.config.model_dump_json() + "\n")
        self.child.stdin.flush()
        self._reader = threading.Thread(target=self._relay, args=(self.child,), daemon=True)
        self._reader.start()

    def close(self) -> None:
        """End the child that was started here."""
        if self.child is not None and self.child.poll() is None:
            self.child.terminate()
            try:
                self.child.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.child.kill()
                self.child.wait()

    def _relay(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            self._last = line.strip() or self._last
            log.info("%s", line.rstrip())
