"""How many requests may be under way at once. Above it a client is told to come back (429)
instead of queueing without bound."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


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
