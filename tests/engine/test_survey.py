"""What an engine is and can do, asked of fakes that were started in one way or another."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from aiohttp import web

from openclaw_rl.engine import survey as surveying
from openclaw_rl.engine.survey import Needs, survey
from openclaw_rl.errors import ConfigError, EngineUnavailable
from tests.fakes.engine import FakeEngine
from tests.fakes.vllm import FakeVLLM


@pytest.mark.parametrize("said", ["auto", "itself"])
@pytest.mark.parametrize(("kind", "fake"), [("sglang", FakeEngine), ("vllm", FakeVLLM)])
async def test_the_engine_says_what_it_is(
    http: aiohttp.ClientSession, kind: str, fake: type[FakeEngine], said: str
) -> None:
    async with fake(context_length=512) as engine:
        found = await survey(kind if said == "itself" else said, engine.url, http)
        assert found.kind == kind
        assert found.info["context_length"] == 512
        assert engine.adapters == {}, "nothing is left there"


async def test_a_wrong_name_is_refused(http: aiohttp.ClientSession) -> None:
    async with FakeVLLM() as engine:
        with pytest.raises(ConfigError, match=f"--engine sglang: .* at {engine.url} is vllm"):
            await survey("sglang", engine.url, http)


async def test_an_unknown_server_must_be_named(http: aiohttp.ClientSession) -> None:
    async with FakeVLLM() as engine:
        engine.owned_by = "somebody"
        with pytest.raises(ConfigError, match=r"--engine sglang\|vllm"):
            await survey("auto", engine.url, http)
        assert (await survey("vllm", engine.url, http)).kind == "vllm"


async def test_an_absent_engine_may_come_yet(http: aiohttp.ClientSession) -> None:
    async with FakeVLLM() as engine:
        url = engine.url
    with pytest.raises(EngineUnavailable):
        await survey("auto", url, http)


async def test_an_engine_that_gives_no_token_is_not_waited_for_in_silence(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surveying, "_SECONDS", 0.2)
    async with FakeVLLM() as engine:
        engine.paused = True
        with pytest.raises(EngineUnavailable, match="it answers, but generates no token"):
            await survey("auto", engine.url, http)


@pytest.mark.parametrize("processed", [False, True])
async def test_where_vllm_takes_its_log_probs_is_found_out(
    http: aiohttp.ClientSession, processed: bool
) -> None:
    async with FakeVLLM(processed=processed) as engine:
        found = await survey("auto", engine.url, http)
        assert found.abilities.any_temperature is processed
        found.check(Needs(temperature=1.0))
        if processed:
            found.check(Needs(temperature=0.6))
        else:
            with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
                found.check(Needs(temperature=0.6))


async def test_how_many_candidates_vllm_gives_is_found_out(http: aiohttp.ClientSession) -> None:
    async with FakeVLLM(max_logprobs=24) as engine:
        found = await survey("auto", engine.url, http, 32)
        assert found.abilities.top_logprobs == 24
        with pytest.raises(ConfigError, match="start it with --max-logprobs 32"):
            found.check(Needs(candidates=32))
        engine.max_logprobs = 32
        (await survey("auto", engine.url, http, 32)).check(Needs(candidates=32))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"updating": False}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"),
        ({"enable_lora": False}, "--enable-lora"),
        ({"max_logprobs": 0}, "max allowed: 0"),
    ],
)
async def test_a_vllm_that_cannot_serve_our_weights_is_refused(
    http: aiohttp.ClientSession, options: dict[str, Any], words: str
) -> None:
    async with FakeVLLM(**options) as engine:
        with pytest.raises(ConfigError, match=words) as caught:
            await survey("auto", engine.url, http)
        assert "\n" not in str(caught.value)


async def test_a_vllm_that_gives_logits_for_log_probs_is_refused(
    http: aiohttp.ClientSession,
) -> None:
    async with FakeVLLM() as engine:
        engine.logprob = lambda token, position: 17.5
        with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
            await survey("auto", engine.url, http)


async def test_a_refused_key_is_said(http: aiohttp.ClientSession) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": "Unauthorized"}, status=401)

    app = web.Application()
    app.router.add_get("/v1/models", refuse)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        with pytest.raises(ConfigError, match="ENGINE_API_KEY"):
            await survey("auto", f"http://127.0.0.1:{port}", http)
    finally:
        await runner.cleanup()
