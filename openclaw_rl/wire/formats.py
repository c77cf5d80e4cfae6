"""Which model writes its replies how: the one place that knows.

A `ReplyFormat` makes the parser of a reply. `choose_format` reads it off the chat template and
the special tokens, then off the model's name; `find_format` takes the name that a person gave;
`format_for` does what `--reply-format` says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from openclaw_rl.errors import ConfigError
from openclaw_rl.wire import harmony, sglang_calls, syntax
from openclaw_rl.wire.reply import ReplyParser, ReplyReader, new_call_id
from openclaw_rl.wire.syntax import CallSyntax, schemas

SGLANG = "sglang"
"""`sglang:NAME` is the parser NAME of an installed SGLang, `sglang` the one that fits the model."""


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """`syntax` None is harmony. `marks` must stay visible although the tokenizer may call them
    special; of these, `inner` stand between two messages of one reply and do not end it."""

    name: str
    syntax: CallSyntax | None
    marks: frozenset[str]
    inner: frozenset[str] = frozenset()

    def parser(
        self,
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        in_reasoning: bool = False,
        new_id: Callable[[], str] = new_call_id,
    ) -> ReplyReader:
        """A reader of one reply. `tools`: those of the request; none: calls are text.
        `in_reasoning`: the prompt already opened `<think>`."""
        offered = schemas(tools) if tools else None
        if self.syntax is None:
            return harmony.HarmonyParser(tools=offered, new_id=new_id)
        return ReplyParser(
            tools=offered, in_reasoning=in_reasoning, syntax=self.syntax, new_id=new_id
        )

    def message(
        self, text: str, tools: Sequence[Mapping[str, Any]] | None, *, in_reasoning: bool = False
    ) -> dict[str, Any]:
        """The assistant message of a whole reply."""
        parser = self.parser(tools, in_reasoning=in_reasoning)
        parser.feed(text)
        parser.finish()
        return parser.message()

    def meaning(
        self, text: str, tools: Sequence[Mapping[str, Any]] | None, *, in_reasoning: bool = False
    ) -> Any:
        """A value that is equal for texts that mean the same reply: white space around its parts
        and the writing of arguments do not count."""
        message = self.message(text, tools, in_reasoning=in_reasoning)
        calls = [call["function"] for call in message.get("tool_calls", ())]
        return (
            message.get("reasoning_content", "").strip(),
            (message["content"] or "").strip(),
            [(call["name"], json.dumps(json.loads(call["arguments"]), sort_keys=True))
             for call in calls],
        )  # fmt: skip


def _format(name: str, calls: CallSyntax, *inner_marks: str) -> ReplyFormat:
    ends = (end for end in calls.marks.values() if end is not None)
    return ReplyFormat(name, calls, frozenset((*calls.marks, *ends, *_THINK, *inner_marks)))


_THINK = ("<think>", "</think>")

FORMATS: Mapping[str, ReplyFormat] = {
    one.name: one
    for one in (
        _format("hermes", syntax.HERMES),
        _format("qwen3-coder", syntax.QWEN3_CODER),
        _format("glm", syntax.GLM, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        _format(
            "kimi", syntax.KIMI,
            "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>",
        ),
        _format(
            "deepseek", syntax.DEEPSEEK,
            "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "｜DSML｜",
        ),
        _format("llama3", syntax.LLAMA3),
        ReplyFormat("gpt-oss", None, frozenset(harmony.MARKS), frozenset(("<|end|>",))),
    )
}  # fmt: skip

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
)
_NAMES = (
    ("gpt-oss", "gpt-oss"), ("kimi", "kimi"), ("deepseek", "deepseek"), ("glm", "glm-4"),
    ("qwen3-coder", "qwen3-coder"), ("llama3", "llama-3"),
)  # fmt: skip


def choose_format(
    template: str, tokens: Collection[str], model: str = ""
) -> tuple[ReplyFormat, str]:
    """The format of a model and what gave it away.

    `template` is its chat template, `tokens` the texts of its added tokens, `model` its name.
    """
    for name, signs, in_tokens in _SIGNS:
        if all(sign in template for sign in signs):
            return FORMATS[name], "chat template"
        if in_tokens and all(sign in tokens for sign in signs):
            return FORMATS[name], "special tokens"
    other = sglang_calls.detect(template)
    if other is not None and sglang_calls.installed():
        return _of_sglang(other), "chat template"
    if other is not None:
        return FORMATS["hermes"], f"default: the format {other} of its template needs SGLang"
    for name, word in _NAMES:
        if word in model.lower():
            return FORMATS[name], "model name"
    return FORMATS["hermes"], "default"


def find_format(name: str) -> ReplyFormat:
    """The format of that name. Raises `ConfigError` where there is none."""
    if name.startswith(f"{SGLANG}:"):
        return _of_sglang(name.removeprefix(f"{SGLANG}:"))
    if name not in FORMATS:
        known = ", ".join(FORMATS)
        raise ConfigError(
            f"--reply-format: {name!r} is none of auto, {known}, {SGLANG}, {SGLANG}:NAME "
            "(SGLang's own)"
        )
    return FORMATS[name]


def check_asked(asked: str) -> None:
    """Raises `ConfigError` where `--reply-format` asks for what no model can have here."""
    if asked == SGLANG:
        sglang_calls.require(asked)
    elif asked != "auto":
        find_format(asked)


def format_for(
    asked: str, template: str, tokens: Collection[str], model: str = ""
) -> tuple[ReplyFormat, str]:
    """The format that `--reply-format` asks for, and what gave it away; of the model as
    `choose_format`. Raises `ConfigError` where it cannot be had."""
    if asked not in ("auto", SGLANG):
        return find_format(asked), "--reply-format"
    chosen, by = choose_format(template, tokens, model)
    if asked == SGLANG and chosen.name in FORMATS:
        chosen = _of_sglang(sglang_calls.name_for(chosen.name, template))
    return chosen, by


def _of_sglang(name: str) -> ReplyFormat:
    made = _format(f"{SGLANG}:{name}", sglang_calls.load(name))
    own = sglang_calls.kin(name)
    return replace(made, marks=made.marks | FORMATS[own].marks) if own else made
