"""Which model writes its replies how: the one place that knows.

`choose_format` does what `--reply-format` says, or reads it off the chat template and the special
tokens.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from openclaw_rl.errors import ConfigError
from openclaw_rl.wire import calls
from openclaw_rl.wire.calls import Found, Tools
from openclaw_rl.wire.reply import Marks, Section, begins
from openclaw_rl.wire.reply import ReplyFormat as ReplyFormat

# -- the table -----------------------------------------------------------------------------------


def _section(opening: str, close: str, read: calls.Read, *words: str) -> dict[str, Section]:
    """A section that begins with one of `words`."""
    return {opening: Section(Marks(close), read, lambda body: begins(body, *words))}


def _fits_glm(body: str) -> bool | None:
    match = re.match(r"\s*[\w.-]+\s*", body)
    if match is None:
        return False if body.strip() else None
    return begins(body[match.end() :], "<arg_key>", "</tool_call>")


def _fits_llama(body: str) -> bool | None:
    text = body.lstrip()
    if not text.startswith("{"):
        return False if text else None
    return begins(text[1:], '"name"', '"type"', '"function"', '"parameters"', '"arguments"')


HERMES = ReplyFormat("hermes", _section("<tool_call>", "</tool_call>", calls.read_json, "{", "["))
QWEN3_CODER = ReplyFormat(
    "qwen3-coder", _section("<tool_call>", "</tool_call>", calls.read_coder, "<function=", "{")
)
GLM = ReplyFormat(
    "glm",
    {"<tool_call>": Section(Marks("</tool_call>"), calls.read_glm, _fits_glm)},
    within=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
KIMI = ReplyFormat(
    "kimi",
    _section(
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
        # Its template writes the id back, so the model's own has to come back from the client.
        calls.rows(
            r"\s*<\|tool_call_begin\|>\s*(?:(?=(?P<id>[\w.-]+:\d+)))?"
            r"(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?\s*"
            r"<\|tool_call_argument_begin\|>(?P<arguments>.*?)<\|tool_call_end\|>\s*"
        ),
        "<|tool_call_begin|>",
    ),
    within=("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"),
)  # fmt: skip
_DEEPSEEK_JSON = calls.rows(  # V3 and R1 fence their JSON, V3.1 does not
    r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[^\n<]+)"
    r"(?:\n```json\n|<｜tool▁sep｜>)(?P<arguments>.*?)(?:\n```)?<｜tool▁call▁end｜>\s*"
)
DEEPSEEK = ReplyFormat(
    "deepseek",
    {
        **_section("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _DEEPSEEK_JSON,
                   "<｜tool▁call▁begin｜>"),
        **_section("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", calls.read_dsml,
                   "<｜DSML｜invoke"),
        **_section("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", calls.read_dsml,
                   "<｜DSML｜invoke"),
    },
    within=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "｜DSML｜"),
)  # fmt: skip
LLAMA3 = ReplyFormat(
    "llama3",
    {
        "<|python_tag|>": Section(Marks(), calls.read_llama),
        "<function=": Section(
            Marks("</function>"), calls.rows(r"(?P<name>[\w.-]+)>(?P<arguments>.*)")
        ),
    },
    bare=Section(Marks(), calls.read_llama, _fits_llama),
)

_MISTRAL_ROW = calls.rows(
    r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\](?P<id>\w+)\s*)?(?:\[ARGS\])?\s*(?P<arguments>\{.*)"
)


def _read_mistral(mark: str, body: str, tools: Tools) -> Found:
    """A list in JSON to version 7, a mark before each call from version 11 on."""
    return (calls.read_json if body.lstrip().startswith("[") else _MISTRAL_ROW)(mark, body, tools)


def _fits_mistral(body: str) -> bool | None:
    text = body.lstrip()
    return bool(re.match(r"[\[\w]", text)) if text else None


MISTRAL = ReplyFormat(
    "mistral",
    {"[TOOL_CALLS]": Section(Marks(before=("[TOOL_CALLS]",)), _read_mistral, _fits_mistral)},
    think=("[THINK]", "[/THINK]"),
    within=("[CALL_ID]", "[ARGS]"),
)

# gpt-oss' harmony: a reply is a row of messages, each in a channel. `analysis` is reasoning,
# `final` (and `commentary` without a recipient) is content, a recipient makes it a call:
#     <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary
#     to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_HEADS = ("<|start|>", "<|channel|>")  # begin a message also where the end of the last is missing
_LONGEST_HEAD = 500
"""Characters within which a head ends by `<|message|>`, or is none; real ones have about 60."""


def _fits_head(body: str) -> bool | None:
    if body.find("<|message|>", 0, _LONGEST_HEAD) >= 0:
        return True
    return None if len(body) < _LONGEST_HEAD else False


def _read_head(mark: str, body: str, tools: Tools) -> Found:
    head = f"{mark}{body}<|message|>"
    if re.search(r"\bto=[^\s<]", head):
        return Found(then=_HARMONY_CALL, mark=head)
    channel = re.search(r"<\|channel\|>\s*(\w+)", head)
    return Found(then="reasoning" if channel and channel[1] == "analysis" else "content")


def _read_harmony_call(head: str, body: str, tools: Tools) -> Found:
    name = re.findall(r"\bto=([^\s<]+)", head)[0].removeprefix("functions.")
    return Found([calls.Call(name, body.strip())] if tools and calls.is_object(body) else [])


_HARMONY_CALL = Section(Marks(*_ENDS, before=_HEADS), _read_harmony_call, whole=True)
_HARMONY_HEAD = Section(Marks("<|message|>"), _read_head, _fits_head)
HARMONY = ReplyFormat(
    "gpt-oss",
    dict.fromkeys(_HEADS, _HARMONY_HEAD),
    bare=Section(
        Marks("<|message|>"), _read_head, lambda body: begins(body, "to=") and _fits_head(body)
    ),
    think=None,
    ends=_ENDS,
    inner=("<|end|>",),
    within=("<|constrain|>",),
)

FORMATS: Mapping[str, ReplyFormat] = {
    form.name: form for form in (HERMES, QWEN3_CODER, GLM, KIMI, DEEPSEEK, LLAMA3, MISTRAL, HARMONY)
}

_SIGNS: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    # format, what its template (or, where True, its special tokens) holds; the first that fits
    ("gpt-oss", ("<|channel|>", "<|message|>"), True),
    ("kimi", ("<|tool_calls_section_begin|>",), True),
    ("deepseek", ("<｜tool▁calls▁begin｜>",), True),
    ("deepseek", ("｜DSML｜",), True),
    ("glm", ("<arg_key>", "<arg_value>"), True),
    ("qwen3-coder", ("<function=", "<parameter="), False),
    ("hermes", ("<tool_call>",), False),
    ("llama3", ("<|python_tag|>",), True),
    ("mistral", ("[TOOL_CALLS]",), True),
    # families whose calls are not read
    ("MiniMax M2", ("<minimax:tool_call>",), False),
    ("LFM2", ("<|tool_call_start|>",), False),
    ("Intern-S1", ("<|plugin|>",), False),
)


def choose_format(asked: str, template: str, tokens: Collection[str]) -> tuple[ReplyFormat, str]:
    """The format that `--reply-format` asks for ("auto": that of the model), and what decided.

    `template` is its chat template, `tokens` the texts of its added tokens.
    Raises `ConfigError` where there is no such format.
    """
    if asked != "auto":
        return find_format(asked), "--reply-format"
    for name, signs, in_tokens in _SIGNS:
        if all(sign in template for sign in signs):
            if name in FORMATS:
                return FORMATS[name], "chat template"
            return HERMES, f"default: calls in the form of {name} are not read"
        if in_tokens and all(sign in tokens for sign in signs):
            return FORMATS[name], "special tokens"
    return HERMES, "default"


def find_format(name: str) -> ReplyFormat:
    """The format of that name. Raises `ConfigError` where there is none."""
    if name not in FORMATS:
        raise ConfigError(f"--reply-format: {name!r} is not one of auto, {', '.join(FORMATS)}")
    return FORMATS[name]
