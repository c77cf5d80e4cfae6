"""The service around the turns: keys, limits, errors, health, feedback, restart, shutdown."""

import asyncio
import contextlib
import itertools
import json
import logging
import threading
import time

import aiohttp
import pytest
from openai import (
    APIError,
    AsyncOpenAI,
    AuthenticationError,
    BadRequestError,
    NotFoundError,
    RateLimitError,
)

from openclaw_rl import __version__
from openclaw_rl.config import DataConfig
from openclaw_rl.engine.chat import ChatTokenizer
from openclaw_rl.errors import ConfigError, JournalError
from openclaw_rl.gateway.app import run
from openclaw_rl.journal.store import Journal
from openclaw_rl.types import State
from tests.gateway.conftest import eventually, world

SECRET_TEXT = "xylophone-armadillo"


def user(text):
    return {"role": "user", "content": text}


# -- keys ------------------------------------------------------------------------------------------


async def test_with_a_key_set_only_the_key_comes_in(tmp_path, model):
    async with world(tmp_path, model, api_key="k3y") as served:
        assert (await served.chat("hi")).finish_reason == "stop"
        stranger = AsyncOpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=0)
        with pytest.raises(AuthenticationError) as error:
            await stranger.models.list()
        assert error.value.code == "invalid_api_key"
        await stranger.close()
        for path in ("/v1/models", "/metrics", "/v1/unknown"):
            async with served.http.get(served.url + path) as response:
                assert response.status == 401, path
        health = await served.get("/healthz")  # open, and tells no secret
        assert "k3y" not in json.dumps(health)
        assert len(served.engine.requests) == 1


async def test_a_session_named_inside_the_key(tmp_path, model):
    async with world(tmp_path, model, api_key="k3y") as served:
        for _ in range(2):
            await served.chat("hi", extra_headers={"Authorization": "Bearer k3y:alice"})
        assert {turn.session_id for turn in served.turns()} == {"alice"}
        assert {turn.source for turn in served.turns()} == {"key"}


# -- errors ----------------------------------------------------------------------------------------


async def test_unknown_routes_and_methods_are_openai_errors(served):
    status, body = await served.post({}, "/v1/nothing")
    assert (status, body["error"]["code"]) == (404, "not_found")
    async with served.http.get(f"{served.url}/v1/chat/completions") as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert (await response.json())["error"]["code"] == "method_not_allowed"
    with pytest.raises(NotFoundError, match="tiny"):
        await served.client.models.retrieve("gpt-9")


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_body_that_is_too_large_is_a_413(tmp_path, model, chunked):
    async def pieces(data):
        yield data

    async with world(tmp_path, model, max_body_mb=0.001) as served:
        data = json.dumps({"messages": [user("x" * 2000)]}).encode()
        body = pieces(data) if chunked else data
        async with served.http.post(f"{served.url}/v1/chat/completions", data=body) as response:
            assert response.status == 413
            error = (await response.json())["error"]
        assert error["code"] == "request_too_large"
        assert "1048" in error["message"]
        assert (await served.chat("hi")).finish_reason == "stop"


async def test_more_than_max_inflight_is_a_429_and_room_comes_back(tmp_path, model):
    async with world(tmp_path, model, max_inflight=1) as served:
        served.engine.gated = True
        first = asyncio.ensure_future(served.chat("one"))
        await served.engine.arrived(1)
        with pytest.raises(RateLimitError) as error:
            await served.chat("two")
        assert error.value.response.headers["retry-after"] == "1"
        await served.engine.open_gate()
        await first
        assert (await served.chat("three")).finish_reason == "stop"


async def test_a_body_that_comes_slowly_takes_nobodys_place_and_is_given_up(tmp_path, model):
    async with world(tmp_path, model, max_inflight=1, body_seconds=1.0) as served:
        host, port = served.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"
        )
        await writer.drain()
        assert (await served.chat("hi")).finish_reason == "stop"
        assert (await reader.readline()).split()[1] == b"408"
        writer.close()


async def test_a_prompt_of_megabytes_is_refused_without_tokenising_it(tmp_path, model):
    async with world(tmp_path, model, context_length=512) as served:
        encoded = []
        encode = ChatTokenizer.encode

        def watched(self, text):
            encoded.append(len(text))
            return encode(self, text)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ChatTokenizer, "encode", watched)
            status, body = await served.post({"messages": [user("word " * 1_000_000)]})
        assert status == 400
        assert body["error"]["code"] == "context_length_exceeded"
        assert "prompt is too long" in body["error"]["message"]
        assert max(encoded, default=0) < 1000
        assert served.engine.requests == []


async def test_what_the_template_refuses_is_a_400(served):
    status, body = await served.post(
        {"messages": [user("hi")], "chat_template_kwargs": {"tokenize": True}}
    )
    assert status == 400
    assert "chat_template_kwargs" in body["error"]["message"]


async def test_an_engine_that_speaks_nonsense_is_no_500_of_ours(served, monkeypatch):
    async def nonsense(self, http):
        return aiohttp.web.json_response({"what": 1})

    monkeypatch.setattr(
        type(served.engine), "_serve", lambda self, http, request: nonsense(self, http)
    )
    with pytest.raises(APIError) as error:
        await asyncio.wait_for(served.chat("hi"), 30)
    assert error.value.status_code in (502, 503)
    assert served.turns() == []


# -- what it tells ---------------------------------------------------------------------------------


async def test_health_tells_states_and_counts(served):
    await served.chat("hi", extra_headers={"X-Session-Id": "s"})
    lost = await served.chat("ho", extra_headers={"X-Session-Id": "t"})
    served.journal.drop(lost.turn_id, "stale", 1.0)
    health = await served.get("/healthz")
    assert health["status"] == "ok"
    assert health["version"] == __version__
    assert health["model"] == "tiny"
    assert health["engine"]["state"] == "ok"
    assert health["journal"]["state"] == "ok"
    assert (health["turns"]["main"], health["turns"]["waiting"]) == (2, 1)
    assert health["turns"]["dropped"] == {"stale": 1}
    assert health["warnings"] == []


async def test_health_tells_an_engine_that_does_not_answer(tmp_path, model):
    async with world(tmp_path, model, engine_url="http://127.0.0.1:9") as served:
        health = await served.get("/healthz")
        assert health["engine"]["state"] == "waiting"
        assert health["status"] == "ok"
        assert any("engine" in warning for warning in health["warnings"])


async def test_neither_logs_nor_metrics_nor_health_hold_conversation_text(served, caplog):
    caplog.set_level(logging.DEBUG, "openclaw_rl")
    served.engine.say(f"{SECRET_TEXT} reply")
    first = await served.chat(f"{SECRET_TEXT} question", extra_headers={"X-Session-Id": "s"})
    await served.chat([user(f"{SECRET_TEXT} question"), first.replay(), user(SECRET_TEXT)])
    await served.post({"messages": [{"role": SECRET_TEXT, "content": SECRET_TEXT}]})
    await served.post({"turn_id": first.turn_id, "text": SECRET_TEXT, "score": -1}, "/v1/feedback")
    metrics = await served.metrics()
    health = json.dumps(await served.get("/healthz"))
    assert first.turn_id in caplog.text
    assert 'openclaw_rl_turns_total{kind="main"} 2' in metrics
    assert 'openclaw_rl_requests_total{route="/v1/chat/completions",status="400"} 1' in metrics
    for text in (caplog.text, metrics, health):
        assert "xylophone" not in text


async def test_tokens_come_in_larger_pieces_where_many_stream(served, monkeypatch):
    monkeypatch.setattr("openclaw_rl.gateway.core.STREAMS_PER_TOKEN", 1)
    served.engine.gated = True
    asking = []
    for number in range(3):
        asking.append(asyncio.ensure_future(served.chat(f"hi {number}", stream=True)))
        await served.engine.arrived(number + 1)
    await served.engine.open_gate()
    await asyncio.gather(*asking)
    pieces = [request.sampling.get("stream_interval", 1) for request in served.engine.requests]
    assert pieces == [1, 2, 3]


# -- whose sampling it is --------------------------------------------------------------------------

ASKED = {"temperature": 0.2, "top_p": 0.5, "presence_penalty": 1.0, "stop": ["!"], "max_tokens": 9}


async def test_a_client_decides_how_its_turns_are_sampled(served):
    await served.chat("hi", stream=True, **ASKED)
    sampling = served.only_turn().sampling
    assert {name: sampling.get(name) for name in ASKED} == {**ASKED, "max_tokens": None}
    assert sampling["max_new_tokens"] == 9
    assert served.engine.requests[0].sampling == sampling


async def test_the_operator_may_decide_how_all_turns_are_sampled(tmp_path, model):
    async with world(tmp_path, model, client_sampling="ignore", temperature=0.7) as served:
        for _ in range(2):
            await served.chat("hi", stream=True, **ASKED)
        sampling = served.turns()[1].sampling
        assert served.engine.requests[1].sampling == sampling
        del sampling["stop_token_ids"]
        assert sampling == {"temperature": 0.7, "stop": ["!"], "max_new_tokens": 9}
        metrics = await served.metrics()
    assert 'openclaw_rl_ignored_sampling_total{name="top_p"} 2.0' in metrics


# -- feedback and the end of a session -------------------------------------------------------------


async def test_feedback_on_a_turn_is_its_next_state(served):
    answer = await served.chat("hi")
    body = {"turn_id": f"chatcmpl-{answer.turn_id}", "thumb": "down", "text": "too short"}
    assert (await served.post(body, "/v1/feedback"))[0] == 200
    turn = served.only_turn()
    assert turn.state is State.JUDGING
    assert turn.next_state == (
        {"role": "feedback", "thumb": "down", "score": None, "content": "too short"},
    )
    status, error = await served.post(body, "/v1/feedback")
    assert (status, error["error"]["code"]) == (409, "turn_not_waiting")


async def test_feedback_on_a_session_means_its_newest_main_turn(served):
    headers = {"X-Session-Id": "s"}
    first = await served.chat("hi", extra_headers=headers)
    await served.chat([user("hi"), first.replay(), user("more")], extra_headers=headers)
    await served.chat("aside", extra_headers={**headers, "x-turn-type": "side"})
    status, body = await served.post({"session_id": "s", "score": 1}, "/v1/feedback")
    newest = served.turns()[1]
    assert (status, body["turn_id"]) == (200, newest.turn_id)
    assert newest.next_state[0]["score"] == 1


async def test_feedback_on_somebody_elses_turn_is_a_404(served):
    answer = await served.chat("hi")  # with the SDK's key
    body = {"turn_id": answer.turn_id, "score": 1}
    status, _ = await served.post(body, "/v1/feedback", Authorization="Bearer other")
    assert status == 404
    assert served.only_turn().state is State.WAITING
    assert (await served.post({"turn_id": "nothing", "score": 1}, "/v1/feedback"))[0] == 404


async def test_an_ended_session_begins_anew(served):
    headers = {"X-Session-Id": "s"}
    first = await served.chat("hi", extra_headers=headers)
    status, body = await served.post({}, "/v1/sessions/s/end")
    assert (status, body["ended"]) == (200, True)
    await served.chat([user("hi"), first.replay(), user("more")], extra_headers=headers)
    old, new = served.turns()
    assert old.next_state is None
    assert new.parent_id is None
    assert (await served.post({}, "/v1/sessions/never-seen/end"))[0] == 200


# -- a journal that fails --------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_a_journal_that_cannot_be_written_does_not_disturb_the_client(
    served, monkeypatch, caplog, stream
):
    record = Journal.record_turn

    def fail(self, rec):
        raise JournalError("disk full")

    monkeypatch.setattr(Journal, "record_turn", fail)
    served.engine.say("lost")
    lost = await served.chat("hi", stream=stream)
    assert lost.text == "lost"
    health = await served.get("/healthz")
    assert health["journal"] == {"state": "failing", "failed_writes": 1}
    assert any("not recorded" in warning for warning in health["warnings"])
    assert "NOT RECORDED" in caplog.text or "journal failed" in caplog.text
    monkeypatch.setattr(Journal, "record_turn", record)
    # The conversation goes on, hanging on nothing that the journal does not know.
    served.engine.say("back")
    assert (await served.chat([user("hi"), lost.replay(), user("more")])).text == "back"
    turn = served.only_turn()
    assert turn.parent_id is None
    assert not turn.shares_tokens
    assert (await served.get("/healthz"))["journal"]["state"] == "ok"
    back = {"role": "assistant", "content": "back"}
    talk = [user("hi"), lost.replay(), user("more"), back, user("on")]
    monkeypatch.setattr(Journal, "record_turn", fail)
    lost = await served.chat(talk)
    monkeypatch.setattr(Journal, "record_turn", record)
    await served.chat([*talk, lost.replay(), user("at last")])
    assert served.turns()[1].parent_id == turn.turn_id
    assert served.turns()[1].shares_tokens


async def test_a_turn_that_the_journal_does_not_take_in_time_is_served_and_never_recorded(
    tmp_path, model, monkeypatch
):
    release = threading.Event()
    record = Journal.record_turn
    monkeypatch.setattr(
        Journal, "record_turn", lambda self, rec: (release.wait(20), record(self, rec))[1]
    )
    async with world(tmp_path, model, journal_seconds=0.2) as served:
        try:
            await served.chat("one")  # its write has begun, and the disk hangs
            assert (await served.chat("two")).finish_reason == "stop"
            health = await served.get("/healthz")
            assert health["journal"] == {"state": "failing", "failed_writes": 1}
        finally:
            release.set()
        await served.chat("three")
        asked = [turn.messages[0]["content"] for turn in served.turns()]
        assert asked == ["one", "three"]
        counts = served.journal.outcomes()
        assert (counts.seen, counts.counters["unrecorded"]) == (2, 1)


@pytest.mark.parametrize("stream", [True, False])
async def test_the_turn_is_in_the_journal_before_the_client_sees_its_end(
    served, monkeypatch, stream
):
    commit, record = threading.Event(), Journal.record_turn
    monkeypatch.setattr(
        Journal, "record_turn", lambda self, rec: (commit.wait(4), record(self, rec))[1]
    )
    ends = []

    async def ask():
        answer = await served.chat("hi", stream=stream)
        ends.append(answer.finish_reason)
        return len(served.turns())

    asking = asyncio.ensure_future(ask())
    await served.engine.wait_until(
        lambda: served.engine.requests and served.engine.requests[0].done
    )
    await asyncio.wait([asking], timeout=0.3)  # the reply is whole; only its commit is missing
    assert ends == []
    commit.set()
    assert await asking == 1


# -- restart and shutdown --------------------------------------------------------------------------


async def test_clients_are_told_no_longer_context_than_the_engine_takes(tmp_path, model):
    async with world(tmp_path, model) as served:

        async def told():
            return (await served.get("/v1/models"))["data"][0]["max_model_len"]

        own = await told()
        info = {"context_length": 48}
        served.journal.publish("policy", served.engine.url, info, time.time())
        await eventually(lambda: is_equal(told, 48))
        with pytest.raises(BadRequestError, match="48"):
            await served.chat("hi " * 40)
        assert (await served.chat("hi", max_tokens=5)).finish_reason in ("stop", "length")
        served.journal.publish("policy", served.engine.url, {"context_length": 10**6}, time.time())
        await eventually(lambda: is_equal(told, own))


async def is_equal(asked, value):
    return await asked() == value


async def test_a_second_gateway_of_the_same_journal_does_not_start(tmp_path, model):
    async with world(tmp_path, model) as served:
        first = await asyncio.to_thread(served.journal.endpoint, "gateway")
        with pytest.raises(ConfigError, match="another gateway is already running"):
            async with world(tmp_path, model):
                pass
        assert await asyncio.to_thread(served.journal.endpoint, "gateway") == first
        assert (await served.chat("hi")).finish_reason == "stop"
    async with world(tmp_path, model) as served:  # free again
        assert (await served.chat("hi")).finish_reason == "stop"


async def test_after_a_restart_the_conversation_goes_on_with_its_tokens(tmp_path, model):
    talk = []
    for number in range(4):
        async with world(tmp_path, model) as served:  # a new gateway each turn
            talk.append(user(f"question {number}"))
            served.engine.say(f"answer {number}")
            talk.append((await served.chat(talk)).replay())
            turns = served.turns()
    assert len({turn.session_id for turn in turns}) == 1
    for parent, child in itertools.pairwise(turns):
        assert child.parent_id == parent.turn_id
        assert child.shares_tokens
        assert parent.state is State.JUDGING
    assert turns[-1].state is State.WAITING


async def test_after_a_restart_the_replies_come_back_as_they_were_written(tmp_path, model):
    raw = "<think>\nlet me think\n</think>\n\nanswer"
    talk = [user("q0")]
    async with world(tmp_path, model) as served:
        for number in range(1, 3):
            served.engine.say(raw)
            talk += [(await served.chat(talk)).replay(), user(f"q{number}")]
    async with world(tmp_path, model) as served:
        await served.chat(talk)  # the client never sends reasoning back
        last = served.turns()[-1]
        assert last.shares_tokens
        assert [m.get("reasoning_content") for m in last.messages if m["role"] == "assistant"] == [
            "\nlet me think\n", "\nlet me think\n",
        ]  # fmt: skip


@contextlib.asynccontextmanager
async def stopping(served, tmp_path, monkeypatch, seconds):
    """Another gateway whose reply is under way; gives its address, its stop, and its journal."""
    monkeypatch.setattr("openclaw_rl.gateway.app.SHUTDOWN_SECONDS", seconds)
    config = served.config.model_copy(update={"data": DataConfig(path=str(tmp_path / "other"))})
    config.journal_path.parent.mkdir()
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    running = asyncio.ensure_future(run(config, stop, on_ready=ready.set_result))
    served.engine.gated = True
    served.engine.say("to the very end")
    await served.engine.allow(1)
    with Journal.open(config.journal_path) as journal:
        yield await ready, stop, journal
    await asyncio.wait_for(running, 10)


async def test_a_graceful_stop_lets_replies_under_way_finish(served, tmp_path, monkeypatch):
    async with stopping(served, tmp_path, monkeypatch, 10.0) as (url, stop, journal):
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="tiny", messages=[user("hi")], stream=True
            )
            stop.set()
            await refused(url)
            await served.engine.open_gate()
            text = "".join([c.choices[0].delta.content or "" async for c in stream])
        assert text == "to the very end"
        assert journal.outcomes().main == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_reply_that_outlasts_the_stop_ends_with_an_error_that_says_so(
    served, tmp_path, monkeypatch, stream
):
    body = {"model": "tiny", "messages": [user("hi")], "stream": stream}

    async def ask():
        async with served.http.post(f"{url}/v1/chat/completions", json=body) as response:
            if stream:
                await response.content.readuntil(b"\n\n")
                stop.set()
            return response.status, await response.text()

    async with stopping(served, tmp_path, monkeypatch, 0.2) as (url, stop, journal):
        asking = asyncio.ensure_future(ask())
        if not stream:
            await served.engine.arrived(1)
            stop.set()
        status, text = await asyncio.wait_for(asking, 10)
        assert status == (200 if stream else 503)
        assert '"code":"stopping"' in text.replace(": ", ":")
        assert journal.outcomes().main == 0


async def refused(url):
    """Until nothing listens any more."""

    async def closed():
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        except ConnectionError:
            return True
        writer.close()
        return False

    await eventually(closed)


async def test_an_engine_that_moves_is_found(tmp_path, model):
    async with world(tmp_path, model, engine_url="") as served:
        served.journal.publish("policy", served.engine.url, {}, 1.0)
        assert (await served.chat("one")).finish_reason == "stop"
        await served.engine.stop()
        asking = asyncio.ensure_future(served.chat("two"))
        await eventually(served.waiting)
        await served.engine.start(port=0)
        served.journal.publish("policy", served.engine.url, {}, 2.0)
        assert (await asking).finish_reason == "stop"
