"""How families of models write tool calls in their text: marks around a section, calls inside.

Guarantees: a section is read whole or not at all, nothing in it is repaired; arguments that are
JSON stay the model's own characters. `ReplyParser` finds the sections; the readers here are pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from openclaw_rl.wire.calls import Call, in_string, is_object, parse_calls
from openclaw_rl.wire.tagged import read_dsml, read_function, read_glm

Tools = Mapping[str, Mapping[str, Any]]
"""The offered tools: name to the JSON schema of its parameters."""


@dataclass(frozen=True, slots=True)
class Section:
    """What stands in a section (or in the beginning of one): its calls, none where it is not
    wholly valid. `inside`: it breaks off inside a value, of which a closing mark may be part.
    `rest`: text behind the calls of a section that ends with the reply."""

    calls: list[Call] = field(default_factory=list)
    inside: bool = False
    rest: str = ""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """`marks`: what opens a section to what closes it (None: the end of the reply).

    `read(mark, body, tools)` understands what stands behind `mark`. `fits(body)` looks at the
    first characters: False where no call begins like this, so that the text is released at once;
    None while that is open. `bare`: a whole reply may be calls without any mark.
    """

    marks: Mapping[str, str | None]
    read: Callable[[str, str, Tools], Section]
    fits: Callable[[str], bool | None]
    bare: bool = False

    def longest(self, text: str) -> int:
        """How many characters at the end of `text` may be the beginning of a mark."""
        return max(held(text, mark) for mark in self.marks)


def held(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of `tag` (never the whole)."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0


def schemas(tools: Any) -> Tools:
    """Chat Completions tools by name; what is no function is left out."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools or ():
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            found[function["name"]] = parameters if isinstance(parameters, Mapping) else {}
    return found


def begins(body: str, *words: str) -> bool | None:
    """Whether `body` begins with one of `words`, white space aside; None while it may."""
    text = body.lstrip()
    if any(text.startswith(word) for word in words):
        return True
    return None if any(word.startswith(text) for word in words) else False


# -- readers -------------------------------------------------------------------------------------


def _read_json(mark: str, body: str, tools: Tools) -> Section:
    return Section(parse_calls(body), in_string(body))


def _read_coder(mark: str, body: str, tools: Tools) -> Section:
    """Qwen3-Coder: tagged functions; some of its kin write Hermes' JSON in the same mark."""
    if body.lstrip().startswith("{"):
        return _read_json(mark, body, tools)
    calls, inside = read_function(body, tools)
    return Section(calls, inside)


def _read_glm(mark: str, body: str, tools: Tools) -> Section:
    calls, inside = read_glm(body, tools)
    return Section(calls, inside)


def _fits_glm(body: str) -> bool | None:
    match = re.match(r"\s*[\w.-]+\s*", body)
    if match is None:
        return False if body.strip() else None
    return begins(body[match.end() :], "<arg_key>", "</tool_call>")


_KIMI_CALL = re.compile(
    r"\s*<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?)\s*"
    r"<\|tool_call_argument_begin\|>(?P<arguments>.*?)<\|tool_call_end\|>\s*",
    re.DOTALL,
)
_DEEPSEEK_CALL = re.compile(
    r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<name>[^\n<]+)\n```json\n(?P<fenced>.*?)\n```"
    r"|(?P<plain>[^\n<]+)<｜tool▁sep｜>(?P<arguments>.*?))<｜tool▁call▁end｜>\s*",
    re.DOTALL,
)


def _read_kimi(mark: str, body: str, tools: Tools) -> Section:
    calls = []
    at = 0
    while at < len(body):
        match = _KIMI_CALL.match(body, at)
        if match is None or not is_object(match["arguments"]):
            return Section()
        # Its template writes the id back, so the model's own has to come back from the client.
        own = match["id"] if ":" in match["id"] else ""
        calls.append(Call(match["name"], match["arguments"].strip(), own))
        at = match.end()
    return Section(calls)


def _read_deepseek(mark: str, body: str, tools: Tools) -> Section:
    """V3 and R1 (fenced JSON), V3.1 (plain JSON), V3.2 and V4 (tags)."""
    if "DSML" in mark:
        calls, inside = read_dsml(body)
        return Section(calls, inside)
    found = []
    at = 0
    while at < len(body):
        match = _DEEPSEEK_CALL.match(body, at)
        if match is None:
            return Section()
        arguments = match["arguments"] if match["fenced"] is None else match["fenced"]
        if not is_object(arguments):
            return Section()
        found.append(Call((match["name"] or match["plain"]).strip(), arguments.strip()))
        at = match.end()
    return Section(found)


_LLAMA_FUNCTION = re.compile(r"([\w.-]+)>\s*(\{.*\})\s*", re.DOTALL)
_LLAMA_KEYS = ('"name"', '"type"', '"function"', '"parameters"', '"arguments"')


def _read_llama(mark: str, body: str, tools: Tools) -> Section:
    if mark == "<function=":
        match = _LLAMA_FUNCTION.fullmatch(body)
        valid = match is not None and is_object(match[2])
        return Section([Call(match[1], match[2].strip())] if match and valid else [],
                       in_string(body))  # fmt: skip
    calls = parse_calls(body, ";")
    if not mark and any(call.name not in tools for call in calls):
        return Section()  # an answer in JSON that has a key "name"
    return Section(calls)


def _fits_llama(body: str) -> bool | None:
    text = body.lstrip()
    if re.match(r"[\w.-]+", text):
        return True  # `<function=`; behind the other marks the section ends with the reply
    if not text.startswith(("{", "[")):
        return False if text else None
    return True if text[0] == "[" else begins(text[1:], *_LLAMA_KEYS)


HERMES = CallSyntax(
    {"<tool_call>": "</tool_call>"}, _read_json, lambda body: begins(body, "{", "[")
)
QWEN3_CODER = CallSyntax(
    {"<tool_call>": "</tool_call>"}, _read_coder, lambda body: begins(body, "<function=", "{")
)
GLM = CallSyntax({"<tool_call>": "</tool_call>"}, _read_glm, _fits_glm)
KIMI = CallSyntax(
    {"<|tool_calls_section_begin|>": "<|tool_calls_section_end|>"},
    _read_kimi,
    lambda body: begins(body, "<|tool_call_begin|>"),
)
DEEPSEEK = CallSyntax(
    {
        "<｜tool▁calls▁begin｜>": "<｜tool▁calls▁end｜>",
        "<｜DSML｜function_calls>": "</｜DSML｜function_calls>",
        "<｜DSML｜tool_calls>": "</｜DSML｜tool_calls>",
    },
    _read_deepseek,
    lambda body: begins(body, "<｜tool▁call▁begin｜>", "<｜DSML｜invoke"),
)
LLAMA3 = CallSyntax(
    {"<|python_tag|>": None, "<function=": "</function>"}, _read_llama, _fits_llama, bare=True
)
