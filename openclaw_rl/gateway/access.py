"""Who may come in, and how many at once.

Keys are compared in constant time, and only a digest of a key ever leaves this module
(as `owner`, which keeps the histories of different keys apart). Above a limit a client is told to
come back (429) instead of queueing without bound. All of it is used on one event loop only.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from aiohttp import web

from openclaw_rl.wire.dialect import WireError, unavailable

BODY_SECONDS = 60.0
"""How long a request's body may take to arrive."""


@dataclass(frozen=True, slots=True)
class Caller:
    """`owner` is a digest of the key ("" without one), `key_session` the part after `KEY:`.

    `anybody`: came without a key to a gateway that wants none (a person with curl), and may name
    turns and sessions of every client of it.
    """

    owner: str
    key_session: str | None = None
    anybody: bool = False

    @property
    def reach(self) -> str | None:
        """The owner whose turns and sessions it may name; None: everybody's."""
        return None if self.anybody else self.owner


def caller_of(headers: Mapping[str, str], api_key: str) -> Caller | None:
    """Who sends this, or None where the key is missing or wrong; `headers` ignore case.

    Without an `api_key` everybody may come in, and whatever key a client happens to send only
    tells clients apart. Clients of Anthropic's API may send two keys, one of them a stale one.
    """
    scheme, _, bearer = headers.get("Authorization", "").partition(" ")
    sent = (bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""))
    tokens = [one.strip().encode("utf-8", "surrogateescape") for one in sent if one.strip()]
    parts = [token.partition(b":") for token in tokens]
    if not api_key:
        key, _, session = (parts or [(b"", b"", b"")])[0]
        return _caller(key, session, anybody=not tokens)
    for key, _, session in parts:
        if hmac.compare_digest(key, api_key.encode()):
            return _caller(key, session)
    return None


def _caller(key: bytes, session: bytes, anybody: bool = False) -> Caller:
    owner = hashlib.sha256(b"owner:" + key).hexdigest()[:16] if key else ""
    return Caller(owner, session.decode("utf-8", "replace").strip() or None, anybody)


def from_a_website(headers: Mapping[str, str]) -> bool:
    """Whether a web page of another machine sends this, through a browser on this one.

    A browser sends a plain POST to any address, and names the page in `Origin`. Where no key is
    wanted, every page that is open would be a client whose words are learnt from.
    """
    origin = headers.get("Origin")
    if origin is None:
        return False
    try:
        place = urlsplit(origin)
        host = place.hostname or ""
        if place.scheme not in ("http", "https"):  # an app's own pages; "null" may be anybody's
            return not place.scheme
        local = host == "localhost" or host.endswith(".localhost")
        return not (local or ipaddress.ip_address(host).is_loopback)
    except ValueError:  # a host name, or not a URL at all
        return True


class Limit:
    """At most `limit` at once."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.now = 0

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold one place; raises `WireError` 429 where none is free."""
        if self.now >= self.limit:
            message = f"{self.limit} requests are already under way"
            raise WireError(429, message, code="rate_limit_exceeded")
        self.now += 1
        try:
            yield
        finally:
            self.now -= 1


async def read_body(request: web.Request, reading: Limit) -> bytes:
    """The whole body. Bodies on their way are counted in `reading`, apart from the requests under
    way: slow senders must not keep others from the engine. Raises `WireError` 408 or 429."""
    with reading.slot():
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await request.read()
        except TimeoutError:
            late = f"the request's body did not arrive within {BODY_SECONDS:g} s"
            raise WireError(408, late) from None


class Grace:
    """Ends replies that are still under way some time after the service was told to stop, while
    their clients can still be told so."""

    def __init__(self) -> None:
        self._replies: set[asyncio.Timeout] = set()
        self._until: float | None = None

    @asynccontextmanager
    async def reply(self) -> AsyncIterator[None]:
        """A reply under way; raises `WireError` 503 when its time is over."""
        limit = asyncio.timeout_at(self._until)
        self._replies.add(limit)
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise unavailable("the service is stopping; try again later", code="stopping") from None
        finally:
            self._replies.discard(limit)

    def end_in(self, seconds: float) -> None:
        """From now on replies have at most this many seconds."""
        self._until = asyncio.get_running_loop().time() + seconds
        for limit in self._replies:
            limit.reschedule(self._until)
