"""Anthropic Messages on the way out: events of a stream, the body of an unstreamed reply, errors.

Guarantees: blocks open and close in order, one at a time; a tool call is one block whose input is
the model's own JSON; counts are true. Only keys of the Messages API leave here.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from openclaw_rl.wire.anthropic import parse_messages_request
from openclaw_rl.wire.dialect import (
    Dialect,
    Ending,
    Head,
    TokenLogprob,
    Usage,
    WholeReply,
)
from openclaw_rl.wire.errors import WireError
from openclaw_rl.wire.reply import ReplyEvent

_OVERLOADED = 529
"""That API's own status for a server that is away for the moment."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


class MessagesStream:
    """Writes one streamed reply; see `ReplyStream`."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._index = 0
        self._open: str | None = None  # the type of the block that is open

    def start(self, usage: Usage) -> bytes:
        """`message_start`, with an empty message and the counts of the prompt."""
        usage = Usage(usage.prompt, cached=usage.cached)
        return _event("message_start", message=_message(self._head, [], None, usage))

    def event(self, event: ReplyEvent, logprobs: Sequence[TokenLogprob] | None = None) -> bytes:
        """One piece of the reply, in a block of its kind. A call goes out whole."""
        if event.kind == "tool_call":
            block = {"type": "tool_use", "id": event.call_id, "name": event.name, "input": {}}
            data = self._switch("tool_use", block)
            data += self._delta("input_json_delta", "partial_json", event.arguments)
            return data + self._close()
        if event.kind == "content":
            data = self._switch("text", {"type": "text", "text": ""})
            return data + self._delta("text_delta", "text", event.text)
        block = {"type": "thinking", "thinking": "", "signature": ""}
        data = self._switch("thinking", block)
        if self._head.request.show_reasoning:
            data += self._delta("thinking_delta", "thinking", event.text)
        return data

    def logprobs(self, tokens: Sequence[TokenLogprob]) -> bytes:
        """This API has no word for them."""
        return b""

    def keepalive(self) -> bytes:
        """`ping`; and an empty delta where a block is open, because SDKs keep pings to
        themselves and some clients watch over what the SDK gives them."""
        data = _event("ping")
        if self._open in _DELTAS:
            data += self._delta(*_DELTAS[self._open], "")
        return data

    def end(self, ending: Ending) -> bytes:
        """Close the block, then the stop reason and the counts."""
        delta = {"stop_reason": stop_reason(ending), "stop_sequence": _stop_sequence(ending)}
        usage = usage_body(ending.usage)
        return self._close() + _event("message_delta", delta=delta, usage=usage) + _STOP

    def fail(self, error: WireError) -> bytes:
        """An error event; nothing follows."""
        return _event(**error_body(error))

    def _switch(self, kind: str, block: Mapping[str, Any]) -> bytes:
        if self._open == kind:
            return b""
        data = self._close()
        self._open = kind
        return data + _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        data = b""
        if self._open == "thinking":
            data = self._delta("signature_delta", "signature", signature(self._head))
        data += _event("content_block_stop", index=self._index)
        self._open = None
        self._index += 1
        return data

    def _delta(self, kind: str, key: str, text: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, key: text})


def messages_reply(head: Head, reply: WholeReply, ending: Ending) -> dict[str, Any]:
    """The body of an unstreamed reply: the blocks that the stream would have given."""
    blocks: list[dict[str, Any]] = []
    for event in reply.events:
        if event.kind == "tool_call":
            value = json.loads(event.arguments)
            blocks.append(
                {"type": "tool_use", "id": event.call_id, "name": event.name, "input": value}
            )
            continue
        kind = "text" if event.kind == "content" else "thinking"
        if not blocks or blocks[-1]["type"] != kind:
            signed = {"signature": signature(head)} if kind == "thinking" else {}
            blocks.append({"type": kind, kind: "", **signed})
        if kind == "text" or head.request.show_reasoning:
            blocks[-1][kind] += event.text
    return _message(head, blocks, ending, ending.usage)


def usage_body(usage: Usage) -> dict[str, Any]:
    """That API's counts: what came from the cache is no part of `input_tokens`."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }


def stop_reason(ending: Ending) -> str:
    """That API's word for the end of a reply."""
    if ending.reason == "length":
        return "model_context_window_exceeded" if ending.context_full else "max_tokens"
    if ending.reason == "tool_calls":
        return "tool_use"
    return "stop_sequence" if ending.stop_sequence is not None else "end_turn"


def signature(head: Head) -> str:
    """What stands where clients expect a signature, and send it back unread: the turn's id."""
    return base64.b64encode(f"openclaw-rl:{head.turn_id}".encode()).decode()


def error_body(error: WireError) -> dict[str, Any]:
    """The error object of that API, as a body or as the data of an event."""
    kind = _TYPES.get(error.status)
    if kind is None:
        kind = "api_error" if error.status >= 500 else "invalid_request_error"
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def error_status(error: WireError) -> int:
    """The status of `error` in that API."""
    return _OVERLOADED if error.status == 503 else error.status


def _stop_sequence(ending: Ending) -> str | None:
    return ending.stop_sequence if stop_reason(ending) == "stop_sequence" else None


def _message(
    head: Head, content: list[dict[str, Any]], ending: Ending | None, usage: Usage
) -> dict[str, Any]:
    return {
        "id": f"msg_{head.turn_id}",
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
        "stop_reason": None if ending is None else stop_reason(ending),
        "stop_sequence": None if ending is None else _stop_sequence(ending),
        "usage": usage_body(usage),
    }


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
    error_status=error_status,
    id_header="request-id",
)
