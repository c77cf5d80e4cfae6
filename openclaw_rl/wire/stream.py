"""Chat Completions on the way out: server-sent events, and the body of an unstreamed reply.

Only keys of the OpenAI API leave here. Every event is one complete `data:` line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openclaw_rl.wire.errors import WireError, error_body
from openclaw_rl.wire.reply import ReplyEvent

_LOWEST = -9999.0
"""What the OpenAI API writes for a log-probability that JSON cannot hold (minus infinity)."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One sampled token as `logprobs` reports it. `top` holds the most likely alternatives.

    `bytes` are the token's own bytes, or None where unknown (`token` alone may be half a
    character).
    """

    token: str
    logprob: float
    bytes: Sequence[int] | None = None
    top: Sequence[TokenLogprob] = ()


def usage_body(prompt: int, completion: int, cached: int = 0, reasoning: int = 0) -> dict[str, Any]:
    """The OpenAI usage object; all counts are tokens, `cached` is part of `prompt`, `reasoning`
    part of `completion`."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
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
    """Writes one streamed reply. Keeps no text; each method returns the bytes to send now."""

    def __init__(
        self, completion_id: str, model: str, created: int, include_usage: bool = False
    ) -> None:
        self._include_usage = include_usage
        self._head: dict[str, Any] = {
            "id": completion_id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
        }

    def start(self) -> bytes:
        """The first chunk: the role."""
        return self._chunk({"role": "assistant", "content": ""})

    def event(self, event: ReplyEvent, logprobs: Sequence[TokenLogprob] | None = None) -> bytes:
        """One piece of the reply; a tool call goes out whole, in one chunk."""
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

    def finish(self, reason: str) -> bytes:
        """The last chunk with a choice: `stop`, `length` or `tool_calls`."""
        return self._chunk({}, reason)

    def usage(self, prompt: int, completion: int, cached: int = 0, reasoning: int = 0) -> bytes:
        """The usage chunk (empty `choices`); no bytes if the client did not ask for it."""
        if not self._include_usage:
            return b""
        usage = usage_body(prompt, completion, cached, reasoning)
        return _data({**self._head, "choices": [], "usage": usage})

    def done(self) -> bytes:
        """The end of the stream."""
        return b"data: [DONE]\n\n"

    def error(self, error: WireError) -> bytes:
        """An error after the stream has begun; nothing but `done()` may follow."""
        return _data(error_body(error))

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


def chat_completion(
    completion_id: str,
    model: str,
    created: int,
    message: Mapping[str, Any],
    finish_reason: str,
    usage: Mapping[str, Any],
    logprobs: Sequence[TokenLogprob] | None = None,
) -> dict[str, Any]:
    """The body of an unstreamed reply. `usage` comes from `usage_body`."""
    return {
        "id": completion_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": dict(message),
                "logprobs": None if logprobs is None else logprobs_body(logprobs),
                "finish_reason": finish_reason,
            }
        ],
        "usage": dict(usage),
    }


def _token(item: TokenLogprob) -> dict[str, Any]:
    return {
        "token": item.token,
        "logprob": item.logprob if math.isfinite(item.logprob) else _LOWEST,
        "bytes": None if item.bytes is None else list(item.bytes),
    }


def _data(body: Mapping[str, Any]) -> bytes:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.encode("utf-8", "replace") + b"\n\n"
