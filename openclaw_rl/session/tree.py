"""The turns that the tracker remembers, found by history, by request and by session.

Guarantees: at most `max_turns` turns are held; the least recently used session loses its oldest
turns first. Turns are never found across owners, and always oldest first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator

from openclaw_rl.session.canonical import reply_of, similarity
from openclaw_rl.session.identity import is_conversation, is_named
from openclaw_rl.types import Turn

Key = tuple[str, ...]


class Tree:
    """Heads of turns, under a bound."""

    def __init__(self, max_turns: int) -> None:
        self.max_turns = max_turns
        self._turns: dict[str, Turn] = {}
        self._sessions: OrderedDict[tuple[str, str], dict[str, Turn]] = OrderedDict()
        self._index: dict[Key, dict[str, Turn]] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, turn: Turn) -> None:
        """Remember `turn` (again: the older one with this id is replaced), within the bound."""
        self.remove(turn.turn_id)
        self._turns[turn.turn_id] = turn
        self._sessions.setdefault((turn.owner, turn.session_id), {})[turn.turn_id] = turn
        self.touch(turn.owner, turn.session_id)
        for key in _keys(turn):
            self._index.setdefault(key, {})[turn.turn_id] = turn
        while len(self._turns) > self.max_turns:
            oldest = next(iter(self._sessions.values()))
            self.remove(next(iter(oldest)))

    def touch(self, owner: str, session_id: str) -> None:
        """This session was used just now."""
        if (owner, session_id) in self._sessions:
            self._sessions.move_to_end((owner, session_id))

    def remove_session(self, session_id: str, owner: str | None = None) -> None:
        """Forget a session's turns (of every owner where `owner` is None)."""
        for key in [k for k in self._sessions if k[1] == session_id and owner in (None, k[0])]:
            for turn_id in list(self._sessions[key]):
                self.remove(turn_id)

    def turn(self, turn_id: str | None) -> Turn | None:
        return None if turn_id is None else self._turns.get(turn_id)

    def by_history(self, owner: str, node_hash: str, session_id: str | None) -> Collection[Turn]:
        """Turns whose history with reply has this hash; of one session, or (None) of all."""
        if session_id is None:
            return self._find("history", owner, node_hash)
        return self._find("session", owner, session_id, node_hash)

    def by_similarity(self, owner: str, session_id: str, node_hash: str) -> Collection[Turn]:
        """Turns of the session that differ from `node_hash` only in the middle of their history."""
        similar = similarity(node_hash)
        return self._find("similar", owner, session_id, similar) if similar else ()

    def by_reply(self, owner: str, session_id: str | None, node_hash: str) -> Iterator[Turn]:
        """Turns whose reply is that of `node_hash`, whatever came before it, newest first; of one
        session, or (None) of all that no client named."""
        said = reply_of(node_hash)
        key = ("said", owner, said) if session_id is None else ("reply", owner, session_id, said)
        return reversed(self._index.get(key, {}).values()) if said else iter(())

    def by_request(self, owner: str, request_hash: str, session_id: str | None) -> Collection[Turn]:
        """Turns that answered these very messages; of one session, or (None) of all."""
        if session_id is None:
            return self._find("request", owner, request_hash)
        return self._find("asked", owner, session_id, request_hash)

    def duplicates(self, turn: Turn) -> list[Turn]:
        """The other main turns that answered the same request."""
        key = request_key(turn)
        same = self.by_request(turn.owner, turn.request_hash, turn.session_id)
        return [o for o in same if o is not turn and o.kind == "main" and request_key(o) == key]

    def remove(self, turn_id: str) -> None:
        """Forget a turn, if it is here."""
        if (turn := self._turns.pop(turn_id, None)) is None:
            return
        session = self._sessions[turn.owner, turn.session_id]
        del session[turn_id]
        if not session:
            del self._sessions[turn.owner, turn.session_id]
        for key in _keys(turn):
            del self._index[key][turn_id]
            if not self._index[key]:
                del self._index[key]

    def _find(self, *key: str) -> Collection[Turn]:
        return self._index.get(key, {}).values()


def request_key(turn: Turn) -> Key:
    """Equal for turns that answer the same request: asked again, or twice at once. An opening that
    no conversation's name goes with is like no other: a person may say hello in several."""
    opening = turn.parent_id is None and not is_conversation(turn.source)
    place = turn.parent_id or (turn.turn_id if opening else "")
    return turn.owner, turn.session_id, place, turn.request_hash


def _keys(turn: Turn) -> Iterator[Key]:
    yield "history", turn.owner, turn.node_hash
    yield "session", turn.owner, turn.session_id, turn.node_hash
    yield "request", turn.owner, turn.request_hash
    yield "asked", turn.owner, turn.session_id, turn.request_hash
    if similar := similarity(turn.node_hash):
        said = reply_of(turn.node_hash)
        yield "similar", turn.owner, turn.session_id, similar
        yield "reply", turn.owner, turn.session_id, said
        if not is_named(turn.source):
            yield "said", turn.owner, said
