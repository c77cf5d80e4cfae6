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
from typing import Any, Literal

from pydantic import BaseModel
from pydantic import Field as Bounds

from openclaw_rl.wire.dialect import Dialect, Ending, Head, TextEvent, TokenLogprob, Usage
from openclaw_rl.wire.errors import WireError, invalid, unsupported
from openclaw_rl.wire.reply import ReplyEvent, assistant_message, call_message
from openclaw_rl.wire.request import (
    ChatRequest,
    Field,
    Options,
    Positive,
    Stops,
    join_parts,
    read_object,
)

_ROLES = ("user", "assistant", "system")

_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
"""Claude Code's line to Anthropic's accounting at the head of the system prompt. It is not meant
for a model, and it changes with the client's release: every prompt would begin differently."""

_TEXT_ONLY = "are not supported: this model reads text only"


# -- in ------------------------------------------------------------------------------------------


class _Thinking(BaseModel):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Positive | None = None
    display: str | None = None


class MessagesOptions(Options):
    """What the Messages API (and Claude Code) knows beside the messages."""

    refused = dict.fromkeys(
        ("output_format", "mcp_servers", "container"),
        ([[], {}, ""], "not supported; declare tools that the client itself runs"),
    )

    tools: Any = None
    tool_choice: Any = None
    system: Any = None
    stop: Stops | None = Bounds(None, alias="stop_sequences")
    thinking: _Thinking | None = None
    output_config: dict[str, Any] | None = None


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
    Field(options.metadata, "metadata")["user_id"].text()
    config = options.output_config or {}
    if config.get("format"):
        raise unsupported("output_config.format", "not supported; ask for JSON in the prompt")
    ignored = [f"output_config.{key}" for key, value in config.items() if value]
    thinking = options.thinking
    if thinking and thinking.budget_tokens:
        ignored.append("thinking.budget_tokens")
    conversation = Conversation()
    conversation.read(Field(options.messages, "messages"))
    system = system_text(Field(options.system, "system"))
    # Without `thinking` the template does what it does by itself.
    template_kwargs = {"enable_thinking": thinking.type != "disabled"} if thinking else {}
    return ChatRequest(
        model=options.model,
        messages=(*([{"role": "system", "content": system}] if system else ()),
                  *conversation.messages),
        tools=_tools(options, conversation, ignored),
        stream=options.stream,
        include_usage=True,
        max_tokens=options.max_tokens,
        sampling=options.sampling(),
        template_kwargs={**template_kwargs, **options.chat_template_kwargs},
        hints={"metadata": options.metadata} if options.metadata else {},
        logprobs=False,
        top_logprobs=0,
        ignored=options.ignored(*ignored),
        show_reasoning=thinking is None or thinking.display != "omitted",
    )  # fmt: skip


def _tools(
    options: MessagesOptions, conversation: Conversation, ignored: list[str]
) -> tuple[dict[str, Any], ...]:
    """The tools in Chat Completions' form. A deferred tool counts from when the client's own tool
    search has named it."""
    result = []
    for tool in Field(options.tools, "tools").items():
        if tool.required()["type"].value not in (None, "custom"):
            raise tool["type"].invalid(
                "only tools of the type 'custom' are supported: this server runs no tools, and "
                "the model knows none by heart"
            )
        name = tool["name"].string(empty=False)
        described = {} if (text := tool["description"].text()) is None else {"description": text}
        function = {"name": name, **described, "parameters": tool["input_schema"].required().value}
        if tool["strict"].flag():
            ignored.append("tools.strict")
        offered = conversation.named_tools if tool["defer_loading"].flag() else None
        if name in offered if offered is not None else name not in conversation.removed_tools:
            result.append({"type": "function", "function": function})
    choice = Field(options.tool_choice, "tool_choice")
    kind = choice["type"]
    if choice.object():
        if choice["disable_parallel_tool_use"].flag():
            ignored.append("tool_choice.disable_parallel_tool_use")
        if kind.value in ("any", "tool"):
            raise unsupported("tool_choice", "a call cannot be forced; use 'auto' or 'none'")
        if kind.value not in ("auto", "none"):
            raise kind.invalid("must be 'auto' or 'none'")
    return () if kind.value == "none" else tuple(result)


def system_text(system: Field) -> str:
    """The system prompt: a string or a list of text blocks, without Claude Code's accounting."""
    texts = []
    for block in _blocks(system) if system.value is not None else ():
        if block["type"].value != "text":
            raise block["type"].invalid("must be 'text'")
        own = block["text"].string()
        kept = _BILLING.sub("", own)
        if kept or not own:
            texts.append(kept)
    return "\n".join(texts)


class Conversation:
    """`messages` as in `ChatRequest`. `named_tools` were offered in mid-conversation (by a tool
    search, or by the client's own word) and not taken back; `removed_tools` were taken back."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.named_tools: set[str] = set()
        self.removed_tools: set[str] = set()

    def read(self, messages: Field) -> None:
        """Take the messages of a body; `WireError` 400 names the field."""
        if not isinstance(messages.value, list):
            raise messages.invalid("must be a list of messages")
        turns: list[tuple[str, list[Field]]] = []
        for message in messages.items():
            role = message.required()["role"].value
            if role not in _ROLES:
                raise message["role"].invalid(f"must be one of {', '.join(_ROLES)}")
            blocks = _blocks(message["content"])
            if turns and turns[-1][0] == role:
                turns[-1][1].extend(blocks)
            else:
                turns.append((role, blocks))
        for role, blocks in turns:
            self.messages += [_reply(blocks)] if role == "assistant" else self._heard(role, blocks)
        if not self.messages:
            raise messages.invalid("must have at least one message that says something")

    def _heard(self, role: str, blocks: Sequence[Field]) -> list[dict[str, Any]]:
        """What a user, a tool or the client itself said, in its order."""
        result: list[dict[str, Any]] = []
        parts: list[dict[str, Any]] = []
        silent = False  # blocks that say something about tools and are no text

        def flush() -> None:
            if parts:
                result.append({"role": role, "content": join_parts(parts)})
                parts.clear()

        for block in blocks:
            kind = block["type"].value
            if kind == "tool_result" and role == "user":
                flush()
                result.append(self._tool_result(block))
            elif kind in ("tool_addition", "tool_removal"):
                self._change_tools(block, added=kind == "tool_addition")
                silent = True
            else:
                parts.append(_part(block))
        flush()
        if not result and not silent:
            result.append({"role": role, "content": ""})
        return result

    def _tool_result(self, block: Field) -> dict[str, Any]:
        call_id = block["tool_use_id"].string(empty=False)
        content, parts = block["content"], []
        for one in _blocks(content) if content.value is not None else ():
            if one["type"].value == "tool_reference":
                name = one["tool_name"].string()
                self.named_tools.add(name)
                parts.append({"type": "text", "text": name})
            else:
                parts.append(_part(one))
        message = {"role": "tool", "content": join_parts(parts), "tool_call_id": call_id}
        if block["is_error"].flag():
            message["is_error"] = True  # no template reads it, but judges do
        return message

    def _change_tools(self, block: Field, added: bool) -> None:
        tool = block["tool"]
        if tool["type"].value != "tool_reference":
            raise tool["type"].invalid("must be 'tool_reference'")
        name = tool["name"].string()
        (self.named_tools if added else self.removed_tools).add(name)
        (self.removed_tools if added else self.named_tools).discard(name)


def _blocks(content: Field) -> list[Field]:
    if isinstance(content.value, str):
        return [Field({"type": "text", "text": content.value}, content.path)]
    if not isinstance(content.value, list):
        raise content.invalid("must be a string or a list of blocks")
    return [block.required() for block in content.items()]


def _part(block: Field) -> dict[str, Any]:
    kind = block["type"].value
    if kind == "text":
        return {"type": "text", "text": block["text"].string()}
    if kind == "image":
        raise block.invalid(f"images {_TEXT_ONLY}")
    if kind == "document":
        return {"type": "text", "text": _document(block)}
    raise block["type"].invalid("blocks of this type are not supported here")


def _document(block: Field) -> str:
    """A document that is text, with its title and context before it."""
    source = block["source"]
    heads = [block[key].text() for key in ("title", "context")]
    if source["type"].value == "text":
        body = source["data"].string()
    elif source["type"].value == "content":
        body = join_parts([_part(one) for one in _blocks(source["content"])])
    else:
        raise source["type"].invalid(f"documents that are not text {_TEXT_ONLY}")
    return "\n".join([*filter(None, heads), body])


def _reply(blocks: Sequence[Field]) -> dict[str, Any]:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        kind = block["type"].value
        if kind == "text":
            texts.append(block["text"].string())
        elif kind == "thinking":
            block["signature"].text()
            reasoning.append(block["thinking"].string())
        elif kind == "tool_use":
            name = block["name"].string(empty=False)
            arguments = json.dumps(block["input"].required().value, ensure_ascii=False)
            calls.append(call_message(block["id"].string(), name, arguments))
        elif kind != "redacted_thinking":  # another server's, which nobody here can read
            raise block["type"].invalid("must be text, thinking or tool_use in a reply")
    # Text without a gap: a reply is cut where a call or a thought stood.
    return assistant_message("".join(texts), "\n".join(filter(None, reasoning)), calls)


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

    def __init__(self, head: Head) -> None:
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
    head: Head,
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
    head: Head, content: list[dict[str, Any]], ending: Ending | None, usage: Usage
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


def _signature(head: Head) -> str:
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
