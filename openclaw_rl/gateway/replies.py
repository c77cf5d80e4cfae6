"""What goes back to an HTTP client: a reply token by token or whole, or an error in its dialect.

Guarantees: an error before the first byte is an HTTP status, later it is an error event; a stream
is never silent for longer than the keep-alive time, also while the engine is away. Nothing here
repeats conversation text into a log; an unexpected exception is logged by type and place only,
because its message may hold some.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn
from urllib.parse import quote

from aiohttp import web

from openclaw_rl.errors import (
    ContextOverflow,
    EngineError,
    EngineRefused,
    EngineUnavailable,
    JournalError,
)
from openclaw_rl.gateway.core import ClientGone
from openclaw_rl.gateway.turn import OpenTurn, Shown
from openclaw_rl.wire.dialect import Dialect, TokenLogprob
from openclaw_rl.wire.errors import (
    WireError,
    body_too_large,
    internal,
    invalid,
    prompt_too_long,
    unavailable,
)
from openclaw_rl.wire.reply import ReplyEvent

log = logging.getLogger("openclaw_rl.gateway")

RETRY_AFTER = {429: "1", 503: "5"}
"""Seconds after which trying again makes sense."""

_PRINTABLE = "".join(map(chr, range(33, 127))).replace("%", "")


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


class StreamedReply:
    """Writes one reply as it is made. The response starts with the first token, or with the first
    keep-alive chunk; until then an error can still be a plain response."""

    def __init__(
        self, http: web.Request, turn: OpenTurn, dialect: Dialect, keepalive_seconds: float
    ) -> None:
        self._http = http
        self._turn = turn
        self._dialect = dialect
        self._keepalive_seconds = keepalive_seconds
        self._stream = dialect.stream(turn.head)
        self._clock = asyncio.get_running_loop().time
        self._last_write = self._clock()
        self._starting = asyncio.Lock()
        self.response: web.StreamResponse | None = None

    async def show(self, shown: Shown) -> None:
        """Send what became visible, in one write."""
        events, tokens = shown
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
        with contextlib.suppress(ClientGone):  # the reply's own task finds out by itself
            await pace(
                lambda: self._last_write + self._keepalive_seconds,
                lambda: self._send(self._stream.keepalive()),
                clock=self._clock,
                sleep=asyncio.sleep,
            )

    async def _send(self, data: bytes) -> None:
        self._last_write = self._clock()
        try:
            response = self.response
            if response is None or not response.prepared:
                async with self._starting:  # the keep-alive and the first token may come together
                    if self.response is None:
                        data = self._stream.start(self._turn.usage) + data
                        self.response = web.StreamResponse(
                            headers={
                                "Content-Type": "text/event-stream; charset=utf-8",
                                "Cache-Control": "no-cache",
                                "X-Accel-Buffering": "no",  # reverse proxies would hold tokens back
                                **_headers(self._turn, self._dialect),
                            }
                        )
                        await self.response.prepare(self._http)
                    response = self.response
            if data:
                await response.write(data)
        except ConnectionError as error:
            raise ClientGone from error

    async def _end(self, data: bytes) -> web.StreamResponse:
        await self._send(data)
        assert self.response is not None
        try:
            await self.response.write_eof()
        except ConnectionError as error:
            raise ClientGone from error
        return self.response


def whole_reply(
    turn: OpenTurn,
    dialect: Dialect,
    events: Sequence[ReplyEvent],
    logprobs: Sequence[TokenLogprob],
) -> web.Response:
    """A finished reply in one piece."""
    asked = logprobs if turn.request.logprobs else None
    body = dialect.whole(turn.head, events, turn.ending, asked)
    return web.Response(
        body=json.dumps(body, ensure_ascii=False).encode("utf-8", "replace"),
        content_type="application/json",
        headers=_headers(turn, dialect),
    )


def error_response(error: WireError, dialect: Dialect) -> web.Response:
    """A plain response with the error object of `dialect`."""
    headers = {"Retry-After": RETRY_AFTER[error.status]} if error.status in RETRY_AFTER else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(
        status=dialect.error_status(error),
        body=json.dumps(dialect.error_body(error)).encode(),
        content_type="application/json",
        headers=headers,
    )


def to_wire(error: Exception) -> WireError:
    """What the client is told about `error`: the one table of all that can go wrong."""
    match error:
        case WireError():
            return error
        case ContextOverflow():
            return prompt_too_long(error.prompt_tokens, error.limit)
        case EngineRefused():
            status = error.status if 400 <= error.status < 500 else 400
            return WireError(status, str(error), code="engine_refused")
        case EngineUnavailable():
            return unavailable(f"the engine is away: {error}")
        case EngineError():
            return WireError(502, str(error), type="server_error", code="engine_error")
        case JournalError():
            return WireError(503, str(error), type="server_error", code="journal_unavailable")
        case web.HTTPRequestEntityTooLarge():
            # aiohttp says it in words only: "Maximum request body size N exceeded, ..."
            numbers = [int(word) for word in (error.text or "").split() if word.isdigit()]
            return body_too_large(numbers[0] if numbers else 0)
        case web.HTTPNotFound():
            return WireError(
                404,
                "there is no such route; the API is at /v1 (POST /v1/chat/completions, "
                "POST /v1/messages)",
                code="not_found",
            )
        case web.HTTPMethodNotAllowed():
            return WireError(405, "this route does not take this method", code="method_not_allowed")
        case web.HTTPException():
            return WireError(error.status, error.reason)
        case web.RequestPayloadError():
            return invalid(None, "the body cannot be read: it is not encoded as its headers say")
        case RecursionError():
            return invalid(None, "the request is nested too deeply")
    frames = traceback.extract_tb(error.__traceback__)
    where = " < ".join(f"{frame.filename}:{frame.lineno}" for frame in reversed(frames[-6:]))
    log.error("unexpected %s at %s", type(error).__name__, where)
    return internal()


def _headers(turn: OpenTurn, dialect: Dialect) -> dict[str, str]:
    """Names of turn and session, how the session was recognised, and of what kind the turn is.
    A session id may be any text, a header may not."""
    record = turn.record
    own = {dialect.id_header: f"req_{record.turn_id}"} if dialect.id_header else {}
    return {
        "X-Turn-Id": record.turn_id,
        "X-Session-Id": quote(record.session_id, safe=_PRINTABLE),
        "X-Session-Source": record.source,
        "X-Turn-Type": record.kind,
        **own,
    }
