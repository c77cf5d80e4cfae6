"""`openclaw-rl up` beside an engine outside, in real processes; the engine is a fake vLLM."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from openclaw_rl.engine.chat import ChatTokenizer
from openclaw_rl.journal import Journal
from tests.e2e.system import System, free_port
from tests.fakes.model import tiny_model
from tests.fakes.vllm import FakeVLLM

pytestmark = pytest.mark.slow

START_SECONDS = 240


async def test_a_reply_comes_from_the_first_adapter(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    port = free_port()
    async with FakeVLLM(tokenizer=ChatTokenizer.load(str(model))) as engine:
        engine.say("Hello there.")
        command = (
            "up", "--model", str(model), "--data", str(tmp_path / "data"), "--port", str(port),
            "--engine-url", engine.url, "--train-device", "cpu",
            "--lora-rank", "4", "--custom-rm-path", "openclaw_rl.rewards.feedback.custom_rm",
        )  # fmt: skip
        up = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "openclaw_rl.cli", *command, stdout=asyncio.subprocess.DEVNULL
        )
        try:
            answer = await asyncio.wait_for(_ask(port, up), START_SECONDS)
        finally:
            if up.returncode is None:
                up.send_signal(signal.SIGTERM)
            assert await up.wait() == 0
        assert answer["choices"][0]["message"]["content"] == "Hello there."
        (name,) = engine.adapters
        assert [body["model"] for body in engine.talks] == [name]
        assert (Path(engine.adapters[name]) / "adapter_config.json").is_file()
    with Journal.open(tmp_path / "data" / "journal.db") as journal:
        turn = journal.turn(answer["id"].removeprefix("chatcmpl-"))
    assert turn is not None
    assert set(turn.output_versions) == {"0"}


async def test_an_engine_that_we_started_and_that_dies_comes_back_with_our_weights(
    tmp_path: Path,
) -> None:
    model = tiny_model(tmp_path / "model")
    port, pid = free_port(), tmp_path / "pid"
    command = f"{sys.executable} -m tests.fakes.vllm --port {port} --pid-file {pid}"
    flags = ("--engine-url", f"http://127.0.0.1:{port}", "--engine-cmd", command)
    rest = ("--temperature", "0.6", "--train-device", "cpu", "--lora-rank", "4")
    async with System(tmp_path, model, *flags, *rest) as system:
        before = await _say(system, "Hi.")
        dead = int(pid.read_text())
        os.kill(dead, signal.SIGKILL)
        after = await _say(system, "Are you there?")
        assert int(pid.read_text()) != dead
        with system.journal() as journal:
            turns = [journal.turn(turn) for turn in (before, after)]
            policy = journal.endpoint("policy")
        assert policy is not None
        async with aiohttp.ClientSession() as http, http.get(f"{policy.url}/v1/models") as answer:
            held = [one["id"] for one in (await answer.json())["data"] if one["parent"]]
    assert held == [policy.info["adapter"]]
    for turn in turns:
        assert turn is not None
        assert set(turn.output_versions) == {"0"}
        assert len(turn.output_logprobs) == len(turn.output_ids), "at a temperature of its own"


async def _say(system: System, words: str) -> str:
    """The turn that answers."""
    answer = await system.client.chat.completions.create(
        model="model", messages=[{"role": "user", "content": words}]
    )
    return answer.id.removeprefix("chatcmpl-")


async def _ask(port: int, up: asyncio.subprocess.Process) -> dict:
    body = {"model": "model", "messages": [{"role": "user", "content": "Hi."}]}
    async with aiohttp.ClientSession() as http:
        while True:
            assert up.returncode is None, "it ended"
            try:
                url = f"http://127.0.0.1:{port}/v1/chat/completions"
                async with http.post(url, json=body) as answer:
                    return await answer.json()
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.2)
