"""Weights that are adapters at an engine outside, as the gateway meets them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.engine.chat import ChatTokenizer
from openclaw_rl.journal import Journal
from tests.fakes.vllm import FakeVLLM
from tests.gateway.conftest import World, eventually, world


def announce(journal: Journal, url: str, version: int) -> None:
    info = {"engine": "vllm", "adapter": f"name-{version}", "weight_version": str(version)}
    journal.publish("policy", url, info, time.time())


def said(journal: Journal) -> tuple[Any, Any]:
    found = journal.endpoint("gateway")
    info = found.info if found is not None else {}
    return info.get("adapter"), info.get("in_use")


async def ask(served: World) -> str:
    answer = await served.client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hello."}]
    )
    return answer.choices[0].message.content or ""


@pytest.mark.parametrize("engine_url", [None])
async def test_new_requests_use_the_new_version_and_the_old_one_is_in_use_to_the_end(
    tmp_path: Path, model: Path, engine_url: None
) -> None:
    async with FakeVLLM(tokenizer=ChatTokenizer.load(str(model))) as engine:
        engine.adapters |= {"name-1": "/1", "name-2": "/2"}
        changes = {"engine": engine, "engine_url": engine_url, "engine_kind": "vllm"}
        async with world(tmp_path, model, **changes) as served:
            engine.gated = True
            engine.say("First.")
            engine.say("Second.")
            announce(served.journal, engine.url, 1)
            old = asyncio.create_task(ask(served))
            await engine.arrived(1)
            announce(served.journal, engine.url, 2)
            await eventually(lambda: said(served.journal) == ("name-2", ["name-1"]))
            new = asyncio.create_task(ask(served))
            await engine.arrived(2)
            assert [body["model"] for body in engine.raw] == ["name-1", "name-2"]
            await engine.open_gate()
            assert {await old, await new} == {"First.", "Second."}
            await eventually(lambda: said(served.journal) == ("name-2", []))
            turns = [
                served.journal.turn(request.rid.partition("-")[0]) for request in engine.requests
            ]
        versions = [set(turn.output_versions) for turn in turns if turn is not None]
        assert versions == [{"1"}, {"2"}]
