"""CASES 1 to 10 over HTTP, with the official SDK against the fake engine."""

import asyncio
import json
import logging

import pytest
from openai import BadRequestError

from openclaw_rl.types import State
from tests.fakes.engine import Fault, logprob_of
from tests.gateway.conftest import eventually, whole_text, world

TOOLS = [
    {
        "type": "function",
        "function": {"name": "run", "parameters": {"type": "object", "properties": {}}},
    }
]
CALLS = (
    'On it.\n<tool_call>\n{"name": "run", "arguments": {"a":1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "run", "arguments": {"b": [2,  3]}}\n</tool_call>'
)


@pytest.mark.parametrize("stream", [True, False])
async def test_case_01_two_tool_calls_each_complete(served, stream):
    served.engine.say(CALLS)
    answer = await served.chat("go", stream=stream, tools=TOOLS)
    assert answer.text == "On it."
    assert answer.finish_reason == "tool_calls"
    assert [call.function.name for call in answer.message.tool_calls] == ["run", "run"]
    arguments = [call.function.arguments for call in answer.message.tool_calls]
    assert arguments == ['{"a":1}', '{"b": [2,  3]}']
    ids = [call.id for call in answer.message.tool_calls]
    assert len(set(ids)) == 2
    assert all(one.isalnum() for one in ids)
    if stream:
        assert [call.index for call in answer.message.tool_calls] == [0, 1]
        assert all(call.type == "function" for call in answer.message.tool_calls)
    turn = served.only_turn()
    assert turn.finish_reason == "tool_calls"
    assert turn.reply["tool_calls"][1]["function"]["arguments"] == '{"b": [2,  3]}'


async def test_case_02_a_stream_has_reasoning_text_usage_and_an_end(served):
    served.engine.say("<think>\nlet me see\n</think>\n\nParis it is.")
    options = {"include_usage": True}
    answer = await served.chat("Capital of France?", stream=True, stream_options=options)
    assert answer.reasoning.strip() == "let me see"
    assert (answer.text, answer.finish_reason) == ("Paris it is.", "stop")
    assert {(c.id, c.model) for c in answer.chunks} == {(f"chatcmpl-{answer.turn_id}", "tiny")}
    assert answer.chunks[-1].choices == []
    turn = served.only_turn()
    assert answer.usage.prompt_tokens == len(turn.prompt_ids)
    assert answer.usage.completion_tokens == len(turn.output_ids)


async def test_case_02_tokens_are_shown_as_they_arrive(served):
    served.engine.say("one two three")
    served.engine.gated = True
    await served.engine.allow(3)
    stream = await served.client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "count"}], stream=True
    )
    seen = ""
    async for chunk in stream:
        seen += chunk.choices[0].delta.content or ""
        if seen:
            break
    assert "three" not in seen
    assert served.turns() == []
    await served.engine.open_gate()
    async for chunk in stream:
        seen += chunk.choices[0].delta.content or ""
    assert seen == "one two three"


@pytest.mark.parametrize("stream", [True, False])
async def test_case_03_a_prompt_that_is_too_long_is_a_400_that_makes_agents_compact(
    tmp_path, model, stream
):
    async with world(tmp_path, model, context_length=64) as served:
        with pytest.raises(BadRequestError) as error:
            await served.chat("word " * 200, stream=stream)
        assert error.value.code == "context_length_exceeded"
        assert "prompt is too long" in str(error.value)
        assert served.engine.requests == []


@pytest.mark.parametrize("stream", [True, False])
async def test_case_03_the_engine_refuses_and_the_client_gets_its_status(served, stream):
    served.engine.faults.append(Fault(status=400, message="min_p must be small"))
    with pytest.raises(BadRequestError, match="min_p must be small"):
        await served.chat("hi", stream=stream)
    assert served.turns() == []


async def test_case_03_the_engines_context_is_smaller_than_we_thought(served):
    served.engine.context_length = 20
    with pytest.raises(BadRequestError, match="prompt is too long"):
        await served.chat("word " * 30, stream=True)


async def test_case_03_an_over_large_limit_is_cut_to_what_is_left(served):
    answer = await served.chat("hi", max_completion_tokens=10_000_000)
    assert answer.finish_reason == "stop"
    sent = served.engine.requests[0]
    assert sent.sampling["max_new_tokens"] == 4096 - len(sent.ids)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{bad", None),
        (b"[1]", None),
        (b"{}", "messages"),
        (b'{"messages": ["hello"]}', "messages[0]"),
        (b'{"messages": [{"role": "wizard", "content": "x"}]}', "messages[0].role"),
    ],
)
async def test_case_04_a_wrong_body_is_a_400_that_names_the_field(served, body, param):
    status, answer = await served.post(body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"] == param
    assert served.engine.requests == []
    assert served.journal.outcomes().seen == 0


async def disconnected(served, stream):
    """A client that asks, gets three tokens' time, and leaves."""
    served.engine.gated = True
    served.engine.say("a long reply that nobody waits for")
    body = {"stream": stream, "messages": [{"role": "user", "content": "tell me"}]}
    asking = asyncio.ensure_future(served.http.post(f"{served.url}/v1/chat/completions", json=body))
    await served.engine.arrived(1)
    await served.engine.allow(3)
    await served.engine.wait_until(lambda: len(served.engine.requests[0].sent) == 3)
    if stream:
        response = await asking
        await response.content.readany()
        response.close()
    else:
        asking.cancel()
    await served.engine.wait_until(lambda: served.engine.requests[0].done)


@pytest.mark.parametrize("stream", [True, False])
async def test_case_05_a_client_that_leaves_ends_the_engines_work_and_records_nothing(
    served, stream
):
    await disconnected(served, stream)
    request = served.engine.requests[0]
    assert request.aborted or request.disconnected
    assert len(request.sent) < len(request.reply)
    await eventually(lambda: served.journal.outcomes().counters.get("disconnected"))
    assert served.turns() == []
    health = await served.get("/healthz")
    assert health["requests"]["inflight"] == 0
    await served.engine.open_gate()
    assert (await served.chat("again", stream=stream)).finish_reason == "stop"


async def test_case_06_before_the_first_rollout_a_stream_is_kept_alive_and_then_served(
    tmp_path, model
):
    async with world(tmp_path, model, engine_url="", keepalive_seconds=0.05) as served:
        assert (await served.get("/healthz"))["engine"]["state"] == "unknown"
        stream = await served.client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], stream=True
        )
        empty = 0
        async for chunk in stream:
            assert not chunk.choices[0].delta.content
            empty += 1
            if empty == 4:
                break
        assert (await served.get("/healthz"))["requests"]["waiting_for_engine"] == 1
        served.engine.say("here I am")
        served.journal.publish("policy", served.engine.url, {"weight_version": "0"}, 1.0)
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        assert text == "here I am"
        assert (await served.get("/healthz"))["engine"] == {"state": "ok", "weight_version": "0"}
        assert served.only_turn().state is State.WAITING


async def test_case_06_without_a_stream_it_just_waits(tmp_path, model):
    async with world(tmp_path, model, engine_url="", keepalive_seconds=0.05) as served:
        asking = asyncio.ensure_future(served.chat("hello"))
        await eventually(served.waiting)
        served.journal.publish("policy", served.engine.url, {}, 1.0)
        assert (await asking).finish_reason == "stop"


async def test_case_06_a_request_during_a_weight_update_is_served_afterwards(served):
    await served.engine.pause()
    asking = asyncio.ensure_future(served.chat("hello", stream=True))
    await served.engine.arrived(1)
    served.engine.version = "1"
    await served.engine.resume()
    assert (await asking).finish_reason == "stop"
    assert set(served.only_turn().output_versions) == {"1"}


@pytest.mark.parametrize(("stream", "keepalive"), [(False, 5.0), (True, 5.0), (True, 0.05)])
async def test_case_06_an_engine_that_stays_away_is_a_503_or_ends_a_begun_stream(
    tmp_path, model, stream, keepalive
):
    async with world(
        tmp_path, model, engine_url="http://127.0.0.1:9", engine_wait_seconds=0.3,
        keepalive_seconds=keepalive,
    ) as served:  # fmt: skip
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream}
        async with served.http.post(f"{served.url}/v1/chat/completions", json=body) as response:
            lines = [line for line in (await response.text()).split("\n") if line]
            status = response.status
        if keepalive < 1:
            assert (status, lines.pop()) == (200, "data: [DONE]")
        else:
            assert status == 503
            assert response.headers["Retry-After"] == "5"
        error = json.loads(lines[-1].removeprefix("data: "))["error"]
        assert error["code"] == "engine_unavailable"
        assert served.turns() == []


@pytest.mark.parametrize("stream", [True, False])
async def test_case_07_an_engine_abort_is_not_seen_and_each_token_keeps_its_version(served, stream):
    ids = served.engine.say("a reply in two halves, please")
    served.engine.gated = True
    asking = asyncio.ensure_future(served.chat("go on", stream=stream))
    await served.engine.arrived(1)
    await served.engine.allow(4)
    await served.engine.wait_until(lambda: len(served.engine.requests[0].sent) == 4)
    await served.engine.update_weights("1")
    await served.engine.open_gate()
    answer = await asking
    assert answer.text == "a reply in two halves, please"
    assert answer.finish_reason == "stop"
    turn = served.only_turn()
    assert list(turn.output_ids) == ids
    assert list(turn.output_versions) == ["0"] * 4 + ["1"] * (len(ids) - 4)
    start = len(turn.prompt_ids)
    assert list(turn.output_logprobs) == [logprob_of(t, start + i) for i, t in enumerate(ids)]
    assert answer.usage is None or answer.usage.completion_tokens == len(ids)


async def test_case_08_the_prompt_that_was_served_is_the_prompt_that_is_recorded(
    tmp_path, qwen_model
):
    async with world(tmp_path, qwen_model) as served:
        await served.chat("hi", extra_body={"chat_template_kwargs": {"enable_thinking": False}})
        turn = served.only_turn()
        assert served.engine.requests[0].ids == list(turn.prompt_ids)
        text = whole_text(served, list(turn.prompt_ids))
        assert text.endswith("<think>\n\n</think>\n\n")
        assert turn.template_kwargs == {"enable_thinking": False}


async def test_case_09_content_null_empty_and_parts(served):
    await served.chat(
        [
            {"role": "user", "content": [{"type": "text", "text": "Say"},
                                         {"type": "text", "text": "hello"}]},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "a1", "type": "function", "function": {"name": "run", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "a1", "content": ""},
            {"role": "user", "content": ""},
        ]
    )  # fmt: skip
    text = whole_text(served, served.engine.requests[0].ids)
    assert "Say\nhello" in text


async def test_case_09_an_image_for_a_text_model_is_refused_in_words(served):
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(BadRequestError, match="images are not supported"):
        await served.chat([{"role": "user", "content": [part]}])
    assert served.engine.requests == []


async def test_case_10_usage_is_true_and_models_lists_the_served_name(served):
    ids = served.engine.say("<think>hm, so</think>fine")
    answer = await served.chat("hi")
    sent = served.engine.requests[0].ids
    assert answer.usage.prompt_tokens == len(sent)
    assert answer.usage.completion_tokens == len(ids)
    assert answer.usage.total_tokens == len(sent) + len(ids)
    assert answer.usage.prompt_tokens_details.cached_tokens == len(sent) // 2
    end = ids.index(served.tokenizer.encode("</think>")[0])
    assert answer.usage.completion_tokens_details.reasoning_tokens == end + 1
    listed = await served.client.models.list()
    assert [entry.id for entry in listed.data] == ["tiny"]
    assert (await served.client.models.retrieve("tiny")).id == "tiny"


async def test_case_10_unknown_keys_are_named_in_the_log_and_not_obeyed(served, caplog):
    caplog.set_level(logging.INFO, "openclaw_rl.gateway")
    await served.chat("hi", extra_body={"mirostat": 2, "seed": 1}, temperature=0.7, top_p=0.9)
    assert "mirostat" in caplog.text
    sampling = served.engine.requests[0].sampling
    assert "mirostat" not in sampling
    assert (sampling["temperature"], sampling["top_p"]) == (0.7, 0.9)
    assert served.only_turn().sampling["temperature"] == 0.7


async def test_temperature_is_the_settings_own_where_the_client_gives_none(served):
    await served.chat("hi")
    assert served.engine.requests[0].sampling["temperature"] == 1.0
    assert served.only_turn().sampling["temperature"] == 1.0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_string_ends_what_is_shown_and_is_never_shown(served, stream):
    ids = served.engine.say("one two STOP three", end=False)
    answer = await served.chat("count", stream=stream, stop=["STOP"])
    assert answer.text == "one two "
    turn = served.only_turn()
    assert turn.reply["content"] == "one two "
    assert list(turn.output_ids) == ids  # what was sampled, whole
