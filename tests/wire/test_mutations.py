"""Every field of both dialects, wrong in every way: understood, or refused by its name."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from openclaw_rl.wire.anthropic import parse_count_request, parse_messages_request
from openclaw_rl.wire.chat import parse_chat_request
from openclaw_rl.wire.dialect import ChatRequest, WireError

CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "bob"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "refusal": None,
         "tool_calls": [{"id": "c", "type": "function",
                         "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": "go"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "description": "d", "strict": True,
                                                "parameters": {"type": "object"}}}],
    "tool_choice": "auto", "parallel_tool_calls": True, "stream": False,
    "stream_options": {"include_usage": True, "include_obfuscation": False},
    "max_tokens": 5, "max_completion_tokens": 5, "temperature": 1.0, "top_p": 0.9, "top_k": 5,
    "min_p": 0.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1,
    "stop": ["x"], "stop_token_ids": [5], "logprobs": True, "top_logprobs": 2,
    "chat_template_kwargs": {"enable_thinking": False}, "user": "u", "prompt_cache_key": "k",
    "metadata": {"session_id": "s"}, "n": 1, "modalities": ["text"],
    "response_format": {"type": "text"}, "seed": 1, "logit_bias": {"5": 1}, "store": False,
    "service_tier": "auto", "reasoning_effort": "low", "verbosity": "low", "prediction": {},
    "safety_identifier": "x", "prompt_cache_retention": "24h",
}  # fmt: skip

MESSAGES: dict[str, Any] = {
    "model": "m", "max_tokens": 5,
    "system": [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}},
            {"type": "document", "title": "t", "context": "c",
             "source": {"type": "text", "media_type": "text/plain", "data": "d"}},
        ]},
        {"role": "system", "content": "look"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "yes"},
            {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "is_error": True,
             "content": [{"type": "text", "text": "x"},
                         {"type": "tool_reference", "tool_name": "f"}]},
            {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "f"}},
        ]},
    ],
    "tools": [{"type": "custom", "name": "f", "description": "d", "defer_loading": True,
               "strict": False, "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "stream": False,
    "stop_sequences": ["x"], "temperature": 1.0, "top_p": 0.9, "top_k": 5,
    "metadata": {"user_id": "u"}, "thinking": {"type": "enabled", "budget_tokens": 1024,
                                               "display": "summarized"},
    "output_config": {"effort": "low", "format": None},
    "chat_template_kwargs": {"x": 1}, "cache_control": {"type": "ephemeral"},
    "context_management": {"edits": []}, "diagnostics": {}, "inference_geo": "eu",
    "service_tier": "auto", "speed": "fast", "betas": ["x"], "safeguards": [],
    "user_profile_id": "x", "output_format": None, "mcp_servers": [], "container": None,
}  # fmt: skip

DEEP: Any = 1
for _ in range(400):
    DEEP = {"a": [DEEP]}

WRONG: list[Any] = [
    None, True, False, 0, -1, 1.5, 10**30, float("nan"), float("inf"), "", "x", "\x00", "😀" * 5000,
    [], [[]], [None], ["x"], [{}], {}, {"type": "x"}, {"type": ["text"]}, {"type": {}}, DEEP,
]  # fmt: skip

WAYS = [
    pytest.param(parse_chat_request, CHAT, id="chat"),
    pytest.param(parse_messages_request, MESSAGES, id="messages"),
    pytest.param(parse_count_request, MESSAGES, id="count_tokens"),
]


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if at:
        yield at
    if isinstance(value, dict):
        for key, item in value.items():
            yield from paths(item, (*at, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from paths(item, (*at, index))


def changed(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    made = copy.deepcopy(body)
    at: Any = made
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return made


def well_formed(request: ChatRequest) -> None:
    assert request.messages
    for message in request.messages:
        assert message["role"] in ("system", "user", "assistant", "tool")
        assert isinstance(message["content"], str) or message["role"] == "assistant"
        assert isinstance(message.get("tool_call_id", ""), str)
        for call in message.get("tool_calls", []):
            assert isinstance(call["function"]["arguments"], str)
    for tool in request.tools:
        assert isinstance(tool["function"]["name"], str)
    assert all(isinstance(stop, str) and stop for stop in request.sampling.get("stop", []))
    assert request.max_tokens is None or request.max_tokens >= 1
    json.dumps(request.sampling, allow_nan=False)


def refusal(parse, body: dict[str, Any]) -> WireError | None:
    """How the body was refused; None if it was understood."""
    try:
        well_formed(parse(json.dumps(body).encode()))
    except WireError as error:
        return error
    return None


@pytest.mark.parametrize(("parse", "body"), WAYS)
def test_the_whole_body_is_understood(parse, body):
    well_formed(parse(json.dumps(body).encode()))


@pytest.mark.parametrize(("parse", "body"), WAYS)
def test_case_04_every_field_in_every_wrong_form(parse, body):
    refused = 0
    for path in paths(body):
        for value in WRONG:
            error = refusal(parse, changed(body, path, value))
            if error is None:
                continue
            refused += 1
            assert error.status == 400
            assert error.param, (path, error.message)
            # The field that is named is the one that is wrong, or the one it made wrong.
            named = re.split(r"[.\[]", error.param)[0]
            assert named == path[0] or {named, path[0]} == {"logprobs", "top_logprobs"}
            assert len(error.message) < 300  # names the field, does not quote it
    assert refused > 500


@pytest.mark.parametrize(("parse", "body"), WAYS)
def test_case_04_a_field_that_is_missing(parse, body):
    for path in paths(body):
        made = copy.deepcopy(body)
        at: Any = made
        for step in path[:-1]:
            at = at[step]
        del at[path[-1]]
        error = refusal(parse, made)
        assert error is None or (error.status == 400 and error.param)


@pytest.mark.parametrize(("parse", "body"), WAYS)
@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{bad",
        b"[1]",
        b"null",
        b"1",
        b"\xff{}",
        b'"x"',
        b"[" * 10**5,
        b'{"messages": \xed\xa0\x80}',
    ],
)
def test_case_04_what_is_no_object(parse, body, text):
    with pytest.raises(WireError) as caught:
        parse(text)
    assert (caught.value.status, caught.value.param) == (400, None)
