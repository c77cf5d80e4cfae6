"""The vLLM client against a real vLLM (skipped with its reason where there is none)."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from openclaw_rl.engine.client import EngineClient
from openclaw_rl.engine.kinds import engine_api
from openclaw_rl.engine.survey import Needs, survey
from openclaw_rl.engine.types import Adapter, Engine, Reply, collect
from openclaw_rl.errors import ConfigError, ContextOverflow, EngineRefused
from tests.vllm.conftest import write_adapter

PROMPT = [1, 4093, 198, 19556, 28, 638, 359, 346, 47, 2, 198, 1, 520, 9531, 198]
_rids = (f"real{n:06d}" for n in itertools.count())


def params(max_new_tokens: int = 24, **more: Any) -> dict[str, Any]:
    return {"max_new_tokens": max_new_tokens, "temperature": 1.0, **more}


async def run(engine: Engine, ids: list[int] = PROMPT, **more: Any) -> Reply:
    sampling = more.pop("sampling", params())
    return await collect(engine.generate(ids, sampling, rid=next(_rids), **more))


async def test_ids_are_the_same_streamed_and_not(
    engine: EngineClient, url: str, http: aiohttp.ClientSession
) -> None:
    greedy = {"temperature": 0.0, "ignore_eos": True}
    streamed = await run(engine, sampling=params(**greedy))
    body = {"prompt": PROMPT, "max_tokens": 24, "logprobs": 1, "return_token_ids": True, **greedy}
    async with http.post(f"{url}/v1/completions", json=body) as answer:
        whole = (await answer.json())["choices"][0]
    assert streamed.ids == whole["token_ids"]
    assert len(streamed.ids) == 24


async def test_each_id_has_its_log_prob(engine: EngineClient) -> None:
    reply = await run(engine, sampling=params(40, ignore_eos=True))
    assert len(reply.ids) == 40
    assert reply.logprobs is not None
    assert len(reply.logprobs) == 40
    assert set(reply.versions) == {"base"}
    scored = (await engine.score([*PROMPT, *reply.ids], len(PROMPT))).log_probs
    gaps = [abs(a - b) for a, b in zip(reply.logprobs, scored, strict=True)]
    print(f"generated against scored: mean {sum(gaps) / 40:.5f}, max {max(gaps):.5f}")
    assert max(gaps) < 0.02


async def test_what_it_is_and_can_do_is_found_out(
    url: str, http: aiohttp.ClientSession, mode: str
) -> None:
    began = time.monotonic()
    found = await survey("auto", url, http, candidates=32)
    print(f"{found.abilities} in {time.monotonic() - began:.2f} s")
    assert found.kind == "vllm"
    assert found.abilities.any_temperature is (mode == "processed_logprobs")
    assert found.abilities.top_logprobs == 20
    assert found.info["context_length"] == 2048
    with pytest.raises(ConfigError, match="--max-logprobs 32"):
        found.check(Needs(candidates=32))
    with pytest.raises(ConfigError, match="is vllm"):
        await survey("sglang", url, http)


async def test_log_probs_at_a_temperature_are_those_sampled_from_or_missing(
    url: str, http: aiohttp.ClientSession
) -> None:
    """Two tokens are 1/T times as far apart as at temperature 1."""
    able = asdict((await survey("auto", url, http)).abilities)
    engine = EngineClient(engine_api("vllm", able), url, http, wait_seconds=120)
    sampling = params(8, temperature=0.5, ignore_eos=True)
    ids: list[int] = []
    tops: list[list[tuple[float, int]]] = []
    async for delta in engine.generate(PROMPT, sampling, rid=next(_rids), top_logprobs=4):
        assert (delta.logprobs is None) is (bool(delta.ids) and not able["any_temperature"])
        ids += delta.ids
        tops += delta.top or []
    assert len(ids) == 8
    if able["any_temperature"]:
        scores = await engine.score([*PROMPT, *ids], len(PROMPT), 4)
        assert scores.top is not None
        for sampled, plain in zip(tops, scores.top, strict=True):
            assert [token for _, token in sampled] == [token for _, token in plain]
            apart = 2 * (plain[0][0] - plain[-1][0])
            assert sampled[0][0] - sampled[-1][0] == pytest.approx(apart, abs=0.02)


async def test_stop_reasons(engine: EngineClient) -> None:
    first = await run(engine, sampling=params(8, temperature=0.0, ignore_eos=True))
    assert first.finish is not None
    assert first.finish.type == "length"
    stop = first.ids[3]
    asked = await run(engine, sampling=params(8, temperature=0.0, stop_token_ids=[stop]))
    assert asked.finish is not None
    assert asked.finish.type == "stop"
    assert asked.ids == first.ids[: first.ids.index(stop) + 1]


async def test_candidates_generated_and_scored(engine: EngineClient) -> None:
    stream = engine.generate(PROMPT, params(8, ignore_eos=True), rid=next(_rids), top_logprobs=4)
    ids: list[int] = []
    tops: list[list[tuple[float, int]]] = []
    async for delta in stream:
        ids += delta.ids
        tops += delta.top or []
    assert [len(top) for top in tops] == [4] * 8
    scores = await engine.score([*PROMPT, *ids], len(PROMPT), 4)
    assert scores.top is not None
    assert [[i for _, i in top] for top in scores.top] == [[i for _, i in top] for top in tops]


async def test_refusals_are_understood(engine: EngineClient) -> None:
    limit = (await engine.model_info())["context_length"]
    with pytest.raises(ContextOverflow) as caught:
        await run(engine, [5] * (limit + 10))
    assert caught.value.limit == limit
    with pytest.raises(ContextOverflow):
        await run(engine, sampling=params(limit + 10))
    with pytest.raises(EngineRefused):
        await run(engine, sampling=params(top_p=7.0))


async def test_more_tokens_than_are_left_of_the_context(engine: EngineClient) -> None:
    limit = (await engine.model_info())["context_length"]
    try:
        reply = await run(engine, [5] * (limit - 4), sampling=params(50, ignore_eos=True))
    except ContextOverflow as error:
        print(f"refused: {error}")
    else:
        print(f"cut to {len(reply.ids)} tokens")
        assert reply.finish is not None
        assert reply.finish.type == "length"


async def test_closing_the_stream_ends_it_there(
    engine: EngineClient, url: str, http: aiohttp.ClientSession
) -> None:
    async with aclosing(
        engine.generate(PROMPT, params(1500, ignore_eos=True), rid=next(_rids))
    ) as deltas:
        await anext(deltas)
    async with asyncio.timeout(30):
        while await _running(url, http):  # noqa: ASYNC110  (an outside process)
            await asyncio.sleep(0.2)


async def _running(url: str, http: aiohttp.ClientSession) -> float:
    async with http.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    found = [line for line in lines if line.startswith("vllm:num_requests_running{")]
    return math.fsum(float(line.rsplit(" ", 1)[1]) for line in found)


async def test_sixteen_streams_at_once(engine: EngineClient) -> None:
    for streams in (1, 16):
        began = time.monotonic()
        sampling = params(48, ignore_eos=True)
        replies = await asyncio.gather(
            *(run(engine, [*PROMPT, 30 + n], sampling=sampling) for n in range(streams))
        )
        took = time.monotonic() - began
        assert all(len(reply.ids) == len(reply.logprobs or ()) == 48 for reply in replies)
        print(f"{streams} streams: {streams * 48 / took:.0f} tokens a second")


async def test_adapters_change_under_load_and_no_reply_fails_or_mixes(
    url: str, http: aiohttp.ClientSession, model_path: Path, tmp_path: Path
) -> None:
    """Eight streams, three versions; each reply is, token for token, its version's own."""
    present: list[Adapter] = []
    engine = EngineClient("vllm", url, http, adapter=lambda: present[-1], wait_seconds=120)
    adapters = [Adapter(f"swap-{tmp_path.name}-{n}", str(n)) for n in range(3)]
    folders = [write_adapter(tmp_path / f"v{n}", model_path, seed=n + 1) for n in range(3)]
    sampling = params(32, temperature=0.0, ignore_eos=True)
    prompts = [[*PROMPT, 30 + n] for n in range(8)]
    alone: dict[str, list[list[int]]] = {}
    for adapter, folder in zip(adapters, folders, strict=True):
        await engine.load_adapter(adapter.name, str(folder))
        present.append(adapter)
        replies = await asyncio.gather(*(run(engine, one, sampling=sampling) for one in prompts))
        alone[adapter.version] = [reply.ids for reply in replies]
        await engine.unload_adapter(adapter.name)
    assert len({tuple(ids[0]) for ids in alone.values()}) == 3, "the adapters do differ"

    present[:] = []
    seen: list[str] = []
    done = asyncio.Event()

    async def talk(n: int) -> None:
        while not done.is_set():
            reply = await run(engine, prompts[n], sampling=sampling)
            assert len(set(reply.versions)) == 1
            assert reply.ids == alone[reply.versions[0]][n]
            seen.append(reply.versions[0])

    talks: list[asyncio.Task[None]] = []
    for adapter, folder in zip(adapters, folders, strict=True):
        began = time.monotonic()
        await engine.load_adapter(adapter.name, str(folder))
        print(f"version {adapter.version} loaded in {time.monotonic() - began:.2f} s")
        old, present = present, [adapter]
        talks = talks or [asyncio.create_task(talk(n)) for n in range(8)]
        while seen.count(adapter.version) < 8:
            await asyncio.sleep(0.1)
            await _raise_failed(talks)
        if old and old[0].name not in engine.in_use:
            await engine.unload_adapter(old[0].name)
    done.set()
    await asyncio.gather(*talks)
    assert set(seen) == {"0", "1", "2"}
    assert await engine.adapters() >= {adapters[-1].name}
    for adapter in adapters:
        if adapter.name in await engine.adapters():
            await engine.unload_adapter(adapter.name)


async def test_texts_are_scored_while_an_adapter_replies(
    url: str, http: aiohttp.ClientSession, model_path: Path, tmp_path: Path
) -> None:
    """vLLM whose adapters may change the output layer dies of this: see docs/engines.md."""
    adapter = Adapter(f"scored-{tmp_path.name}", "1")
    policy = EngineClient("vllm", url, http, adapter=lambda: adapter, wait_seconds=60)
    base = EngineClient("vllm", url, http, wait_seconds=60)
    text = [*PROMPT * 6, 30, 31]
    alone = (await base.score(text, len(PROMPT))).log_probs
    await policy.load_adapter(adapter.name, str(write_adapter(tmp_path / "a", model_path, seed=5)))
    talks = [
        asyncio.create_task(run(policy, [*PROMPT, 30 + n], sampling=params(48, ignore_eos=True)))
        for n in range(4)
    ]
    while not all(talk.done() for talk in talks):
        beside = (await base.score(text, len(PROMPT))).log_probs
        assert max(abs(a - b) for a, b in zip(alone, beside, strict=True)) < 0.02
    for talk in talks:
        assert set((await talk).versions) == {"1"}
    await policy.unload_adapter(adapter.name)


async def _raise_failed(talks: list[asyncio.Task[None]]) -> None:
    for talk in talks:
        if talk.done():
            await talk


async def test_an_engine_without_the_adapter_is_waited_for(
    url: str, http: aiohttp.ClientSession, model_path: Path, tmp_path: Path
) -> None:
    adapter = Adapter(f"late-{tmp_path.name}", "7")
    engine = EngineClient("vllm", url, http, adapter=lambda: adapter, wait_seconds=60)
    waiting = asyncio.Event()
    task = asyncio.create_task(run(engine, on_wait=lambda _: waiting.set()))
    await waiting.wait()
    folder = write_adapter(tmp_path / "late", model_path, seed=9)
    await engine.load_adapter(adapter.name, str(folder))
    assert set((await task).versions) == {"7"}
    with pytest.raises(EngineRefused, match="No adapter found"):
        await engine.load_adapter("bad", str(tmp_path / "nowhere"))
    await engine.unload_adapter(adapter.name)
