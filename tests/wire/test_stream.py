from __future__ import annotations

import json

from openai.types.chat import ChatCompletion, ChatCompletionChunk

from openclaw_rl.wire.errors import unavailable
from openclaw_rl.wire.reply import ReplyEvent, ReplyParser
from openclaw_rl.wire.stream import ChatStream, TokenLogprob, chat_completion, usage_body


def chunks(raw: bytes) -> list[dict]:
    events = raw.decode().split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [json.loads(event[6:]) for event in events if event != "data: [DONE]"]


def test_case_01_each_call_is_one_complete_chunk():
    parser = ReplyParser(tools=True, reasoning=True, in_reasoning=False)
    stream = ChatStream("chatcmpl-1", "m", 1)
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


def test_case_02_golden_transcript():
    stream = ChatStream("chatcmpl-1", "m", 7, include_usage=True)
    raw = (
        stream.start()
        + stream.keepalive()
        + stream.event(ReplyEvent("reasoning", "hm"))
        + stream.event(ReplyEvent("content", "é\n"))
        + stream.finish("stop")
        + stream.usage(10, 2, cached=4, reasoning=1)
        + stream.done()
    )
    head = '{"id":"chatcmpl-1","object":"chat.completion.chunk","created":7,"model":"m",'
    plain = '"finish_reason":null}],"usage":null}\n\n'
    assert raw.decode() == (
        f'data: {head}"choices":[{{"index":0,"delta":{{"role":"assistant","content":""}},{plain}'
        f'data: {head}"choices":[{{"index":0,"delta":{{}},{plain}'
        f'data: {head}"choices":[{{"index":0,"delta":{{"reasoning_content":"hm"}},{plain}'
        f'data: {head}"choices":[{{"index":0,"delta":{{"content":"é\\n"}},{plain}'
        f'data: {head}"choices":[{{"index":0,"delta":{{}},"finish_reason":"stop"}}],"usage":null}}'
        "\n\n"
        f'data: {head}"choices":[],"usage":{{"prompt_tokens":10,"completion_tokens":2,'
        '"total_tokens":12,"prompt_tokens_details":{"cached_tokens":4},'
        '"completion_tokens_details":{"reasoning_tokens":1}}}\n\n'
        "data: [DONE]\n\n"
    )
    for chunk in chunks(raw):
        ChatCompletionChunk.model_validate(chunk, strict=True)


def test_usage_is_sent_only_when_asked():
    stream = ChatStream("c", "m", 1)
    assert stream.usage(1, 1) == b""
    assert "usage" not in chunks(stream.start())[0]


def test_logprobs_and_the_unstreamed_body():
    tokens = [TokenLogprob("a", float("-inf"), [97], (TokenLogprob("b", -0.5),))]
    stream = ChatStream("c", "m", 1)
    chunk = chunks(stream.event(ReplyEvent("content", "a"), tokens))[0]
    ChatCompletionChunk.model_validate(chunk)
    entry = chunk["choices"][0]["logprobs"]["content"][0]
    assert (entry["logprob"], entry["bytes"]) == (-9999.0, [97])
    assert entry["top_logprobs"] == [{"token": "b", "logprob": -0.5, "bytes": None}]
    message = {"role": "assistant", "content": "a"}
    body = chat_completion("c", "m", 1, message, "stop", usage_body(1, 1), tokens)
    parsed = ChatCompletion.model_validate(json.loads(json.dumps(body)))
    assert parsed.choices[0].message.content == "a"
    assert parsed.usage is not None
    assert parsed.usage.total_tokens == 2


def test_an_error_in_mid_stream_is_an_error_object():
    error = chunks(ChatStream("c", "m", 1).error(unavailable("the engine is away")))[0]["error"]
    assert (error["type"], error["code"]) == ("server_error", "engine_unavailable")
