"""The trajectory tree: where a request belongs, of what kind it is, what it says of the last turn.

Guarantees, whatever clients send:
- no message of one session becomes the next state of another session's turn, and histories never
  match across owners or across explicit session names;
- a turn gets at most one next state among committed turns; side requests give none, get none;
- `place` depends only on the requests seen so far and changes nothing in the tree, `look` nothing
  at all but the time that reading takes; their cost is linear in the request, mostly in what is
  new to its session; memory is bounded by `max_turns`.

Pure: no I/O, no clock (the caller passes `now`). Not thread-safe; one event loop owns it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from cachetools import LRUCache

from openclaw_rl.session.canonical import (
    History,
    Step,
    Trace,
    extend,
    followed,
    read_history,
    text_of,
)
from openclaw_rl.session.identity import Identity, RequestView, identify, is_conversation, is_named
from openclaw_rl.session.kind import ALWAYS_WITH_TOOLS, last_user, named_kind, side_pattern
from openclaw_rl.session.tree import Tree
from openclaw_rl.types import Kind, Message, Turn

_RETRY_SECONDS = 600.0
"""How long after a turn a request without any name may still be its client's retry. OpenClaw
repeats silently after about 82 s, SDKs give up after ten minutes."""

_NAMED, _EXTENDS = "header:x-turn-type", "extends"
"""Why a request is of its kind, where that is asked for again."""

_CLIENTS = 1024
"""How many (owner, program) pairs and sessions are remembered for telling main from side."""

_READ_CHARS = 32 * 2**20
"""How many characters of histories are kept as they were read, the last of each conversation."""


@dataclass(slots=True)
class Placement:
    """Where a request belongs in the trajectory tree, and what it says of other turns.

    `turn` is the head of the turn that will answer it, as far as its place tells; whoever serves it
    names it and fills it in. `known_replies` maps the index of an assistant message in the request
    to the turn that produced it. `next_state` is what followed the parent's reply. `retried_id` is
    an earlier turn that this request repeats, and `superseded` are turns of the very request that
    the parent answered, asked while it was under way: the client went on from the parent. All these
    must be dropped as `retried`. `duplicates` had answered the same request by then.
    """

    turn: Turn
    history_hash: str
    """Chain hash of the request's messages; `Tracker.commit` extends it by the reply."""
    known_replies: Mapping[int, str]
    next_state: tuple[Message, ...] | None
    retried_id: str | None
    superseded: tuple[str, ...]
    duplicates: frozenset[str]


class Tracker:
    """Places requests; see the module's guarantees.

    `unnamed` says what a request without `x-turn-type` is that opens a trajectory: "main", "side",
    or "auto" (side if the same program, under the same key, has named its turns before).
    """

    def __init__(
        self, *, max_turns: int = 20_000, unnamed: Literal["auto", "main", "side"] = "auto"
    ) -> None:
        self._tree = Tree(max_turns)
        self._unnamed = unnamed
        self._opened = 0
        self._namers: LRUCache[tuple[str, str], bool] = LRUCache(_CLIENTS)
        self._tool_sessions: LRUCache[tuple[str, str], bool] = LRUCache(_CLIENTS)
        self._followed: LRUCache[str | None, bool] = LRUCache(max_turns)
        self._readings: LRUCache[Any, History] = LRUCache(_READ_CHARS, lambda history: history.size)

    @property
    def turns(self) -> int:
        """How many turns are held in memory, at most `max_turns`."""
        return len(self._tree)

    def place(self, view: RequestView, now: float) -> Placement:
        """Where this request belongs. Turns are added only by `commit`; this notes which
        programs name their turns, which sessions use tools, and which turns were followed."""
        placement = self.look(view, now)
        turn = placement.turn
        if turn.kind_reason == _NAMED and turn.kind == "main":
            # Naming only what is side (a probe, an exam) leaves the rest as it is.
            self._namers[_program(view)] = True
        opens = turn.kind == "main" and turn.kind_reason != _EXTENDS
        if opens and view.has_tools and turn.source not in ("new", "body:user"):
            self._tool_sessions[turn.owner, turn.session_id] = True
        if turn.parent_id is not None and placement.next_state is not None:
            self.follow(turn.parent_id)
        self._opened += turn.source == "new"
        self._tree.touch(turn.owner, turn.session_id)
        return placement

    def look(self, view: RequestView, now: float) -> Placement:
        """What `place` would say; nothing is noted."""
        named = identify(view)
        history = self._read(view, named)
        parent, mark = self._parent(view, history, named)
        identity = named or (Identity(parent.session_id, "history") if parent else None)
        kind, reason = self._kind(view, identity, parent)
        retried = None
        if kind == "main":
            retried = self._retried(view, history, identity, parent, now)
        if identity is None and retried is not None:
            identity = Identity(retried.session_id, "history")
        if identity is None:
            identity = self._new_session(view.owner, history.request_hash, now)
        matched = 0
        if mark is not None:  # empty replies behind it are its own
            behind = history.steps[mark.end :]
            full = (step.end - 1 for step in behind if step.trace is not Trace.EMPTY)
            matched = next(full, len(history.steps))
        next_state = None
        if kind == "main" and parent is not None and parent.kind == "main" and _waits(parent):
            next_state = _next_state(history, mark)
        turn = Turn(
            turn_id="",
            session_id=identity.session_id,
            source=identity.source,
            owner=view.owner,
            kind=kind,
            kind_reason=reason,
            parent_id=parent.turn_id if parent else None,
            matched=matched,
            request_hash=history.request_hash,
            created=now,
        )
        return Placement(
            turn=turn,
            history_hash=history.history_hash,
            known_replies=self._known_replies(view.owner, history, identity.session_id, parent),
            next_state=next_state,
            retried_id=retried.turn_id if retried else None,
            superseded=self._superseded(parent) if parent and next_state else (),
            duplicates=frozenset(same.turn_id for same in self._tree.duplicates(turn)),
        )

    def follow(self, turn_id: str) -> None:
        """The turn has its next state (`place` notes that by itself)."""
        self._followed[turn_id] = True

    def repeated(self, placement: Placement) -> str | None:
        """The turn that the request repeats; None if something followed that turn meanwhile."""
        return None if placement.retried_id in self._followed else placement.retried_id

    def commit(self, placement: Placement, reply: Message) -> None:
        """The request was answered: the turn (which has its id by now) gets the hash of its history
        and reply and is remembered. It is dropped as `retried` where the same request was answered
        while it was under way, and the client went on from there."""
        turn = placement.turn
        turn.node_hash = extend(placement.history_hash, reply)
        meanwhile = {same.turn_id for same in self._tree.duplicates(turn)} - placement.duplicates
        if turn.kind == "main" and any(same in self._followed for same in meanwhile):
            turn.drop_reason = "retried"
        for earlier in (self.repeated(placement), *placement.superseded):
            if (known := self._tree.turn(earlier)) is not None:
                known.drop_reason = "retried"
        answered = self._tree.turn(turn.parent_id)
        if answered is not None and placement.next_state is not None:
            answered.next_state = ()
        self._tree.add(turn.head())

    def restore(self, heads: Iterable[Turn]) -> None:
        """Remember turns of an earlier run, in any order."""
        for head in sorted(heads, key=lambda turn: (turn.created, turn.turn_id)):
            self._tree.add(head)

    def forget_session(self, session_id: str, owner: str | None = None) -> None:
        """Forget a session's turns: what comes next under its name opens a new trajectory."""
        self._tree.forget(session_id, owner)

    def _read(self, view: RequestView, named: Identity | None) -> History:
        """The request's history; what it shares with the last one under its name is not read
        again (turn 200 takes a sixth of the time). Without a name, its first words stand for one:
        this is about speed only."""
        name = named.session_id if named else next(map(text_of, view.messages), "")
        key = (view.owner, named is not None, name)
        history = read_history(view.messages, self._readings.get(key))
        with suppress(ValueError):  # larger than all of the cache
            self._readings[key] = history
        return history

    # -- the parent ---------------------------------------------------------------------------

    def _parent(
        self, view: RequestView, history: History, named: Identity | None
    ) -> tuple[Turn | None, Step | None]:
        """The turn that the request extends, and the mark where its history ends in the request.

        The mark is None where the turn is recognised although something between its first message
        and its reply was re-worded since.
        """
        session_id = named.session_id if named else None
        exact, mark = self._exact_parent(view, history, session_id)
        session_id = exact.session_id if exact else session_id
        reply = next((m for m in reversed(history.marks) if m.node), None)
        if reply is None or session_id is None or (mark is not None and mark.end >= reply.end):
            return exact, mark
        alike = self._tree.by_similarity(view.owner, session_id, reply.node)
        reworded = _choose(alike, history.system_hash, frozenset())
        return (reworded, None) if reworded else (exact, mark)

    def _exact_parent(
        self, view: RequestView, history: History, session_id: str | None
    ) -> tuple[Turn | None, Step | None]:
        prefer: frozenset[str] = frozenset()
        if _says_retry(view.headers):
            same = self._tree.by_request(view.owner, history.request_hash)
            prefer = frozenset(turn.parent_id for turn in same if turn.parent_id is not None)
        first_reply = next((m.end for m in history.marks if m.node), None)
        for mark in reversed(history.marks):
            # A turn without a visible reply has the hash of its own request: without anything
            # new behind it this is that request once more. And without a name or any reply before
            # it nothing tells it from another person's question in the same words.
            fresh = mark.end < history.fresh_end
            known = session_id is not None or (first_reply is not None and first_reply <= mark.end)
            for node_hash in (mark.node, mark.empty if fresh and known else ""):
                if node_hash:
                    found = self._tree.by_history(view.owner, node_hash, session_id)
                    turn = _choose(found, history.system_hash, prefer)
                    if turn is not None:
                        return turn, mark
        return None, None

    def _new_session(self, owner: str, request_hash: str, now: float) -> Identity:
        """A name of our own. Two users may open with the same words at the same time."""
        seed = f"{owner}\0{request_hash}\0{now!r}\0{self._opened}"
        name = hashlib.blake2b(seed.encode("utf-8", "surrogatepass"), digest_size=10).hexdigest()
        return Identity(f"chat-{name}", "new")

    def _known_replies(
        self, owner: str, history: History, session_id: str, parent: Turn | None
    ) -> Mapping[int, str]:
        """Which turn made which assistant message; the parent's own ancestors come first."""
        ancestors: set[str] = set()
        known: dict[int, str] = {}
        for mark in history.marks:
            if not mark.node:
                continue
            found = self._tree.by_history(owner, mark.node, session_id) or self._tree.by_similarity(
                owner, session_id, mark.node
            )
            turn = next(iter(found), None)
            if len(found) > 1:  # rare: the ancestors are looked up only then
                ancestors = ancestors or set(self._chain(parent))
                turn = min(found, key=lambda turn: turn.turn_id not in ancestors)
            if turn is not None:
                known[mark.end - 1] = turn.turn_id
        return known

    def _chain(self, turn: Turn | None) -> Iterator[str]:
        """The turn and its ancestors, as far as they are known."""
        seen: set[str] = set()
        while turn is not None and turn.turn_id not in seen:
            seen.add(turn.turn_id)
            yield turn.turn_id
            turn = self._tree.turn(turn.parent_id)

    # -- main or side -------------------------------------------------------------------------

    def _kind(
        self, view: RequestView, identity: Identity | None, parent: Turn | None
    ) -> tuple[Kind, str]:
        session = None
        if identity is not None and identity.source != "body:user":
            session = (view.owner, identity.session_id)
        explicit = named_kind(view.headers)
        if explicit is not None:
            return explicit, _NAMED
        pattern = side_pattern(view.messages)
        if pattern is not None:
            return "side", f"pattern:{pattern}"
        program = view.headers.get("user-agent", "")
        if not view.has_tools and program.startswith(ALWAYS_WITH_TOOLS):
            return "side", "no tools in a program with tools"
        if parent is not None and parent.kind == "main":
            return "main", _EXTENDS
        if last_user(view.messages) is None:
            return "side", "no user message"
        if self._unnamed == "side":
            return "side", "unnamed"
        if self._unnamed == "auto" and _program(view) in self._namers:
            return "side", "unnamed among named turns"
        if session in self._tool_sessions and not view.has_tools:
            return "side", "no tools in a session with tools"
        return "main", "opens"

    # -- retries ------------------------------------------------------------------------------

    def _superseded(self, turn: Turn) -> tuple[str, ...]:
        """Other turns of the same request that still wait. One that came later, when `turn` was
        known, has taken its place already: these were under way at the same time."""
        same = self._tree.duplicates(turn)
        return tuple(other.turn_id for other in same if other is not turn and _waits(other))

    def _retried(
        self,
        view: RequestView,
        history: History,
        identity: Identity | None,
        parent: Turn | None,
        now: float,
    ) -> Turn | None:
        """The turn that this request repeats, if nothing has followed it yet."""
        says_retry = _says_retry(view.headers)
        in_session = identity is not None and (
            parent is not None or says_retry or is_conversation(identity.source)
        )
        if not in_session and (identity is not None or not says_retry):
            return None
        parent_id = parent.turn_id if parent else None
        same = [
            turn
            for turn in self._tree.by_request(view.owner, history.request_hash)
            if turn.parent_id == parent_id and turn.kind == "main" and _waits(turn)
        ]
        if identity is not None:
            same = [turn for turn in same if turn.session_id == identity.session_id]
            return same[-1] if same else None
        # Another user may have opened with the same words: only a single recent turn is ours.
        since = now - _RETRY_SECONDS
        same = [turn for turn in same if not is_named(turn.source) and turn.created >= since]
        return same[0] if len(same) == 1 else None


def _choose(turns: Iterable[Turn], system_hash: str, prefer: frozenset[str]) -> Turn | None:
    """Among turns with one history: the oldest that still waits for its next state."""
    return min(
        turns,
        key=lambda turn: (
            turn.turn_id not in prefer,
            turn.kind == "side",
            is_named(turn.source),
            turn.request_hash.partition(".")[0] != system_hash,
            turn.drop_reason == "retried",
            turn.next_state is not None,
        ),
        default=None,
    )


def _waits(turn: Turn) -> bool:
    return turn.next_state is None and turn.drop_reason != "retried"


def _next_state(history: History, mark: Step | None) -> tuple[Message, ...] | None:
    """What followed a turn whose history ends at `mark` (None: at the last reply of the request,
    as something before it was re-worded since). None where nothing did, or where the user only said
    the same again after a turn without a visible reply."""
    if mark is None:
        mark = next(step for step in reversed(history.marks) if step.node)
    if not mark.node:
        after = next((step for step in history.marks if step.end > mark.end), None)
        if after is not None and after.digest == mark.digest:
            return None
    return tuple(followed(history.messages[mark.end :])) or None


def _says_retry(headers: Mapping[str, str]) -> bool:
    count = headers.get("x-stainless-retry-count", "").strip()
    if count.isdecimal() and count.strip("0"):  # no int(): a header may hold any digits
        return True
    return headers.get("x-retry", "").strip().lower() not in ("", "0", "false", "no")


def _program(view: RequestView) -> tuple[str, str]:
    return view.owner, view.headers.get("user-agent", "")
