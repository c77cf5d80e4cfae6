"""Every reply format: what it understands, and that no cut of the text changes it."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from openclaw_rl.errors import ConfigError
from openclaw_rl.wire.formats import FORMATS, choose_format


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("write", path={"type": "string"}, lines={"type": "integer"}, tags={"type": "array"},
         ok={"type": ["boolean", "null"]}, size={"anyOf": [{"type": "number"}, {"type": "null"}]}),
    tool("now"),
]  # fmt: skip

CALLS = {
    "hermes": (
        '<tool_call>\n{"name": "write", "arguments": {"path":  "a</tool_call>b"}}\n</tool_call>'
    ),
    "qwen3-coder": (
        "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter> b\n</parameter>\n"
        "<parameter=lines>\n3\n</parameter>\n</function>\n</tool_call>"
    ),
    "glm": (
        "<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>42</arg_value>\n"
        "<arg_key>tags</arg_key>\n<arg_value>[1,  2]</arg_value>\n</tool_call>"
    ),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.write:0"
        '<|tool_call_argument_begin|>{"path":  "a"}<|tool_call_end|><|tool_call_begin|>'
        "functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>write<｜tool▁sep｜>"
        '{"path":  "a"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "llama3": '<|python_tag|>{"name": "write", "parameters": {"path":  "a"}}',
    "mistral": '[TOOL_CALLS]write[ARGS]{"path":  "a"}',
    "gpt-oss": (
        "<|channel|>commentary to=functions.write <|constrain|>json<|message|>"
        '{"path":  "a"}<|call|>'
    ),
}


def read(name, pieces, tools=TOOLS, in_reasoning=False):
    counter = itertools.count()
    parser = FORMATS[name].parser(
        tools, in_reasoning=in_reasoning, new_id=lambda: f"call{next(counter)}"
    )
    events = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.finish()
    return events, parser.message()


def whole(name, text, **options):
    return read(name, [text], **options)[1]


def calls_of(message):
    return [(c["function"]["name"], c["function"]["arguments"])
            for c in message.get("tool_calls", [])]  # fmt: skip


WORDS = [
    *("<think>", "</think>", "<", "text", "{", "}", '"', ";", "write", "final", "analysis", "é✓"),
    *("to=functions.now", "<function=write>", "</function>", "<parameter=path>", "</parameter>"),
    *("functions.now:0", '<｜DSML｜invoke name="now">', "</｜DSML｜invoke>"),
    *("\n", " ", '{"name": "now"}', '{"a": 1}', "```json\n", "\n```"),
]
MARKS = {name: [*sorted(FORMATS[name].marks), CALLS[name], *WORDS] for name in FORMATS}


@st.composite
def replies(draw):
    name = draw(st.sampled_from(sorted(FORMATS)))
    parts = draw(st.lists(st.sampled_from(MARKS[name]), max_size=12))
    return name, "".join(parts)


@pytest.mark.slow
@given(
    reply=replies(),
    cuts=st.lists(st.integers(0, 500), max_size=12),
    tools=st.sampled_from([TOOLS, None]),
    in_reasoning=st.booleans(),
)
@settings(max_examples=1500, deadline=None)
@example(reply=("gpt-oss", CALLS["gpt-oss"]), cuts=[3], tools=TOOLS, in_reasoning=False)
@example(reply=("llama3", ' {"name": "x"}'), cuts=[1], tools=TOOLS, in_reasoning=False)
def test_any_cut_of_any_format_gives_the_same_message(reply, cuts, tools, in_reasoning):
    name, text = reply
    options = {"tools": tools, "in_reasoning": in_reasoning}
    expected = whole(name, text, **options)
    points = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    for pieces in ([text[a:b] for a, b in itertools.pairwise(points)], list(text)):
        events, message = read(name, pieces, **options)
        assert message == expected
        shown = "".join(e.text for e in events if e.kind == "content")
        assert shown == (message["content"] or "")
        thought = "".join(e.text for e in events if e.kind == "reasoning")
        assert thought == message.get("reasoning_content", "")
        calls = [(e.index, e.name, e.arguments) for e in events if e.kind == "tool_call"]
        assert calls == [(i, *call) for i, call in enumerate(calls_of(message))]
        assert all(isinstance(json.loads(arguments), dict) for *_, arguments in calls)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_no_part_of_a_mark_is_shown_before_its_fate_is_known(name):
    begin = "<|channel|>final<|message|>" if name == "gpt-oss" else ""
    between = "<|end|><|start|>assistant" if name == "gpt-oss" else ""
    parser = FORMATS[name].parser(TOOLS)
    shown = ""
    calls = 0
    for char in f"{begin}I look.{between}{CALLS[name]}":
        for event in parser.feed(char):
            shown += event.text
            calls += event.kind == "tool_call"
        assert "I look.".startswith(shown)
    parser.finish()
    assert shown == "I look."
    assert len(parser.message()["tool_calls"]) >= 1


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_case_21_a_broken_call_stays_text_verbatim(name):
    broken = {
        "qwen3-coder": CALLS["qwen3-coder"].replace("</function>", ""),
        "glm": CALLS["glm"].replace("</arg_key>", ""),
    }.get(name, CALLS[name].replace("}", "", 1))
    message = whole(name, broken)
    assert "tool_calls" not in message
    assert message["content"] == broken
    assert whole(name, CALLS[name], tools=None)["content"] == CALLS[name]


def test_qwen3_coder_values_are_what_their_schema_says():
    message = whole("qwen3-coder", f"Let me.\n\n{CALLS['qwen3-coder']}\nDone.")
    assert calls_of(message) == [("write", '{"path": "a\\n</parameter> b", "lines": 3}')]
    assert message["content"] == "Let me.\nDone."
    odd = CALLS["qwen3-coder"].replace("\n3\n", "\nthree\n")
    assert json.loads(calls_of(whole("qwen3-coder", odd))[0][1])["lines"] == "three"
    values = "".join(
        f"<parameter={key}>{value}</parameter>"
        for key, value in (("ok", "True"), ("size", "3"), ("tags", '["a"]'), ("extra", "7"))
    )
    text = f"<tool_call><function=write>{values}</function><function=now></function></tool_call>"
    assert calls_of(whole("qwen3-coder", text)) == [
        ("write", '{"ok": true, "size": 3, "tags": ["a"], "extra": "7"}'),
        ("now", "{}"),
    ]
    hermes = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert calls_of(whole("qwen3-coder", hermes)) == [("now", "{}")]


def test_glm_strings_are_bare_and_all_else_is_json():
    message = whole("glm", f"<think>hm</think>\nOn it.\n{CALLS['glm']}<tool_call>now</tool_call>")
    assert message["reasoning_content"] == "hm"
    assert message["content"] == "On it."
    assert calls_of(message) == [("write", '{"path": "42", "tags": [1,  2]}'), ("now", "{}")]
    prose = "Use <tool_call>this</tool_call> mark."
    assert whole("glm", prose)["content"] == prose
    unknown = "<tool_call>f<arg_key>n</arg_key><arg_value>7</arg_value></tool_call>"
    assert calls_of(whole("glm", unknown)) == [("f", '{"n": 7}')]


def test_kimi_keeps_its_own_ids():
    message = whole("kimi", f"Both.{CALLS['kimi']}")
    assert [call["id"] for call in message["tool_calls"]] == ["functions.write:0",
                                                              "functions.now:1"]  # fmt: skip
    assert calls_of(message) == [("write", '{"path":  "a"}'), ("now", "{}")]


@pytest.mark.parametrize(
    "text",
    [
        CALLS["deepseek"],
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>write\n```json\n"
        '{"path":  "a"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="write">\n'
        '{"path":  "a"}\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        CALLS["deepseek"].removesuffix("<｜tool▁calls▁end｜>"),
    ],
)
def test_deepseek_of_every_generation(text):
    message = whole("deepseek", f"<think>x</think>So:\n\n{text}")
    assert calls_of(message) == [("write", '{"path":  "a"}')]
    assert message["content"] == "So:"


def test_deepseek_parameters_in_tags():
    text = (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="write">\n'
        '<｜DSML｜parameter name="path" string="true">7</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="tags" string="false">[1]</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="now"/>\n</｜DSML｜tool_calls>'
    )
    assert calls_of(whole("deepseek", text)) == [("write", '{"path": "7", "tags": [1]}'),
                                                 ("now", "{}")]  # fmt: skip


def test_llama_writes_calls_with_and_without_the_tag():
    call = '{"name": "write", "parameters": {"path": "a"}}'
    for text in (call, f"<|python_tag|>{call}", f'{{"type": "function", {call[1:]}',
                 '<function=write>{"path": "a"}</function>'):  # fmt: skip
        assert calls_of(whole("llama3", text)) == [("write", '{"path": "a"}')], text
    assert len(whole("llama3", f"<|python_tag|>{call}; {call}")["tool_calls"]) == 2


def test_llama_answers_in_json_are_answers():
    for text in ('{"name": "Bob", "age": 3}', '{"a": 1}', "<|python_tag|>print(1)", '{"name"'):
        assert whole("llama3", text) == {"role": "assistant", "content": text}
    parser = FORMATS["llama3"].parser(TOOLS)
    assert [e.text for e in parser.feed('{"answer"')] == ['{"answer"']


def test_mistral_writes_a_list_or_a_mark_before_each_call():
    listed = (
        '[TOOL_CALLS] [{"name": "write", "arguments": {"path": "[TOOL_CALLS]"}}, {"name": "now"}]'
    )
    assert calls_of(whole("mistral", listed)) == [("write", '{"path": "[TOOL_CALLS]"}'),
                                                  ("now", "{}")]  # fmt: skip
    marked = 'Both.[TOOL_CALLS]write[CALL_ID]abc123def[ARGS]{"path": "a"}[TOOL_CALLS]now{}'
    message = whole("mistral", f"[THINK]hm[/THINK]{marked}")
    assert (message["reasoning_content"], message["content"]) == ("hm", "Both.")
    assert calls_of(message) == [("write", '{"path": "a"}'), ("now", "{}")]
    assert message["tool_calls"][0]["id"] == "abc123def"


def test_harmony_channels():
    text = (
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I look it up.<|end|><|start|>assistant to=functions.now<|channel|>commentary "
        '<|constrain|>json<|message|>{"a":1}<|call|>'
    )
    message = whole("gpt-oss", text)
    assert message["reasoning_content"] == "Think."
    assert message["content"] == "I look it up."
    assert calls_of(message) == [("now", '{"a":1}')]
    final = "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>final<|message|>B"
    assert whole("gpt-oss", final + "<|return|>")["content"] == "B"
    sloppy = whole("gpt-oss", "<|channel|>analysis<|message|>A<|channel|>final<|message|>B")
    assert (sloppy["reasoning_content"], sloppy["content"]) == ("A", "B")
    assert whole("gpt-oss", "plain words") == {"role": "assistant", "content": "plain words"}
    assert whole("gpt-oss", "<|channel|>analysis<|message|>cut off") == {
        "role": "assistant",
        "reasoning_content": "cut off",
        "content": "",
    }


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_the_writing_of_arguments_is_no_part_of_their_meaning(name):
    one = FORMATS[name]
    text = CALLS[name]
    other = text.replace(":  ", ": ").replace("[1,  2]", "[1, 2]")
    assert one.meaning(text, TOOLS) == one.meaning(other + "\n", TOOLS)
    assert one.meaning(text, TOOLS) != one.meaning(text.replace("write", "now"), TOOLS)


@pytest.mark.parametrize(
    ("template", "tokens", "expected"),
    [
        ("{{ '<tool_call>' }}", (), "hermes"),
        ("<tool_call> <function=x> <parameter=y>", (), "qwen3-coder"),
        ("<tool_call> <arg_key> <arg_value>", (), "glm"),
        ("x", ("<arg_key>", "<arg_value>"), "glm"),
        ("<|tool_calls_section_begin|>", (), "kimi"),
        ("<｜tool▁calls▁begin｜>", (), "deepseek"),
        ("{{ dsml }}<｜DSML｜tool_calls>", (), "deepseek"),
        ("<|start_header_id|>", ("<|python_tag|>",), "llama3"),
        ("<tool_call>", ("<|python_tag|>",), "hermes"),
        ("<|channel|>analysis<|message|>", (), "gpt-oss"),
        ("{{ '[TOOL_CALLS]' }}", (), "mistral"),
        ("{{ messages }}", (), "hermes"),
    ],
)
def test_the_format_is_read_off_the_model(template, tokens, expected):
    chosen, by = choose_format("auto", template, tokens)
    assert chosen.name == expected
    assert by


def test_an_unknown_format_is_refused_in_one_line():
    with pytest.raises(ConfigError, match="'qwen' is not one of auto, hermes"):
        choose_format("qwen", "{{ '<tool_call>' }}", ())
    assert choose_format("kimi", "<tool_call>", ()) == (FORMATS["kimi"], "--reply-format")


def test_a_family_whose_calls_are_not_read_is_named():
    chosen, by = choose_format("auto", "{{ tools }} <minimax:tool_call>", ())
    assert chosen.name == "hermes"
    assert "MiniMax" in by
