from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from openclaw_rl.wire.calls import read_json
from openclaw_rl.wire.formats import FORMATS, HERMES
from openclaw_rl.wire.reply import Marks, ReplyFormat, Section, new_call_id

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
CALL = '<tool_call>\n{"name": "exec", "arguments": {"command":  "echo x"}}\n</tool_call>'


def read(pieces, *, tools=True, in_reasoning=False):
    counter = itertools.count()
    parser = HERMES.parser(
        TOOLS if tools else None,
        in_reasoning=in_reasoning,
        new_id=lambda: f"call{next(counter)}",
    )
    events = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.finish()
    return events, parser.message()


def whole(text, **kwargs):
    return read([text], **kwargs)[1]


def arguments(message):
    return [call["function"]["arguments"] for call in message.get("tool_calls", [])]


PARTS = st.sampled_from(
    [
        "<think>", "</think>", "<tool_call>", "</tool_call>", "<", ">", "</", "<th", "<tool", "\n",
        "\n\n", " ", "a < b", "text", '{"name": "f", "arguments": {}}', '{"name": "f",',
        '"arguments": {"s": "</tool_call>"}}', '"', "\\", "[", "]", ",", CALL, "é✓", "{", "}",
    ]
)  # fmt: skip


@pytest.mark.slow
@given(
    parts=st.lists(PARTS, max_size=12),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    tools=st.booleans(),
    in_reasoning=st.booleans(),
)
@settings(max_examples=600, deadline=None)
@example(parts=[CALL, "\n", CALL], cuts=list(range(12)), tools=True, in_reasoning=False)
def test_any_cut_gives_the_same_message(parts, cuts, tools, in_reasoning):
    text = "".join(parts)
    kwargs = {"tools": tools, "in_reasoning": in_reasoning}
    points = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(points)]
    expected = whole(text, **kwargs)
    for split in (pieces, list(text)):
        events, message = read(split, **kwargs)
        assert message == expected
        shown = "".join(e.text for e in events if e.kind == "content")
        assert shown == (message["content"] or "")
        thought = "".join(e.text for e in events if e.kind == "reasoning")
        assert thought == message.get("reasoning_content", "")
        calls = [e for e in events if e.kind == "tool_call"]
        assert [e.index for e in calls] == list(range(len(calls)))
        assert [e.arguments for e in calls] == arguments(message)
        assert all(e.text for e in events if e.kind != "tool_call")


@given(st.text(alphabet=st.sampled_from('<tool_cal/>hink \n{}"ab'), max_size=60))
@settings(max_examples=300, deadline=None)
def test_without_tags_every_character_comes_back(text):
    if any(tag in text for tag in ("<tool_call>", "<think>", "</think>")):
        return
    assert whole(text)["content"] == text


def test_case_01_two_calls_and_the_text_before_them():
    events, message = read(list(f"I look it up.\n{CALL}\n{CALL}"))
    calls = [e for e in events if e.kind == "tool_call"]
    assert [(c.index, c.name, c.arguments) for c in calls] == [
        (0, "exec", '{"command":  "echo x"}'),
        (1, "exec", '{"command":  "echo x"}'),
    ]
    assert calls[0].call_id != calls[1].call_id
    assert message["content"] == "I look it up."
    assert [c["id"] for c in message["tool_calls"]] == [c.call_id for c in calls]


def test_a_call_is_shown_when_it_closes_not_before():
    parser = HERMES.parser(TOOLS)
    assert parser.feed(CALL[:-1]) == []
    assert [e.kind for e in parser.feed(">")] == ["tool_call"]


def test_content_is_null_only_beside_calls():
    assert whole(CALL)["content"] is None
    assert whole("\n\n" + CALL)["content"] is None
    assert whole("")["content"] == ""
    assert "tool_calls" not in whole("")


def test_text_behind_and_between_calls_survives():
    message = whole(f"A\n{CALL}\n{CALL}\nB\n")
    assert message["content"] == "A\nB\n"
    assert len(message["tool_calls"]) == 2
    assert whole(f"A\n{CALL}\n")["content"] == "A"


def test_the_smollm2_list_form():
    message = whole(
        '<tool_call>[{"name": "a", "arguments": {"x":1}}, {"name": "b", "arguments": {}}]'
        "</tool_call>"
    )
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["a", "b"]
    assert arguments(message) == ['{"x":1}', "{}"]


@pytest.mark.parametrize(
    "body",
    [
        "{bad",
        '{"name": 1, "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": null}',
        '{"name": "f", "arguments": {"x": NaN}}',
        '{"name": "f", "arguments": {}} trailing',
        "[]",
        '[{"name": "f"}, 3]',
        "see the tag",
        "",
        '{"name": "odd quote}',
        "[" * 100_000,
    ],
)
def test_what_is_no_call_stays_text_verbatim(body):
    text = f"x\n<tool_call>{body}</tool_call>\n y"
    assert whole(text) == {"role": "assistant", "content": text}


def test_a_mention_of_the_tag_does_not_swallow_the_call_behind_it():
    message = whole(f"The <tool_call> tag, and <tool_call>{{oops, then\n{CALL}")
    assert message["content"] == "The <tool_call> tag, and <tool_call>{oops, then"
    assert len(message["tool_calls"]) == 1


def test_a_closing_tag_inside_an_argument_does_not_close():
    body = '{"name": "write", "arguments": {"text": "say </tool_call> \\"loud\\""}}'
    assert arguments(whole(f"<tool_call>{body}</tool_call>")) == [
        '{"text": "say </tool_call> \\"loud\\""}'
    ]


def test_a_missing_closing_tag_keeps_a_whole_call_and_a_cut_one_is_text():
    inner = '{"name": "f", "arguments": {"x": 1}}'
    for end in ("", "\n", "</tool", "</tool_call"):
        assert arguments(whole(f"<tool_call>\n{inner}{end}")) == ['{"x": 1}']
    cut = f"<tool_call>\n{inner[:-1]}"
    assert whole(cut) == {"role": "assistant", "content": cut}


def test_arguments_encoded_twice_are_read_once():
    assert arguments(
        whole('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>')
    ) == ['{"x": 1}']


def test_without_tools_a_call_is_text():
    assert whole(f"A\n{CALL}\n", tools=False) == {"role": "assistant", "content": f"A\n{CALL}\n"}


def test_reasoning_is_told_apart_and_newlines_behind_it_trimmed():
    assert whole("<think>\nLet me see.\n</think>\n\nYes.\n") == {
        "role": "assistant",
        "reasoning_content": "\nLet me see.\n",
        "content": "Yes.\n",
    }
    assert whole("so </think>\n\nYes", in_reasoning=True)["reasoning_content"] == "so "
    assert whole("<think>again</think>Yes", in_reasoning=True)["reasoning_content"] == "again"
    assert whole("\n<think>\n\n</think>\n\nYes") == {"role": "assistant", "content": "Yes"}
    assert whole("Use <think> tags.")["content"] == "Use <think> tags."


def test_case_21_reasoning_that_never_closes_and_compact_arguments():
    assert whole("<think>hm <tool_call> </thin") == {
        "role": "assistant",
        "reasoning_content": "hm <tool_call> </thin",
        "content": "",
    }
    assert arguments(
        whole('<tool_call>{"name":"f","arguments":{"a":1 ,"b" :[ ]}}</tool_call>')
    ) == ['{"a":1 ,"b" :[ ]}']


def test_text_that_resembles_a_tag_is_released_at_once():
    parser = HERMES.parser(TOOLS)
    shown = [[e.text for e in parser.feed(piece)] for piece in ["a <", " b", " <tool", "s", "<t"]]
    assert shown == [["a"], [" < b"], [], [" <tools"], []]
    assert [e.text for e in parser.finish()] == ["<t"]
    parser = HERMES.parser(TOOLS)
    assert [[e.text for e in parser.feed(p)] for p in ["<thin", "g"]] == [[], ["<thing"]]
    parser = HERMES.parser(TOOLS)
    assert [[e.text for e in parser.feed(p)] for p in ["<tool_call>", " no"]] == [
        [],
        ["<tool_call> no"],
    ]


def test_call_ids_are_letters_and_digits():
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(i.isalnum() and i.isascii() for i in ids)
    tool = {"type": "function", "function": {"name": "exec"}}
    message = FORMATS["hermes"].message(CALL, [tool])
    assert message["tool_calls"][0]["id"].isalnum()


def test_long_arguments_are_read_once():
    body = '{"name": "write", "arguments": {"text": "' + "<b>ab</b>" * 2_000 + '"}}'
    read_sizes = []

    def read(mark, body, tools):
        read_sizes.append(len(body))
        return read_json(mark, body, tools)

    section = Section(Marks("</tool_call>"), read)
    parser = ReplyFormat("own", {"<tool_call>": section}).parser(TOOLS)
    text = f"<tool_call>{body}</tool_call>"
    events = [e for i in range(0, len(text), 4) for e in parser.feed(text[i : i + 4])]
    assert [e.name for e in events] == ["write"]
    assert read_sizes == [len(body)]


def test_importing_wire_loads_no_model_library():
    code = (
        "import sys, openclaw_rl.wire.chat, openclaw_rl.wire.anthropic, openclaw_rl.wire.formats\n"
        "print(sorted({'torch', 'transformers', 'sglang'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
