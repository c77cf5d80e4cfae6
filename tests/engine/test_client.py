"""The engine client against the fake engine: streams, resumes, aborts, refusals, lost engines."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from openclaw_rl.engine.client import EngineClient
from openclaw_rl.engine.transport import connections
from openclaw_rl.engine.types import Delta, Finish, Reply, collect, joined
from openclaw_rl.errors import ContextOverflow, EngineError, EngineRefused, EngineUnavailable
from tests.fakes.engine import EOS_ID, FakeEngine, Fault, logprob_of

PROMPT = [11, 12, 13, 14]
REPLY = [50, 51, 52, 53, 54, EOS_ID]
_rids = (f"rid{n:05d}" for n in itertools.count())


@pytest.fixture
async def fake() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(default_reply=REPLY) as engine:
        yield engine


@pytest.fixture
def client(fake: FakeEngine, http: aiohttp.ClientSession) -> EngineClient:
    return EngineClient("sglang", lambda: fake.url, http, wait_seconds=5.0)


def params(max_new_tokens: int = 32, **more: Any) -> dict[str, Any]:
    return {"max_new_tokens": max_new_tokens, "temperature": 1.0, **more}


async def run(client: EngineClient, ids: list[int] = PROMPT, **more: Any) -> Reply:
    sampling = more.pop("sampling", params())
    return await collect(client.generate(ids, sampling, rid=next(_rids), **more))


def true_logprobs(prompt: list[int], ids: list[int]) -> list[float]:
    return [logprob_of(token, len(prompt) + at) for at, token in enumerate(ids)]


@pytest.mark.parametrize("cumulative", [True, False])
@pytest.mark.parametrize("chunk_bytes", [None, 7])
async def test_every_form_of_stream_gives_the_same_tokens(
    fake: FakeEngine,
    client: EngineClient,
    cumulative: bool,
    chunk_bytes: int | None,
) -> None:
    fake.cumulative = cumulative
    fake.chunk_bytes = chunk_bytes
    reply = await run(client)
    assert reply.ids == REPLY
    assert reply.logprobs == true_logprobs(PROMPT, REPLY)
    assert reply.versions == ["0"] * len(REPLY)
    assert reply.finish == Finish("stop")
    assert reply.cached_tokens == len(PROMPT) // 2


async def test_tokens_arrive_one_by_one(fake: FakeEngine, client: EngineClient) -> None:
    fake.gated = True
    async with aclosing(client.generate(PROMPT, params(), rid=next(_rids))) as deltas:
        for token in REPLY:
            await fake.allow(1)
            assert (await anext(deltas)).ids == [token]


async def test_request_says_what_was_asked(fake: FakeEngine, client: EngineClient) -> None:
    sampling = params(9, top_p=0.5, stop_token_ids=[7])
    reply = client.generate(PROMPT, sampling, rid="r1", routing_key="session-a", top_logprobs=2)
    deltas = [delta async for delta in reply]
    body = fake.requests[0].body
    assert body["input_ids"] == PROMPT
    assert body["sampling_params"] == sampling
    assert (body["rid"], body["stream"], body["return_logprob"]) == ("r1", True, True)
    assert fake.requests[0].headers["x-smg-routing-key"] == "session-a"
    tops = [place for delta in deltas for place in delta.top or ()]
    assert tops[1] == [(logprob_of(51, 5), 51), (logprob_of(51, 5) - 0.5, 52)]


# --- refusals ------------------------------------------------------------------------------------


async def test_case_03_prompt_too_long(fake: FakeEngine, client: EngineClient) -> None:
    fake.context_length = 10
    with pytest.raises(ContextOverflow) as caught:
        await run(client, list(range(10, 22)))
    assert (caught.value.prompt_tokens, caught.value.limit) == (12, 10)
    assert str(caught.value).startswith("prompt is too long")
    assert len(fake.requests) == 1


async def test_case_03_max_tokens_too_large(fake: FakeEngine, client: EngineClient) -> None:
    fake.context_length = 10
    with pytest.raises(ContextOverflow) as caught:
        await run(client, sampling=params(100))
    assert (caught.value.prompt_tokens, caught.value.limit) == (104, 10)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(
            abort_after=0,
            abort_status=400,
            message="Input length (20 tokens) exceeds the maximum allowed length (10 tokens).",
        ),
        Fault(
            status=400,
            message="The input (20 tokens) is longer than the model's context length (10 tokens).",
        ),
    ],
)
async def test_case_03_overflow_in_other_places(
    fake: FakeEngine, client: EngineClient, fault: Fault
) -> None:
    fake.faults.append(fault)
    with pytest.raises(ContextOverflow) as caught:
        await run(client)
    assert caught.value.limit == 10


async def test_case_03_other_refusals(fake: FakeEngine, client: EngineClient) -> None:
    fake.faults += [Fault(status=400, message="bad top_p"), Fault(stream_error="bad top_k")]
    with pytest.raises(EngineRefused, match="bad top_p") as caught:
        await run(client)
    assert caught.value.status == 400
    with pytest.raises(EngineRefused, match="bad top_k"):
        await run(client)
    assert len(fake.requests) == 2, "a refusal is not tried again"
    with pytest.raises(EngineRefused, match="max_new_tokens"):
        await run(client, sampling={"temperature": 1.0})
    assert fake.aborts == []


DYING = "EngineCore encountered an issue. See stack trace (above) for the root cause."


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=500, message=DYING),
        Fault(stream_error=DYING),
        Fault(status=400, message="The following requested LoRA adapters are not loaded: later"),
    ],
)
async def test_what_an_engine_says_between_two_lives_is_waited_out(
    fake: FakeEngine, client: EngineClient, fault: Fault
) -> None:
    fake.faults += [fault] * 5
    assert (await run(client)).ids == REPLY


async def test_a_request_that_the_engine_fails_at_is_not_tried_for_ever(
    fake: FakeEngine, client: EngineClient
) -> None:
    fake.faults += [
        Fault(abort_after=0, abort_status=500, message="engine step failed") for _ in range(9)
    ]
    with pytest.raises(EngineUnavailable, match="engine step failed"):
        await run(client)
    assert len(fake.requests) < 9


async def test_an_engines_own_words_stay_out_of_the_log(
    fake: FakeEngine, client: EngineClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    fake.faults += [Fault(status=500, message="cannot tokenise 'xylophone'")]
    await run(client)
    assert "the engine is not ready (500); trying again" in caplog.text
    assert "xylophone" not in caplog.text


async def test_a_wait_is_one_line_with_the_request_however_many_tries_it_takes(
    fake: FakeEngine, client: EngineClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "openclaw_rl")
    away = [Fault(status=503)] * 3
    fake.faults += [*away, Fault(abort_after=1), *away]
    await run(client)
    said = [record.getMessage() for record in caplog.records]
    (rid,) = {request.rid.partition("-")[0] for request in fake.requests}
    assert [line.partition(": ")[0] for line in said] == [f"request {rid}"] * 2


# --- aborts of ours ------------------------------------------------------------------------------


async def test_case_05_cancelling_the_reader_aborts(fake: FakeEngine, client: EngineClient) -> None:
    fake.gated = True
    task = asyncio.create_task(collect(client.generate(PROMPT, params(), rid="cancelled")))
    await fake.arrived(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await client.close()
    await fake.wait_until(lambda: fake.requests[0].done)
    assert fake.aborts == ["cancelled"]


async def test_finished_requests_are_not_aborted(fake: FakeEngine, client: EngineClient) -> None:
    await run(client)
    await client.close()
    assert fake.aborts == []


# --- resumes -------------------------------------------------------------------------------------


async def test_case_07_engine_abort_is_resumed(fake: FakeEngine, client: EngineClient) -> None:
    fake.gated = True
    held: list[str] = []
    stream = client.generate(PROMPT, params(10, min_new_tokens=3), rid="a", on_wait=held.append)
    task = asyncio.create_task(collect(stream))
    await fake.allow(2)
    await fake.wait_until(lambda: bool(fake.requests) and fake.requests[0].written == 2)
    await fake.update_weights("1")
    await fake.arrived(2)
    await fake.allow(3)
    await fake.wait_until(lambda: fake.requests[1].written == 3)
    await fake.update_weights("2")
    await fake.open_gate()
    reply = await task
    assert reply.ids == REPLY
    assert reply.versions == ["0", "0", "1", "1", "1", "2"]
    assert reply.logprobs == true_logprobs(PROMPT, REPLY)
    assert [request.ids for request in fake.requests] == [
        PROMPT,
        PROMPT + REPLY[:2],
        PROMPT + REPLY[:5],
    ]
    budgets = [request.sampling["max_new_tokens"] for request in fake.requests]
    assert budgets == [10, 8, 5]
    assert [request.sampling["min_new_tokens"] for request in fake.requests] == [3, 1, 0]
    assert len({request.rid for request in fake.requests}) == 3
    assert len(held) == 2


async def test_case_07_abort_before_the_first_token(fake: FakeEngine, client: EngineClient) -> None:
    fake.faults += [Fault(abort_after=0), Fault(abort_after=0), None]
    reply = await run(client)
    assert reply.ids == REPLY
    assert reply.logprobs == true_logprobs(PROMPT, REPLY)


async def test_case_07_abort_at_the_last_allowed_token(
    fake: FakeEngine, client: EngineClient
) -> None:
    """Every token is there, then comes an abort instead of the finish."""
    fake.faults.append(Fault(abort_after=3, ignore_budget=True))
    reply = await run(client, sampling=params(3))
    assert reply.ids == [50, 51, 52]
    assert reply.finish == Finish("length")
    assert len(fake.requests) == 1


async def test_case_07_in_place_update_in_mid_stream(
    fake: FakeEngine, client: EngineClient
) -> None:
    fake.faults.append(Fault(bump_version_at=2))
    reply = await run(client)
    assert reply.versions == ["0", "0", "1", "1", "1", "1"]


async def test_case_06_waits_while_paused(fake: FakeEngine, client: EngineClient) -> None:
    await fake.pause()
    task = asyncio.create_task(run(client))
    await fake.arrived(1)
    fake.version = "7"
    await fake.resume()
    assert (await task).versions == ["7"] * len(REPLY)


async def test_case_06_waits_for_the_first_address(
    fake: FakeEngine, http: aiohttp.ClientSession
) -> None:
    url: list[str] = []
    waiting = asyncio.Event()
    client = EngineClient("sglang", lambda: url[0] if url else None, http, wait_seconds=5)
    task = asyncio.create_task(run(client, on_wait=lambda _: waiting.set()))
    await waiting.wait()
    url.append(fake.url + "/")
    assert (await task).ids == REPLY


async def test_case_33_engine_killed_in_mid_stream(fake: FakeEngine, client: EngineClient) -> None:
    fake.gated = True
    lost = asyncio.Event()
    task = asyncio.create_task(run(client, on_wait=lambda _: lost.set()))
    await fake.allow(2)
    await fake.wait_until(lambda: bool(fake.requests) and fake.requests[0].written == 2)
    await fake.stop()
    await lost.wait()
    fake.version = "1"
    await fake.start()
    await fake.open_gate()
    reply = await task
    assert reply.ids == REPLY
    assert reply.versions == ["0", "0", "1", "1", "1", "1"]
    assert reply.logprobs == true_logprobs(PROMPT, REPLY)


async def test_case_33_engine_restarted_elsewhere(
    fake: FakeEngine, http: aiohttp.ClientSession
) -> None:
    """The old one hangs without a word; the address changes; the stream moves on."""
    async with FakeEngine(default_reply=REPLY[2:], version="1") as second:
        url = [fake.url]
        client = EngineClient("sglang", lambda: url[0], http, wait_seconds=5, silence_seconds=0.05)
        fake.gated = True
        task = asyncio.create_task(run(client))
        await fake.allow(2)
        await fake.wait_until(lambda: bool(fake.requests) and fake.requests[0].written == 2)
        url[0] = second.url
        reply = await task
        assert second.requests[0].ids == PROMPT + REPLY[:2]
    assert reply.ids == REPLY
    assert reply.versions == ["0", "0", "1", "1", "1", "1"]


async def test_a_silent_engine_that_lives_is_waited_for(
    fake: FakeEngine, http: aiohttp.ClientSession
) -> None:
    client = EngineClient("sglang", fake.url, http, wait_seconds=5, silence_seconds=0.03)
    fake.gated = True
    task = asyncio.create_task(run(client))
    await fake.arrived(1)
    await asyncio.sleep(0.15)
    await fake.open_gate()
    assert (await task).ids == REPLY
    assert len(fake.requests) == 1


async def test_gives_up_after_wait_seconds(fake: FakeEngine, http: aiohttp.ClientSession) -> None:
    client = EngineClient("sglang", fake.url, http, wait_seconds=0.2)
    await fake.stop()
    with pytest.raises(EngineUnavailable, match="gave up after"):
        await run(client)
    with pytest.raises(EngineUnavailable):
        await client.score([1, 2, 3], 1)
    await fake.start()
    fake.faults += [Fault(abort_after=0)] * 50
    with pytest.raises(EngineUnavailable, match="aborted"):
        await run(client)


async def test_patience_is_fresh_after_each_token(
    fake: FakeEngine, http: aiohttp.ClientSession
) -> None:
    """Eight kills with one token each: never longer than wait_seconds without progress."""
    client = EngineClient("sglang", fake.url, http, wait_seconds=0.5)
    fake.default_reply = REPLY[:5] + REPLY
    fake.faults += [Fault(kill_after=1)] * 10
    reply = await run(client)
    assert reply.ids == REPLY[:5] + REPLY
    assert len(fake.requests) == 11


async def test_an_error_of_the_engines_own_is_tried_three_times(
    fake: FakeEngine, client: EngineClient
) -> None:
    fake.faults += [Fault(status=500, message="CUDA error"), Fault(status=503)]
    assert (await run(client)).ids == REPLY
    fake.requests.clear()
    fake.faults += [Fault(status=500, message="CUDA error")] * 9
    with pytest.raises(EngineUnavailable, match="CUDA error"):
        await run(client)
    assert len(fake.requests) == 3


async def test_a_reply_that_fills_the_context_ends_by_length(
    fake: FakeEngine, client: EngineClient
) -> None:
    fake.faults += [Fault(kill_after=2), Fault(stream_error="maximum context length of 6 tokens")]
    reply = await run(client)
    assert reply.ids == REPLY[:2]
    assert reply.finish == Finish("length")


async def test_a_reply_under_a_grammar_is_not_resumed(
    fake: FakeEngine, client: EngineClient
) -> None:
    fake.faults += [Fault(abort_after=0), Fault(abort_after=2)]
    with pytest.raises(EngineUnavailable, match="grammar"):
        await run(client, sampling=params(json_schema="{}"))
    assert len(fake.requests) == 2


# --- connections ---------------------------------------------------------------------------------


async def test_stale_pooled_connections_lose_nothing(
    fake: FakeEngine, client: EngineClient
) -> None:
    """An engine restarted on the same port, with eight of our connections pooled."""
    fake.gated = True
    tasks = [asyncio.create_task(run(client)) for _ in range(8)]
    await fake.arrived(8)
    await fake.open_gate()
    await asyncio.gather(*tasks)
    await fake.stop()
    await fake.start()
    replies = await asyncio.gather(*(run(client) for _ in range(8)))
    assert all(reply.ids == REPLY for reply in replies)


async def test_connections_are_reused(fake: FakeEngine) -> None:
    """Also after a stream, whose end is not waited for."""
    ports = set()

    @web.middleware
    async def note(request: web.Request, handler: Any) -> web.StreamResponse:
        assert request.transport is not None
        ports.add(request.transport.get_extra_info("peername"))
        return await handler(request)

    fake.middlewares.append(note)
    await fake.stop()
    await fake.start()
    async with connections() as http:
        client = EngineClient("sglang", fake.url, http)
        for _ in range(3):
            await run(client)
            await client.score(PROMPT, 1)
    assert len(ports) <= 2


async def test_sixty_four_streams_at_once(fake: FakeEngine, client: EngineClient) -> None:
    fake.reply_fn = lambda request: [100 + request.ids[0]] * 20 + [EOS_ID]
    prompts = [[at, 1, 2] for at in range(64)]
    replies = await asyncio.gather(*(run(client, prompt) for prompt in prompts))
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply.ids == [100 + prompt[0]] * 20 + [EOS_ID]
        assert reply.logprobs == true_logprobs(prompt, reply.ids)


# --- log-probs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cumulative", [True, False])
async def test_a_reply_of_one_token_over_and_over(
    fake: FakeEngine, client: EngineClient, cumulative: bool
) -> None:
    fake.cumulative = cumulative
    fake.logprob = lambda token, position: -0.5
    fake.replies.append([7] * 5 + [EOS_ID])
    reply = await run(client)
    assert reply.ids == [7] * 5 + [EOS_ID]
    assert reply.logprobs == [-0.5] * 6


@pytest.mark.parametrize("lie", ["missing", "fewer", "none", "shifted"])
@pytest.mark.parametrize("cumulative", [True, False])
async def test_case_24_a_lie_about_logprobs_is_reported_not_padded(
    fake: FakeEngine, client: EngineClient, lie: str, cumulative: bool
) -> None:
    fake.cumulative = cumulative
    fake.faults.append(Fault(logprobs=lie, logprobs_from=2))
    stream = client.generate(PROMPT, params(), rid=next(_rids))
    deltas: list[Delta] = [delta async for delta in stream]
    assert [token for delta in deltas for token in delta.ids] == REPLY
    honest = [value for delta in deltas for value in delta.logprobs or ()]
    assert honest == true_logprobs(PROMPT, REPLY[:2])
    assert sum(len(delta.ids) for delta in deltas if delta.logprobs is None) == len(REPLY) - 2


# --- scoring, health -----------------------------------------------------------------------------


async def test_score(fake: FakeEngine, client: EngineClient) -> None:
    ids = PROMPT + REPLY
    assert (await client.score(ids, 4)).log_probs == true_logprobs(PROMPT, REPLY)
    assert (await client.score(ids, 1)).log_probs == true_logprobs(ids[:1], ids[1:])
    assert (await client.score(ids, len(ids))).log_probs == []
    with pytest.raises(ValueError, match="between 1 and"):
        await client.score(ids, 0)
    body = fake.requests[0].body
    assert body["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0}
    assert body["logprob_start_len"] == 3


async def test_score_with_the_likeliest_tokens(fake: FakeEngine, client: EngineClient) -> None:
    ids = PROMPT + REPLY
    scores = await client.score(ids, 4, 3)
    assert scores.log_probs == true_logprobs(PROMPT, REPLY)
    assert scores.top == [
        [(logprob_of(t, 4 + at) - rank / 2, t + rank) for rank in range(3)]
        for at, t in enumerate(REPLY)
    ]
    assert fake.requests[0].body["top_logprobs_num"] == 3
    assert (await client.score(ids, len(ids), 3)).top == []
    assert (await client.score(ids, 4, 0)).top is None
    assert "top_logprobs_num" not in fake.requests[1].body


async def test_an_engine_that_knows_no_likeliest_tokens_gives_the_scores_alone(
    fake: FakeEngine, client: EngineClient
) -> None:
    fake.candidates = None
    scores = await client.score(PROMPT + REPLY, 4, 3)
    assert (scores.log_probs, scores.top) == (true_logprobs(PROMPT, REPLY), None)
    assert all([d.top is None async for d in client.generate(PROMPT, params(), rid="t",
                                                             top_logprobs=2)])  # fmt: skip


async def test_likeliest_tokens_of_probability_0_are_left_out(
    fake: FakeEngine, client: EngineClient
) -> None:
    fake.candidates = lambda request, token, at, k: [(None, 9), (-2.0, 8), (-1.0, 7)]
    assert (await client.score(PROMPT, 3, 3)).top == [[(-1.0, 7), (-2.0, 8)]]
    fake.candidates = lambda request, token, at, k: [(1.5, 9)]
    assert (await client.score(PROMPT, 3, 1)).top is None


async def test_score_refuses_what_does_not_line_up(fake: FakeEngine, client: EngineClient) -> None:
    fake.logprob = lambda token, position: float("nan")
    with pytest.raises(EngineError, match="line up"):
        await client.score(PROMPT, 1)
    fake.context_length = 3
    with pytest.raises(ContextOverflow):
        await client.score(PROMPT, 1)


async def test_score_is_repeated_when_the_engine_is_away(
    fake: FakeEngine, client: EngineClient
) -> None:
    fake.faults += [Fault(status=503), Fault(status=502), Fault(abort_after=0)]
    assert (await client.score(PROMPT, 3)).log_probs == true_logprobs(PROMPT[:3], PROMPT[3:])


async def test_an_engine_that_falls_silent_in_the_middle_of_scores_is_lost(
    http: aiohttp.ClientSession,
) -> None:
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
        server.close()  # nobody takes connections any more: no sign of life
        await writer.drain()
        with suppress(ConnectionError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(half, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = EngineClient(
        "sglang", f"http://127.0.0.1:{port}", http, wait_seconds=0.3, silence_seconds=0.05
    )
    with pytest.raises(EngineUnavailable, match="gave up after"):
        await asyncio.wait_for(client.score(PROMPT, 1), 10)


async def test_health_and_model_info(fake: FakeEngine, client: EngineClient) -> None:
    assert await client.health()
    assert (await client.model_info())["model_path"] == "fake-model"
    fake.healthy = False
    assert not await client.health()
    await fake.stop()
    assert not await client.health()
    with pytest.raises(EngineUnavailable):
        await client.model_info()


async def test_base_prefix(fake: FakeEngine, http: aiohttp.ClientSession) -> None:
    client = EngineClient("sglang", fake.url + "/base", http)
    reply = await run(client)
    assert reply.versions == ["base"] * len(REPLY)
    assert fake.requests[0].base


async def test_an_unknown_kind_of_server_is_an_error_at_once(
    http: aiohttp.ClientSession,
) -> None:
    client = EngineClient("sglang", "not a url", http, wait_seconds=0.2)
    with pytest.raises(EngineError):
        await run(client)


def test_deltas_join_only_where_nothing_is_lost() -> None:
    a, b = Delta([1], [-0.1], "0", None, 3), Delta([2, 3], [-0.2, -0.3], "0", Finish("stop", 3))
    assert joined([a, b, a]) == [Delta([1, 2, 3], [-0.1, -0.2, -0.3], "0", Finish("stop", 3), 3)]
    for apart in (
        [a, Delta([2], [-0.2], "1")],
        [a, Delta([2], None, "0")],
        [Delta([1], None, "0"), b],
        [a, Delta([2], [-0.2], "0", top=[[(-0.2, 2)]])],
    ):
        assert joined(apart) == apart


async def test_a_reply_that_nobody_reads_along_comes_in_few_pieces(
    fake: FakeEngine, client: EngineClient
) -> None:
    fake.replies.append([50 + at % 40 for at in range(200)] + [EOS_ID])
    wanted = list(fake.replies[0])
    fake.faults.append(Fault(bump_version_at=1, abort_after=150))
    deltas = client.generate(PROMPT, params(500), rid=next(_rids), interval=None)
    got = [delta async for delta in deltas]
    assert [token for delta in got for token in delta.ids] == wanted
    assert len(got) <= 4, "two of each try: its first token, and the rest"
    assert len(fake.requests[1].ids) == len(PROMPT) + 150, "what was there before the abort is kept"
