"""Chat Completions on the way in: every field checked before anything else happens.

A request is either understood completely or refused with 400 and the path of the field. What
would change the *shape* of the reply and cannot be honoured (`n`, audio, JSON schemas, forced tool
calls) is refused by name; what only bends sampling, speed or bookkeeping is listed in `ignored`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openclaw_rl.wire.errors import invalid, unsupported
from openclaw_rl.wire.messages import parse_messages
from openclaw_rl.wire.sampling import parse_sampling, positive_int

_TAKEN = {
    "model", "messages", "tools", "tool_choice", "stream", "stream_options", "max_tokens",
    "max_completion_tokens", "chat_template_kwargs", "prompt_cache_key", "user", "metadata",
    "logprobs", "top_logprobs", "n", "response_format", "modalities", "audio", "functions",
    "function_call", "parallel_tool_calls",
}  # fmt: skip

_SHAPES = (
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
    "json_schema", "regex", "ebnf", "structural_tag", "web_search_options",
)  # fmt: skip
"""Keys of vLLM, SGLang and OpenAI that would bind the reply to a form or a source."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A valid request, normalised.

    `messages`: roles system, user, assistant, tool (developer became system); text parts joined by
    newlines into a str; `content` None only for assistants; arguments of tool calls as JSON text.
    `tools` is empty where `tool_choice` is "none". `max_tokens` None means: whatever fits.
    `sampling` holds only what was given. `ignored` names given keys without effect.
    """

    model: str | None
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    tool_choice: Any
    stream: bool
    include_usage: bool
    max_tokens: int | None
    sampling: dict[str, Any]
    template_kwargs: dict[str, Any]
    hints: dict[str, Any]
    logprobs: bool
    top_logprobs: int
    ignored: tuple[str, ...]


def parse_chat_request(body: bytes, *, image_ok: bool = False) -> ChatRequest:
    """Read and check a body; `WireError` 400 names the first field that is wrong.

    Without `image_ok` image parts are refused; with it, content with images stays a list of parts.
    """
    data = read_object(body)
    given = {key: value for key, value in data.items() if value is not None}
    _refuse_shapes(given)
    sampling, known = parse_sampling(given)
    messages = parse_messages(data.get("messages"), image_ok=image_ok)
    tools, choice = _tools(given)
    logprobs, top_logprobs = _logprobs(given)
    ignored = [key for key in given if key not in _TAKEN and key not in known]
    if given.get("parallel_tool_calls") is False:
        ignored.append("parallel_tool_calls")
    limits = [positive_int(given, key) for key in ("max_completion_tokens", "max_tokens")]
    options = _object(given, "stream_options")
    return ChatRequest(
        model=_text(given, "model"),
        messages=messages,
        tools=tools,
        tool_choice=choice,
        stream=_flag(given, "stream"),
        include_usage=_flag(options, "include_usage", "stream_options."),
        max_tokens=limits[0] if limits[0] is not None else limits[1],
        sampling=sampling,
        template_kwargs=_object(given, "chat_template_kwargs"),
        hints=_hints(given),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        ignored=tuple(sorted(ignored)),
    )


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`, its texts whole Unicode; `WireError` 400 for anything else."""
    try:
        data: Any = json.loads(body.decode("utf-8-sig"))
        if b"\\ud" in body or b"\\uD" in body:
            data = _whole_characters(data)
    except UnicodeDecodeError:
        raise invalid(None, "the body is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise invalid(
            None, f"the body is not valid JSON (line {error.lineno}, column {error.colno})"
        ) from None
    except RecursionError:
        raise invalid(None, "the body is nested too deeply") from None
    except ValueError:
        raise invalid(None, "the body is not valid JSON") from None
    if not isinstance(data, dict):
        raise invalid(None, "the body must be a JSON object")
    return data


def _whole_characters(value: Any) -> Any:
    """JavaScript clients cut texts in the middle of a character; half of one has no UTF-8."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_whole_characters(item) for item in value]
    if isinstance(value, dict):
        return {_whole_characters(key): _whole_characters(item) for key, item in value.items()}
    return value


def _refuse_shapes(given: Mapping[str, Any]) -> None:
    n = given.get("n", 1)
    if isinstance(n, bool) or not isinstance(n, int):
        raise invalid("n", "must be an integer")
    if n != 1:
        raise unsupported("n", "only one choice per request is supported")
    if "audio" in given or given.get("modalities", ["text"]) != ["text"]:
        name = "audio" if "audio" in given else "modalities"
        raise unsupported(name, "only text replies are supported")
    form = _object(given, "response_format")
    if form and form.get("type") != "text":
        raise unsupported(
            "response_format", "only the type 'text' is supported; ask for JSON in the prompt"
        )
    for key in ("functions", "function_call"):
        if given.get(key):
            raise unsupported(key, "superseded; use tools and tool_choice")
    for key in _SHAPES:
        if key in given:
            raise unsupported(key, "constrained replies are not supported")


def _tools(given: Mapping[str, Any]) -> tuple[tuple[dict[str, Any], ...], Any]:
    tools = given.get("tools", [])
    if not isinstance(tools, list):
        raise invalid("tools", "must be a list")
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise invalid(where, "must be an object")
        if tool.get("type") != "function":
            raise invalid(f"{where}.type", "only tools of the type 'function' are supported")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise invalid(f"{where}.function", "must be an object")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise invalid(f"{where}.function.name", "must be a non-empty string")
        if not isinstance(function.get("description", ""), str | None):
            raise invalid(f"{where}.function.description", "must be a string")
        if not isinstance(function.get("parameters", {}), dict | None):
            raise invalid(f"{where}.function.parameters", "must be an object")
    choice = given.get("tool_choice", "auto" if tools else "none")
    if choice == "none":
        return (), choice
    if choice == "auto":
        return tuple(tools), choice
    if choice == "required" or isinstance(choice, dict):
        raise unsupported("tool_choice", "a call cannot be forced; use 'auto' or 'none'")
    raise invalid("tool_choice", "must be 'auto' or 'none'")


def _logprobs(given: Mapping[str, Any]) -> tuple[bool, int]:
    logprobs = _flag(given, "logprobs")
    top = given.get("top_logprobs", 0)
    if isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= 20:
        raise invalid("top_logprobs", "must be an integer from 0 to 20")
    if top and not logprobs:
        raise invalid("top_logprobs", "needs logprobs: true")
    return logprobs, top


def _hints(given: Mapping[str, Any]) -> dict[str, Any]:
    hints: dict[str, Any] = {}
    for key in ("prompt_cache_key", "user"):
        text = _text(given, key)
        if text:
            hints[key] = text
    metadata = _object(given, "metadata")
    if metadata:
        hints["metadata"] = metadata
    return hints


def _text(given: Mapping[str, Any], key: str) -> str | None:
    value = given.get(key)
    if value is not None and not isinstance(value, str):
        raise invalid(key, "must be a string")
    return value


def _flag(given: Mapping[str, Any], key: str, prefix: str = "") -> bool:
    value = given.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise invalid(prefix + key, "must be true or false")
    return value


def _object(given: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = given.get(key, {})
    if not isinstance(value, dict):
        raise invalid(key, "must be an object")
    return value
