"""The turns that the tracker remembers, found by history, by request and by session.

Guarantees: at most `max_turns` turns are held; the least recently used session loses its oldest
turns first. Turns are never found across owners, and always oldest first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator

from openclaw_rl.session.canonical import similarity
from openclaw_rl.types import Turn

Key = tuple[str, ...]


class Tree:
    """Heads of turns, under a bound."""

    def __init__(self, max_turns: int) -> None:
        if max_turns < 1:
            raise ValueError("max_turns must be at least 1")
        self.max_turns = max_turns
        self._turns: dict[str, Turn] = {}
        self._sessions: OrderedDict[tuple[str, str], dict[str, Turn]] = OrderedDict()
        self._index: dict[Key, dict[str, Turn]] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, turn: Turn) -> None:
        """Remember `turn` (again: the older one with this id is replaced), within the bound."""
        if turn.turn_id in self._turns:
            self._remove(self._turns[turn.turn_id])
        self._turns[turn.turn_id] = turn
        self._sessions.setdefault((turn.owner, turn.session_id), {})[turn.turn_id] = turn
        self.touch(turn.owner, turn.session_id)
        for key in _keys(turn):
            self._index.setdefault(key, {})[turn.turn_id] = turn
        while len(self._turns) > self.max_turns:
            oldest = next(iter(self._sessions.values()))
            self._remove(next(iter(oldest.values())))

    def touch(self, owner: str, session_id: str) -> None:
        """This session was used just now."""
        if (owner, session_id) in self._sessions:
            self._sessions.move_to_end((owner, session_id))

    def forget(self, session_id: str, owner: str | None = None) -> None:
        """Drop a session's turns (of every owner where `owner` is None)."""
        for key in [k for k in self._sessions if k[1] == session_id and owner in (None, k[0])]:
            for turn in list(self._sessions[key].values()):
                self._remove(turn)

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

    def by_request(self, owner: str, request_hash: str) -> Collection[Turn]:
        """Turns that answered exactly this request."""
        return self._find("request", owner, request_hash)

    def duplicates(self, turn: Turn) -> list[Turn]:
        """Main turns that answered the same request at the same place."""
        place = (turn.session_id, turn.parent_id, "main")
        same = self.by_request(turn.owner, turn.request_hash)
        return [one for one in same if (one.session_id, one.parent_id, one.kind) == place]

    def _find(self, *key: str) -> Collection[Turn]:
        return self._index.get(key, {}).values()

    def _remove(self, turn: Turn) -> None:
        del self._turns[turn.turn_id]
        session = self._sessions[turn.owner, turn.session_id]
        del session[turn.turn_id]
        if not session:
            del self._sessions[turn.owner, turn.session_id]
        for key in _keys(turn):
            del self._index[key][turn.turn_id]
            if not self._index[key]:
                del self._index[key]


def _keys(turn: Turn) -> Iterator[Key]:
    yield "history", turn.owner, turn.node_hash
    yield "session", turn.owner, turn.session_id, turn.node_hash
    yield "request", turn.owner, turn.request_hash
    if similar := similarity(turn.node_hash):
        yield "similar", turn.owner, turn.session_id, similar
