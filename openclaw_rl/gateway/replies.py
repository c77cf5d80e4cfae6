"""How a reply reaches an HTTP client: token by token as server-sent events, or whole.

Guarantees: an error before the first byte is an HTTP status, later it is an error event; a stream
is never silent for longer than the keep-alive time, also while the engine is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import quote

from aiohttp import web

from openclaw_rl.engine.types import Delta
from openclaw_rl.gateway.core import ClientGone
from openclaw_rl.gateway.turn import OpenTurn
from openclaw_rl.wire.dialect import Dialect, Head, TokenLogprob
from openclaw_rl.wire.errors import WireError
from openclaw_rl.wire.reply import ReplyEvent

Decode = Callable[[list[int]], str]
_PRINTABLE = "".join(map(chr, range(33, 127))).replace("%", "")


@dataclass(frozen=True, slots=True)
class Way:
    """How one reply goes to its client: the dialect, the served name, the tokenizer's `decode`."""

    dialect: Dialect
    model: str
    decode: Decode

    def head(self, turn: OpenTurn) -> Head:
        """What the reply says about itself."""
        return Head(turn.turn_id, self.model, int(turn.created), turn.request)

    def headers(self, turn: OpenTurn) -> dict[str, str]:
        """Names of turn and session, how the session was recognised, and of what kind the turn is.
        A session id may be any text, a header may not."""
        placement = turn.placement
        own = {self.dialect.id_header: f"req_{turn.turn_id}"} if self.dialect.id_header else {}
        return {
            "X-Turn-Id": turn.turn_id,
            "X-Session-Id": quote(placement.session_id, safe=_PRINTABLE),
            "X-Session-Source": placement.source,
            "X-Turn-Type": placement.kind,
            **own,
        }


async def pace(
    due: Callable[[], float],
    send: Callable[[], Awaitable[object]],
    *,
    clock: Callable[[], float],
    sleep: Callable[[float], Awaitable[object]],
) -> NoReturn:
    """Call `send` whenever `due()` has come, for ever; both `due` and `clock` are in seconds.

    `due` is asked again after each sleep: what was sent meanwhile puts it off.
    """
    while True:
        rest = due() - clock()
        if rest > 0:
            await sleep(rest)
        else:
            await send()


class StreamSink:
    """Writes one reply as it is made. The response starts with the first token, or with the first
    keep-alive chunk; until then an error can still be a plain response."""

    def __init__(
        self,
        http: web.Request,
        turn: OpenTurn,
        way: Way,
        keepalive_seconds: float,
    ) -> None:
        self._http = http
        self._turn = turn
        self._way = way
        self._keepalive_seconds = keepalive_seconds
        self._stream = way.dialect.stream(way.head(turn))
        self._last_write = asyncio.get_running_loop().time()
        self._starting = asyncio.Lock()
        self.response: web.StreamResponse | None = None

    async def show(self, events: list[ReplyEvent], delta: Delta) -> None:
        """Send what became visible, in one write."""
        tokens = None
        if self._turn.request.logprobs:
            tokens = token_logprobs(delta, self._way.decode, self._turn.request.top_logprobs)
        data = b""
        for event in events:
            data += self._stream.event(event, tokens)
            tokens = None if tokens is None else []
        if tokens:
            data += self._stream.logprobs(tokens)
        if data or self.response is None:
            await self._send(data)

    async def finish(self) -> web.StreamResponse:
        """Send the end: how the reply ended, and the counts."""
        return await self._end(self._stream.end(self._turn.ending))

    async def fail(self, error: WireError) -> web.StreamResponse:
        """End a stream that has begun with an error event."""
        return await self._end(self._stream.fail(error))

    async def keep_alive(self) -> None:
        """Runs beside the reply until cancelled."""
        clock = asyncio.get_running_loop().time
        with contextlib.suppress(ClientGone):  # the reply's own task finds out by itself
            await pace(
                lambda: self._last_write + self._keepalive_seconds,
                lambda: self._send(self._stream.keepalive()),
                clock=clock,
                sleep=asyncio.sleep,
            )

    async def _send(self, data: bytes) -> None:
        self._last_write = asyncio.get_running_loop().time()
        try:
            response = self.response
            if response is None or not response.prepared:
                async with self._starting:  # the keep-alive and the first token may come together
                    if self.response is None:
                        data = self._stream.start(self._turn.usage) + data
                        self.response = self._new_response()
                        await self.response.prepare(self._http)
                    response = self.response
            if data:
                await response.write(data)
        except ConnectionError as error:
            raise ClientGone from error

    def _new_response(self) -> web.StreamResponse:
        return web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # reverse proxies would hold back tokens
                **self._way.headers(self._turn),
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

    def __init__(self, turn: OpenTurn, way: Way) -> None:
        self._turn = turn
        self._way = way
        self._events: list[ReplyEvent] = []
        self._logprobs: list[TokenLogprob] = []

    async def show(self, events: list[ReplyEvent], delta: Delta) -> None:
        """Keep what the reply will be made of."""
        self._events += events
        if self._turn.request.logprobs:
            shown = self._turn.request.top_logprobs
            self._logprobs += token_logprobs(delta, self._way.decode, shown)

    def response(self) -> web.Response:
        """The complete reply."""
        turn = self._turn
        logprobs = self._logprobs if turn.request.logprobs else None
        head = self._way.head(turn)
        body = self._way.dialect.whole(head, self._events, turn.ending, logprobs)
        return web.Response(
            body=json.dumps(body, ensure_ascii=False).encode("utf-8", "replace"),
            content_type="application/json",
            headers=self._way.headers(turn),
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
