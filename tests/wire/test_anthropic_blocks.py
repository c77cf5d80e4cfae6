"""Anthropic blocks in both directions: what we send as blocks comes back as the reply it was."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.wire.anthropic import messages_reply, parse_messages_request
from openclaw_rl.wire.dialect import Ending, ReplyInfo, Usage
from openclaw_rl.wire.formats import HERMES

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
ASK = {"role": "user", "content": "go"}
PIECES = st.sampled_from(
    [
        "Well. ",
        "\n",
        " so",
        '<tool_call>\n{"name": "f", "arguments": {"a":  1}}\n</tool_call>',
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        "<tool_call>none</tool_call>",
    ]
)


def asked(messages: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """What a body with these messages says."""
    body = {"model": "m", "max_tokens": 9, "messages": messages}
    return parse_messages_request(json.dumps(body).encode()).messages


def served(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The reply `text` as a Chat Completions message, and the body of an Anthropic reply."""
    request = parse_messages_request(
        json.dumps({"model": "m", "max_tokens": 9, "messages": [ASK]}).encode()
    )
    parser = HERMES.parser(TOOLS)
    events = parser.feed(text) + parser.finish()
    body = messages_reply(ReplyInfo("t1", "m", 0, request), events, Ending("stop", Usage(1, 1)))
    return parser.message(), body


@given(st.booleans(), st.lists(PIECES, max_size=6))
def test_the_blocks_of_a_reply_are_the_reply_again(thinks, pieces):
    said, body = served(("<think>hm</think>" if thinks else "") + "".join(pieces))
    message = asked([ASK, {"role": "assistant", "content": body["content"]}, ASK])[1]
    assert message["content"] == said["content"]
    assert message.get("reasoning_content") == said.get("reasoning_content")
    calls = [
        [(call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
         for call in one.get("tool_calls", ())]
        for one in (message, said)
    ]  # fmt: skip
    assert calls[0] == calls[1]


def test_results_and_words_keep_their_order():
    def result(name: str) -> dict[str, Any]:
        return {"type": "tool_result", "tool_use_id": name, "content": f"from {name}"}

    def text(words: str) -> dict[str, Any]:
        return {"type": "text", "text": words}

    use = [{"type": "tool_use", "id": name, "name": "f", "input": {}} for name in "ab"]
    heard = asked([
        ASK,
        {"role": "assistant", "content": use},
        {"role": "user", "content": [text("wait"), result("b"), text("and"), text("this")]},
        {"role": "user", "content": [result("a"), text("then")]},
    ])[2:]  # fmt: skip
    assert [(m["role"], m["content"]) for m in heard] == [
        ("user", "wait"), ("tool", "from b"), ("user", "and\nthis"), ("tool", "from a"),
        ("user", "then"),
    ]  # fmt: skip


def test_keys_of_other_types_of_blocks_mean_nothing():
    stray = {"content": [{"type": "image"}], "title": "t", "thinking": "x", "tool_name": "f"}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", **stray}]},
        {"role": "assistant", "content": [{"type": "text", "text": "b", **stray}]},
        ASK,
    ]
    assert asked(messages)[:2] == (
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    )


def test_case_51_effort_reaches_the_template():
    def kwargs(**given):
        body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
        return parse_messages_request(json.dumps(body | given).encode()).template_kwargs

    assert kwargs(output_config={"effort": "high"}) == {"reasoning_effort": "high"}
    assert kwargs(output_config={"effort": "none"})["enable_thinking"] is False
    asked = kwargs(output_config={"effort": "low"}, thinking={"type": "enabled"})
    assert asked == {"reasoning_effort": "low", "enable_thinking": True}
