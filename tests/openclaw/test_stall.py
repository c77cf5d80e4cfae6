"""A real OpenClaw and a reply that stands still.

2026.9 gives up a stream after 120 s without a data chunk, but not one from the loopback, and
2026.3.23 waited 200 s in silence: here a stall is outlived without keep-alives too. What they are
worth to a client that is less patient is shown in `tests/gateway/test_stalls.py`.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import aiohttp
import pytest

from tests.fakes.model import tiny_tokenizer
from tests.gateway.conftest import World, world
from tests.openclaw.real import TOKEN, RealOpenClaw, why_not

SECONDS = float(os.environ.get("OPENCLAW_STALL") or 0)
CONTEXT = 100_000


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [0, 3], ids=["before the first token", "within the reply"])
async def test_a_real_openclaw_outlives_a_stall(tmp_path: Path, tokens: int):
    if not SECONDS:
        pytest.skip("OPENCLAW_STALL is not set: a stall of so many seconds (200) is waited for")
    if reason := why_not():
        pytest.skip(reason)
    model = tiny_tokenizer(tmp_path / "tiny")
    (model / "config.json").write_text("{}")
    limits = {"context_length": CONTEXT, "max_tokens": 64}
    async with (
        world(tmp_path / "data", model, **limits) as served,
        RealOpenClaw(tmp_path / "openclaw", served.url) as openclaw,
    ):
        served.engine.context_length = CONTEXT
        served.engine.gated = True
        served.engine.say("Here at last.")
        asking = asyncio.create_task(ask(openclaw, "Are you there?"))
        await served.engine.wait_until(lambda: bool(served.engine.requests), 120)
        await served.engine.allow(tokens)
        await asyncio.wait({asking}, timeout=SECONDS)  # the stall itself
        assert not asking.done(), await asking
        assert len(served.engine.requests) == 1  # it has not asked again
        await served.engine.open_gate()
        assert await asking == "Here at last."
        check(served)


async def ask(openclaw: RealOpenClaw, text: str) -> str:
    """As `RealOpenClaw.say`, with more patience than OpenClaw has."""
    body = {"model": "openclaw", "user": "ann", "messages": [{"role": "user", "content": text}]}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SECONDS + 300)) as http,
        http.post(
            f"http://127.0.0.1:{openclaw.port}/v1/chat/completions",
            json=body,
            headers={"Authorization": f"Bearer {TOKEN}"},
        ) as response,
    ):
        assert response.status == 200, await response.text()
        return str((await response.json())["choices"][0]["message"]["content"])


def check(served: World) -> None:
    """One turn, served whole."""
    outcomes = served.journal.outcomes()
    assert (outcomes.main, outcomes.counters.get("disconnected", 0)) == (1, 0)
    turn = next(turn for turn in served.turns() if turn.kind == "main")
    assert served.tokenizer.decode(turn.output_ids) == "Here at last."
