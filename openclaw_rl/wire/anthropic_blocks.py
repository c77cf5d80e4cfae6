"""The messages of an Anthropic request, block by block, as Chat Completions messages.

Guarantees: the order of blocks is kept (a tool result becomes a `tool` message where it stands);
neighbours of one role are one message, as that API says; the blocks of a reply that we made give
the reply's own text again; what is not understood is refused by its path, never left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from openclaw_rl.wire.errors import invalid
from openclaw_rl.wire.request import flag, obj, string, text

_ROLES = ("user", "assistant", "system")

_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
"""Claude Code's line to Anthropic's accounting at the head of the system prompt. It is not meant
for a model, and it changes with the client's release: every prompt would begin differently."""

_BINARY = "are not supported: this model reads text only"


@dataclass(slots=True)
class Conversation:
    """`messages` as in `ChatRequest`. `named_tools` were offered in mid-conversation (by a tool
    search, or by the client's own word) and not taken back; `removed_tools` were taken back."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    named_tools: set[str] = field(default_factory=set)
    removed_tools: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Block:
    value: dict[str, Any]
    where: str


def read_conversation(messages: Any, *, image_ok: bool = False) -> Conversation:
    """The conversation in `messages`; `WireError` 400 names the field."""
    if not isinstance(messages, list):
        raise invalid("messages", "must be a list of messages")
    if not messages:
        raise invalid("messages", "must have at least one message")
    turns: list[tuple[str, list[_Block]]] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise invalid(where, "must be an object")
        role = message.get("role")
        if role not in _ROLES:
            raise invalid(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
        blocks = _blocks(message.get("content"), f"{where}.content")
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, blocks))
    found = Conversation()
    for role, blocks in turns:
        if role == "assistant":
            found.messages.append(_assistant(blocks))
        else:
            found.messages += _heard(role, blocks, found, image_ok)
    if not found.messages:
        raise invalid("messages", "must have at least one message that says something")
    return found


def system_text(system: Any, where: str) -> str:
    """The system prompt: a string or a list of text blocks, without Claude Code's accounting."""
    if system is None:
        return ""
    texts = []
    for block in _blocks(system, where):
        if block.value.get("type") != "text":
            raise invalid(f"{block.where}.type", "must be 'text'")
        own = string(block.value.get("text"), f"{block.where}.text")
        kept = _BILLING.sub("", own)
        if kept or not own:
            texts.append(kept)
    return "\n".join(texts)


def _blocks(content: Any, where: str) -> list[_Block]:
    if isinstance(content, str):
        return [_Block({"type": "text", "text": content}, where)]
    if not isinstance(content, list):
        raise invalid(where, "must be a string or a list of blocks")
    for index, block in enumerate(content):
        if not isinstance(block, dict):
            raise invalid(f"{where}[{index}]", "must be an object")
    return [_Block(block, f"{where}[{index}]") for index, block in enumerate(content)]


def _heard(
    role: str, blocks: Sequence[_Block], found: Conversation, image_ok: bool
) -> list[dict[str, Any]]:
    """What a user, a tool or the client itself said, in its order."""
    result: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    silent = False  # blocks that say something about tools and are no text

    def flush() -> None:
        if parts:
            result.append({"role": role, "content": _joined(parts)})
            parts.clear()

    for block in blocks:
        kind = block.value.get("type")
        if kind == "tool_result" and role == "user":
            flush()
            result.append(_tool_result(block, found))
        elif kind in ("tool_addition", "tool_removal"):
            _change_tools(block, found, added=kind == "tool_addition")
            silent = True
        else:
            parts.append(_part(block, image_ok and role == "user"))
    flush()
    if not result and not silent:
        result.append({"role": role, "content": ""})
    return result


def _part(block: _Block, image_ok: bool) -> dict[str, Any]:
    value, where = block.value, block.where
    kind = value.get("type")
    if kind == "text":
        return {"type": "text", "text": string(value.get("text"), f"{where}.text")}
    if kind == "image":
        if not image_ok:
            raise invalid(where, f"images {_BINARY}")
        return {"type": "image_url", "image_url": {"url": _image_url(block)}}
    if kind == "document":
        return {"type": "text", "text": _document(block)}
    if not isinstance(kind, str):
        raise invalid(f"{where}.type", "must be a string")
    raise invalid(f"{where}.type", "blocks of this type are not supported here")


def _image_url(block: _Block) -> str:
    source = obj(block.value, "source", f"{block.where}.")
    if source.get("type") == "url":
        return string(source.get("url"), f"{block.where}.source.url")
    if source.get("type") == "base64":
        media = string(source.get("media_type"), f"{block.where}.source.media_type")
        return f"data:{media};base64," + string(source.get("data"), f"{block.where}.source.data")
    raise invalid(f"{block.where}.source.type", "must be 'base64' or 'url'")


def _document(block: _Block) -> str:
    """A document that is text, with its title and context before it."""
    value, where = block.value, f"{block.where}.source"
    source = obj(value, "source", f"{block.where}.")
    heads = [text(value, key, f"{block.where}.") for key in ("title", "context")]
    if source.get("type") == "text":
        body = string(source.get("data"), f"{where}.data")
    elif source.get("type") == "content":
        inner = _blocks(source.get("content"), f"{where}.content")
        body = _joined([_part(one, image_ok=False) for one in inner])
    else:
        raise invalid(f"{where}.type", f"documents that are not text {_BINARY}")
    return "\n".join([*(head for head in heads if head), body])


def _tool_result(block: _Block, found: Conversation) -> dict[str, Any]:
    value, where = block.value, block.where
    call_id = string(value.get("tool_use_id"), f"{where}.tool_use_id")
    if not call_id:
        raise invalid(f"{where}.tool_use_id", "must not be empty")
    content = value.get("content")
    inner = [] if content is None else _blocks(content, f"{where}.content")
    parts = []
    for one in inner:
        if one.value.get("type") == "tool_reference":
            name = string(one.value.get("tool_name"), f"{one.where}.tool_name")
            found.named_tools.add(name)
            parts.append({"type": "text", "text": name})
        else:
            parts.append(_part(one, image_ok=False))
    message = {"role": "tool", "content": _joined(parts), "tool_call_id": call_id}
    if flag(value, "is_error", f"{where}."):
        message["is_error"] = True  # no template reads it, but judges do
    return message


def _change_tools(block: _Block, found: Conversation, added: bool) -> None:
    tool = obj(block.value, "tool", f"{block.where}.")
    if tool.get("type") != "tool_reference":
        raise invalid(f"{block.where}.tool.type", "must be 'tool_reference'")
    name = string(tool.get("name"), f"{block.where}.tool.name")
    (found.named_tools if added else found.removed_tools).add(name)
    (found.removed_tools if added else found.named_tools).discard(name)


def _assistant(blocks: Sequence[_Block]) -> dict[str, Any]:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        value, where = block.value, block.where
        kind = value.get("type")
        if kind == "text":
            texts.append(string(value.get("text"), f"{where}.text"))
        elif kind == "thinking":
            thought = string(value.get("thinking"), f"{where}.thinking")
            text(value, "signature", f"{where}.")
            if thought:
                reasoning.append(thought)
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind != "redacted_thinking":  # another server's, which nobody here can read
            raise invalid(f"{where}.type", "must be text, thinking or tool_use in a reply")
    content = "".join(texts)  # without a gap: a reply is cut where a call or a thought stood
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content if content or not calls else None,
    }
    if reasoning:
        message["reasoning_content"] = "\n".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: _Block) -> dict[str, Any]:
    value, where = block.value, block.where
    name = string(value.get("name"), f"{where}.name")
    if not name:
        raise invalid(f"{where}.name", "must not be empty")
    if not isinstance(value.get("input"), dict):
        raise invalid(f"{where}.input", "must be an object")
    return {
        "id": string(value.get("id"), f"{where}.id"),
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(value["input"], ensure_ascii=False)},
    }


def _joined(parts: Sequence[dict[str, Any]]) -> Any:
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return list(parts)
