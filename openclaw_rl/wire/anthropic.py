"""Anthropic Messages on the way in: the same `ChatRequest` as any other dialect gives.

As in Chat Completions a request is understood completely or refused with 400 and the path of the
field (`messages[1].content[0].type`); what only bends sampling, speed or bookkeeping is listed in
`ignored`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openclaw_rl.wire.anthropic_blocks import Conversation, read_conversation, system_text
from openclaw_rl.wire.errors import invalid, unsupported
from openclaw_rl.wire.request import (
    ChatRequest,
    check_types,
    flag,
    given_keys,
    obj,
    read_object,
    string,
    text,
)
from openclaw_rl.wire.sampling import parse_sampling, positive_int, stop_list

TAKEN = {
    "model", "messages", "max_tokens", "system", "tools", "tool_choice", "stream",
    "stop_sequences", "temperature", "top_p", "top_k", "metadata", "thinking", "output_config",
    "chat_template_kwargs", "output_format", "mcp_servers", "container",
}  # fmt: skip
"""Keys that mean something here, be it a refusal."""

IGNORED: dict[str, type] = {
    "cache_control": dict,
    "context_management": dict,
    "diagnostics": dict,
    "inference_geo": str,
    "service_tier": str,
    "speed": str,
    "betas": list,
    "safeguards": list,
    "user_profile_id": str,
}
"""Keys of the Messages API (and of Claude Code) without effect, and their types."""

SHAPES = ("output_format", "mcp_servers", "container")
"""Keys that would bind the reply to a form, or let the server run tools."""

THINKING = ("enabled", "adaptive", "between_tools", "disabled")


def parse_messages_request(body: bytes, *, image_ok: bool = False) -> ChatRequest:
    """Read and check the body of `/v1/messages`; `WireError` 400 names the first wrong field."""
    given = given_keys(read_object(body))
    if "max_tokens" not in given:
        raise invalid("max_tokens", "is required")
    request = _parse(given, image_ok)
    if request.messages[-1]["role"] == "assistant":
        raise invalid(
            "messages",
            "the conversation must end with a user message: prefilled replies are not supported",
        )
    return request


def parse_count_request(body: bytes, *, image_ok: bool = False) -> ChatRequest:
    """Read and check the body of `/v1/messages/count_tokens`: the same without a limit."""
    return _parse(given_keys(read_object(body)), image_ok)


def _parse(given: Mapping[str, Any], image_ok: bool) -> ChatRequest:
    for key in SHAPES:
        if given.get(key):
            raise unsupported(key, "not supported; declare tools that the client itself runs")
    check_types(given, IGNORED)
    ignored = [key for key in given if key not in TAKEN]
    sampling = _sampling(given)
    conversation = read_conversation(given.get("messages"), image_ok=image_ok)
    system = system_text(given.get("system"), "system")
    first = ({"role": "system", "content": system},) if system else ()
    show, template_kwargs = _thinking(given, ignored)
    _output_config(given, ignored)
    metadata = obj(given, "metadata")
    text(metadata, "user_id", "metadata.")
    tools = _tools(given, conversation, ignored)
    return ChatRequest(
        model=text(given, "model"),
        messages=(*first, *conversation.messages),
        tools=tools,
        tool_choice="auto" if tools else "none",
        stream=flag(given, "stream"),
        include_usage=True,
        max_tokens=positive_int(given, "max_tokens"),
        sampling=sampling,
        template_kwargs={**template_kwargs, **obj(given, "chat_template_kwargs")},
        hints={"metadata": metadata} if metadata else {},
        logprobs=False,
        top_logprobs=0,
        ignored=tuple(sorted(set(ignored))),
        show_reasoning=show,
    )


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    own = {key: given[key] for key in ("temperature", "top_p", "top_k") if key in given}
    if own.get("top_k") == 0 and type(own["top_k"]) is int:  # here the word for: no limit
        own["top_k"] = -1
    sampling, _ = parse_sampling(own)
    stops = stop_list(given.get("stop_sequences") or [], "stop_sequences")
    if stops:
        sampling["stop"] = stops
    return sampling


def _thinking(given: Mapping[str, Any], ignored: list[str]) -> tuple[bool, dict[str, Any]]:
    """Whether to show reasoning, and what the template is told. Without `thinking` the template
    does what it does by itself."""
    thinking = obj(given, "thinking")
    if not thinking:
        return True, {}
    if thinking.get("type") not in THINKING:
        raise invalid("thinking.type", f"must be one of {', '.join(THINKING)}")
    display = text(thinking, "display", "thinking.")
    if "budget_tokens" in thinking:
        positive_int(thinking, "budget_tokens", "thinking.")
        ignored.append("thinking.budget_tokens")
    return display != "omitted", {"enable_thinking": thinking["type"] != "disabled"}


def _output_config(given: Mapping[str, Any], ignored: list[str]) -> None:
    config = obj(given, "output_config")
    if config.get("format"):
        raise unsupported("output_config.format", "not supported; ask for JSON in the prompt")
    ignored += [f"output_config.{key}" for key in config if config[key] is not None]


def _tools(
    given: Mapping[str, Any], conversation: Conversation, ignored: list[str]
) -> tuple[dict[str, Any], ...]:
    """The tools in Chat Completions' form. A deferred tool counts from when the client's own tool
    search has named it."""
    tools = given.get("tools", [])
    if not isinstance(tools, list):
        raise invalid("tools", "must be a list")
    result = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        function = _function(tool, where)
        if flag(tool, "strict", f"{where}."):
            ignored.append("tools.strict")
        if flag(tool, "defer_loading", f"{where}."):
            offered = function["name"] in conversation.named_tools
        else:
            offered = function["name"] not in conversation.removed_tools
        if offered:
            result.append({"type": "function", "function": function})
    return tuple(result) if _wants_calls(given, ignored) else ()


def _function(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise invalid(where, "must be an object")
    if tool.get("type") not in (None, "custom"):
        raise invalid(
            f"{where}.type",
            "only tools of the type 'custom' are supported: this server runs no tools, and "
            "the model knows none by heart",
        )
    name = string(tool.get("name"), f"{where}.name")
    if not name:
        raise invalid(f"{where}.name", "must not be empty")
    description = text(tool, "description", f"{where}.")
    if not isinstance(tool.get("input_schema"), dict):
        raise invalid(f"{where}.input_schema", "must be an object")
    described = {} if description is None else {"description": description}
    return {"name": name, **described, "parameters": tool["input_schema"]}


def _wants_calls(given: Mapping[str, Any], ignored: list[str]) -> bool:
    choice = obj(given, "tool_choice")
    if not choice:
        return True
    if flag(choice, "disable_parallel_tool_use", "tool_choice."):
        ignored.append("tool_choice.disable_parallel_tool_use")
    kind = choice.get("type")
    if kind in ("any", "tool"):
        raise unsupported("tool_choice", "a call cannot be forced; use 'auto' or 'none'")
    if kind not in ("auto", "none"):
        raise invalid("tool_choice.type", "must be 'auto' or 'none'")
    return bool(kind == "auto")
