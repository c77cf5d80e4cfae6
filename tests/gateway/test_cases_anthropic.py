"""CASE 11 over HTTP: the official Anthropic SDK against the gateway and the fake engine."""

import contextlib
import json

import pytest

from openclaw_rl.types import State
from tests.fakes.engine import logprob_of
from tests.fakes.model import tiny_tokenizer
from tests.fakes.templates import SYSTEM_FIRST
from tests.gateway.conftest import whole_text, world

anthropic = pytest.importorskip("anthropic", reason="needs the anthropic SDK (dev extra)")

TOOL = {
    "name": "run",
    "description": "Runs it.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CALLS = (
    'On it.\n<tool_call>\n{"name": "run", "arguments": {"a":1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "run", "arguments": {"a":  2}}\n</tool_call>'
)


@contextlib.asynccontextmanager
async def sdk(served, **options):
    given = {
        "api_key": served.config.gateway.api_key or "-",
        "max_retries": 0,
        "timeout": 20,
        **options,
    }
    async with anthropic.AsyncAnthropic(base_url=served.url, **given) as client:
        yield client


async def ask(served, messages, *, stream, **options):
    """One request by the SDK; a streamed one is put together by the SDK itself."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    request = {"model": "tiny", "max_tokens": 200, "messages": messages, **options}
    async with sdk(served) as client:
        if not stream:
            return await client.messages.create(**request)
        async with client.messages.stream(**request) as events:
            return await events.get_final_message()


def replay(message):
    return {"role": "assistant", "content": [b.model_dump(mode="json") for b in message.content]}


def blocks(message):
    """The content without what changes from run to run."""
    found = [block.model_dump(exclude_none=True) for block in message.content]
    return [{k: v for k, v in b.items() if k not in ("id", "signature", "caller")} for b in found]


@pytest.mark.parametrize("stream", [True, False])
async def test_case_11_a_plain_reply_with_thinking(served, stream):
    ids = served.engine.say("<think>\nlet me see\n</think>\n\nParis it is.")
    message = await ask(served, "Capital of France?", stream=stream, system="Be brief.")
    assert blocks(message) == [
        {"type": "thinking", "thinking": "\nlet me see\n"},
        {"type": "text", "text": "Paris it is."},
    ]
    assert message.content[0].signature
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    turn = served.only_turn()
    assert message.id == f"msg_{turn.turn_id}"
    assert turn.messages[0] == {"role": "system", "content": "Be brief."}
    assert list(turn.output_ids) == ids
    start = len(turn.prompt_ids)
    assert list(turn.output_logprobs) == [logprob_of(t, start + i) for i, t in enumerate(ids)]
    assert turn.state is State.WAITING
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(turn.prompt_ids)
    assert usage.cache_read_input_tokens == len(turn.prompt_ids) // 2
    assert usage.output_tokens == len(ids)
    assert 0 < usage.output_tokens_details.thinking_tokens < len(ids)


@pytest.mark.parametrize("stream", [True, False])
async def test_case_11_tools_and_their_results(served, stream):
    first_ids = served.engine.say(CALLS)
    first = await ask(served, "go", stream=stream, tools=[TOOL])
    assert blocks(first) == [
        {"type": "text", "text": "On it."},
        {"type": "tool_use", "name": "run", "input": {"a": 1}},
        {"type": "tool_use", "name": "run", "input": {"a": 2}},
    ]
    assert first.stop_reason == "tool_use"
    calls = [block.id for block in first.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": calls[0], "content": "no such file",
         "is_error": True},
        {"type": "tool_result", "tool_use_id": calls[1],
         "content": [{"type": "text", "text": "done"}]},
        {"type": "text", "text": "and hurry", "cache_control": {"type": "ephemeral"}},
    ]  # fmt: skip
    history = [
        {"role": "user", "content": "go"},
        replay(first),
        {"role": "user", "content": results},
    ]
    served.engine.say("Done.")
    await ask(served, history, stream=stream, tools=[TOOL])
    one, two = served.turns()
    # The next state is both results and the words behind them, in their order.
    assert [m["role"] for m in one.next_state] == ["tool", "tool", "user"]
    assert [m["content"] for m in one.next_state] == ["no such file", "done", "and hurry"]
    assert one.next_state[0]["is_error"] is True
    assert two.parent_id == one.turn_id
    # Served again are the tokens that were sampled, with the model's own spaces in the arguments.
    assert two.shares_tokens
    assert list(two.prompt_ids[: len(one.prompt_ids)]) == list(one.prompt_ids)
    assert list(two.prompt_ids[len(one.prompt_ids) :][: len(first_ids)]) == first_ids
    assert served.engine.requests[1].ids == list(two.prompt_ids)


async def test_case_11_tokens_are_shown_as_they_arrive_and_thinking_can_be_left_out(served):
    served.engine.say("<think>a secret thought</think>one two three")
    served.engine.delay = 0.005
    options = {"thinking": {"type": "adaptive", "display": "omitted"}}
    async with (
        sdk(served) as client,
        client.messages.stream(
            model="tiny", max_tokens=99, messages=[{"role": "user", "content": "count"}], **options
        ) as stream,
    ):
        events = [event async for event in stream]
        message = await stream.get_final_message()
    assert sum(event.type == "text" for event in events) > 2
    assert blocks(message) == [
        {"type": "thinking", "thinking": ""},
        {"type": "text", "text": "one two three"},
    ]
    assert "a secret thought" in served.only_turn().reply["reasoning_content"]
    # A client that sends back what it got is recognised, and the model sees its own thought again.
    history = [{"role": "user", "content": "count"}, replay(message),
               {"role": "user", "content": "on"}]  # fmt: skip
    await ask(served, history, stream=False, **options)
    first, second = served.turns()
    assert second.parent_id == first.turn_id
    assert "a secret thought" in whole_text(served, second.prompt_ids)


@pytest.mark.parametrize(
    ("thinking", "told"),
    [
        ({"type": "disabled"}, {"enable_thinking": False}),
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True}),
        ({"type": "adaptive"}, {"enable_thinking": True}),
        (anthropic.omit if hasattr(anthropic, "omit") else anthropic.NOT_GIVEN, {}),
    ],
)
async def test_case_11_thinking_is_what_the_template_is_told(tmp_path, qwen_model, thinking, told):
    async with world(tmp_path, qwen_model) as served:
        await ask(served, "hi", stream=False, thinking=thinking)
        turn = served.only_turn()
        assert turn.template_kwargs == told
        closed = whole_text(served, turn.prompt_ids).endswith("<think>\n\n</think>\n\n")
        assert closed == (told.get("enable_thinking") is False)


@pytest.mark.parametrize("stream", [True, False])
async def test_case_11_why_a_reply_ended(served, stream):
    served.engine.say("one two STOP three", end=False)
    message = await ask(served, "count", stream=stream, stop_sequences=["END", "STOP"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")
    assert blocks(message) == [{"type": "text", "text": "one two "}]
    served.engine.say("a long reply that is cut")
    message = await ask(served, "tell", stream=stream, max_tokens=3)
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 3


@pytest.mark.parametrize("stream", [True, False])
async def test_case_11_a_reply_that_the_context_ends(tmp_path, model, stream):
    async with world(tmp_path, model, context_length=64) as served:
        served.engine.reply_fn = lambda request: [101] * 100
        message = await ask(served, "on and on", stream=stream, max_tokens=100_000)
        assert message.stop_reason == "model_context_window_exceeded"
        sent = served.engine.requests[0]
        assert message.usage.output_tokens == 64 - len(sent.ids)


async def test_case_11_count_tokens_is_what_the_prompt_then_has(served):
    options = {"model": "tiny", "system": "Be kind.", "tools": [TOOL]}
    messages = [{"role": "user", "content": "How many tokens is this?"}]
    async with sdk(served) as client:
        counted = await client.messages.count_tokens(messages=messages, **options)
        assert served.engine.requests == []
        assert served.journal.outcomes().seen == 0
        served.engine.say("<think>well</think>Few.")
        message = await client.messages.create(messages=messages, max_tokens=50, **options)
        assert counted.input_tokens == len(served.engine.requests[0].ids)
        # Also in a conversation, where the reply is served as it was sampled.
        messages += [replay(message), {"role": "user", "content": "Sure?"}]
        counted = await client.messages.count_tokens(messages=messages, **options)
        await client.messages.create(messages=messages, max_tokens=50, **options)
        assert counted.input_tokens == len(served.engine.requests[1].ids)


async def test_case_11_counting_tokens_changes_nothing_for_later_requests(served):
    """A counted request that names its turn and has tools is no sign that others should."""
    words = {"messages": [{"role": "user", "content": "How many?"}], "model": "tiny"}
    names = {"x-session-id": "s", "x-turn-type": "main"}
    async with sdk(served) as client:
        await client.messages.count_tokens(tools=[TOOL], extra_headers=names, **words)
        await client.messages.create(max_tokens=5, extra_headers={"x-session-id": "s"}, **words)
    assert (served.only_turn().kind, served.only_turn().kind_reason) == ("main", "opens")


async def test_case_11_models_are_listed_for_both_sdks(served):
    async with sdk(served) as client:
        listed = [entry async for entry in client.models.list()]
        assert [(entry.id, entry.type, entry.display_name) for entry in listed] == [
            ("tiny", "model", "tiny")
        ]
        assert (await client.models.retrieve("tiny")).max_input_tokens == 4096
        with pytest.raises(anthropic.NotFoundError) as error:
            await client.models.retrieve("huge")
        assert error.value.body["error"]["type"] == "not_found_error"
    assert [entry.id for entry in (await served.client.models.list()).data] == ["tiny"]


@pytest.mark.parametrize("stream", [True, False])
async def test_case_11_a_prompt_that_is_too_long_is_worded_so_that_clients_compact(
    tmp_path, model, stream
):
    async with world(tmp_path, model, context_length=64) as served:
        with pytest.raises(anthropic.BadRequestError) as error:
            await ask(served, "word " * 200, stream=stream)
        assert error.value.body["type"] == "error"
        assert error.value.body["error"]["type"] == "invalid_request_error"
        assert error.value.body["error"]["message"].startswith("prompt is too long: ")
        assert " tokens > 64 maximum" in error.value.body["error"]["message"]
        assert served.engine.requests == []


async def test_case_11_keys_and_headers(tmp_path, model):
    async with world(tmp_path, model, api_key="sesame") as served:
        for options in ({"api_key": "sesame"}, {"api_key": None, "auth_token": "sesame"}):
            async with sdk(served, **options) as client:
                await client.beta.messages.create(
                    model="any-name", max_tokens=9, betas=["context-management-2025-06-27"],
                    messages=[{"role": "user", "content": "hi"}],
                )  # fmt: skip
        for options in ({"api_key": "wrong"}, {"api_key": None, "auth_token": "wrong"}):
            async with sdk(served, **options) as client:
                with pytest.raises(anthropic.AuthenticationError) as error:
                    await client.messages.count_tokens(model="m", messages=[])
                assert error.value.body["error"]["type"] == "authentication_error"
        assert len(served.turns()) == 2


@pytest.mark.parametrize(("stream", "keepalive"), [(False, 5.0), (True, 5.0), (True, 0.05)])
async def test_case_11_an_engine_that_is_away_is_overloaded(tmp_path, model, stream, keepalive):
    """Also told inside of a stream that has begun with keep-alives."""
    async with world(
        tmp_path, model, engine_url="http://127.0.0.1:9", engine_wait_seconds=0.3,
        keepalive_seconds=keepalive,
    ) as served:  # fmt: skip
        with pytest.raises(anthropic.APIStatusError) as error:
            await ask(served, "hi", stream=stream)
        assert error.value.status_code == (200 if keepalive < 1 else 529)
        assert error.value.body["error"]["type"] == "overloaded_error"
        assert served.turns() == []


async def test_case_11_a_request_that_waits_gets_pings(tmp_path, model):
    async with world(tmp_path, model, keepalive_seconds=0.05) as served:
        served.engine.gated = True
        served.engine.say("<think>slow</think>here")
        body = {"model": "tiny", "max_tokens": 50, "stream": True,
                "messages": [{"role": "user", "content": "hi"}]}  # fmt: skip
        async with served.http.post(f"{served.url}/v1/messages", json=body) as response:
            seen = b""
            while seen.count(b"event: ping\n") < 3:
                seen += await response.content.readany()
            assert seen.startswith(b"event: message_start\n")
            assert b"content_block" not in seen
            await served.engine.allow(2)
            # Inside a block an empty delta goes with the ping, for those who never see pings.
            while seen.count(b'{"type":"thinking_delta","thinking":""}') < 2:
                seen += await response.content.readany()
            await served.engine.open_gate()
            seen += await response.read()
        assert seen.endswith(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')
        assert served.only_turn().reply["content"] == "here"


async def test_case_11_a_system_message_in_mid_conversation(tmp_path, tmp_path_factory):
    """Claude Code's, for a model whose template refuses it (Qwen3.5's does)."""
    model = tiny_tokenizer(tmp_path_factory.mktemp("strict"), template=SYSTEM_FIRST)
    async with world(tmp_path, model) as served:
        first = [{"role": "user", "content": "hi"}, {"role": "system", "content": "It is noon."}]
        message = await ask(served, first, stream=True, system="Be kind.")
        again = [*first, replay(message), {"role": "user", "content": "and now?"}]
        await ask(served, again, stream=True, system="Be kind.")
        one, two = served.turns()
        assert "It is noon." in whole_text(served, one.prompt_ids)
        assert two.parent_id == one.turn_id
        assert two.shares_tokens
        assert [m["content"] for m in one.next_state] == ["and now?"]


async def test_case_11_feedback_names_the_reply_by_its_id(served):
    message = await ask(served, "hi", stream=False)
    status, _ = await served.post({"turn_id": message.id, "thumb": "up"}, "/v1/feedback")
    assert status == 200
    assert served.only_turn().next_state[0]["thumb"] == "up"


async def test_case_11_one_conversation_through_two_dialects(served):
    """The history is what counts, not the words in which it is sent."""
    served.engine.say("Hello.")
    await ask(served, "hi", stream=False, system="Be kind.")
    await served.chat(
        [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "thanks"},
        ]
    )
    one, two = served.turns()
    assert two.session_id == one.session_id
    assert two.parent_id == one.turn_id
    assert json.loads(json.dumps(one.next_state)) == [{"role": "user", "content": "thanks"}]
