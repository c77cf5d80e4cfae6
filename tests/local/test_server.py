"""The engine over HTTP, as SGLang's clients see it."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from openclaw_rl.local.engine import EngineCore
from openclaw_rl.local.model import LoadedModel, LoraSpec
from openclaw_rl.local.sampling import GenerateRequest, SamplingParams
from openclaw_rl.local.server import serve_engine
from tests.fakes.model import tiny_model
from tests.local.engine_kit import random_adapter

pytestmark = pytest.mark.slow

PROMPT = list(range(7, 60))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tiny_model(tmp_path_factory.mktemp("model"), scale=3.0, context_length=2048)
    return LoadedModel.load(path, lora=LoraSpec(rank=4, alpha=8))


@pytest.fixture
def core(model):
    core = EngineCore(model, prefill_tokens=64, threads=1, seed=1).start()
    yield core
    core.stop()


@pytest.fixture
async def server(core):
    server = await serve_engine(core)
    yield server
    await server.close()


@pytest.fixture
async def http(server):
    async with aiohttp.ClientSession(headers=bearer(server.key)) as session:
        yield session


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def body(ids=PROMPT, **values):
    names = ("rid", "stream", "logprob_start_len", "top_logprobs_num")
    top = {name: values.pop(name) for name in names if name in values}
    sampling = {"ignore_eos": True, "max_new_tokens": 6, **values}
    return {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, **top}


async def post(http, url, value):
    async with http.post(url, json=value) as response:
        text = await response.text()
        return response.status, json.loads(text) if text.startswith("{") else text


async def events(response):
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


async def test_a_reply_has_sglangs_form(http, server):
    status, reply = await post(http, f"{server.url}/generate", body(rid="r1", top_logprobs_num=2))
    meta = reply["meta_info"]
    assert status == 200
    assert len(reply["output_ids"]) == 6
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [
        [i] for i in reply["output_ids"]
    ]
    assert all(entry[0] <= 0 for entry in meta["output_token_logprobs"])
    assert [len(top) for top in meta["output_top_logprobs"]] == [2] * 6
    assert meta["input_token_logprobs"] == []
    assert meta["id"] == "r1"
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), 6)
    assert meta["weight_version"] == "0"


async def test_a_stream_gives_each_token_once_says_so_and_ends_with_done(http, server):
    async with http.post(f"{server.url}/generate", json=body(stream=True)) as response:
        raw = await response.text()
    seen = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    assert raw.endswith("data: [DONE]\n\n")
    assert sum(len(event["output_ids"]) for event in seen) == 6
    assert sum(len(event["meta_info"]["output_token_logprobs"]) for event in seen) == 6
    assert seen[-1]["meta_info"]["completion_tokens"] == 6
    assert all(event["meta_info"]["incremental"] is True for event in seen)


async def test_a_stream_costs_what_the_reply_is_long(http, server):
    url, value = f"{server.url}/generate", body(stream=True, max_new_tokens=600)
    async with http.post(url, json=value) as response:
        raw = await response.text()
    tokens_of = [
        json.loads(line[6:])["output_ids"] for line in raw.splitlines() if line[6:7] == "{"
    ]
    assert sum(map(len, tokens_of)) == 600
    assert len(raw) < 600 * len(tokens_of) + 100 * 600


async def test_large_pieces_are_of_one_version_each(http, server, core, model):
    """Who does not read along asks for few events."""
    url, pieces = f"{server.url}/generate", []
    value = body(stream=True, max_new_tokens=1500, stream_interval=200)
    async with http.post(url, json=value) as response:
        async for event in events(response):
            pieces.append((event["meta_info"]["weight_version"], len(event["output_ids"])))
            if len(pieces) == 1:
                await asyncio.wrap_future(core.publish(1, random_adapter(model)))
    assert sum(tokens for _, tokens in pieces) == 1500
    assert {version for version, _ in pieces} == {"0", "1"}
    assert len(pieces) <= 1500 // 200 + 2


async def test_case_46_what_clients_ask_for_is_served(http, server):
    asked = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "frequency_penalty": 0.5,
        "presence_penalty": -0.5, "repetition_penalty": 1.1,
        "stop": ["never said"], "stop_token_ids": [0],
    }  # fmt: skip
    status, _ = await post(http, f"{server.url}/generate", body(**asked))
    assert status == 200


async def test_scoring_and_the_base_prefix(http, server, core, model):
    core.publish(4, random_adapter(model)).result()
    scored = {}
    for name, url in (("policy", server.url), ("base", server.base_url)):
        _, reply = await post(
            http,
            f"{url}/generate",
            body(max_new_tokens=0, logprob_start_len=3),
        )
        meta = reply["meta_info"]
        assert reply["output_ids"] == []
        assert [entry[1] for entry in meta["input_token_logprobs"]] == PROMPT[4:]
        scored[name] = [entry[0] for entry in meta["input_token_logprobs"]]
        assert meta["weight_version"] == {"policy": "4", "base": "base"}[name]
    assert max(abs(a - b) for a, b in zip(*scored.values(), strict=True)) > 0.01
    async with http.get(f"{server.base_url}/model_info") as response:
        assert (await response.json())["weight_version"] == "base"
    async with http.get(f"{server.url}/model_info") as response:
        info = await response.json()
    assert info["weight_version"] == "4"
    assert info["context_length"] == 2048


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[1, 2]]}, "input_ids"),
        ({"input_ids": [100000]}, "input_ids"),
        ({"input_ids": [8], "rid": 3}, "rid"),
        ({"input_ids": [8], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"input_ids": [8], "sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"input_ids": [8], "sampling_params": {"temperature": 10**400}}, "temperature"),
        ({"input_ids": [8], "sampling_params": {"top_k": 10**100}}, "top_k"),
        ({"input_ids": [8], "sampling_params": {"stop": 5}}, "stop"),
        ({"input_ids": [8], "sampling_params": {"top_p": 0}}, "top_p"),
        ({"input_ids": [8], "sampling_params": {"max_new_tokens": -3}}, "max_new_tokens"),
        ({"input_ids": [8], "sampling_params": {"json_schema": "{}"}}, "json_schema"),
        ({"input_ids": [8], "sampling_params": {"n": 2}}, "sampling_params.n"),
        ({"input_ids": [8], "top_logprobs_num": 100000}, "top_logprobs_num"),
        ({"input_ids": [8], "logprob_start_len": 2**40}, "logprob_start_len"),
        ([1], "body"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(http, server, value, words):
    status, reply = await post(http, f"{server.url}/generate", value)
    assert status == 400
    assert words in reply["error"]["message"]


@pytest.mark.parametrize("path", ["/generate", "/abort_request"])
async def test_a_body_nested_without_end_is_refused(http, server, path):
    async with http.post(f"{server.url}{path}", data=b"[" * 100_000) as response:
        assert response.status == 400


async def test_a_prompt_beyond_the_context_is_refused_in_sglangs_words(http, server):
    status, reply = await post(http, f"{server.url}/generate", body([9] * 2049))
    assert status == 400
    assert reply["error"]["message"] == (
        "The input (2049 tokens) is longer than the model's context length (2048 tokens)."
    )
    status, reply = await post(http, f"{server.url}/generate", body([9] * 2047))
    assert (status, len(reply["output_ids"])) == (200, 1)
    status, _ = await post(http, f"{server.url}/generate", body([9] * 2048, max_new_tokens=0))
    assert status == 200


async def test_abort_ends_one_request_with_its_tokens_so_far(http, server, core):
    url = f"{server.url}/generate"
    async with http.post(url, json=body(rid="a", stream=True, max_new_tokens=1900)) as response:
        other = asyncio.ensure_future(post(http, url, body(rid="b", max_new_tokens=30)))
        got = 0
        async for event in events(response):
            got += len(event["output_ids"])
            if got >= 3 and event["meta_info"]["finish_reason"] is None:
                await post(http, f"{server.url}/abort_request", {"rid": "a"})
        assert event["meta_info"]["finish_reason"]["type"] == "abort"
        assert 3 <= got < 1900
    assert len((await other)[1]["output_ids"]) == 30
    status, _ = await post(http, f"{server.url}/abort_request", {})
    assert status == 400


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_ends_its_request(http, server, core, stream):
    async with aiohttp.ClientSession(headers=bearer(server.key)) as other:
        call = asyncio.ensure_future(
            other.post(f"{server.url}/generate", json=body(stream=stream, max_new_tokens=1900))
        )
        await until_running(server, http, 1)
        if stream:
            (await call).close()
        else:
            call.cancel()
    await until_running(server, http, 0)
    assert core.load == (0, 0)


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain", "Origin": "https://page.example"},
        {"Content-Type": "text/plain", "Origin": "http://127.0.0.1:3000"},
        bearer(""),
        bearer("another"),
        {"Authorization": "Bearer k\u00e9y"},
    ],
)
async def test_case_54_only_who_has_the_key_can_use_the_engine(server, core, headers):
    """A page's plain post needs no leave of the server; other users reach the port as we do."""
    params = SamplingParams(max_new_tokens=1900, ignore_eos=True)
    request = GenerateRequest(input_ids=tuple(PROMPT), sampling_params=params, rid="r")
    core.submit(request, lambda _: None)
    async with aiohttp.ClientSession(headers=headers) as http:
        for path in ("generate", "base/generate", "abort_request", "pause_generation"):
            value = body(rid="r") if path.endswith("generate") else {"rid": "r"}
            async with http.post(f"{server.url}/{path}", data=json.dumps(value)) as response:
                assert response.status == 401
        async with http.get(f"{server.url}/model_info") as response:
            assert response.status == 401
    assert core.load != (0, 0)  # still under way


@pytest.mark.parametrize("path", ["pause_generation", "continue_generation", "flush_cache"])
async def test_case_54_no_route_stops_the_engine(http, server, path):
    async with http.post(f"{server.url}/{path}", json={}) as response:
        assert response.status == 404


async def test_health(http, server, core):
    async with http.get(f"{server.url}/health") as response:
        assert response.status == 200
    core.stop()
    async with http.get(f"{server.url}/health") as response:
        assert response.status == 503
    assert (await post(http, f"{server.url}/generate", body()))[0] == 503


async def test_a_new_version_goes_live_inside_a_request(http, server, core, model):
    url = f"{server.url}/generate"
    per_token: list[str] = []
    async with http.post(url, json=body(stream=True, max_new_tokens=1500)) as response:
        async for event in events(response):
            version = event["meta_info"]["weight_version"]
            per_token.extend([version] * len(event["output_ids"]))
            if len(per_token) >= 5 and core.version == "0":
                await asyncio.wrap_future(core.publish(1, random_adapter(model)))
    meta = event["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 1500}
    assert per_token == sorted(per_token)
    assert len(per_token) == 1500
    assert set(per_token) == {"0", "1"}


async def until_running(server, http, count):
    await _until(server, http, "num_running_reqs", count)


async def _until(server, http, name, count):
    async with asyncio.timeout(30):
        while True:
            async with http.get(f"{server.url}/model_info") as response:
                if (await response.json())[name] == count:
                    return
