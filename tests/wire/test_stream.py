from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from openclaw_rl.wire.chat import ChatStream, chat_completion, parse_chat_request
from openclaw_rl.wire.dialect import Ending, ReplyInfo, TokenLogprob, Usage, unavailable
from openclaw_rl.wire.formats import HERMES
from openclaw_rl.wire.reply import ReplyEvent

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]


def head(**options) -> ReplyInfo:
    body = {"messages": [{"role": "user", "content": "hi"}], **options}
    return ReplyInfo("1", "m", 7, parse_chat_request(json.dumps(body).encode()))


def chunks(raw: bytes) -> list[dict]:
    events = raw.decode().split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [json.loads(event[6:]) for event in events if event != "data: [DONE]"]


def test_case_01_each_call_is_one_complete_chunk():
    parser = HERMES.parser(TOOLS)
    stream = ChatStream(head())
    reply = (
        'Two.\n<tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call>\n'
        '<tool_call>{"name": "b", "arguments": {}}</tool_call>'
    )
    raw = b"".join(stream.event(e) for c in reply for e in parser.feed(c))
    raw += b"".join(stream.event(e) for e in parser.finish())
    deltas = [c["choices"][0]["delta"] for c in chunks(raw)]
    assert "".join(d.get("content", "") for d in deltas) == "Two."
    calls = [d["tool_calls"][0] for d in deltas if "tool_calls" in d]
    assert [(c["index"], c["type"], c["function"]) for c in calls] == [
        (0, "function", {"name": "a", "arguments": '{"x": 1}'}),
        (1, "function", {"name": "b", "arguments": "{}"}),
    ]
    assert all(c["id"].isalnum() for c in calls)


def test_usage_is_sent_only_when_asked():
    ending = Ending("stop", Usage(10, 2, cached=4, reasoning=1))
    stream = ChatStream(head())
    sent = chunks(stream.start(Usage(10)) + stream.end(ending))
    assert not any("usage" in chunk for chunk in sent)
    stream = ChatStream(head(stream_options={"include_usage": True}))
    sent = chunks(stream.start(Usage(10)) + stream.end(ending))
    assert [chunk["usage"] for chunk in sent[:-1]] == [None, None]
    assert sent[-1]["choices"] == []
    assert sent[-1]["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 2,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }


def test_logprobs_and_the_unstreamed_body():
    tokens = [TokenLogprob("a", float("-inf"), [97], (TokenLogprob("b", -0.5),))]
    stream = ChatStream(head())
    chunk = chunks(stream.event(ReplyEvent("content", "a"), tokens))[0]
    ChatCompletionChunk.model_validate(chunk)
    entry = chunk["choices"][0]["logprobs"]["content"][0]
    assert (entry["logprob"], entry["bytes"]) == (-9999.0, [97])
    assert entry["top_logprobs"] == [{"token": "b", "logprob": -0.5, "bytes": None}]
    said = [ReplyEvent("content", "a")]
    body = chat_completion(head(), said, Ending("stop", Usage(1, 1)), tokens)
    parsed = ChatCompletion.model_validate(json.loads(json.dumps(body)))
    assert parsed.choices[0].message.content == "a"
    assert parsed.usage is not None
    assert parsed.usage.total_tokens == 2


def test_an_error_in_mid_stream_is_an_error_object_and_the_end():
    raw = ChatStream(head()).fail(unavailable("the engine is away"))
    error = chunks(raw)[0]["error"]
    assert (error["type"], error["code"]) == ("server_error", "engine_unavailable")
    assert raw.endswith(b"data: [DONE]\n\n")


@given(st.text(), st.sampled_from(["content", "reasoning"]), st.booleans(), st.text(max_size=9))
def test_a_prewritten_chunk_is_the_json_of_the_same_chunk(text, kind, usage, model):
    options = {"stream_options": {"include_usage": usage}}
    raw = ChatStream(replace(head(**options), model=model)).event(ReplyEvent(kind, text))
    name = "content" if kind == "content" else "reasoning_content"
    (chunk,) = chunks(raw)
    assert chunk["model"] == model
    assert chunk["choices"] == [{"index": 0, "delta": {name: text}, "finish_reason": None}]
    assert raw.count(b"\n") == 2
