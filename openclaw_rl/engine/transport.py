"""HTTP with an engine: an answer to read as it comes, a refusal, or `Lost`.

Guarantee: nothing waits on a dead peer. An engine that falls silent is asked for a sign of life
(one that is paused, or has a long queue, is silent and alive), and counts as lost without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

from openclaw_rl.engine.api import RETRIED_STATUS, Lost, passing, reason_of, refusal
from openclaw_rl.errors import EngineError, EngineRefused, EngineUnavailable

_CONNECT_SECONDS, _ASK_SECONDS = 10.0, 5.0
_IDLE_SECONDS = 3.0
"""A pooled connection unused for longer is not used again: servers close idle ones after 5 s
(uvicorn, and so SGLang and vLLM), and a request that crosses that is lost."""
_DRAIN_SECONDS = 0.2
"""The end of an answer follows its last event at once; a server that withholds it costs us the
connection."""


def connections(api_key: str | None = None, **options: Any) -> aiohttp.ClientSession:
    """A pool for engines. No limit: a queue in it would hide what waits. `api_key` goes with each
    request, so the pool is for the engine's own address only."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
        **options,
    )


class EventLines:
    """Splits a stream of server-sent events, however the network cut it, into the payloads of its
    `data:` lines: engines send JSON without line breaks. Each byte is looked at once."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        *ended, rest = chunk.split(b"\n")
        payloads: list[bytes] = []
        for line in ended:
            if self._pieces:
                line = b"".join([*self._pieces, line])
                self._pieces = []
            if line.startswith(b"data:"):
                payloads.append(line[5:].strip())
        if rest:
            self._pieces.append(rest)
        return payloads


class Exchange:
    """A request under way and its answer. `finished`: what was wanted of it has been read."""

    def __init__(self, sending: asyncio.Future[aiohttp.ClientResponse], prompt_tokens: int) -> None:
        self.finished = False
        self.reads = 0
        self._sending = sending
        self._prompt_tokens = prompt_tokens
        self._lines = EventLines()

    async def receive(self) -> list[bytes]:
        """The payloads that come next and together; of a plain answer all of it; [] at the end."""
        response = await self._answer()
        if response.content_type != "text/event-stream":
            return [data] if (data := await self.read()) else []
        while data := await self._piece(response):
            if payloads := [one for one in self._lines.feed(data) if one != b"[DONE]"]:
                return payloads
        return []

    async def read(self) -> bytes:
        """All of the answer."""
        response, pieces = await self._answer(), []
        while data := await self._piece(response):
            pieces.append(data)
        self.finished = True
        return b"".join(pieces)

    def close(self) -> None:
        """Give the connection back to the pool where the answer was read to its end (nobody waits
        for what follows the last event), else close it, which also tells the engine."""
        if self._sending.cancel() or self._sending.cancelled() or self._sending.exception():
            return
        response = self._sending.result()
        if self.finished:
            asyncio.get_running_loop().call_later(_DRAIN_SECONDS, response.close)
        else:
            response.close()

    async def _answer(self) -> aiohttp.ClientResponse:
        if not self._sending.done():
            await asyncio.wait([self._sending])  # not awaited itself: `close` may cancel it
        if self._sending.cancelled():
            raise Lost("the request was closed")
        response = self._sending.result()
        if response.status != 200:
            raise _refused(response.status, await response.read(), self._prompt_tokens)
        return response

    async def _piece(self, response: aiohttp.ClientResponse) -> bytes:
        data: bytes = await response.content.readany()
        self.reads += 1
        return data


class Transport:
    """Exchanges with the engine at `url` (a function is asked each time; None: not there yet).
    `http` pools the connections (`connections`); `key` is asked each time as well (None: the one
    that `http` sends, if any)."""

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

    @asynccontextmanager
    async def exchange(
        self, path: str, body: dict[str, Any], prompt_tokens: int, routing_key: str | None = None
    ) -> AsyncGenerator[Exchange, None]:
        """POST `body` to `path`. Raises Lost or EngineRefused, also from the reading inside."""
        if (base := self.base()) is None:
            raise Lost("the engine has no address yet")
        try:
            data = orjson.dumps(body)
        except TypeError:  # what a client of ours put into its sampling parameters
            raise EngineRefused(400, "a parameter is no JSON that an engine takes") from None
        headers = {"Content-Type": "application/json", **self._authorization()}
        if routing_key is not None:
            headers["X-SMG-Routing-Key"] = routing_key
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        sending = self._http.post(base + path, data=data, headers=headers, timeout=timeout)
        exchange = Exchange(asyncio.ensure_future(sending), prompt_tokens)
        silence = asyncio.ensure_future(self._close_when_silent(exchange, base))
        try:
            yield exchange
        except aiohttp.InvalidURL:
            raise EngineError("the engine's address is not a URL") from None
        except (aiohttp.ClientError, OSError, Lost) as error:
            if silence.done():
                raise Lost("the engine has fallen silent") from None
            if isinstance(error, Lost):
                raise
            raise Lost(f"the connection to the engine broke ({type(error).__name__})") from None
        finally:
            silence.cancel()
            exchange.close()

    async def _close_when_silent(self, exchange: Exchange, base: str) -> None:
        """Ends when nothing comes and nothing lives at the address. One look now and then: a timer
        for each read would cost more than the read. Any answer is a sign of life: `/health` of a
        paused SGLang may say 503, and vLLM knows no `/model_info`."""
        while True:
            reads = exchange.reads
            await asyncio.sleep(self._silence_seconds)
            if exchange.reads == reads:
                alive = self.base() == base and await self.ask("GET", "/model_info") is not None
                if not alive and exchange.reads == reads:
                    exchange.close()
                    return

    async def ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        seconds: float = _ASK_SECONDS,
    ) -> tuple[int, bytes] | None:
        """Status and body of the answer; None without one within `seconds`."""
        if (base := self.base()) is None:
            return None
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._http.request(
                method, base + path, json=body, timeout=timeout, headers=self._authorization()
            ) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None

    async def fetch(self, *paths: str) -> Any:
        """The JSON of a GET of the first of `paths` that the engine knows. Raises
        EngineUnavailable, and EngineRefused where it knows none."""
        for path in paths:
            status, body = await self.ask("GET", path) or (503, b"")
            if status == 404:
                continue
            if status in (401, 403):
                raise EngineRefused(status, "the engine refuses our key (ENGINE_API_KEY)")
            try:
                if status < 400:
                    return orjson.loads(body)
            except ValueError:
                pass
            raise EngineUnavailable(f"the engine does not answer {path} ({status})")
        raise EngineRefused(404, f"the engine knows no {' and no '.join(paths)}")

    def _authorization(self) -> dict[str, str]:
        key = self._key()
        return {} if key is None else {"Authorization": f"Bearer {key}"}

    def base(self) -> str | None:
        url = self._url() if callable(self._url) else self._url
        return url.rstrip("/") if url else None


def _refused(status: int, body: bytes, prompt_tokens: int) -> EngineError | Lost:
    reason = reason_of(body)
    if passing(reason):
        return Lost("the engine has not loaded the adapter, or is about to end")
    if status >= 500 or status in RETRIED_STATUS:
        faulty = status not in RETRIED_STATUS
        return Lost(f"the engine is not ready ({status}): {reason}", faulty=faulty)
    return refusal(status, reason, prompt_tokens)
