"""Anthropic blocks in both directions: what we send as blocks comes back as the reply it was."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.wire.anthropic import parse_messages_request
from openclaw_rl.wire.anthropic_blocks import read_conversation
from openclaw_rl.wire.anthropic_reply import messages_reply
from openclaw_rl.wire.dialect import Ending, Head, Usage, WholeReply
from openclaw_rl.wire.reply import ReplyParser

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


def served(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The reply `text` as a Chat Completions message, and the body of an Anthropic reply."""
    asked = parse_messages_request(
        json.dumps({"model": "m", "max_tokens": 9, "messages": [ASK]}).encode()
    )
    parser = ReplyParser(tools={"f": {}, "g": {}})
    events = parser.feed(text) + parser.finish()
    reply = WholeReply(parser.message(), events, None)
    body = messages_reply(Head("t1", "m", 0, asked), reply, Ending("stop", Usage(1, 1)))
    return parser.message(), body


@given(st.booleans(), st.lists(PIECES, max_size=6))
def test_the_blocks_of_a_reply_are_the_reply_again(thinks, pieces):
    said, body = served(("<think>hm</think>" if thinks else "") + "".join(pieces))
    message = read_conversation([ASK, {"role": "assistant", "content": body["content"]}]).messages[
        1
    ]
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
    heard = read_conversation([
        ASK,
        {"role": "assistant", "content": use},
        {"role": "user", "content": [text("wait"), result("b"), text("and"), text("this")]},
        {"role": "user", "content": [result("a"), text("then")]},
    ]).messages[2:]  # fmt: skip
    assert [(m["role"], m["content"]) for m in heard] == [
        ("user", "wait"), ("tool", "from b"), ("user", "and\nthis"), ("tool", "from a"),
        ("user", "then"),
    ]  # fmt: skip
