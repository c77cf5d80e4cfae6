"""HTTP with an engine: an answer to read as it comes, or what a failure means (`Lost`, a refusal).

Guarantees: nothing waits on a dead peer. An engine that falls silent is asked for a sign of life
(one that is paused, or has a long queue, is silent and alive), and counts as lost without it.
Errors keep the engine's own words, shortened; bodies that may echo the request (validation errors)
are reduced to the names of the fields, so no conversation text reaches logs or clients.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from openclaw_rl.errors import ContextOverflow, EngineError, EngineRefused

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


def listens(url: str, seconds: float) -> bool:
    """Whether anything accepts connections at the address within `seconds`. Blocks so long."""
    try:
        place = urlsplit(url)
        port = place.port or (443 if place.scheme == "https" else 80)
        with socket.create_connection((place.hostname or "", port), timeout=seconds):
            return True
    except (OSError, ValueError):
        return False


class Exchange:
    """A request under way and its answer. `finished`: what was wanted of it has been read."""

    def __init__(self, sending: asyncio.Future[aiohttp.ClientResponse], prompt_tokens: int) -> None:
        self.finished = False
        self.reads = 0
        self._sending = sending
        self._prompt_tokens = prompt_tokens
        self._line = b""

    async def receive(self) -> list[bytes]:
        """The server-sent events that come next and together (engines send JSON without line
        breaks); of a plain answer all of it; [] at the end."""
        response = await self._answer()
        if response.content_type != "text/event-stream":
            return [data] if (data := await self.read()) else []
        while data := await self._piece(response):
            *lines, self._line = (self._line + data).split(b"\n")
            payloads = [line[5:].strip() for line in lines if line.startswith(b"data:")]
            if payloads := [one for one in payloads if one != b"[DONE]"]:
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
            raise _failure(response.status, await response.read(), self._prompt_tokens)
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
        key: Callable[[], str | None],
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
        if (base := self._base()) is None:
            raise Lost("the engine has no address yet")
        try:
            data = orjson.dumps(body)
        except TypeError:  # what a client of ours put into its sampling parameters
            raise EngineRefused(400, "a parameter cannot be sent as JSON") from None
        headers = {"Content-Type": "application/json", **self._authorization()}
        if routing_key is not None:
            headers["X-SMG-Routing-Key"] = routing_key
        sending = self._http.post(base + path, data=data, headers=headers)
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
                alive = self._base() == base and await self.ask("GET", "/model_info") is not None
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
        if (base := self._base()) is None:
            return None
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._http.request(
                method, base + path, json=body, timeout=timeout, headers=self._authorization()
            ) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None

    def _authorization(self) -> dict[str, str]:
        key = self._key()
        return {} if key is None else {"Authorization": f"Bearer {key}"}

    def _base(self) -> str | None:
        url = self._url() if callable(self._url) else self._url
        return url.rstrip("/") if url else None


# --- what a failure means ------------------------------------------------------------------------

RETRIED_STATUS = frozenset({408, 425, 429, 502, 503, 504})
"""The engine (or the router before it) is away or busy: the same request may succeed later."""
NO_REASON = "no reason given"
_LIMIT = re.compile(
    r"context length(?: of| is|\s)*\(?(\d+)|maximum allowed length \((\d+) tokens\)|"
    r"maximum model length of (\d+)|max_model_len=(\d+)|context (?:holds|window of|length:) (\d+)"
)
_TOTAL = re.compile(r"requested a total of (\d+) tokens")
_OVERFLOW = re.compile(
    r"context length|maximum allowed length|maximum model length|max_model_len|prompt is too long|"
    # vLLM cuts max_tokens to what is left of the context, then says this; we never ask for less.
    r"context window|max_tokens must be at least 1, got 0",
    re.IGNORECASE,
)
_BETWEEN_LIVES = re.compile(
    # An adapter that is not there (yet): vLLM, SGLang, SGLang since 0.5.
    r"^The model `[^`]*` does not exist|requested LoRA adapters are not loaded|"
    r"LoRA adapter that has never been loaded|"
    # vLLM ends itself: its core died, its server still answers for a moment.
    r"EngineCore encountered an issue",
    re.IGNORECASE,
)
"""What an engine says that was started anew, is about to load the adapter, or about to end."""


class Lost(Exception):
    """No finish came, but the same request may succeed elsewhere or later.

    `faulty`: the engine answered with an error of its own (status 500), which may well be the
    request's fault.
    """

    def __init__(self, reason: str, *, faulty: bool = False) -> None:
        super().__init__(reason)
        self.faulty = faulty


def read_event(payload: bytes, prompt_tokens: int) -> dict[str, Any]:
    """The object in an event. Raises the error that it brings instead of tokens."""
    try:
        event = orjson.loads(payload)
    except ValueError:
        raise EngineError("the engine sent an event that is not JSON") from None
    if not isinstance(event, dict):
        raise EngineError("the engine sent an event that is not a JSON object")
    if "error" in event:
        code = event["error"].get("code") if isinstance(event["error"], dict) else None
        raise _failure(code if type(code) is int and code > 400 else 400, payload, prompt_tokens)
    return event


def refusal(status: int, message: str, prompt_tokens: int) -> EngineRefused:
    """The error for a request that the engine will not serve (status 4xx)."""
    if status not in (400, 413, 422) or not _OVERFLOW.search(message):
        return EngineRefused(status, f"the engine refused the request ({status}): {message}")
    total, limit = _TOTAL.search(message), _LIMIT.search(message)
    if limit is not None:
        tokens = int(total.group(1)) if total else prompt_tokens
        return ContextOverflow(tokens, int(limit.group(limit.lastindex or 0)))
    return EngineRefused(
        400, f"prompt is too long: {prompt_tokens} tokens are more than the engine takes"
    )


def reason_of(body: bytes) -> str:
    """The reason in an error body, at most 300 characters."""
    try:
        value: Any = orjson.loads(body)
    except ValueError:
        return NO_REASON
    for key in ("error", "message", "detail", "error_message"):
        if isinstance(value, dict) and key in value:
            value = value[key]
    if isinstance(value, list):  # FastAPI's validation errors: their "input" echoes the request
        fields = [
            ".".join(map(str, item.get("loc", ()))) + ": " + str(item.get("type", "invalid"))
            for item in value
            if isinstance(item, dict)
        ]
        value = ", ".join(fields)
    return value[:300] if isinstance(value, str) and value else NO_REASON


def _failure(status: int, body: bytes, prompt_tokens: int) -> EngineError | Lost:
    reason = reason_of(body)
    if _BETWEEN_LIVES.search(reason):
        return Lost("the engine has not loaded the adapter, or is about to end")
    if status >= 500 or status in RETRIED_STATUS:
        faulty = status not in RETRIED_STATUS
        return Lost(f"the engine is not ready ({status}): {reason}", faulty=faulty)
    return refusal(status, reason, prompt_tokens)
