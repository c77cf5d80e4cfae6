from __future__ import annotations

import json

import pytest

from openclaw_rl.wire.chat import error_body, parse_chat_request, parse_messages
from openclaw_rl.wire.dialect import WireError, prompt_too_long

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def parse(**body):
    body.setdefault("messages", [USER])
    return parse_chat_request(json.dumps(body).encode())


def refused(body: dict) -> WireError:
    with pytest.raises(WireError) as caught:
        parse_chat_request(json.dumps(body).encode())
    assert caught.value.status == 400
    assert set(error_body(caught.value)["error"]) == {"message", "type", "param", "code"}
    return caught.value


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [USER, {"role": "robot", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "odd"}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"messages": [USER], "model": 3}, "model"),
        ({"messages": [USER], "stream": "yes"}, "stream"),
        ({"messages": [USER], "stream_options": {"include_usage": 1}},
         "stream_options.include_usage"),
        ({"messages": [USER], "max_tokens": 0}, "max_tokens"),
        ({"messages": [USER], "max_completion_tokens": True}, "max_completion_tokens"),
        ({"messages": [USER], "temperature": -1}, "temperature"),
        ({"messages": [USER], "temperature": 10**400}, "temperature"),
        ({"messages": [USER], "temperature": float("nan")}, "temperature"),
        ({"messages": [USER], "top_p": 0}, "top_p"),
        ({"messages": [USER], "top_k": -2}, "top_k"),
        ({"messages": [USER], "top_k": 2**31}, "top_k"),
        ({"messages": [USER], "stop_token_ids": [2**31]}, "stop_token_ids[0]"),
        ({"messages": [USER], "stop": [""]}, "stop[0]"),
        ({"messages": [USER], "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"messages": [USER], "tools": [{"type": "function", "function": {}}]},
         "tools[0].function.name"),
        ({"messages": [USER], "tool_choice": "maybe"}, "tool_choice"),
        ({"messages": [USER], "top_logprobs": 3}, "top_logprobs"),
        ({"messages": [USER], "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": [USER], "chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)  # fmt: skip
def test_case_04_the_field_is_named(body, param):
    error = refused(body)
    assert error.param == param
    assert error.message.startswith(param)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n", 2),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("functions", [{"name": "f"}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("guided_json", {}),
        ("web_search_options", {}),
    ],
)
def test_what_would_change_the_shape_is_refused_by_name(key, value):
    error = refused({"messages": [USER], "tools": [TOOL], key: value})
    assert (error.param, error.code) == (key, "unsupported_parameter")


def test_harmless_forms_of_refused_parameters_pass():
    request = parse(n=1, modalities=["text"], response_format={"type": "text"}, functions=[],
                    audio=None)  # fmt: skip
    assert request.ignored == ()


def test_case_09_forms_of_content():
    request = parse(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "be kind"}]},
            {"role": "user", "content": ""},
            {"role": "assistant", "content": None,
             "tool_calls": [{"id": "c1", "type": "function",
                             "function": {"name": "f", "arguments": {"x": "é"}}}]},
            {"role": "tool", "tool_call_id": "c1", "content": None},
            {"role": "user", "content": [{"type": "text", "text": "a"},
                                         {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "", "tool_calls": [], "reasoning": "hm"},
            {"role": "user", "content": []},
        ]
    )  # fmt: skip
    assert request.messages == (
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": None,
         "tool_calls": [{"id": "c1", "type": "function",
                         "function": {"name": "f", "arguments": '{"x": "é"}'}}]},
        {"role": "tool", "content": "", "tool_call_id": "c1"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        {"role": "user", "content": ""},
    )  # fmt: skip


def test_case_09_an_image_for_a_text_model():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "see"}, image]}]
    error = refused({"messages": messages})
    assert error.param == "messages[0].content[1]"
    assert "text only" in error.message
    assert parse_messages(messages, image_ok=True)[0]["content"][1] == image


def test_case_10_unknown_keys_are_named_not_obeyed():
    request = parse(temperature=0.5, top_k=-1, stop="END", seed=7, mirostat=2, store=False,
                    parallel_tool_calls=False, logit_bias={}, top_p=None)  # fmt: skip
    assert request.sampling == {"temperature": 0.5, "top_k": -1, "stop": ["END"]}
    assert request.ignored == ("logit_bias", "mirostat", "parallel_tool_calls", "seed", "store")


def test_case_10_what_has_no_effect_is_named():
    request = parse(tools=[{"type": "function", "function": {"name": "f", "strict": True}}],
                    stream_options={"include_obfuscation": True},
                    verbosity="low", service_tier="auto", prediction={})  # fmt: skip
    assert request.ignored == (
        "prediction", "service_tier", "stream_options.include_obfuscation",
        "tools.function.strict", "verbosity",
    )  # fmt: skip


def test_case_51_effort_reaches_the_template():
    assert parse().template_kwargs == {}
    assert parse(reasoning_effort="high").template_kwargs == {"reasoning_effort": "high"}
    none = parse(reasoning_effort="none")
    assert none.template_kwargs == {"enable_thinking": False, "thinking": False}
    assert none.ignored == ()
    # What is said to the template itself wins.
    both = parse(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert both.template_kwargs["enable_thinking"] is True
    assert refused({"reasoning_effort": 3}).param == "reasoning_effort"


def test_legacy_and_refused_forms_of_messages():
    assert refused({"messages": [{"role": "function", "name": "f", "content": "x"}]}).param == (
        "messages[0].role"
    )
    for kind in ("input_audio", "file", "video_url"):
        error = refused({"messages": [{"role": "user", "content": [{"type": kind}]}]})
        assert error.param == "messages[0].content[0].type"
    audio = {"role": "assistant", "audio": {"id": "a"}, "content": None}
    assert refused({"messages": [USER, audio, USER]}).param == "messages[1].audio"
    said = {"role": "assistant", "content": None, "refusal": "I will not."}
    assert parse(messages=[USER, said, USER]).messages[1]["content"] == "I will not."
    parts = [{"type": "refusal", "refusal": "No."}]
    said = {"role": "assistant", "content": parts}
    assert parse(messages=[USER, said, USER]).messages[1]["content"] == "No."


def test_limits_streams_and_hints():
    request = parse(model="m", stream=True, stream_options={"include_usage": True},
                    max_tokens=5, max_completion_tokens=9, user="u", prompt_cache_key="k",
                    metadata={"session_id": "s"}, logprobs=True, top_logprobs=2,
                    chat_template_kwargs={"enable_thinking": False})  # fmt: skip
    assert (request.model, request.stream, request.include_usage) == ("m", True, True)
    assert request.max_tokens == 9
    assert request.hints == {"user": "u", "prompt_cache_key": "k", "metadata": {"session_id": "s"}}
    assert (request.logprobs, request.top_logprobs) == (True, 2)
    assert request.template_kwargs == {"enable_thinking": False}
    assert parse().max_tokens is None


def test_tool_choice_none_means_no_tools():
    assert parse(tools=[TOOL]).tools == (TOOL,)
    assert parse(tools=[TOOL], tool_choice="none").tools == ()


def test_half_a_character_is_replaced():
    body = b'{"messages": [{"role": "user", "content": "cut \\ud83d, whole \\ud83d\\ude00"}]}'
    assert parse_chat_request(body).messages[0]["content"] == "cut \ufffd, whole \U0001f600"


def test_errors_never_quote_the_conversation():
    error = refused({"messages": [{"role": "secret-role", "content": "secret"}]})
    assert "secret" not in str(error_body(error))


def test_case_03_overflow_is_worded_so_that_agents_compact():
    error = error_body(prompt_too_long(10, 5))["error"]
    assert error["message"].startswith("prompt is too long")
    assert error["code"] == "context_length_exceeded"
