"""One suite for every kind of engine: what is above the Protocol must not be able to tell them
apart. SGLang and vLLM are fakes of their dialects; the embedded engine is real, with a tiny model.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from openclaw_rl.engine.client import EngineClient
from openclaw_rl.engine.kinds import Generation, engine_api
from openclaw_rl.engine.transport import connections
from openclaw_rl.engine.types import Adapter, Engine, Finish, Reply, collect
from openclaw_rl.errors import ContextOverflow, EngineError, EngineRefused, EngineUnavailable
from openclaw_rl.local.engine import EngineCore
from openclaw_rl.local.model import LoadedModel, LoraSpec
from openclaw_rl.local.server import EngineServer, serve_engine
from tests.fakes.engine import EOS_ID, FakeEngine, Fault, logprob_of
from tests.fakes.model import tiny_model
from tests.fakes.vllm import FakeVLLM

PROMPT = [11, 12, 13, 14]
REPLY = [50, 51, 52, 53, 54, EOS_ID]
CONTEXT = 256
FAKES = {"sglang": FakeEngine, "vllm": FakeVLLM}
_rids = (f"rid{n:05d}" for n in itertools.count())


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCore]:
    path = tiny_model(tmp_path_factory.mktemp("model"), scale=3.0, context_length=CONTEXT)
    started = EngineCore(LoadedModel.load(path, lora=LoraSpec(rank=4)), threads=1, seed=1).start()
    yield started
    started.stop()


@asynccontextmanager
async def embedded(core: EngineCore) -> AsyncIterator[EngineServer]:
    server = await serve_engine(core)
    try:
        yield server
    finally:
        await server.close()


@pytest.fixture(params=["sglang", "vllm", "embedded"])
async def engine(
    request: pytest.FixtureRequest, core: EngineCore, http: aiohttp.ClientSession
) -> AsyncIterator[EngineClient]:
    if request.param == "embedded":
        async with embedded(core) as server:
            yield EngineClient(
                "embedded", server.url, http, key=lambda: server.key, wait_seconds=5.0
            )
        return
    async with FAKES[request.param](context_length=CONTEXT, delay=0.001) as fake:
        fake.reply_fn = lambda _: [*range(50, 150), EOS_ID]
        yield EngineClient(request.param, fake.url, http, wait_seconds=5.0)


@pytest.fixture(params=["sglang", "vllm"])
async def fake(request: pytest.FixtureRequest) -> AsyncIterator[FakeEngine]:
    async with FAKES[request.param](default_reply=REPLY, context_length=CONTEXT) as started:
        yield started


@pytest.fixture
def client(fake: FakeEngine, http: aiohttp.ClientSession) -> EngineClient:
    return EngineClient(kind_of(fake), lambda: fake.url, http, wait_seconds=5.0)


def kind_of(fake: FakeEngine) -> str:
    return "vllm" if isinstance(fake, FakeVLLM) else "sglang"


def params(max_new_tokens: int = 32, **more: Any) -> dict[str, Any]:
    return {"max_new_tokens": max_new_tokens, "temperature": 1.0, **more}


async def run(engine: Engine, ids: list[int] = PROMPT, **more: Any) -> Reply:
    sampling = more.pop("sampling", params())
    return await collect(engine.generate(ids, sampling, rid=next(_rids), **more))


# --- all three ---


async def test_a_reply_has_a_log_prob_and_a_version_for_each_id(engine: EngineClient) -> None:
    reply = await run(engine, sampling=params(20, ignore_eos=True))
    assert len(reply.ids) == 20
    assert reply.logprobs is not None
    assert len(reply.logprobs) == 20
    assert all(math.isfinite(value) and value <= 1e-3 for value in reply.logprobs)
    assert len(reply.versions) == 20
    assert "" not in reply.versions
    assert reply.finish == Finish("length")


async def test_a_stop_token_is_part_of_the_reply(engine: EngineClient) -> None:
    first = await run(engine, sampling=params(1, ignore_eos=True, temperature=0.0))
    stop = first.ids[0]
    reply = await run(engine, sampling=params(20, stop_token_ids=[stop], temperature=0.0))
    assert reply.ids == [stop]
    assert reply.finish == Finish("stop")


async def test_a_text_is_scored_id_by_id(engine: EngineClient) -> None:
    ids = [*PROMPT, 21, 22, 23]
    values = (await engine.score(ids, len(PROMPT))).log_probs
    assert len(values) == 3
    assert all(math.isfinite(value) for value in values)
    assert values[1:] == pytest.approx(
        (await engine.score(ids, len(PROMPT) + 1)).log_probs, abs=1e-5
    )
    assert (await engine.score(ids, len(ids))).log_probs == []


async def test_scores_come_with_the_likeliest_tokens(engine: EngineClient) -> None:
    scores = await engine.score([*PROMPT, 21, 22], len(PROMPT), 3)
    assert len(scores.log_probs) == 2
    assert scores.top is not None
    assert [len(one) for one in scores.top] == [3, 3]
    assert all(one == sorted(one, reverse=True) for one in scores.top)


async def test_generated_tokens_come_with_candidates(engine: EngineClient) -> None:
    deltas = engine.generate(PROMPT, params(5, ignore_eos=True), rid=next(_rids), top_logprobs=3)
    tops = [one async for delta in deltas for one in delta.top or ()]
    assert [len(one) for one in tops] == [3] * 5


async def test_case_03_a_prompt_beyond_the_context(engine: EngineClient) -> None:
    with pytest.raises(ContextOverflow) as caught:
        await run(engine, [20] * (CONTEXT + 10))
    assert caught.value.limit == CONTEXT


async def test_health_is_told(engine: EngineClient) -> None:
    assert await engine.health()


async def test_a_reply_that_nobody_reads_along_is_exact(engine: EngineClient) -> None:
    deltas = engine.generate(
        PROMPT, params(80, ignore_eos=True), rid=next(_rids), top_logprobs=2, interval=None
    )
    got = [delta async for delta in deltas]
    assert sum(len(delta.ids) for delta in got) == 80
    assert all(len(d.ids) == len(d.logprobs or ()) == len(d.top or ()) for d in got)
    assert len(got) <= 3


# --- both dialects, where a script is needed to say what must come out ---


async def test_ids_and_log_probs_are_exact(fake: FakeEngine, client: EngineClient) -> None:
    fake.chunk_bytes = 7
    fake.tokens_per_chunk = 2
    reply = await run(client)
    assert reply.ids == REPLY
    assert reply.logprobs == [logprob_of(one, len(PROMPT) + at) for at, one in enumerate(REPLY)]
    assert reply.finish == Finish("stop")


async def test_scores_are_exact(fake: FakeEngine, client: EngineClient) -> None:
    assert (await client.score([*PROMPT, 21, 22], 4)).log_probs == [
        logprob_of(21, 4),
        logprob_of(22, 5),
    ]


@pytest.mark.parametrize("token", [-1, 2**31])
async def test_what_is_no_token_id_ends_the_reply(
    fake: FakeEngine, client: EngineClient, token: int
) -> None:
    fake.replies.append([50, token, EOS_ID])
    with pytest.raises(EngineError, match="not a token id"):
        await run(client)


@pytest.mark.parametrize("lie", ["missing", "fewer", "none", "shifted"])
async def test_no_log_prob_is_made_up(fake: FakeEngine, client: EngineClient, lie: str) -> None:
    fake.faults.append(Fault(logprobs=lie))
    reply = await run(client)
    assert reply.ids == REPLY
    assert reply.logprobs is None


async def test_case_05_closing_the_stream_ends_it_at_the_engine(
    fake: FakeEngine, client: EngineClient
) -> None:
    fake.gated = True
    await fake.allow(1)
    async with aclosing(client.generate(PROMPT, params(), rid="leaving")) as deltas:
        await anext(deltas)
    await fake.wait_until(lambda: fake.requests[0].done)
    await client.close()
    assert len(fake.requests[0].sent) == 1
    assert fake.aborts == (["leaving"] if kind_of(fake) == "sglang" else [])


@pytest.mark.parametrize("fault", [Fault(abort_after=3), Fault(kill_after=3), Fault(status=503)])
async def test_case_07_a_reply_goes_on_where_it_broke_off(
    fake: FakeEngine, client: EngineClient, fault: Fault
) -> None:
    fake.faults.append(fault)
    reply = await run(client)
    assert reply.ids == REPLY
    assert reply.logprobs == [logprob_of(one, len(PROMPT) + at) for at, one in enumerate(REPLY)]


@pytest.mark.parametrize("fault", [Fault(abort_after=3), Fault(kill_after=3), Fault(status=503)])
async def test_case_07_a_reply_that_nobody_reads_along_goes_on_as_well(
    fake: FakeEngine, client: EngineClient, fault: Fault
) -> None:
    fake.faults.append(fault)
    reply = await run(client, interval=None)
    assert reply.ids == REPLY
    assert reply.logprobs == [logprob_of(one, len(PROMPT) + at) for at, one in enumerate(REPLY)]
    assert len(fake.requests) == 2
    if fault.abort_after:
        assert fake.requests[1].ids == [*PROMPT, *REPLY[:3]], "the tokens so far are kept"


async def test_a_refusal_is_not_tried_again(fake: FakeEngine, client: EngineClient) -> None:
    fake.faults.append(Fault(status=400, message="bad top_p"))
    with pytest.raises(EngineRefused, match="bad top_p"):
        await run(client)
    assert len(fake.requests) == 1


async def test_an_absent_engine_is_waited_for_not_for_ever(http: aiohttp.ClientSession) -> None:
    for kind in FAKES:
        with pytest.raises(EngineUnavailable):
            await run(EngineClient(kind, lambda: None, http, wait_seconds=0.1))


# --- weights as adapters ---


async def test_an_adapter_is_not_taken_for_the_model(
    fake: FakeEngine, client: EngineClient
) -> None:
    await client.load_adapter("mine", "/adapters/mine")
    told = {"model_path": fake.model_path, "context_length": CONTEXT}
    assert await client.model_info() == told


async def test_each_try_asks_for_the_present_adapter_and_tokens_carry_its_version(
    fake: FakeEngine, http: aiohttp.ClientSession
) -> None:
    now = Adapter("first", "1")
    client = EngineClient(kind_of(fake), fake.url, http, adapter=lambda: now, wait_seconds=5.0)
    for name in ("first", "second"):
        await client.load_adapter(name, f"/adapters/{name}")
    assert await client.adapters() == {"first", "second"}
    fake.gated = True
    old = asyncio.create_task(run(client))
    await fake.allow(2)
    await fake.wait_until(lambda: bool(fake.requests) and fake.requests[0].written == 2)
    now = Adapter("second", "2")
    assert client.in_use == {"first"}
    new = asyncio.create_task(run(client))
    await fake.arrived(2)
    assert client.in_use == {"first", "second"}
    await fake.open_gate()
    assert (await old).versions == ["1"] * len(REPLY)
    assert (await new).versions == ["2"] * len(REPLY)
    assert client.in_use == frozenset()
    await client.unload_adapter("first")
    assert await client.adapters() == {"second"}


async def test_a_text_is_scored_by_the_present_adapter(
    fake: FakeEngine, http: aiohttp.ClientSession
) -> None:
    client = EngineClient(kind_of(fake), fake.url, http, adapter=lambda: Adapter("first", "1"))
    await client.load_adapter("first", "first")
    await client.score(PROMPT, 1)
    body = fake.raw[0] if isinstance(fake, FakeVLLM) else fake.requests[0].body
    assert body["model" if isinstance(fake, FakeVLLM) else "lora_path"] == "first"


async def test_the_key_goes_with_every_request(fake: FakeEngine) -> None:
    """Also on connections of their own: the first request, repeated ones, orders."""
    seen: list[str | None] = []

    @web.middleware
    async def note(request: web.Request, handler: Any) -> web.StreamResponse:
        seen.append(request.headers.get("Authorization"))
        return await handler(request)

    fake.middlewares.append(note)
    await fake.stop()
    await fake.start()
    async with connections("k3y") as http:
        client = EngineClient(kind_of(fake), fake.url, http, wait_seconds=5.0)
        fake.faults.append(Fault(kill_after=2))
        await run(client)
        await run(client)
        await client.score(PROMPT, 1)
        await client.load_adapter("first", "first")
        await client.adapters()
        await client.health()
        await client.close()
    assert len(seen) >= 7
    assert set(seen) == {"Bearer k3y"}


async def test_a_broken_reply_goes_on_with_the_newer_adapter(
    fake: FakeEngine, http: aiohttp.ClientSession
) -> None:
    now = Adapter("first", "1")
    client = EngineClient(kind_of(fake), fake.url, http, adapter=lambda: now, wait_seconds=5.0)
    for name in ("first", "second"):
        await client.load_adapter(name, name)

    def turn(_: str) -> None:
        nonlocal now
        now = Adapter("second", "2")

    fake.faults.append(Fault(kill_after=2))
    reply = await run(client, on_wait=turn)
    assert reply.ids == REPLY
    assert reply.versions == ["1", "1", "2", "2", "2", "2"]


async def test_an_engine_that_lacks_the_adapter_is_waited_for(
    fake: FakeEngine, http: aiohttp.ClientSession
) -> None:
    client = EngineClient(
        kind_of(fake), fake.url, http, adapter=lambda: Adapter("later", "3"), wait_seconds=5.0
    )
    waiting = asyncio.Event()
    task = asyncio.create_task(run(client, on_wait=lambda _: waiting.set()))
    await waiting.wait()
    await client.load_adapter("later", "later")
    assert (await task).versions == ["3"] * len(REPLY)


async def test_an_adapter_that_cannot_be_loaded_says_why(
    fake: FakeEngine, client: EngineClient
) -> None:
    with pytest.raises(EngineRefused, match="No adapter found for /no/such/folder"):
        await client.load_adapter("lost", "/no/such/folder")
    fake.load_error = "rank 64 is greater than max_lora_rank 16"
    with pytest.raises(EngineRefused, match="max_lora_rank 16"):
        await client.load_adapter("big", "/adapters/big")
    assert await client.adapters() == frozenset()
    await fake.stop()
    with pytest.raises(EngineUnavailable):
        await client.load_adapter("big", "/adapters/big")


# --- vLLM alone ---


async def test_what_vllm_is_asked(http: aiohttp.ClientSession) -> None:
    async with FakeVLLM(default_reply=REPLY) as fake:
        client = EngineClient("vllm", fake.url, http)
        schema = json.dumps({"type": "object"})
        sampling = params(9, min_new_tokens=2, top_p=0.5, json_schema=schema, sampling_seed=7)
        await run(client, sampling=sampling)
        body = fake.raw[0]
        assert (body["seed"], body["logprobs"], body["skip_special_tokens"]) == (7, 1, False)
        assert body["return_token_ids"] is body["return_tokens_as_token_ids"] is True
        assert body["prompt"] == PROMPT
        assert (body["max_tokens"], body["min_tokens"], body["top_p"]) == (9, 2, 0.5)
        assert body["structured_outputs"] == {"json": schema}
        assert (body["top_k"], body["repetition_penalty"]) == (-1, 1.0), "not the model's own"
        with pytest.raises(EngineRefused, match="logit_bias"):
            await run(client, sampling=params(logit_bias={"5": 1.0}))
        assert len(fake.raw) == 1


def vllm_reads(*choices: Any) -> list[list[int]]:
    _, reader = engine_api("vllm").generation(Generation([1], params(), "r"))
    return [reader(json.dumps({"choices": [one]}).encode()).ids for one in choices]


def logprobs_of(places: list[dict[str, float]]) -> dict[str, Any]:
    first = [next(iter(place.items())) for place in places]
    return {
        "tokens": [name for name, _ in first],
        "token_logprobs": [value for _, value in first],
        "top_logprobs": places,
    }


def test_what_vllm_writes_for_minus_infinity_is_no_log_prob() -> None:
    _, reader = engine_api("vllm").generation(Generation([1], params(), "r", top=2))
    places = [{"token_id:5": -9999.0, "token_id:6": -0.1, "token_id:7": -9999.0}]
    choice = {"text": "x", "token_ids": [5], "logprobs": logprobs_of(places)}
    delta = reader(json.dumps({"choices": [choice]}).encode())
    assert (delta.ids, delta.logprobs) == ([5], None)
    places = [{"token_id:6": -0.1, "token_id:7": -9999.0}]
    choice = {"text": "x", "token_ids": [6], "logprobs": logprobs_of(places)}
    delta = reader(json.dumps({"choices": [choice]}).encode())
    assert (delta.logprobs, delta.top) == ([-0.1], [[(-0.1, 6)]])


def test_vllm_adds_the_token_itself_to_the_candidates_asked_for() -> None:
    _, reader = engine_api("vllm").generation(Generation([1], params(), "r", top=2))
    places = [{"token_id:5": -4.0, "token_id:6": -0.1, "token_id:7": -2.0}]
    choice = {"text": "x", "token_ids": [5], "logprobs": logprobs_of(places)}
    delta = reader(json.dumps({"choices": [choice]}).encode())
    assert delta.logprobs == [-4.0]
    assert delta.top == [[(-0.1, 6), (-2.0, 7)]], "as many as asked for, likeliest first"


@pytest.mark.parametrize("shift", [-1, 1])
def test_scores_of_another_number_of_tokens_are_refused(shift: int) -> None:
    """Also where each of the ids asked for has a value in its place."""
    ids = [7, 7, 7, 7]
    entries = [None, *[{"7": {"logprob": -1.0}}] * (len(ids) - 1 + shift)]
    body = {"choices": [{"prompt_logprobs": entries, "finish_reason": "length"}]}
    with pytest.raises(EngineError, match="line up"):
        engine_api("vllm").scores(json.dumps(body).encode(), ids, 2, 0)


@pytest.mark.parametrize(
    "choice",
    [
        {"text": "lost", "finish_reason": None},
        {"text": "lost", "token_ids": None, "finish_reason": "stop"},
        {"text": "x", "token_ids": [5.0]},
        {"text": "x", "token_ids": [None]},
        {"text": "x", "token_ids": [True]},
        "text",
        None,
    ],
)
def test_no_token_of_vllm_is_passed_over(choice: Any) -> None:
    """A reply with a hole would be trained as if the tokens behind it had followed at once."""
    first = {"text": "a", "token_ids": [5]}
    assert vllm_reads(first, {"text": "", "token_ids": [], "finish_reason": "stop"}) == [[5], []]
    with pytest.raises(EngineError):
        vllm_reads(first, choice)


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        (
            "This model's maximum context length is 2048 tokens. However, your prompt contains "
            "2058 input tokens, which exceeds this limit even without any output tokens.",
            2048,
        ),
        ("max_tokens=2058 cannot be greater than max_model_len=2048. Please request fewer.", 2048),
        ("max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)", None),
    ],
)
async def test_case_03_overflow_in_the_words_of_vllm_0_32(
    http: aiohttp.ClientSession, words: str, limit: int | None
) -> None:
    async with FakeVLLM() as fake:
        fake.faults.append(Fault(status=400, message=words))
        with pytest.raises(EngineRefused, match="prompt is too long") as caught:
            await run(EngineClient("vllm", fake.url, http))
        assert isinstance(caught.value, ContextOverflow) is (limit is not None)
        assert getattr(caught.value, "limit", None) == limit


@pytest.mark.parametrize(
    ("processed", "sampling", "ours"),
    [
        (False, {"temperature": 0.5}, False),
        (False, {"temperature": 1.0}, True),
        (False, {}, True),
        (True, {"temperature": 0.5}, True),
    ],
)
async def test_vllm_gives_no_log_probs_of_another_temperature(
    http: aiohttp.ClientSession, processed: bool, sampling: dict[str, Any], ours: bool
) -> None:
    async with FakeVLLM(default_reply=REPLY) as fake:
        dialect = engine_api("vllm", {"any_temperature": processed})
        client = EngineClient(dialect, fake.url, http, wait_seconds=5.0)
        reply = await run(client, sampling={"max_new_tokens": 32, **sampling})
        assert reply.ids == REPLY
        assert (reply.logprobs is not None) is ours
