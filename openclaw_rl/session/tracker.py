"""The trajectory tree: where a request belongs, of what kind it is, what it says of the last turn.

Guarantees, whatever clients send:
- no message of one session becomes the next state of another session's turn, and histories never
  match across owners or across explicit session names;
- a turn gets at most one next state among committed turns; side requests give none, get none;
- of the turns that answer one request (asked again, or twice at once) one is kept: the one that the
  client goes on from, and until it does, the latest;
- `place` depends only on the requests seen so far and changes nothing in the tree, `look` nothing
  at all but the time that reading takes; their cost is linear in the request, mostly in what is
  new to its session; memory is bounded by `max_turns`.

Pure: no I/O, no clock (the caller passes `now`). Not thread-safe; one event loop owns it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
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
from openclaw_rl.session.tree import Key, Tree, request_key
from openclaw_rl.types import Kind, Message, Turn

_RETRY_SECONDS = 600.0
"""How long after a turn a request without any name may still be its client's retry. OpenClaw
repeats silently after about 82 s, SDKs give up after ten minutes."""

_SAID = 16
"""How many turns with equal replies are looked at, the newest."""

_NAMED, _EXTENDS = "header:x-turn-type", "extends"
"""Why a request is of its kind, where that is asked for again."""

_CLIENTS = 1024
"""How many (owner, program) pairs and sessions are remembered for telling main from side."""

_READ_CHARS = 32 * 2**20
"""How many characters of histories are kept as they were read, the last of each conversation."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request belongs in the trajectory tree, and what it says of other turns."""

    turn: Turn
    """What its place says of the turn that will answer it: who speaks, main or side, the parent."""
    history_hash: str
    """Chain hash of the request's messages; `Tracker.commit` extends it by the reply."""
    served_replies: Mapping[int, str]
    """The turn that made an assistant message of the request, by the message's index."""
    next_state: tuple[Message, ...] | None
    """What followed the parent's reply."""
    superseded: tuple[str, ...]
    """Turns that end as `retried` with its commit: the one whose request is asked again, and those
    that answered the parent's request beside it, as the client went on from the parent."""
    number: int = field(compare=False)
    """Requests placed so far, with this one."""


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
        self._placed = 0
        """How many requests were placed."""
        self._continued: LRUCache[Key, int] = LRUCache(max_turns)
        """By request: how many were placed when the client last went on from an answer to it."""
        self._ended: LRUCache[tuple[str | None, str], int] = LRUCache(max_turns)
        """By owner (None: all) and session: how many were placed when it was said to have ended."""
        self._namers: LRUCache[tuple[str, str], bool] = LRUCache(_CLIENTS)
        self._tool_sessions: LRUCache[tuple[str, str], bool] = LRUCache(_CLIENTS)
        self._readings: LRUCache[Any, History] = LRUCache(_READ_CHARS, lambda history: history.size)

    @property
    def turns(self) -> int:
        """How many turns are held in memory, at most `max_turns`."""
        return len(self._tree)

    def place(self, view: RequestView, now: float) -> Placement:
        """Where this request belongs. Turns are added only by `commit`; this notes which programs
        name their turns, which sessions use tools, and which requests the client went on from."""
        placement = self.look(view, now)
        turn = placement.turn
        if turn.kind_reason == _NAMED and turn.kind == "main":
            # Naming only what is side (a probe, an exam) leaves the rest as it is.
            self._namers[_program(view)] = True
        opens = turn.kind == "main" and turn.kind_reason != _EXTENDS
        if opens and view.has_tools and turn.source not in ("new", "body:user"):
            self._tool_sessions[turn.owner, turn.session_id] = True
        self._placed = placement.number
        parent = self._tree.turn(turn.parent_id)
        if parent is not None and placement.next_state is not None:
            self._continued[request_key(parent)] = self._placed
        self._tree.touch(turn.owner, turn.session_id)
        return placement

    def look(self, view: RequestView, now: float) -> Placement:
        """What `place` would say; nothing is noted."""
        named = identify(view)
        history = self._read(view, named)
        parent, mark = self._parent(view, history, named)
        identity = named or (Identity(parent.session_id, "history") if parent else None)
        kind, reason = self._kind(view, identity, parent)
        main = kind == "main"
        repeated = self._repeated(view, history, identity, parent, now) if main else None
        if identity is None and repeated is not None:
            identity = Identity(repeated.session_id, "history")
        if identity is None:
            identity = self._new_session(view.owner, history.request_hash, now)
        next_state, superseded = None, [repeated] if repeated is not None else []
        if parent is not None and main and parent.kind == "main" and _waits(parent):
            next_state = _next_state(history, mark)
        if parent is not None and next_state is not None:
            superseded += filter(_waits, self._tree.duplicates(parent))
        matched = 0
        if mark is not None:  # empty replies behind it are its own
            behind = history.steps[mark.end :]
            full = (step.end - 1 for step in behind if step.trace is not Trace.EMPTY)
            matched = next(full, len(history.steps))
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
            served_replies=self._served_replies(view.owner, history, identity.session_id, parent),
            next_state=next_state,
            superseded=tuple(one.turn_id for one in superseded),
            number=self._placed + 1,
        )

    def commit(self, placement: Placement, turn_id: str, reply: Message) -> Turn:
        """The request was answered: remembers the turn and gives its head.

        It is dropped if, while it was under way, the client went on from another answer to the same
        request (`retried`), or its session ended.
        """
        hashed = extend(placement.history_hash, reply)
        turn = replace(placement.turn, turn_id=turn_id, node_hash=hashed)
        ends = (self._ended.get((owner, turn.session_id), 0) for owner in (turn.owner, None))
        if turn.kind == "main" and self._continued.get(request_key(turn), 0) > placement.number:
            turn.drop_reason = "retried"
        elif max(ends) >= placement.number:
            turn.drop_reason = "session_ended"
        for other in map(self._tree.turn, placement.superseded):
            if other is not None:
                other.drop_reason = "retried"
        parent = self._tree.turn(turn.parent_id)
        if parent is not None and placement.next_state is not None:
            parent.next_state = ()
        self._tree.add(turn)
        return turn.head()

    def restore(self, heads: Iterable[Turn]) -> None:
        """Remember turns of an earlier run, in any order."""
        for head in sorted(heads, key=lambda turn: (turn.created, turn.turn_id)):
            self._tree.add(head)

    def forget(self, turn_id: str) -> None:
        """Forget a turn: nothing hangs on it."""
        self._tree.remove(turn_id)

    def end_session(self, session_id: str, owner: str | None = None) -> None:
        """A session (of every owner where `owner` is None) ended: its turns are forgotten, and what
        comes next under its name opens a new trajectory."""
        self._ended[owner, session_id] = self._placed
        self._tree.remove_session(session_id, owner)

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

        The mark is None where the turn is recognised by its reply although something before it was
        re-worded since, or left out.
        """
        session_id = named.session_id if named else None
        exact, mark = self._exact_parent(view, history, session_id)
        session_id = exact.session_id if exact else session_id
        replies = [m for m in history.marks if m.node]
        if not replies or (mark is not None and mark.end >= replies[-1].end):
            return exact, mark
        reworded = None
        if session_id is not None:
            alike = self._tree.by_similarity(view.owner, session_id, replies[-1].node)
            reworded = _choose(alike, history.system_hash)
        reworded = reworded or self._by_reply(view.owner, session_id, replies)
        return (reworded, None) if reworded else (exact, mark)

    def _by_reply(self, owner: str, session_id: str | None, replies: Sequence[Step]) -> Turn | None:
        """The turn that waits with the last of the request's `replies`, where those before it are
        of its session, too: clients send a window of their history, or word anew what came first.
        Equal words of two people do not meet, and what follows a summary has no reply before it.
        """
        last, before = replies[-1], [step.node for step in replies[:-1]]
        said = islice(self._tree.by_reply(owner, session_id, last.node), _SAID)
        found: dict[str, Turn] = {}  # the newest of each session
        for turn in said:
            if turn.kind == "main" and _waits(turn):
                found.setdefault(turn.session_id, turn)
        own = [
            turn
            for name, turn in found.items()
            if before and all(any(self._tree.by_reply(owner, name, node)) for node in before)
        ]
        return own[0] if len(own) == 1 else None

    def _exact_parent(
        self, view: RequestView, history: History, session_id: str | None
    ) -> tuple[Turn | None, Step | None]:
        retry = _says_retry(view.headers)
        same = self._tree.by_request(view.owner, history.request_hash, None) if retry else ()
        prefer = {turn.parent_id for turn in same}
        first_reply = next((m.end for m in history.marks if m.node), None)
        for mark in reversed(history.marks):
            # A turn without a visible reply has the hash of its own request: without anything
            # new behind it this is that request once more. And without a name or any reply before
            # it nothing tells it from another person's question in the same words.
            fresh = mark.end < history.fresh_end
            own = session_id is not None or (first_reply is not None and first_reply <= mark.end)
            for node_hash in (mark.node, mark.empty if fresh and own else ""):
                if node_hash:
                    found = self._tree.by_history(view.owner, node_hash, session_id)
                    turn = _choose(found, history.system_hash, prefer)
                    if turn is not None:
                        return turn, mark
        return None, None

    def _new_session(self, owner: str, request_hash: str, now: float) -> Identity:
        """A name of our own. Two users may open with the same words at the same time."""
        seed = f"{owner}\0{request_hash}\0{now!r}\0{self._placed}"
        name = hashlib.blake2b(seed.encode("utf-8", "surrogatepass"), digest_size=10).hexdigest()
        return Identity(f"chat-{name}", "new")

    def _served_replies(
        self, owner: str, history: History, session_id: str, parent: Turn | None
    ) -> Mapping[int, str]:
        """Which turn made which assistant message; the parent's own ancestors come first."""
        ancestors: set[str] = set()
        served: dict[int, str] = {}
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
                served[mark.end - 1] = turn.turn_id
        return served

    def _chain(self, turn: Turn | None) -> Iterator[str]:
        """The turn and its ancestors, as far as they are remembered."""
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

    # -- the same request again ----------------------------------------------------------------

    def _repeated(
        self,
        view: RequestView,
        history: History,
        identity: Identity | None,
        parent: Turn | None,
        now: float,
    ) -> Turn | None:
        """The turn that answered this very request before, if it still waits for what follows."""
        session_id, source = (identity.session_id, identity.source) if identity else (None, "")
        if parent is None and not is_conversation(source) and not _says_retry(view.headers):
            return None  # somebody else may open with the same words
        parent_id = parent.turn_id if parent else None
        same = [
            turn
            for turn in self._tree.by_request(view.owner, history.request_hash, session_id)
            if turn.parent_id == parent_id and turn.kind == "main" and _waits(turn)
        ]
        if identity is not None:
            return same[-1] if same else None
        # Without any name only a single recent turn is surely ours.
        since = now - _RETRY_SECONDS
        same = [turn for turn in same if not is_named(turn.source) and turn.created >= since]
        return same[0] if len(same) == 1 else None


def _choose(
    turns: Iterable[Turn], system_hash: str, prefer: Collection[str | None] = ()
) -> Turn | None:
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
