"""Messages of a Chat Completions request, checked and brought into one form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from openclaw_rl.wire.errors import invalid
from openclaw_rl.wire.request import string as _string

_ROLES = ("system", "developer", "user", "assistant", "tool")
_PLAIN_ROLES = ("system", "user", "assistant")


def parse_messages(messages: Any, *, image_ok: bool = False) -> tuple[dict[str, Any], ...]:
    """The normalised messages (see `ChatRequest`); `WireError` 400 names the field."""
    if not isinstance(messages, list):
        raise invalid("messages", "must be a list of messages")
    if not messages:
        raise invalid("messages", "must have at least one message")
    return tuple(
        [
            message if _is_plain(message) else _message(message, f"messages[{index}]", image_ok)
            for index, message in enumerate(messages)
        ]
    )


def _is_plain(message: Any) -> bool:
    """Whether a message is in our form already, as most of a long history are."""
    return (
        type(message) is dict
        and len(message) == 2
        and type(message.get("content")) is str
        and message.get("role") in _PLAIN_ROLES
    )


def _message(message: Any, where: str, image_ok: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise invalid(where, "must be an object")
    role = message.get("role")
    if role == "function":
        raise invalid(f"{where}.role", "'function' is superseded; use 'tool' and tool_call_id")
    if role not in _ROLES:
        raise invalid(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    if role == "developer":
        role = "system"
    result: dict[str, Any] = {"role": role}
    content, at = message.get("content"), f"{where}.content"
    if role == "assistant" and content is None and message.get("refusal") is not None:
        content, at = _string(message["refusal"], f"{where}.refusal"), f"{where}.refusal"
    result["content"] = _content(content, at, role, image_ok)
    name = message.get("name")
    if name is not None:
        result["name"] = _string(name, f"{where}.name")
    if role == "assistant":
        result.update(_assistant(message, where))
    if role == "tool":
        call_id = _string(message.get("tool_call_id"), f"{where}.tool_call_id")
        if not call_id:
            raise invalid(f"{where}.tool_call_id", "must not be empty")
        result["tool_call_id"] = call_id
    return result


def _content(content: Any, where: str, role: str, image_ok: bool) -> Any:
    if content is None:
        if role == "assistant":
            return None
        if role == "tool":  # a tool that returned nothing
            return ""
        raise invalid(where, "must be a string or a list of parts")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(where, "must be a string or a list of parts")
    parts = [_part(part, f"{where}[{index}]", role, image_ok) for index, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(part: Any, where: str, role: str, image_ok: bool) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise invalid(where, "must be an object")
    kind = part.get("type")
    if kind == "text":
        return {"type": "text", "text": _string(part.get("text"), f"{where}.text")}
    if kind == "refusal" and role == "assistant":
        return {"type": "text", "text": _string(part.get("refusal"), f"{where}.refusal")}
    if kind == "image_url":
        if not image_ok or role != "user":
            raise invalid(where, "images are not supported: this model reads text only")
        image = part.get("image_url")
        if not isinstance(image, dict) or not isinstance(image.get("url"), str):
            raise invalid(f"{where}.image_url.url", "must be a string")
        return {"type": "image_url", "image_url": dict(image)}
    if kind in ("input_audio", "file", "video_url"):
        raise invalid(where, f"parts of the type '{kind}' are not supported")
    raise invalid(f"{where}.type", "must be 'text'")


def _assistant(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key in ("reasoning_content", "reasoning"):  # the second is OpenRouter's and vLLM's name
        text = message.get(key)
        if text is not None:
            result["reasoning_content"] = _string(text, f"{where}.{key}")
            break
    if message.get("function_call"):
        raise invalid(f"{where}.function_call", "superseded; use tool_calls")
    if message.get("audio"):
        raise invalid(f"{where}.audio", "audio is not supported: this model reads text only")
    calls = message.get("tool_calls")
    if calls is None:
        return result
    if not isinstance(calls, list):
        raise invalid(f"{where}.tool_calls", "must be a list")
    if calls:
        result["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
    return result


def _call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise invalid(where, "must be an object")
    if call.get("type", "function") != "function":
        raise invalid(f"{where}.type", "must be 'function'")
    function = call.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{where}.function", "must be an object")
    name = _string(function.get("name"), f"{where}.function.name")
    if not name:
        raise invalid(f"{where}.function.name", "must not be empty")
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": _string(call.get("id"), f"{where}.id"),
        "type": "function",
        "function": {
            "name": name,
            "arguments": _string(arguments, f"{where}.function.arguments"),
        },
    }
