"""SGLang's own tool-call parsers: for the formats that are not in `syntax.py`, and for whoever
prefers them in the others.

SGLang is imported only when one of them is asked for: that takes seconds and brings torch with
it. Its detector reads a whole section at once, when the reply is over, so the result does not
depend on how the text was cut; its streaming parsers promise less.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Mapping
from typing import Any

from openclaw_rl.errors import ConfigError
from openclaw_rl.wire.calls import Call, is_object
from openclaw_rl.wire.syntax import CallSyntax, Section, Tools

_PARSER = "sglang.srt.function_call.function_call_parser"
_ENVIRON = "sglang.srt.environ"

_SIGNS = (
    ("minimax-m2", "<minimax:tool_call>"),
    ("mistral", "[TOOL_CALLS]"),
    ("lfm2", "<|tool_call_start|>"),
    ("interns1", "<|plugin|>"),
)
"""SGLang's name of a format, and what its chat template holds. Others can be asked for by name."""


_KIN = (
    ("hermes", "qwen25", ""),
    ("qwen3-coder", "qwen3_coder", ""),
    ("glm", "glm47", "</arg_key><arg_value>"),
    ("glm", "glm45", ""),
    ("kimi", "kimi_k2", ""),
    ("deepseek", "deepseekv4", "<｜DSML｜tool_calls>"),
    ("deepseek", "deepseekv32", "｜DSML｜"),
    ("deepseek", "deepseekv3", "```json"),
    ("deepseek", "deepseekv31", ""),
    ("llama3", "llama3", ""),
)
"""Our format, SGLang's name for it, and what the chat template of that generation holds; the first
that fits. None for gpt-oss: SGLang's reads calls, but not the channels around them."""


def name_for(ours: str, template: str) -> str:
    """SGLang's parser for what is our format `ours` in this template. Raises `ConfigError`."""
    for own, name, sign in _KIN:
        if own == ours and sign in template:
            return name
    raise ConfigError(f"--reply-format sglang: SGLang has no parser that reads all of {ours}: "
                      "leave the flag out")  # fmt: skip


def kin(name: str) -> str | None:
    """Our format of the same models as SGLang's parser `name`."""
    return next((own for own, theirs, _ in _KIN if theirs == name), None)


def detect(template: str) -> str | None:
    """SGLang's name for the calls of a chat template that is none of ours; None: not known."""
    return next((name for name, sign in _SIGNS if sign in template), None)


def installed() -> bool:
    """Whether SGLang is here; does not import it."""
    return importlib.util.find_spec("sglang") is not None


def require(asked: str) -> None:
    """Raises `ConfigError` where SGLang is not here."""
    if not installed():
        raise ConfigError(f"--reply-format {asked}: SGLang is not installed here")


def load(name: str) -> CallSyntax:
    """SGLang's parser `name` as a syntax. Raises `ConfigError` where it cannot be had."""
    require(f"sglang:{name}")
    logging.getLogger("sglang.srt.function_call").setLevel(logging.CRITICAL)  # they quote replies
    try:
        parsers: Any = importlib.import_module(_PARSER).FunctionCallParser.ToolCallParserEnum
        # Calls of tools that were not offered would vanish, with their text.
        importlib.import_module(_ENVIRON).envs.SGLANG_FORWARD_UNKNOWN_TOOLS.set(True)
    except Exception as error:
        raise ConfigError(
            f"--reply-format sglang:{name}: SGLang cannot be imported ({type(error).__name__})"
        ) from error
    if name not in parsers:
        raise ConfigError(
            f"--reply-format: SGLang has no parser {name!r}; it has {', '.join(sorted(parsers))}"
        )
    mark = _opening(parsers[name])
    if not mark:
        raise ConfigError(
            f"--reply-format sglang:{name}: SGLang does not tell what opens a call in this format"
        )

    def read(opened: str, body: str, tools: Tools) -> Section:
        section = _read(parsers[name], opened + body, tools)
        if not opened and any(call.name not in tools for call in section.calls):
            return Section()  # an answer in JSON
        return section

    return CallSyntax({mark: None}, read, lambda body: True, bare=kin(name) == "llama3")


def _opening(detector: Any) -> str:
    try:
        made = detector()
    except Exception:  # some need more than a name
        return ""
    for attribute in ("bot_token", "tool_call_start_token"):
        mark = getattr(made, attribute, "")
        if isinstance(mark, str) and mark.strip():
            return mark.strip()
    return ""


def _read(detector: Any, text: str, tools: Tools) -> Section:
    """The calls of a section that goes to the end of the reply, and the text beside them."""
    protocol: Any = importlib.import_module("sglang.srt.entrypoints.openai.protocol")
    offered = [protocol.Tool.model_validate(_tool(name, tools[name])) for name in tools]
    try:
        result = detector().detect_and_parse(text, offered)
    except Exception:  # broken text: it stays text
        return Section()
    calls = [Call(item.name, item.parameters) for item in result.calls if item.name]
    if len(calls) < len(result.calls) or not all(is_object(call.arguments) for call in calls):
        return Section()
    return Section(calls, rest=result.normal_text or "")


def _tool(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": dict(parameters)}}
