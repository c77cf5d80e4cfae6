"""Chat Completions on the way out: server-sent events, and the body of an unstreamed reply.

Only keys of the OpenAI API leave here. Every event is one complete `data:` line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any

from openclaw_rl.wire.chat import parse_chat_request
from openclaw_rl.wire.dialect import (
    Dialect,
    Ending,
    Head,
    TokenLogprob,
    Usage,
    WholeReply,
)
from openclaw_rl.wire.errors import WireError, error_body
from openclaw_rl.wire.reply import ReplyEvent

_HOLE = "\ue000"
"""Stands for a text that is not known yet; nothing behind it in a chunk is a client's or a model's,
so the last one is it."""

_LOWEST = -9999.0
"""What the OpenAI API writes for a log-probability that JSON cannot hold (minus infinity)."""


def usage_body(usage: Usage) -> dict[str, Any]:
    """The OpenAI usage object."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def logprobs_body(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The OpenAI `logprobs` object of a choice."""
    return {
        "content": [
            {**_token(item), "top_logprobs": [_token(other) for other in item.top]}
            for item in tokens
        ],
        "refusal": None,
    }


class ChatStream:
    """Writes one streamed reply; see `ReplyStream`. Keeps no text."""

    def __init__(self, head: Head) -> None:
        self._include_usage = head.request.include_usage
        self._head: dict[str, Any] = {
            "id": completion_id(head),
            "object": "chat.completion.chunk",
            "created": head.created,
            "model": head.model,
        }
        # Nearly every chunk is a piece of text: all around it is the same, and written once.
        self._pieces = {
            "reasoning": self._around({"reasoning_content": _HOLE}),
            "content": self._around({"content": _HOLE}),
        }

    def start(self, usage: Usage) -> bytes:
        """The first chunk: the role."""
        return self._chunk({"role": "assistant", "content": ""})

    def event(self, event: ReplyEvent, logprobs: Sequence[TokenLogprob] | None = None) -> bytes:
        """One piece of the reply; a tool call goes out whole, in one chunk."""
        if logprobs is None and event.kind != "tool_call":
            before, behind = self._pieces[event.kind]
            return before + encode_basestring(event.text).encode("utf-8", "replace") + behind
        if event.kind == "reasoning":
            return self._chunk({"reasoning_content": event.text}, logprobs=logprobs)
        if event.kind == "content":
            return self._chunk({"content": event.text}, logprobs=logprobs)
        call = {
            "index": event.index,
            "id": event.call_id,
            "type": "function",
            "function": {"name": event.name, "arguments": event.arguments},
        }
        return self._chunk({"tool_calls": [call]}, logprobs=logprobs)

    def logprobs(self, tokens: Sequence[TokenLogprob]) -> bytes:
        """Log-probabilities of tokens that show no text (yet)."""
        return self._chunk({}, logprobs=tokens)

    def keepalive(self) -> bytes:
        """A chunk that says nothing: clients' idle watchdogs count data, not SSE comments."""
        return self._chunk({})

    def end(self, ending: Ending) -> bytes:
        """The chunk with the finish reason, the usage (empty `choices`) where the client asked
        for it, and the end of the stream."""
        data = self._chunk({}, ending.reason)
        if self._include_usage:
            data += _data({**self._head, "choices": [], "usage": usage_body(ending.usage)})
        return data + _DONE

    def fail(self, error: WireError) -> bytes:
        """An error object in place of the rest."""
        return _data(error_body(error)) + _DONE

    def _around(self, delta: Mapping[str, Any]) -> tuple[bytes, bytes]:
        before, _, behind = self._chunk(delta).rpartition(encode_basestring(_HOLE).encode())
        return before, behind

    def _chunk(
        self,
        delta: Mapping[str, Any],
        reason: str | None = None,
        logprobs: Sequence[TokenLogprob] | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": reason}
        if logprobs is not None:
            choice["logprobs"] = logprobs_body(logprobs)
        body = {**self._head, "choices": [choice]}
        if self._include_usage:
            body["usage"] = None
        return _data(body)


def chat_completion(head: Head, reply: WholeReply, ending: Ending) -> dict[str, Any]:
    """The body of an unstreamed reply."""
    return {
        "id": completion_id(head),
        "object": "chat.completion",
        "created": head.created,
        "model": head.model,
        "choices": [
            {
                "index": 0,
                "message": dict(reply.message),
                "logprobs": None if reply.logprobs is None else logprobs_body(reply.logprobs),
                "finish_reason": ending.reason,
            }
        ],
        "usage": usage_body(ending.usage),
    }


def completion_id(head: Head) -> str:
    """The id that the client sees; it carries the turn's id, so that feedback can name it."""
    return f"chatcmpl-{head.turn_id}"


def _token(item: TokenLogprob) -> dict[str, Any]:
    return {
        "token": item.token,
        "logprob": item.logprob if math.isfinite(item.logprob) else _LOWEST,
        "bytes": None if item.bytes is None else list(item.bytes),
    }


def _data(body: Mapping[str, Any]) -> bytes:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.encode("utf-8", "replace") + b"\n\n"


_DONE = b"data: [DONE]\n\n"

CHAT = Dialect(
    name="chat",
    parse=parse_chat_request,
    stream=ChatStream,
    whole=chat_completion,
    error_body=error_body,
    error_status=lambda error: error.status,
)
