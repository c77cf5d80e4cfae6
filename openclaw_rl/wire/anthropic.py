"""Anthropic Messages: a body in, server-sent events or the body of a reply out.

Guarantees: the order of blocks is kept (a tool result becomes a `tool` message where it stands);
neighbours of one role are one message, as that API says; the blocks of a reply that we made give
the reply's own text again. On the way out blocks open and close in order, one at a time, a tool
call is one block whose input is the model's own JSON, and only keys of the Messages API leave here.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

from pydantic import ConfigDict
from pydantic import Field as Bounds

from openclaw_rl.wire.dialect import (
    Body,
    ChatRequest,
    Dialect,
    Ending,
    Options,
    Parts,
    Positive,
    ReplyInfo,
    Stops,
    TextEvent,
    TokenLogprob,
    Usage,
    WireError,
    effort_kwargs,
    invalid,
    read_object,
    unsupported,
)
from openclaw_rl.wire.reply import ReplyEvent, assistant_message, call_message

_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
"""Claude Code's line to Anthropic's accounting at the head of the system prompt. It is not meant
for a model, and it changes with the client's release: every prompt would begin differently."""


# -- in ------------------------------------------------------------------------------------------


_NEEDED = {
    "text": ("text",),
    "document": ("source",),
    "tool_result": ("tool_use_id",),
    "tool_reference": ("tool_name",),
    "tool_addition": ("tool",),
    "tool_removal": ("tool",),
    "thinking": ("thinking",),
    "redacted_thinking": (),  # another server's, which nobody here can read
    "tool_use": ("id", "name", "input"),
}
"""The types of blocks that are read, and what each must have."""
_CHANGES = ("tool_addition", "tool_removal")
_HEARD = ("text", "document", "tool_result", *_CHANGES)
_ALLOWED = {
    "user": _HEARD,
    "system": _HEARD,
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "tool_result": ("text", "document", "tool_reference"),
    "prompt": ("text",),
}


class _Source(Body):
    type: Literal["text"]
    data: str


class _NamedTool(Body):
    type: Literal["tool_reference"]
    name: str


class _Block(Body):
    """A block of any type."""

    type: str
    text: str = ""
    title: str | None = None
    context: str | None = None
    source: _Source | None = None
    tool_use_id: str = Bounds("", min_length=1)
    content: Parts[_Block] | None = None
    is_error: bool | None = None
    tool_name: str = ""
    tool: _NamedTool | None = None
    thinking: str = ""
    id: str = ""
    name: str = Bounds("", min_length=1)
    input: dict[str, Any] | None = None

    @property
    def words(self) -> str:
        """What it says; of a document with its title and context before it."""
        if self.source is not None and self.type == "document":
            return "\n".join(filter(None, (self.title, self.context, self.source.data)))
        return self.tool_name if self.type == "tool_reference" else self.text

    def check(self, inside: str, at: str) -> None:
        """Whether it may stand `inside` and is whole; else `WireError` 400."""
        if self.type not in _ALLOWED[inside]:
            known = ", ".join(_ALLOWED[inside])
            words = f"only {known} are supported here: this model reads text only"
            raise invalid(f"{at}.type", words)
        for key in _NEEDED[self.type]:
            if key not in self.model_fields_set or getattr(self, key) is None:
                raise invalid(f"{at}.{key}", "is required")
        for index, block in enumerate(self.content or () if self.type == "tool_result" else ()):
            block.check(self.type, f"{at}.content[{index}]")


class _Message(Body):
    role: Literal["user", "assistant", "system"]
    content: Parts[_Block]


class _Tool(Body):
    type: Literal["custom"] | None = None  # this server runs no tools of its own
    name: str = Bounds(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    defer_loading: bool | None = None


class _Choice(Body):
    type: Literal["auto", "none"] = "auto"  # a call cannot be forced
    disable_parallel_tool_use: bool | None = None


class _ThinkingOption(Body):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Positive | None = None
    display: str | None = None


class _OutputConfig(Body):
    model_config = ConfigDict(extra="allow")
    effort: str | None = None
    format: Any = None


class MessagesOptions(Options):
    """What the Messages API (and Claude Code) knows."""

    refused = dict.fromkeys(
        ("output_format", "mcp_servers", "container"),
        ([[], {}, ""], "not supported; declare tools that the client itself runs"),
    )

    messages: list[_Message] = Bounds(min_length=1, fail_fast=True)
    system: Parts[_Block] = Bounds([])
    tools: list[_Tool] = Bounds([], fail_fast=True)
    tool_choice: _Choice = Bounds(_Choice())
    stop: Stops | None = Bounds(None, alias="stop_sequences")
    thinking: _ThinkingOption | None = None
    output_config: _OutputConfig = Bounds(_OutputConfig())


def parse_messages_request(raw: bytes) -> ChatRequest:
    """Read and check the body of `/v1/messages`; `WireError` 400 names the first wrong field."""
    request = parse_count_request(raw)
    if request.max_tokens is None:
        raise invalid("max_tokens", "is required")
    if request.messages[-1]["role"] == "assistant":
        raise invalid(
            "messages",
            "the conversation must end with a user message: prefilled replies are not supported",
        )
    return request


def parse_count_request(raw: bytes) -> ChatRequest:
    """Read and check the body of `/v1/messages/count_tokens`: the same without a limit."""
    options = MessagesOptions.read(read_object(raw))
    config, thinking = options.output_config, options.thinking
    if config.format:
        raise unsupported("output_config.format", "not supported; ask for JSON in the prompt")
    ignored = {
        "thinking.budget_tokens": thinking and thinking.budget_tokens,
        "tools.strict": any(tool.strict for tool in options.tools),
        "tool_choice.disable_parallel_tool_use": options.tool_choice.disable_parallel_tool_use,
        **{f"output_config.{key}": value for key, value in (config.model_extra or {}).items()},
    }
    messages, offered = _conversation(options.messages)
    for index, block in enumerate(options.system):
        block.check("prompt", f"system[{index}]")
    # Neither a system prompt that is cut to nothing nor one that was empty says anything.
    if system := "\n".join(
        kept for block in options.system if (kept := _BILLING.sub("", block.text)) or not block.text
    ):
        messages.insert(0, {"role": "system", "content": system})
    # Without `thinking` the template does what it does by itself.
    template_kwargs = effort_kwargs(options.output_config.effort)
    if thinking:
        template_kwargs["enable_thinking"] = thinking.type != "disabled"
    return ChatRequest(
        model=options.model,
        messages=tuple(messages),
        tools=() if options.tool_choice.type == "none" else _tools(options.tools, offered),
        stream=options.stream,
        include_usage=True,
        max_tokens=options.max_tokens,
        sampling=options.sampling(),
        template_kwargs={**template_kwargs, **options.chat_template_kwargs},
        hints={"metadata": options.metadata} if options.metadata else {},
        ignored=options.ignored(*(name for name, given in ignored.items() if given)),
        show_reasoning=thinking is None or thinking.display != "omitted",
    )


def _tools(tools: Sequence[_Tool], offered: Mapping[str, bool]) -> tuple[dict[str, Any], ...]:
    """The tools in Chat Completions' form. The conversation's last word on a tool counts; without
    one a deferred tool does not yet."""
    functions = [
        {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
        for tool in tools
        if offered.get(tool.name, not tool.defer_loading)
    ]
    return tuple(
        {"type": "function", "function": {k: v for k, v in one.items() if v is not None}}
        for one in functions
    )


def _conversation(messages: Sequence[_Message]) -> tuple[list[dict[str, Any]], dict[str, bool]]:
    """The messages in Chat Completions' form, and the tools that were offered in mid-conversation
    (true, also by the client's tool search) or taken back."""
    for at, message in enumerate(messages):
        for index, block in enumerate(message.content):
            block.check(message.role, f"messages[{at}].content[{index}]")
    found: list[dict[str, Any]] = []
    offered: dict[str, bool] = {}
    for role, neighbours in groupby(messages, key=lambda message: message.role):
        blocks = [block for message in neighbours for block in message.content]
        if role == "assistant":
            found.append(_reply(blocks))
            continue
        for block in blocks:
            if block.tool is not None and block.type in _CHANGES:
                offered[block.tool.name] = block.type == "tool_addition"
            elif block.type == "tool_result":
                named = (one for one in block.content or () if one.type == "tool_reference")
                offered.update((one.tool_name, True) for one in named)
        said = [block for block in blocks if block.type not in _CHANGES]
        for is_result, run in groupby(said, key=lambda block: block.type == "tool_result"):
            if is_result:
                found += map(_tool_message, run)
            else:
                found.append({"role": role, "content": "\n".join(block.words for block in run)})
        if not blocks:
            found.append({"role": role, "content": ""})
    if not found:
        raise invalid("messages", "must have at least one message that says something")
    return found, offered


def _tool_message(result: _Block) -> dict[str, Any]:
    content = "\n".join(block.words for block in result.content or ())
    message = {"role": "tool", "content": content, "tool_call_id": result.tool_use_id}
    # No template reads `is_error`, but judges do.
    return {**message, "is_error": True} if result.is_error else message


def _reply(blocks: Sequence[_Block]) -> dict[str, Any]:
    calls = [
        call_message(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
        for block in blocks
        if block.type == "tool_use"
    ]
    # Text without a gap: a reply is cut where a call or a thought stood.
    text = "".join(block.text for block in blocks if block.type == "text")
    thoughts = (block.thinking for block in blocks if block.type == "thinking")
    return assistant_message(text, "\n".join(filter(None, thoughts)), calls)


# -- out -----------------------------------------------------------------------------------------

_OVERLOADED = 529
"""That API's own status for a server that is away for the moment."""

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_EMPTY_BLOCKS: Mapping[str, Mapping[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


class MessagesStream:
    """Writes one streamed reply; see `ReplyStream`."""

    def __init__(self, head: ReplyInfo) -> None:
        self._head = head
        self._index = 0
        self._open: str | None = None  # the type of the block that is open
        self._text: Callable[[str], bytes] = str.encode  # its next piece

    def start(self, usage: Usage) -> bytes:
        """`message_start`, with an empty message and the counts of the prompt."""
        usage = Usage(usage.prompt, cached=usage.cached)
        return _event("message_start", message=_message(self._head, [], None, usage))

    def event(self, event: ReplyEvent, logprobs: Sequence[TokenLogprob] | None = None) -> bytes:
        """One piece of the reply, in a block of its kind. A call goes out whole."""
        if event.kind == "tool_call":
            block = {"type": "tool_use", "id": event.call_id, "name": event.name, "input": {}}
            data = self._close() + self._begin(block)
            data += self._delta("input_json_delta", "partial_json", event.arguments)
            return data + self._close()
        kind = "text" if event.kind == "content" else "thinking"
        data = b""
        if self._open != kind:
            data = self._close() + self._begin(_EMPTY_BLOCKS[kind])
            self._text = TextEvent(lambda text: self._delta(f"{kind}_delta", kind, text))
        if kind == "text" or self._head.request.show_reasoning:
            data += self._text(event.text)
        return data

    def logprobs(self, tokens: Sequence[TokenLogprob]) -> bytes:
        """This API has no word for them."""
        return b""

    def keepalive(self) -> bytes:
        """`ping`; and an empty delta where a block is open, because SDKs keep pings to
        themselves and some clients watch over what the SDK gives them."""
        return _event("ping") + (self._text("") if self._open else b"")

    def end(self, ending: Ending) -> bytes:
        """Close the block, then the stop reason and the counts."""
        counts = _usage(ending.usage)
        return self._close() + _event("message_delta", delta=_stop(ending), usage=counts) + _STOP

    def fail(self, error: WireError) -> bytes:
        """An error event; nothing follows."""
        return _event(**error_body(error))

    def _begin(self, block: Mapping[str, Any]) -> bytes:
        self._open = block["type"]
        return _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        data = b""
        if self._open == "thinking":
            data = self._delta("signature_delta", "signature", _signature(self._head))
        data += _event("content_block_stop", index=self._index)
        self._open = None
        self._index += 1
        return data

    def _delta(self, kind: str, key: str, text: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, key: text})


def messages_reply(
    head: ReplyInfo,
    events: Sequence[ReplyEvent],
    ending: Ending,
    logprobs: Sequence[TokenLogprob] | None = None,
) -> dict[str, Any]:
    """The body of an unstreamed reply: the blocks that the stream would have given."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event.kind == "tool_call":
            call = {"id": event.call_id, "name": event.name, "input": json.loads(event.arguments)}
            blocks.append({"type": "tool_use", **call})
            continue
        kind = "text" if event.kind == "content" else "thinking"
        if not blocks or blocks[-1]["type"] != kind:
            signed = {"signature": _signature(head)} if kind == "thinking" else {}
            blocks.append({**_EMPTY_BLOCKS[kind], **signed})
        if kind == "text" or head.request.show_reasoning:
            blocks[-1][kind] += event.text
    return _message(head, blocks, ending, ending.usage)


def error_body(error: WireError) -> dict[str, Any]:
    """The error object of that API, as a body or as the data of an event."""
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ERROR_TYPES.get(error.status, other)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _message(
    head: ReplyInfo, content: list[dict[str, Any]], ending: Ending | None, usage: Usage
) -> dict[str, Any]:
    return {
        "id": f"msg_{head.turn_id}",
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
        **_stop(ending),
        "usage": _usage(usage),
    }


def _stop(ending: Ending | None) -> dict[str, Any]:
    """That API's word for the end of a reply, and the stop string that made it."""
    if ending is None:
        return {"stop_reason": None, "stop_sequence": None}
    stopped = ending.stop_sequence if ending.reason == "stop" else None
    reason = {
        "length": "model_context_window_exceeded" if ending.context_full else "max_tokens",
        "tool_calls": "tool_use",
        "stop": "end_turn" if stopped is None else "stop_sequence",
    }[ending.reason]
    return {"stop_reason": reason, "stop_sequence": stopped}


def _usage(usage: Usage) -> dict[str, Any]:
    """That API's counts: what came from the cache is no part of `input_tokens`."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }


def _signature(head: ReplyInfo) -> str:
    """What stands where clients expect a signature, and send it back unread: the turn's id."""
    return base64.b64encode(f"openclaw-rl:{head.turn_id}".encode()).decode()


def _event(type: str, **body: Any) -> bytes:
    text = json.dumps({"type": type, **body}, ensure_ascii=False, separators=(",", ":"))
    return f"event: {type}\ndata: {text}\n\n".encode("utf-8", "replace")


_STOP = _event("message_stop")

MESSAGES = Dialect(
    name="messages",
    parse=parse_messages_request,
    stream=MessagesStream,
    whole=messages_reply,
    error_body=error_body,
    error_status=lambda error: _OVERLOADED if error.status == 503 else error.status,
    id_header="request-id",
)
