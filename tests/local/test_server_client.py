"""The project's own engine client against the embedded engine: what the gateway does all day."""

from __future__ import annotations

import asyncio

import aiohttp
import numpy as np
import pytest
import torch

from openclaw_rl.engine.client import EngineClient
from openclaw_rl.errors import ContextOverflow
from openclaw_rl.local.engine import EngineCore
from openclaw_rl.local.model import LoadedModel, LoraSpec
from openclaw_rl.local.server import serve_engine
from tests.fakes.model import tiny_model
from tests.local.engine_kit import random_adapter, reference

pytestmark = pytest.mark.slow

PROMPT = list(range(7, 60))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tiny_model(tmp_path_factory.mktemp("model"), scale=3.0, context_length=2048)
    return LoadedModel.load(path, lora=LoraSpec(rank=4, alpha=8))


@pytest.fixture
async def stack(model):
    core = EngineCore(model, threads=1, seed=1).start()
    server = await serve_engine(core)
    async with aiohttp.ClientSession() as http:
        yield core, server, EngineClient("embedded", server.url, http, key=lambda: server.key)
    await server.close()
    core.stop()


async def collect(engine, ids, max_new, rid="t", started=None):
    out, logprobs, versions, finish = [], [], [], None
    sampling = {"temperature": 1.0, "max_new_tokens": max_new, "ignore_eos": True}
    async for delta in engine.generate(ids, sampling, rid=rid):
        out += delta.ids
        if started is not None:
            started.set()
        logprobs += delta.logprobs or []
        versions += [delta.version] * len(delta.ids)
        finish = delta.finish or finish
    return out, logprobs, versions, finish


async def test_generate_and_score_agree_with_transformers(stack, model):
    _, _, engine = stack
    out, logprobs, versions, finish = await collect(engine, PROMPT, 40)
    assert len(out) == len(logprobs) == 40
    assert set(versions) == {"0"}
    assert finish.type == "length"
    want = np.array(reference(model.bare_model().eval(), PROMPT, out))
    assert np.abs(np.array(logprobs) - want).max() < 1e-4
    scored = (await engine.score(PROMPT + out, len(PROMPT))).log_probs
    assert np.abs(np.array(scored) - want).max() < 1e-4


async def test_likeliest_tokens_agree_with_transformers_sampled_and_scored(stack, model):
    _, _, engine = stack
    sampling = {"temperature": 1.0, "max_new_tokens": 30, "ignore_eos": True}
    out, sampled = [], []
    async for delta in engine.generate(PROMPT, sampling, rid="top", top_logprobs=5):
        out += delta.ids
        sampled += delta.top
    scores = await engine.score(PROMPT + out, len(PROMPT), 20)
    with torch.no_grad():
        logits = model.bare_model().eval()(torch.tensor([PROMPT + out])).logits[0]
    want = torch.log_softmax(logits[len(PROMPT) - 1 : -1].float(), -1).topk(20)
    assert torch.tensor([[i for _, i in one] for one in scores.top]).equal(want.indices)
    for lists, k in ((sampled, 5), (scores.top, 20)):
        values = torch.tensor([[value for value, _ in one] for one in lists])
        assert (values - want.values[:, :k]).abs().max() < 1e-4
    assert [[i for _, i in one] for one in sampled] == want.indices[:, :5].tolist()


async def test_case_07_streams_go_on_over_weight_updates_with_versions(stack, model):
    core, _, engine = stack
    started = asyncio.Event()
    calls = [
        asyncio.ensure_future(collect(engine, PROMPT, 300, f"r{i}", started)) for i in range(3)
    ]
    await started.wait()
    for version in (1, 2):
        await asyncio.wrap_future(core.publish(version, random_adapter(model, seed=version)))
    for out, logprobs, versions, finish in await asyncio.gather(*calls):
        assert len(out) == len(logprobs) == len(versions) == 300
        assert versions == sorted(versions)
        assert versions[-1] == "2"
        assert finish.type == "length"


async def test_overflow_is_known_as_such(stack):
    _, _, engine = stack
    with pytest.raises(ContextOverflow) as caught:
        await collect(engine, [9] * 2100, 5)
    assert (caught.value.prompt_tokens, caught.value.limit) == (2100, 2048)
