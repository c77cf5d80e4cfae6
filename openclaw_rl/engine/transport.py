"""One HTTP exchange with an engine: an answer to read, a refusal, or `Lost`.

Guarantees: nothing waits on a dead peer. A repeated request, and the first one after a quiet time,
opens a connection of its own (pooled ones may have gone stale over a weight update); an engine
that falls silent is asked for a sign of life on another connection, and counts as lost without it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from openclaw_rl.engine.fastjson import dumps
from openclaw_rl.engine.refusals import RETRIED_STATUS, Lost, passing, reason_of, refusal
from openclaw_rl.errors import EngineError, EngineRefused, EngineUnavailable

_POOL_SECONDS = 3.0
"""A pooled connection unused for so long may be dead without our knowing: servers close idle ones
after 5 s (uvicorn, and so SGLang), and the first request after it would be lost."""
_CONNECT_SECONDS, _ASK_SECONDS = 10.0, 5.0
_DRAIN_SECONDS = 0.2
"""`[DONE]` follows the last event at once; a server that withholds it costs us the connection."""


@dataclass(slots=True, eq=False)
class Exchange:
    """An answer under way. `finished`: its last event has been read. `silent`: no byte came for
    long, and no sign of life from the engine either."""

    response: aiohttp.ClientResponse
    finished: bool = False
    silent: bool = False
    reads: int = 0
    waits: bool = False

    async def read(self) -> bytes:
        """The next bytes, or b"" at the end. No clock is asked: see `_Watchdog`."""
        self.waits = True
        data: bytes = await self.response.content.readany()
        self.waits = False
        self.reads += 1
        return data


class _Watchdog:
    """Looks at an exchange now and then: a timer for each read would cost more than the read.

    Where nothing came from one look to the next, the engine is asked for a sign of life; without
    one the exchange is closed as `silent`.
    """

    def __init__(
        self, exchange: Exchange, seconds: float, alive: Callable[[], Coroutine[Any, Any, bool]]
    ) -> None:
        self._exchange = exchange
        self._seconds = seconds
        self._alive = alive
        self._asking: asyncio.Task[None] | None = None
        self._look_later()

    def end(self) -> None:
        self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()

    def _look_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._seconds, self._look, self._exchange.reads)

    def _look(self, reads: int) -> None:
        if self._exchange.waits and self._exchange.reads == reads:
            self._asking = asyncio.ensure_future(self._ask(reads))
        else:
            self._look_later()

    async def _ask(self, reads: int) -> None:
        if not await self._alive() and self._exchange.reads == reads:
            self._exchange.silent = True
            self._exchange.response.close()
        else:
            self._look_later()


class Transport:
    """Connections to the engine at `url` (a function is asked each time; None: not there yet).
    `key` is asked each time too; None: the one that `http` sends, if any."""

    def __init__(
        self,
        url: str | Callable[[], str | None],
        http: aiohttp.ClientSession,
        silence_seconds: float,
        key: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._url = url
        self._key = key
        self._http = http
        self._silence_seconds = silence_seconds
        self._last_answer = -math.inf
        self._settling: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def exchange(
        self,
        path: str,
        body: dict[str, Any],
        prompt_tokens: int,
        routing_key: str | None = None,
        *,
        fresh: bool,
    ) -> AsyncGenerator[Exchange, None]:
        """POST `body` to `path`. Raises Lost or EngineRefused, also from the reading inside."""
        base = self.base()
        if base is None:
            raise Lost("the engine has no address yet")
        headers = {"Content-Type": "application/json", **self._authorization()}
        if routing_key is not None:
            headers["X-SMG-Routing-Key"] = routing_key
        own = watchdog = None
        if fresh or self._now() - self._last_answer > _POOL_SECONDS:
            own = self._fresh(total=None)
        exchange = None
        try:
            sending = asyncio.ensure_future(
                (own or self._http).post(
                    base + path,
                    data=dumps(body),
                    headers=headers,
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
                )
            )
            exchange = Exchange(await self._first_bytes(sending, base))
            if exchange.response.status != 200:
                await _raise_for(exchange.response, prompt_tokens)
            self._last_answer = self._now()
            watchdog = _Watchdog(exchange, self._silence_seconds, lambda: self._alive(base))
            yield exchange
        except aiohttp.InvalidURL:
            raise EngineError("the engine's address is not a URL") from None
        except (aiohttp.ClientError, OSError) as error:
            if exchange is not None and exchange.silent:
                raise Lost("the engine has fallen silent") from None
            raise Lost(f"the connection to the engine broke ({type(error).__name__})") from None
        finally:
            if watchdog is not None:
                watchdog.end()
            if exchange is not None:
                self._part(exchange, own is None)
            if own is not None:
                await own.close()

    async def close(self) -> None:
        """Waits until finished connections are back in the pool."""
        if self._settling:
            await asyncio.wait(self._settling)

    async def tell(
        self, path: str, body: dict[str, Any], seconds: float = _ASK_SECONDS
    ) -> tuple[int, str] | None:
        """POST `body`, outside the pool and its queue: the status and, of an error, the engine's
        reason; None without an answer within `seconds`."""
        base = self.base()
        if base is None:
            return None
        try:
            async with (
                self._fresh(seconds) as session,
                session.post(base + path, json=body) as response,
            ):
                data = await response.read()
                return response.status, reason_of(data) if response.status >= 400 else ""
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None

    async def ask(self, path: str) -> int | None:
        """The status of a GET, or None without an answer within five seconds."""
        base = self.base()
        if base is None:
            return None
        try:
            async with self._fresh() as session, session.get(base + path) as response:
                return response.status
        except (aiohttp.ClientError, OSError):
            return None

    async def fetch(self, *paths: str) -> Any:
        """The JSON of a GET of the first of `paths` that the engine knows. Raises
        EngineUnavailable, and EngineRefused where it knows none."""
        base = self.base()
        if base is None:
            raise EngineUnavailable("the engine has no address yet")
        try:
            async with self._fresh() as session:
                for path in paths:
                    async with session.get(base + path) as response:
                        if response.status == 404:
                            continue
                        if response.status in (401, 403):
                            raise EngineRefused(
                                response.status, "the engine refuses our key (ENGINE_API_KEY)"
                            )
                        response.raise_for_status()
                        return await response.json(content_type=None)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineUnavailable(
                f"the engine does not tell its model ({type(error).__name__})"
            ) from None
        raise EngineRefused(404, f"the engine knows no {' and no '.join(paths)}")

    def base(self) -> str | None:
        url = self._url() if callable(self._url) else self._url
        return url.rstrip("/") if url else None

    async def _first_bytes(
        self, sending: asyncio.Future[aiohttp.ClientResponse], base: str
    ) -> aiohttp.ClientResponse:
        try:
            while not sending.done():
                await asyncio.wait([sending], timeout=self._silence_seconds)
                if not sending.done() and not await self._alive(base):
                    raise Lost("the engine has fallen silent")
            return sending.result()
        finally:
            sending.cancel()

    def _part(self, exchange: Exchange, pooled: bool) -> None:
        """Gives the connection back to the pool if its answer ended, else closes it, which also
        tells the engine. Nobody waits for what follows the last event."""
        if exchange.finished and pooled:
            self._last_answer = self._now()
            settling = asyncio.ensure_future(_settle(exchange.response))
            self._settling.add(settling)
            settling.add_done_callback(self._settling.discard)
        else:
            exchange.response.close()

    async def _alive(self, base: str) -> bool:
        """Any answer counts, also that there is no such path: `/health` of a paused SGLang may say
        503, and vLLM knows no `/model_info`."""
        return self.base() == base and await self.ask("/model_info") is not None

    def _fresh(self, total: float | None = _ASK_SECONDS) -> aiohttp.ClientSession:
        """A session whose connection is new, and not counted against the pool's limit."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True),
            headers={**self._http.headers, **self._authorization()},
            timeout=aiohttp.ClientTimeout(total=total),
        )

    def _authorization(self) -> dict[str, str]:
        key = self._key()
        return {} if key is None else {"Authorization": f"Bearer {key}"}

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


async def _settle(response: aiohttp.ClientResponse) -> None:
    try:
        with suppress(TimeoutError, aiohttp.ClientError):
            async with asyncio.timeout(_DRAIN_SECONDS):
                while await response.content.readany():
                    pass
    finally:
        if response.content.at_eof():
            response.release()
        else:
            response.close()


async def _raise_for(response: aiohttp.ClientResponse, prompt_tokens: int) -> None:
    reason = reason_of(await response.read())
    if passing(reason):
        raise Lost("the engine has not loaded the adapter, or is about to end")
    if response.status >= 500 or response.status in RETRIED_STATUS:
        faulty = response.status not in RETRIED_STATUS
        raise Lost(f"the engine is not ready ({response.status}): {reason}", faulty=faulty)
    raise refusal(response.status, reason, prompt_tokens)
