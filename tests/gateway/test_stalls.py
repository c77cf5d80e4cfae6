"""A reply that stands still: nobody who is patient for less than the stall gives up.

OpenClaw ends a run after about 82 s without progress and a stream after about 120 s without a data
chunk; the SDKs' read timeout is what its user sets; Claude Code waits 300 s.
"""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest

from openclaw_rl.config import GatewayConfig
from openclaw_rl.gateway.replies import pace
from tests.gateway.conftest import world


class Stalled(Exception):
    """The stall is over."""


async def sent_during(seconds: float, *, every: float, cost: float = 0.0) -> list[float]:
    """When keep-alives go out in a stall of so many seconds, by a clock of our own."""
    now = last = 0.0
    sent: list[float] = []

    async def sleep(duration: float) -> None:
        nonlocal now
        assert duration > 0
        now += duration
        if now > seconds:
            raise Stalled

    async def send() -> None:
        nonlocal now, last
        last = now
        sent.append(now)
        now += cost

    with pytest.raises(Stalled):
        await pace(lambda: last + every, send, clock=lambda: now, sleep=sleep)
    return sent


async def test_a_stall_of_200_seconds_is_filled_at_a_steady_pace():
    every = GatewayConfig().keepalive_seconds
    assert every <= 82 / 2  # one may be lost
    sent = await sent_during(200, every=every)
    assert sent == [every * n for n in range(1, int(200 / every) + 1)]
    slow = await sent_during(200, every=every, cost=3.0)  # a client that reads slowly
    assert max(b - a for a, b in itertools.pairwise(slow)) == every


async def test_what_is_sent_meanwhile_puts_the_next_one_off():
    now, last, sent = 0.0, 0.0, []

    async def sleep(duration: float) -> None:
        nonlocal now, last
        now += duration
        if now == 10.0:
            last = 9.0  # a token went out one second ago
        if len(sent) == 2:
            raise Stalled

    async def send() -> None:
        nonlocal last
        last = now
        sent.append(now)

    with pytest.raises(Stalled):
        await pace(lambda: last + 10.0, send, clock=lambda: now, sleep=sleep)
    assert sent == [19.0, 29.0]


STALL, PATIENCE, EVERY = 4.0, 2.0, 0.1
"""Seconds: 200 s, 100 s and 5 s made short."""


async def test_the_openai_sdk_outlives_a_stall_longer_than_its_patience(tmp_path, model):
    async with world(tmp_path, model, keepalive_seconds=EVERY) as served:
        await served.chat("hi", stream=True)  # what the SDK loads at first is no part of the stall
        served.engine.say("at last")
        served.engine.gated = True
        client = served.client.with_options(timeout=PATIENCE)
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        loop = asyncio.get_running_loop()
        gate = loop.create_task(open_after(served.engine, STALL))
        began, data, text = loop.time(), 0, ""
        async for chunk in stream:
            data += not text and not chunk.choices[0].delta.content
            text += chunk.choices[0].delta.content or ""
        await gate
        assert loop.time() - began >= STALL > PATIENCE
        assert text == "at last"
        assert data > STALL / PATIENCE  # OpenClaw counts these, and no comments


async def test_the_anthropic_sdk_outlives_a_stall_longer_than_its_patience(tmp_path, model):
    anthropic = pytest.importorskip("anthropic", reason="needs the anthropic SDK (dev extra)")
    async with world(tmp_path, model, keepalive_seconds=EVERY) as served:
        loop = asyncio.get_running_loop()
        hi = {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}
        async with anthropic.AsyncAnthropic(
            base_url=served.url, api_key="-", timeout=PATIENCE, max_retries=0
        ) as client:
            async with client.with_options(timeout=60).messages.stream(**hi) as stream:
                await stream.get_final_message()
            served.engine.say("<think>slowly</think>at last")
            served.engine.gated = True
            began = loop.time()
            gate = loop.create_task(open_after(served.engine, STALL))
            async with client.messages.stream(**hi) as stream:
                message = await stream.get_final_message()
            await gate
        assert loop.time() - began >= STALL > PATIENCE
        assert message.content[-1].text == "at last"


async def test_without_keep_alives_they_would_give_up(tmp_path, model):
    """The stall above is a real one."""
    async with world(tmp_path, model, keepalive_seconds=60.0) as served:
        served.engine.gated = True
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True})
        asking = served.http.post(
            f"{served.url}/v1/chat/completions", data=body, timeout=PATIENCE / 4
        )
        with pytest.raises(TimeoutError):
            await asking


async def open_after(engine, seconds):
    await asyncio.sleep(seconds)  # the stall itself is what is tested
    await engine.open_gate()
