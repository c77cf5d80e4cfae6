"""The served model's tokenizer: rendering, text as it arrives, and prompts that go on from known
ids (CASES 8, 21 to 25)."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openclaw_rl.engine.chat import ChatTokenizer, text_sha
from openclaw_rl.errors import ConfigError, EngineRefused
from openclaw_rl.types import Turn
from openclaw_rl.wire.formats import FORMATS
from tests.fakes import templates
from tests.fakes.model import EOS_ID, tiny_tokenizer

Message = dict[str, Any]
END = "<|im_end|>"
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("run", "ls")]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ChatTokenizer]:
    made: dict[str, ChatTokenizer] = {}

    def load(template: str) -> ChatTokenizer:
        if template not in made:
            directory = tmp_path_factory.mktemp("tokenizer")
            made[template] = ChatTokenizer.load(tiny_tokenizer(directory, template=template))
        return made[template]

    return load


@pytest.fixture(scope="module")
def chat(make: Callable[[str], ChatTokenizer]) -> ChatTokenizer:
    return make(templates.CHATML)


@pytest.fixture(scope="module")
def qwen(make: Callable[[str], ChatTokenizer]) -> ChatTokenizer:
    return make(templates.QWEN3_LIKE)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def call(name: str, arguments: str) -> Message:
    function = {"name": name, "arguments": arguments}
    return {"id": "call1", "type": "function", "function": function}


def meaning(text: str) -> Any:
    return FORMATS["hermes"].meaning(text, TOOLS)


def continued(
    chat: ChatTokenizer, known: Turn, rendered: str, same: Callable[[str], Any] = meaning
) -> Any:
    ids = chat.continue_prompt(known, rendered, lambda reply, _: same(reply))
    return None if ids is None else ids.tolist()


def served(chat: ChatTokenizer, messages: list[Message], output: list[int]) -> Turn:
    rendered = chat.render(messages)
    return known_turn(rendered, chat.encode(rendered), output)


def known_turn(rendered: str, prompt: list[int], output: list[int]) -> Turn:
    return Turn(
        turn_id="t",
        session_id="s",
        prompt_ids=prompt,
        output_ids=output,
        rendered_len=len(rendered),
        rendered_sha=text_sha(rendered),
    )


def tokens(turn: Turn) -> list[int]:
    return [*turn.prompt_ids, *turn.output_ids]


def letters(chat: ChatTokenizer, text: str, end: bool = True) -> list[int]:
    """Ids that spell `text` in another way than the tokenizer would: one character at a time."""
    ids = [token for letter in text for token in chat.encode(letter)]
    return [*ids, EOS_ID] if end else ids


# --- loading and rendering -----------------------------------------------------------------------


def test_loads_and_renders_without_torch(tmp_path: Path) -> None:
    directory = tiny_tokenizer(tmp_path)
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from openclaw_rl.engine.chat import ChatTokenizer\n"
        f"chat = ChatTokenizer.load({str(directory)!r})\n"
        "text = chat.render([{'role': 'user', 'content': 'hi'}])\n"
        "assert chat.decode(chat.encode('hi')) == 'hi'\n"
        "print(len(chat.encode(text)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 3


def test_what_ends_a_turn_is_known(chat: ChatTokenizer) -> None:
    assert chat.eos_ids == {0, EOS_ID}
    assert chat.context_length == 4096


def test_end_of_turn_of_the_template_counts_too(tmp_path: Path) -> None:
    """A base model's tokenizer (eos `<|endoftext|>`) with a ChatML template."""
    directory = tiny_tokenizer(tmp_path)
    (directory / "generation_config.json").unlink()
    for name in ("tokenizer_config.json", "config.json"):
        path = directory / name
        path.write_text(
            path.read_text()
            .replace('"eos_token": "<|im_end|>"', '"eos_token": "<|endoftext|>"')
            .replace('"eos_token_id": 2', '"eos_token_id": 0')
        )
    assert ChatTokenizer.load(directory).eos_ids == {0, EOS_ID}


def test_a_model_that_cannot_chat_is_a_config_error(tmp_path: Path) -> None:
    directory = tiny_tokenizer(tmp_path / "model")
    (directory / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="chat template"):
        ChatTokenizer.load(directory)
    with pytest.raises(ConfigError, match="no tokenizer"):
        ChatTokenizer.load(tmp_path / "nowhere")


def test_case_08_template_kwargs_reach_the_prompt(qwen: ChatTokenizer) -> None:
    thinking = qwen.render([user("hi")])
    silent = qwen.render([user("hi")], None, {"enable_thinking": False})
    assert silent == thinking + "<think>\n\n</think>\n\n"


def test_kwargs_that_are_ours_are_refused(chat: ChatTokenizer) -> None:
    for name in ("chat_template", "tokenize", "add_generation_prompt", "messages"):
        with pytest.raises(EngineRefused, match=name) as caught:
            chat.render([user("hi")], None, {name: "{{ 1 }}"})
        assert caught.value.status == 400


def test_errors_of_a_template_are_refusals(
    chat: ChatTokenizer, make: Callable[[str], ChatTokenizer]
) -> None:
    strict = make(templates.ALTERNATING)
    with pytest.raises(EngineRefused, match="must alternate") as caught:
        strict.render([user("a"), user("secret")])
    assert caught.value.status == 400
    assert "secret" not in str(caught.value)
    broken = make("{{ messages[0].content + 1 }}")
    with pytest.raises(EngineRefused, match="cannot render these messages") as caught:
        broken.render([user("secret")])
    assert "secret" not in str(caught.value)
    with pytest.raises(EngineRefused, match="Unknown role"):
        chat.render([{"role": "critic", "content": "x"}])


@pytest.mark.parametrize("template", ["SYSTEM_FIRST", "DROPPING"])
def test_a_late_system_message_is_told_by_the_user_where_the_template_takes_none(
    make: Callable[[str], ChatTokenizer], template: str
) -> None:
    """Claude Code sends one in every turn; Qwen3.5's template refuses it, others drop it."""
    source = getattr(templates, template, None) or templates.CHATML.replace(
        "or (message.role == 'system' and not loop.first)", ""
    )
    strict = make(source)
    system = {"role": "system", "content": "be kind"}
    late = {"role": "system", "content": "it is noon"}
    text = strict.render([system, user("hi"), late])
    head = f"<|im_start|>system\nbe kind{END}\n<|im_start|>user\nhi"
    noon = f"<system-reminder>\nit is noon\n</system-reminder>{END}\n"
    assert text == f"{head}\n\n{noon}<|im_start|>assistant\n"
    # It stays where it stands: the next prompt begins as this one did.
    later = strict.render([system, user("hi"), late, assistant("a"), late, user("b")])
    assert later.startswith(text)
    assert f"<|im_start|>user\n{noon}" in later
    result = {"role": "tool", "tool_call_id": "call1", "content": "x"}
    calls = [system, assistant("", tool_calls=[call("f", "{}")]), result, late]
    assert "it is noon" in strict.render(calls)


def test_a_late_system_message_is_the_templates_business_where_it_takes_one(
    chat: ChatTokenizer,
) -> None:
    text = chat.render([user("hi"), {"role": "system", "content": "it is noon"}])
    assert f"<|im_start|>system\nit is noon{END}" in text


def test_no_content_is_empty_text(make: Callable[[str], ChatTokenizer]) -> None:
    plain = make(templates.ALTERNATING)
    assert "None" not in plain.render([user("a"), assistant(None), user("b")])


def test_arguments_as_each_template_wants_them(
    chat: ChatTokenizer, make: Callable[[str], ChatTokenizer]
) -> None:
    messages = [user("a"), assistant(None, tool_calls=[call("run", '{"b":  1}')])]
    assert '"arguments": {"b":  1}}' in chat.render(messages), "the model's own text"
    parsed = make(
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    assert '{"b": 1}' in parsed.render(messages)
    messages[1]["tool_calls"] = [call("run", "{broken")]
    assert "{broken" in parsed.render(messages)


def test_lone_surrogates_are_refused(chat: ChatTokenizer) -> None:
    with pytest.raises(EngineRefused, match="Unicode"):
        chat.encode(chat.render([user("a\ud800b")]))


# --- text as it arrives --------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), st.data())
def test_pieces_equal_the_whole(chat: ChatTokenizer, text: str, data: st.DataObject) -> None:
    ids = chat.encode(text) if data.draw(st.booleans()) else letters(chat, text, end=False)
    stream = chat.stream()
    shown = ""
    while ids:
        count = data.draw(st.integers(1, 3))
        shown += stream.push(ids[:count])
        assert "�" not in shown.replace("�", "", text.count("�"))
        ids = ids[count:]
    hidden = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    if not any(mark in text for mark in hidden):
        assert shown + stream.finish() == text


def test_incomplete_characters_are_held_back(chat: ChatTokenizer) -> None:
    ids = chat.encode("🦞")
    assert len(ids) > 1
    stream = chat.stream()
    assert [stream.push([token]) for token in ids] == [""] * (len(ids) - 1) + ["🦞"]
    assert stream.push(ids[:2]) == ""
    assert set(stream.finish()) == {"�"}
    assert stream.finish() == ""


def test_bytes_that_are_no_text_do_not_stall_the_stream(chat: ChatTokenizer) -> None:
    stream = chat.stream()
    lonely = chat.encode("🦞")[-1]
    shown = "".join(stream.push([lonely]) for _ in range(100))
    assert len(shown) >= 90
    assert stream.push(chat.encode("ok")).endswith("ok")


def test_what_is_shown(chat: ChatTokenizer) -> None:
    text = "<think>\nhm\n</think>\n\nA <tool_call>\n{}\n</tool_call>"
    ids = [*chat.encode(text), EOS_ID]
    assert chat.decode(ids) == text
    assert chat.decode([1, *chat.encode("a"), 0, EOS_ID]) == "a"


# --- going on from known ids ---------------------------------------------------------------------


def test_sampled_ids_are_kept(chat: ChatTokenizer) -> None:
    history = [user("What is the capital of France?")]
    output = letters(chat, "It is Paris.")
    known = served(chat, history, output)
    rendered = chat.render([*history, assistant("It is Paris."), user("thanks")])
    ids = continued(chat, known, rendered)
    assert ids is not None
    assert ids[: len(tokens(known))] == tokens(known)
    assert ids != chat.encode(rendered), "the tokenizer would have spelt the reply otherwise"
    tail = "\n<|im_start|>user\nthanks<|im_end|>\n<|im_start|>assistant\n"
    assert ids[len(tokens(known)) :] == chat.encode(tail)


def test_same_spelling_gives_the_same_ids(chat: ChatTokenizer) -> None:
    history = [user("What?")]
    known = served(chat, history, [*chat.encode("It is Paris."), EOS_ID])
    rendered = chat.render([*history, assistant("It is Paris."), user("thanks")])
    assert continued(chat, known, rendered) == chat.encode(rendered)


def test_case_22_23_truncated_reply_gets_its_end_from_the_template(chat: ChatTokenizer) -> None:
    history = [user("What?")]
    known = served(chat, history, letters(chat, "It is Par", end=False))
    rendered = chat.render([*history, assistant("It is Par"), user("go on")])
    ids = continued(chat, known, rendered)
    assert ids is not None
    assert ids[: len(tokens(known))] == tokens(known)
    assert ids[len(tokens(known))] == EOS_ID, "part of the prompt, never of the reply"


@pytest.mark.parametrize(
    "sampled",
    [
        '<tool_call>{"name":"run","arguments":{"path":"/tmp"}}</tool_call>',
        '<tool_call>\n\n {"arguments" : {"path":   "/tmp"}, "name": "run"}\n</tool_call>\n',
        '\n<tool_call>\n{"name": "run", "arguments": "{\\"path\\": \\"/tmp\\"}"}\n</tool_call>',
        '<tool_call>[{"name": "run", "arguments": {"path": "/tmp"}}]</tool_call>',
    ],
)
def test_case_21_tool_calls_with_odd_whitespace_are_reused(
    chat: ChatTokenizer, sampled: str
) -> None:
    history = [user("List it")]
    known = served(chat, history, letters(chat, sampled))
    reply = assistant(None, tool_calls=[call("run", '{"path":"/tmp"}')])
    rendered = chat.render([*history, reply, {"role": "tool", "content": "a.txt"}])
    ids = continued(chat, known, rendered)
    assert ids is not None
    assert ids[: len(tokens(known))] == tokens(known)


def test_another_call_or_text_is_not_reused(chat: ChatTokenizer) -> None:
    history = [user("List it")]
    sampled = 'Yes.\n<tool_call>\n{"name": "run", "arguments": {"path": "/tmp"}}\n</tool_call>'
    known = served(chat, history, letters(chat, sampled))
    for content, arguments in (("Yes.", '{"path": "/etc"}'), ("No.", '{"path": "/tmp"}')):
        reply = assistant(content, tool_calls=[call("run", arguments)])
        rendered = chat.render([*history, reply, {"role": "tool", "content": "x"}])
        assert continued(chat, known, rendered) is None


def test_case_21_unclosed_think_is_not_a_closed_one(chat: ChatTokenizer) -> None:
    history = [user("Hm?")]
    known = served(chat, history, letters(chat, "<think>\nwell", end=False))
    closed = chat.render([*history, assistant("", reasoning_content="well"), user("and?")])
    assert continued(chat, known, closed) is None
    raw = chat.render([*history, assistant("<think>\nwell"), user("and?")])
    assert continued(chat, known, raw) is not None


def test_case_25_dropped_reasoning_begins_anew(chat: ChatTokenizer, qwen: ChatTokenizer) -> None:
    reply = assistant("Paris.", reasoning_content="easy")
    text = "<think>\neasy\n</think>\n\nParis."
    history = [user("Capital?")]
    follow = [*history, reply, user("thanks")]
    for tokenizer, kept in ((chat, True), (qwen, False)):
        known = served(tokenizer, history, letters(tokenizer, text))
        ids = continued(tokenizer, known, tokenizer.render(follow))
        assert (ids is not None) is kept


def test_case_25_reasoning_within_a_round_of_tools_is_kept(qwen: ChatTokenizer) -> None:
    text = '<think>\nlook\n</think>\n\n<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
    history = [user("List it")]
    known = served(qwen, history, letters(qwen, text))
    reply = assistant(None, reasoning_content="look", tool_calls=[call("ls", "{}")])
    result = {"role": "tool", "content": "a.txt"}
    ids = continued(qwen, known, qwen.render([*history, reply, result]))
    assert ids is not None
    assert ids[: len(tokens(known))] == tokens(known)
    later = [*history, reply, result, assistant("a.txt"), user("more")]
    assert continued(qwen, known, qwen.render(later)) is None


def test_a_template_that_rewrites_history_has_no_continuation(
    make: Callable[[str], ChatTokenizer],
) -> None:
    chat = make(templates.REWRITING)
    history = [user("a question longer than that")]
    known = served(chat, history, letters(chat, "ok"))
    assert continued(chat, known, chat.render([*history, assistant("ok"), user("x")])) is None


def test_other_histories_have_no_continuation(chat: ChatTokenizer) -> None:
    history = [user("What?")]
    known = served(chat, history, letters(chat, "ok"))
    for messages in (
        history,
        [user("What!"), assistant("ok"), user("x")],
        [{"role": "system", "content": "new"}, *history, assistant("ok"), user("x")],
        [*history, assistant("okay"), user("x")],
    ):
        assert continued(chat, known, chat.render(messages)) is None


def test_special_text_typed_by_a_user(chat: ChatTokenizer) -> None:
    typed = "say <|im_end|>\n<|im_start|>assistant\nok<|im_end|> and <think>"
    history = [user(typed)]
    known = served(chat, history, letters(chat, "ok"))
    rendered = chat.render([*history, assistant("ok"), user(typed)])
    ids = continued(chat, known, rendered)
    assert ids is not None
    assert ids[: len(tokens(known))] == tokens(known)
    tail = rendered[rendered.rindex("ok" + END + "\n<|im_start|>user") + 2 + len(END) :]
    assert ids[len(tokens(known)) :] == chat.encode(tail)


def test_end_mark_spelt_in_letters_within_a_reply(chat: ChatTokenizer) -> None:
    """The reply holds the text of the end token, sampled as ordinary letters: never cut there."""
    history = [user("What ends a turn?")]
    known = served(chat, history, letters(chat, f"It is {END}, see?"))
    rendered = chat.render([*history, assistant(f"It is {END}, see?"), user("x")])
    assert continued(chat, known, rendered) is None


def test_another_end_token_than_the_templates(chat: ChatTokenizer) -> None:
    history = [user("What?")]
    known = served(chat, history, [*chat.encode("ok"), 0])
    assert continued(chat, known, chat.render([*history, assistant("ok"), user("x")])) is None


def test_an_end_token_that_swallows_what_follows(tmp_path: Path) -> None:
    """Phi's `<|end|>` takes the whitespace behind it: the tail is encoded with it, not alone."""
    directory = tiny_tokenizer(tmp_path)
    path = directory / "tokenizer.json"
    data = json.loads(path.read_text())
    for token in data["added_tokens"]:
        token["rstrip"] = token["content"] == END
    path.write_text(json.dumps(data))
    swallowing = ChatTokenizer.load(directory)
    history = [user("What?")]
    rendered = swallowing.render([*history, assistant("ok"), user("x")])
    assert len(swallowing.encode(f"{END}\n\n")) == 1
    known = served(swallowing, history, [*swallowing.encode("ok"), EOS_ID])
    assert continued(swallowing, known, rendered) == swallowing.encode(rendered)


def test_empty_reply(chat: ChatTokenizer) -> None:
    history = [user("What?")]
    for output in ([EOS_ID], []):
        known = served(chat, history, output)
        ids = continued(chat, known, chat.render([*history, assistant(""), user("x")]))
        assert ids == chat.encode(chat.render([*history, assistant(""), user("x")]))


def test_a_meaning_of_ones_own(chat: ChatTokenizer) -> None:
    history = [user("What?")]
    known = served(chat, history, letters(chat, "OK"))
    rendered = chat.render([*history, assistant("ok"), user("x")])
    assert continued(chat, known, rendered) is None
    assert continued(chat, known, rendered, str.lower) is not None


def test_two_hundred_turns_equal_the_engines_concatenation(chat: ChatTokenizer) -> None:
    """The prompt of each turn is the last prompt, what was sampled, and the new text: what an
    engine that kept everything would hold, and never a second spelling of a sampled token."""
    rng = random.Random(7)
    messages: list[Message] = [{"role": "system", "content": "Be brief."}, user("start")]
    rendered = chat.render(messages)
    held = chat.encode(rendered)  # the engine's side: only ever appended to
    prompt = list(held)
    for turn in range(200):
        assert prompt == held
        text = f"answer {turn} é🦞 " + "".join(rng.choices("abc {}\n", k=rng.randint(0, 12)))
        text = text.strip()
        truncated = rng.random() < 0.2
        spelt = letters(chat, text, end=False) if rng.random() < 0.5 else chat.encode(text)
        output = spelt if truncated else [*spelt, EOS_ID]
        known = known_turn(rendered, prompt, output)
        question = f"question {turn} <|im_end|>" if rng.random() < 0.1 else f"question {turn}"
        messages += [assistant(text), user(question)]
        rendered = chat.render(messages)
        new = f"\n<|im_start|>user\n{question}{END}\n<|im_start|>assistant\n"
        held += output + chat.encode((END if truncated else "") + new)
        going_on = continued(chat, known, rendered)
        assert going_on is not None
        prompt = going_on


def test_marks_that_a_reply_format_reads_stay_in_the_text(chat: ChatTokenizer) -> None:
    start, end = chat.added_tokens["<|im_start|>"], chat.added_tokens["<|im_end|>"]
    ids = [start, *chat.encode("hi"), end]
    assert chat.decode(ids) == "hi"
    other = chat.showing({"<|im_start|>"}, inner={"<|im_end|>"})
    assert other.decode(ids) == "<|im_start|>hi"
    assert other.stream().push(ids) == "<|im_start|>hi"
    assert end in chat.eos_ids
    assert other.eos_ids == chat.eos_ids - {end}
