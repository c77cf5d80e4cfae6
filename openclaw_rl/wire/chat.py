"""Chat Completions on the way in: every field checked before anything else happens.

A request is either understood completely or refused with 400 and the path of the field. What
would change the *shape* of the reply and cannot be honoured (`n`, audio, JSON schemas, forced tool
calls) is refused by name; what only bends sampling, speed or bookkeeping is listed in `ignored`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openclaw_rl.wire.errors import invalid, unsupported
from openclaw_rl.wire.messages import parse_messages
from openclaw_rl.wire.request import ChatRequest, check_types, flag, given_keys, obj, read_object
from openclaw_rl.wire.request import text as text_at
from openclaw_rl.wire.sampling import parse_sampling, positive_int

TAKEN = {
    "model", "messages", "tools", "tool_choice", "stream", "stream_options", "max_tokens",
    "max_completion_tokens", "chat_template_kwargs", "prompt_cache_key", "user", "metadata",
    "logprobs", "top_logprobs", "n", "response_format", "modalities", "audio", "functions",
    "function_call", "parallel_tool_calls",
}  # fmt: skip
"""Keys that mean something here, be it a refusal."""

IGNORED: dict[str, type] = {
    "seed": int,
    "store": bool,
    "logit_bias": dict,
    "reasoning_effort": str,
    "verbosity": str,
    "service_tier": str,
    "prediction": dict,
    "safety_identifier": str,
    "prompt_cache_retention": str,
}
"""Keys of the OpenAI API without effect, and their types."""

SHAPES = (
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
    "json_schema", "regex", "ebnf", "structural_tag", "web_search_options",
)  # fmt: skip
"""Keys of vLLM, SGLang and OpenAI that would bind the reply to a form or a source."""


def parse_chat_request(body: bytes, *, image_ok: bool = False) -> ChatRequest:
    """Read and check a body; `WireError` 400 names the first field that is wrong.

    Without `image_ok` image parts are refused; with it, content with images stays a list of parts.
    """
    data = read_object(body)
    given = given_keys(data)
    _refuse_shapes(given)
    check_types(given, IGNORED)
    sampling, known = parse_sampling(given)
    messages = parse_messages(data.get("messages"), image_ok=image_ok)
    tools, choice = _tools(given)
    logprobs, top_logprobs = _logprobs(given)
    limits = [positive_int(given, key) for key in ("max_completion_tokens", "max_tokens")]
    options = obj(given, "stream_options")
    ignored = [key for key in given if key not in TAKEN and key not in known]
    if not flag(given, "parallel_tool_calls", default=True):
        ignored.append("parallel_tool_calls")
    if flag(options, "include_obfuscation", "stream_options."):
        ignored.append("stream_options.include_obfuscation")
    if any(tool["function"].get("strict") for tool in tools):
        ignored.append("tools.function.strict")
    return ChatRequest(
        model=text_at(given, "model"),
        messages=messages,
        tools=tools,
        tool_choice=choice,
        stream=flag(given, "stream"),
        include_usage=flag(options, "include_usage", "stream_options."),
        max_tokens=limits[0] if limits[0] is not None else limits[1],
        sampling=sampling,
        template_kwargs=obj(given, "chat_template_kwargs"),
        hints=_hints(given),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        ignored=tuple(sorted(ignored)),
    )


def _refuse_shapes(given: Mapping[str, Any]) -> None:
    n = given.get("n", 1)
    if isinstance(n, bool) or not isinstance(n, int):
        raise invalid("n", "must be an integer")
    if n != 1:
        raise unsupported("n", "only one choice per request is supported")
    if "audio" in given or given.get("modalities", ["text"]) != ["text"]:
        name = "audio" if "audio" in given else "modalities"
        raise unsupported(name, "only text replies are supported")
    form = obj(given, "response_format")
    if form and form.get("type") != "text":
        raise unsupported(
            "response_format", "only the type 'text' is supported; ask for JSON in the prompt"
        )
    for key in ("functions", "function_call"):
        if given.get(key):
            raise unsupported(key, "superseded; use tools and tool_choice")
    for key in SHAPES:
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
    logprobs = flag(given, "logprobs")
    top = given.get("top_logprobs", 0)
    if isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= 20:
        raise invalid("top_logprobs", "must be an integer from 0 to 20")
    if top and not logprobs:
        raise invalid("top_logprobs", "needs logprobs: true")
    return logprobs, top


def _hints(given: Mapping[str, Any]) -> dict[str, Any]:
    hints: dict[str, Any] = {}
    for key in ("prompt_cache_key", "user"):
        text = text_at(given, key)
        if text:
            hints[key] = text
    metadata = obj(given, "metadata")
    if metadata:
        hints["metadata"] = metadata
    return hints
