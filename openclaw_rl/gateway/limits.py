"""How many requests may be under way at once. Above it a client is told to come back (429)
instead of queueing without bound. A request whose body is still coming is counted apart: slow
senders must not keep others from the engine. And how long they may last once the service stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from aiohttp import web

from openclaw_rl.wire.errors import WireError


class TooManyRequests(Exception):
    """The limit is reached."""


class Inflight:
    """Counts requests under way. Used on one event loop only, hence without a lock."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.now = 0

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold one place; raises `TooManyRequests` where none is free."""
        if self.now >= self.limit:
            raise TooManyRequests(f"{self.limit} requests are already under way")
        self.now += 1
        try:
            yield
        finally:
            self.now -= 1


class Grace:
    """Ends replies that are still under way some time after the service was told to stop, while
    their clients can still be told so. Used on one event loop only."""

    def __init__(self) -> None:
        self._replies: set[asyncio.Timeout] = set()
        self._until: float | None = None

    @asynccontextmanager
    async def reply(self) -> AsyncIterator[None]:
        """A reply under way; raises `WireError` 503 when its time is over."""
        limit = asyncio.timeout_at(self._until)
        try:
            async with limit:
                self._replies.add(limit)
                try:
                    yield
                finally:
                    self._replies.discard(limit)
        except TimeoutError:
            if not limit.expired():
                raise
            raise WireError(
                503, "the service stops; try again later", type="server_error", code="stopping"
            ) from None

    def end_in(self, seconds: float) -> None:
        """All replies have at most so many seconds from now."""
        self._until = asyncio.get_running_loop().time() + seconds
        for limit in self._replies:
            limit.reschedule(self._until)


class Bodies:
    """Reads bodies: at most `limit` at once, each within `seconds`."""

    def __init__(self, limit: int, seconds: float) -> None:
        self.reading = Inflight(limit)
        self._seconds = seconds

    async def read(self, request: web.Request) -> bytes:
        """The whole body. Raises `TooManyRequests`, or `WireError` 408 for one that does not come
        to its end."""
        with self.reading.slot():
            try:
                async with asyncio.timeout(self._seconds):
                    return await request.read()
            except TimeoutError:
                raise WireError(
                    408, f"the request's body did not arrive within {self._seconds:g} s"
                ) from None
