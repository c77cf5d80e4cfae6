"""Who may come in, and how many at once.

Keys are compared by digest in constant time, and only a digest of a key ever leaves this module
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

from openclaw_rl.wire.errors import WireError, too_many_requests

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

    def may_name(self, owner: str) -> bool:
        """Whether feedback and the end of a session of `owner` are taken from this caller."""
        return self.anybody or owner == self.owner


class Auth:
    """Checks the key of requests. Without a configured key everybody may come in, and whatever
    key a client happens to send only tells clients apart."""

    def __init__(self, api_key: str) -> None:
        self._length = len(api_key.encode())
        self._digest = _digest(api_key.encode())

    def caller(self, headers: Mapping[str, str]) -> Caller | None:
        """The caller, or None where the key is missing or wrong. Header names are looked up as
        given, so pass a case-insensitive mapping."""
        tokens = _tokens(headers)
        if not self._length:
            token = tokens[0] if tokens else b""
            key, _, session = token.partition(b":")
            return Caller(_owner(key), _session(session), anybody=not token)
        for token in tokens:
            # A configured key may itself contain colons: cut by its length, not at the first one.
            key, rest = token[: self._length], token[self._length :]
            right = hmac.compare_digest(_digest(key), self._digest)
            if right and (not rest or rest.startswith(b":")):
                return Caller(_owner(key), _session(rest[1:]))
        return None


def from_a_website(headers: Mapping[str, str]) -> bool:
    """Whether a page of another machine's sends this, through the browser of somebody here.

    A browser sends a plain POST to any address, and names the page in `Origin`. Where no key is
    wanted, every page that is open would be a client whose words are learnt from.
    """
    origin = headers.get("Origin")
    if origin is None:
        return False
    try:
        place = urlsplit(origin)
        host = place.hostname or ""
    except ValueError:
        return True
    if place.scheme not in ("http", "https"):  # an app's own pages; "null" may be anybody's
        return not place.scheme
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost" and not host.endswith(".localhost")


class Limit:
    """At most `limit` at once."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.now = 0

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold one place; raises `WireError` 429 where none is free."""
        if self.now >= self.limit:
            raise too_many_requests(f"{self.limit} requests are already under way")
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
            raise WireError(
                408, f"the request's body did not arrive within {BODY_SECONDS:g} s"
            ) from None


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


def _tokens(headers: Mapping[str, str]) -> list[bytes]:
    """What was sent as a key. Clients of Anthropic's API may send two, one of them a stale one."""
    scheme, _, bearer = headers.get("Authorization", "").partition(" ")
    sent = (bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""))
    return [one.strip().encode("utf-8", "surrogateescape") for one in sent if one.strip()]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _owner(key: bytes) -> str:
    return hashlib.sha256(b"owner:" + key).hexdigest()[:16] if key else ""


def _session(text: bytes) -> str | None:
    return text.decode("utf-8", "replace").strip() or None
