"""The gateway, a real sglang-router, and two embedded engines behind it.

Skipped where the router is not installed; SGLANG_ROUTER names its program elsewhere
(`pip install sglang-router` in an environment of its own).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest

from openclaw_rl.local.engine import EngineCore
from openclaw_rl.local.model import LoadedModel, LoraSpec
from openclaw_rl.local.server import EngineServer, serve_engine
from tests.fakes.model import tiny_model
from tests.gateway.conftest import World, world

ROUTER = os.environ.get("SGLANG_ROUTER") or shutil.which("sglang-router")
pytestmark = pytest.mark.skipif(
    ROUTER is None, reason="no sglang-router: pip install it, or set SGLANG_ROUTER to its program"
)
SESSIONS = 6
KEY = "of-both-engines"


@asynccontextmanager
async def routed(*workers: str) -> AsyncIterator[str]:
    """A router before `workers`, sticky by X-SMG-Routing-Key."""
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        port, metrics = one.getsockname()[1], two.getsockname()[1]
    assert ROUTER is not None
    program = await asyncio.create_subprocess_exec(
        ROUTER, "launch", "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *workers,
        "--policy", "manual", "--assignment-mode", "min_group",
        "--api-key", KEY, "--prometheus-port", str(metrics),
        "--health-check-interval-secs", "1", "--health-failure-threshold", "1",
        "--retry-max-retries", "2", stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        async with aiohttp.ClientSession() as http, asyncio.timeout(120):
            while not await _ready(http, url):
                assert program.returncode is None, "the router ended"
                await asyncio.sleep(0.2)
        yield url
    finally:
        if program.returncode is None:
            program.terminate()
            await program.wait()


async def _ready(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(f"{url}/readiness") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


async def ask(served: World, session: str) -> str:
    """One turn; the version of its tokens tells the engine that made them."""
    answer = await served.client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": f"Hello from {session}."}],
        max_tokens=5,
        extra_headers={"X-Session-Id": session},
    )
    turn = served.journal.turn(answer.id.removeprefix("chatcmpl-"))
    assert turn is not None
    (version,) = set(turn.output_versions)
    return str(version)


async def test_sessions_stay_with_an_engine_and_go_on_when_it_dies(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model", scale=3.0)
    servers: dict[str, tuple[EngineCore, EngineServer]] = {}
    for version in (1, 2):
        loaded = LoadedModel.load(path, lora=LoraSpec(rank=4))
        core = EngineCore(loaded, threads=1, seed=version).start()
        await asyncio.wrap_future(core.publish(version, None))
        servers[str(version)] = (core, await serve_engine(core, key=KEY))
    names = [f"session-{n}" for n in range(SESSIONS)]
    try:
        async with routed(*(server.url for _, server in servers.values())) as url:
            engine = SimpleNamespace(url=url)
            async with world(
                tmp_path, path, engine=engine, engine_api_key=KEY, engine_wait_seconds=60.0
            ) as served:
                homes = {name: await ask(served, name) for name in names}
                assert set(homes.values()) == {"1", "2"}
                for _ in range(3):
                    again = await asyncio.gather(*(ask(served, name) for name in names))
                    assert dict(zip(names, again, strict=True)) == homes

                core, server = servers.pop(homes[names[0]])
                (other,) = servers
                await server.close()
                core.stop()
                after = Counter(await asyncio.gather(*(ask(served, name) for name in names)))
                assert after == {other: SESSIONS}
    finally:
        for core, server in servers.values():
            await server.close()
            core.stop()
