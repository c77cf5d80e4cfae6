"""Plain values of the session package: no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openclaw_rl.types import Kind, Message, Turn


@dataclass(frozen=True, slots=True)
class Identity:
    """Who is speaking, and how we know (`source`: `header:x-session-id`, `body:user`, `key`)."""

    session_id: str
    source: str


@dataclass(frozen=True, slots=True)
class RequestView:
    """What the tracker needs of one request.

    `headers` have lower-case names. `owner` separates API keys: histories are never shared
    across owners. `hints` holds body fields that can name a session (`prompt_cache_key`, `user`,
    `metadata`). `key_session` is the session named inside the API key (`KEY:SESSION`), if any.
    """

    messages: tuple[Message, ...]
    headers: Mapping[str, str]
    owner: str = ""
    hints: Mapping[str, Any] | None = None
    key_session: str | None = None
    has_tools: bool = False


@dataclass(frozen=True, slots=True)
class NextState:
    """`messages` followed turn `turn_id` and are what its judge reads."""

    turn_id: str
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request belongs in the trajectory tree.

    `parent_id` is the turn whose history the request extends, `matched` how many of the request's
    messages that history covers (0 without a parent). `known_replies` maps the index of an
    assistant message in the request to the turn that produced it. `next_state` is what this
    request tells about the parent. `retried_id` is an earlier turn that this request repeats, and
    `superseded` are turns of the very request that the parent answered, asked while it was under
    way: the client went on from the parent. All these must be dropped as `retried`.
    """

    session_id: str
    source: str
    kind: Kind
    kind_reason: str
    parent_id: str | None
    matched: int
    known_replies: Mapping[int, str]
    next_state: NextState | None
    retried_id: str | None
    request_hash: str
    history_hash: str
    """Chain hash of the request's messages; `Tracker.commit` extends it by the reply."""
    owner: str = ""
    superseded: tuple[str, ...] = ()
    duplicates: frozenset[str] = frozenset()
    """Turns that had answered the same request by then."""

    def head(self, turn_id: str, created: float) -> Turn:
        """The turn that answers the request, as far as its place tells."""
        return Turn(
            turn_id=turn_id,
            session_id=self.session_id,
            source=self.source,
            owner=self.owner,
            kind=self.kind,
            kind_reason=self.kind_reason,
            parent_id=self.parent_id,
            matched=self.matched,
            request_hash=self.request_hash,
            created=created,
        )
