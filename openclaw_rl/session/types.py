"""Plain values of the session package: no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openclaw_rl.types import Kind, Message


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
    order: int = 0
    """How many turns had been committed by then."""


@dataclass(frozen=True, slots=True)
class NodeState:
    """One recorded turn as the tracker remembers it: what a journal must give back after a restart.

    `node_hash` is what `Tracker.commit` returned, `request_hash` what the placement carried; both
    are opaque text to everybody else. `retried`: a later request repeated this one, so nothing
    that follows is feedback on it.
    """

    turn_id: str
    session_id: str
    source: str
    owner: str
    kind: Kind
    parent_id: str | None
    node_hash: str
    request_hash: str
    has_next_state: bool
    created: float
    retried: bool = False

    @property
    def system_hash(self) -> str:
        """The part of `request_hash` that stands for the system text."""
        return self.request_hash.partition(".")[0]
