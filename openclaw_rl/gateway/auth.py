"""Who calls: the API key, and the session that may be named inside it (`KEY:SESSION`).

Keys are compared by digest in constant time, and only a digest of a key ever leaves this module
(as `owner`, which keeps the histories of different keys apart).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit


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

    def __init__(self, api_key: str | None) -> None:
        self._length = len(api_key.encode()) if api_key else None
        self._digest = _digest(api_key.encode()) if api_key else None

    def caller(self, headers: Mapping[str, str]) -> Caller | None:
        """The caller, or None where the key is missing or wrong. Header names are looked up as
        given, so pass a case-insensitive mapping."""
        tokens = _tokens(headers)
        if self._digest is None or self._length is None:
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
