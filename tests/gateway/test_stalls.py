"""A reply that stands still: nobody who is patient for less than the stall gives up.

OpenClaw ends a run after about 82 s without progress and a stream after about 120 s without a data
chunk; the SDKs' read timeout is what its user sets; Claude Code waits 300 s.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.gateway.conftest import world

pytestmark = pytest.mark.slow

STALL, PATIENCE, EVERY = 4.0, 2.0, 0.1
"""Seconds: 200 s, 100 s and 5 s made short."""
HI = {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}


async def by_openai(served):
    stream = await served.client.with_options(timeout=PATIENCE).chat.completions.create(
        model="tiny", messages=HI["messages"], stream=True
    )
    text, data = "", 0
    async for chunk in stream:
        data += not text and not chunk.choices[0].delta.content
        text += chunk.choices[0].delta.content or ""
    assert data > STALL / PATIENCE  # OpenClaw counts these, and no comments
    return text


async def by_anthropic(served):
    anthropic = pytest.importorskip("anthropic", reason="needs the anthropic SDK (dev extra)")
    async with (
        anthropic.AsyncAnthropic(
            base_url=served.url, api_key="-", timeout=PATIENCE, max_retries=0
        ) as client,
        client.messages.stream(**HI) as stream,
    ):
        return (await stream.get_final_message()).content[-1].text


@pytest.mark.parametrize("ask", [by_openai, by_anthropic])
async def test_an_sdk_outlives_a_stall_longer_than_its_patience(tmp_path, model, ask):
    async with world(tmp_path, model, keepalive_seconds=EVERY) as served:
        served.engine.say("at last")
        served.engine.gated = True
        asking = asyncio.ensure_future(ask(served))
        await served.engine.arrived(1)
        await asyncio.sleep(STALL)  # the stall itself is what is tested
        assert not asking.done()
        await served.engine.open_gate()
        assert await asking == "at last"


async def test_without_keep_alives_they_would_give_up(tmp_path, model):
    """The stall above is a real one."""
    async with world(tmp_path, model, keepalive_seconds=60.0) as served:
        served.engine.gated = True
        with pytest.raises(TimeoutError):
            await served.http.post(
                f"{served.url}/v1/chat/completions", json={**HI, "stream": True}, timeout=0.5
            )
