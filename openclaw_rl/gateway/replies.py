"""How a reply reaches an HTTP client: token by token as server-sent events, or whole.

Guarantees: an error before the first byte is an HTTP status, later it is an error event; a stream
is never silent for longer than the keep-alive time, also while the engine is away.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from aiohttp import web

from openclaw_rl.engine.types import Delta
from openclaw_rl.gateway.core import ClientGone
from openclaw_rl.gateway.turn import OpenTurn
from openclaw_rl.wire.errors import WireError
from openclaw_rl.wire.reply import ReplyEvent
from openclaw_rl.wire.stream import ChatStream, TokenLogprob, chat_completion, usage_body

Decode = Callable[[list[int]], str]
_PRINTABLE = "".join(map(chr, range(33, 127))).replace("%", "")


def completion_id(turn: OpenTurn) -> str:
    """The id that the client sees; it carries the turn's id, so that feedback can name it."""
    return f"chatcmpl-{turn.turn_id}"


def reply_headers(turn: OpenTurn) -> dict[str, str]:
    """Names of turn and session. A session id may be any text, a header may not."""
    session_id = quote(turn.placement.session_id, safe=_PRINTABLE)
    return {"X-Turn-Id": turn.turn_id, "X-Session-Id": session_id}


class StreamSink:
    """Writes one reply as it is made. The response starts with the first token, or with the first
    keep-alive chunk; until then an error can still be a plain response."""

    def __init__(
        self,
        http: web.Request,
        turn: OpenTurn,
        model: str,
        keepalive_seconds: float,
        decode: Decode,
    ) -> None:
        self._http = http
        self._turn = turn
        self._keepalive_seconds = keepalive_seconds
        self._decode = decode
        self._stream = ChatStream(
            completion_id(turn), model, int(turn.created), turn.request.include_usage
        )
        self._last_write = asyncio.get_running_loop().time()
        self._starting = asyncio.Lock()
        self.response: web.StreamResponse | None = None

    async def show(self, events: list[ReplyEvent], delta: Delta) -> None:
        """Send what became visible, in one write."""
        tokens = None
        if self._turn.request.logprobs:
            tokens = token_logprobs(delta, self._decode, self._turn.request.top_logprobs)
        data = b""
        for event in events:
            data += self._stream.event(event, tokens)
            tokens = None if tokens is None else []
        if tokens:
            data += self._stream.logprobs(tokens)
        if data or self.response is None:
            await self._send(data)

    async def finish(self) -> web.StreamResponse:
        """Send the finish reason, the usage if asked for, and the end."""
        turn = self._turn
        data = self._stream.finish(turn.finish_reason) + self._stream.usage(*usage_counts(turn))
        return await self._end(data + self._stream.done())

    async def fail(self, error: WireError) -> web.StreamResponse:
        """End a stream that has begun with an error event."""
        return await self._end(self._stream.error(error) + self._stream.done())

    async def keep_alive(self) -> None:
        """Runs beside the reply until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            rest = self._last_write + self._keepalive_seconds - clock()
            if rest > 0:
                await asyncio.sleep(rest)
                continue
            try:
                await self._send(self._stream.keepalive())
            except ClientGone:
                return  # the reply's own task finds out by itself

    async def _send(self, data: bytes) -> None:
        self._last_write = asyncio.get_running_loop().time()
        try:
            async with self._starting:  # the keep-alive and the first token may come together
                if self.response is None:
                    data = self._stream.start() + data
                    self.response = self._new_response()
                    await self.response.prepare(self._http)
            if data:
                await self.response.write(data)
        except ConnectionError as error:
            raise ClientGone from error

    def _new_response(self) -> web.StreamResponse:
        return web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # reverse proxies would hold back tokens
                **reply_headers(self._turn),
            }
        )

    async def _end(self, data: bytes) -> web.StreamResponse:
        await self._send(data)
        assert self.response is not None
        try:
            await self.response.write_eof()
        except ConnectionError as error:
            raise ClientGone from error
        return self.response


class WholeSink:
    """Collects one reply and answers in one piece."""

    def __init__(self, turn: OpenTurn, model: str, decode: Decode) -> None:
        self._turn = turn
        self._model = model
        self._decode = decode
        self._logprobs: list[TokenLogprob] = []

    async def show(self, events: list[ReplyEvent], delta: Delta) -> None:
        """The events are in the turn's own parser; only asked-for log-probs are kept here."""
        if self._turn.request.logprobs:
            shown = self._turn.request.top_logprobs
            self._logprobs += token_logprobs(delta, self._decode, shown)

    def response(self) -> web.Response:
        """The complete reply."""
        turn = self._turn
        body: dict[str, Any] = chat_completion(
            completion_id(turn),
            self._model,
            int(turn.created),
            turn.parser.message(),
            turn.finish_reason,
            usage_body(*usage_counts(turn)),
            self._logprobs if turn.request.logprobs else None,
        )
        return web.Response(
            body=json.dumps(body, ensure_ascii=False).encode("utf-8", "replace"),
            content_type="application/json",
            headers=reply_headers(turn),
        )


def usage_counts(turn: OpenTurn) -> tuple[int, int, int, int]:
    """Prompt, completion, cached and reasoning tokens."""
    return (
        len(turn.prompt.ids),
        len(turn.output_ids),
        turn.cached_tokens,
        turn.reasoning_tokens,
    )


def token_logprobs(delta: Delta, decode: Decode, shown: int) -> list[TokenLogprob]:
    """What the engine said about each new token, with `shown` candidates for its place; nothing
    where it said nothing."""
    if delta.logprobs is None or len(delta.logprobs) != len(delta.ids):
        return []
    tops = delta.top if delta.top and len(delta.top) == len(delta.ids) else [()] * len(delta.ids)
    return [
        TokenLogprob(
            decode([token]),
            logprob,
            None,
            [TokenLogprob(decode([other]), value) for value, other in top[:shown]],
        )
        for token, logprob, top in zip(delta.ids, delta.logprobs, tops, strict=True)
    ]
