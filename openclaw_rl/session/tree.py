"""The turns that the tracker remembers, found by history, by request and by session.

Guarantees: at most `max_turns` turns are held; the least recently used session loses its oldest
turns first. Turns are never found across owners.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from openclaw_rl.session.canonical import likeness
from openclaw_rl.session.types import NodeState
from openclaw_rl.types import Kind


@dataclass(slots=True, eq=False)
class Node:
    """One turn. `answered`: it has its next state; `retried`: a later request repeated it."""

    turn_id: str
    session_id: str
    source: str
    owner: str
    kind: Kind
    parent_id: str | None
    node_hash: str
    request_hash: str
    created: float
    order: int
    answered: bool = False
    retried: bool = False

    @classmethod
    def of(cls, state: NodeState, order: int) -> Node:
        """The node of a restored turn."""
        return cls(
            turn_id=state.turn_id,
            session_id=state.session_id,
            source=state.source,
            owner=state.owner,
            kind=state.kind,
            parent_id=state.parent_id,
            node_hash=state.node_hash,
            request_hash=state.request_hash,
            created=state.created,
            order=order,
            answered=state.has_next_state,
            retried=state.retried,
        )

    @property
    def system_hash(self) -> str:
        return self.request_hash.partition(".")[0]


class Index:
    """Nodes by a key, oldest first."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[str, ...], dict[str, Node]] = {}

    def add(self, key: tuple[str, ...], node: Node) -> None:
        self._nodes.setdefault(key, {})[node.turn_id] = node

    def discard(self, key: tuple[str, ...], node: Node) -> None:
        nodes = self._nodes.get(key)
        if nodes is not None:
            nodes.pop(node.turn_id, None)
            if not nodes:
                del self._nodes[key]

    def get(self, key: tuple[str, ...]) -> Iterable[Node]:
        return self._nodes.get(key, {}).values()


class Tree:
    """All turns, under a bound. `order` counts the turns ever added."""

    def __init__(self, max_turns: int) -> None:
        if max_turns < 1:
            raise ValueError("max_turns must be at least 1")
        self.max_turns = max_turns
        self.order = 0
        self._turns: dict[str, Node] = {}
        self._sessions: OrderedDict[tuple[str, str], dict[str, Node]] = OrderedDict()
        self._histories = Index()
        self._in_session = Index()
        self._likenesses = Index()
        self._requests = Index()

    @property
    def turns(self) -> int:
        """How many turns are held."""
        return len(self._turns)

    def add(self, node: Node) -> None:
        """Remember `node` (again: the older one with this id is replaced), within the bound."""
        if node.turn_id in self._turns:
            self._remove(self._turns[node.turn_id])
        self.order = max(self.order, node.order) + 1
        self._turns[node.turn_id] = node
        self._sessions.setdefault((node.owner, node.session_id), {})[node.turn_id] = node
        self.touch(node.owner, node.session_id)
        for index, key in self._keys(node):
            index.add(key, node)
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
            for node in list(self._sessions[key].values()):
                self._remove(node)

    def turn(self, turn_id: str | None) -> Node | None:
        return None if turn_id is None else self._turns.get(turn_id)

    def by_history(self, owner: str, node_hash: str, session_id: str | None) -> Iterable[Node]:
        """Turns whose history with reply has this hash; of one session, or (None) of all."""
        if session_id is None:
            return self._histories.get((owner, node_hash))
        return self._in_session.get((owner, session_id, node_hash))

    def by_likeness(self, owner: str, session_id: str, node_hash: str) -> Iterable[Node]:
        """Turns of the session that differ from `node_hash` only in the middle of their history."""
        alike = likeness(node_hash)
        return self._likenesses.get((owner, session_id, alike)) if alike else ()

    def by_request(self, owner: str, request_hash: str) -> Iterable[Node]:
        """Turns that answered exactly this request."""
        return self._requests.get((owner, request_hash))

    def siblings(
        self, owner: str, request_hash: str, session_id: str, parent_id: str | None
    ) -> list[Node]:
        """Main turns that answered the same request at the same place, oldest first."""
        return [
            node
            for node in self.by_request(owner, request_hash)
            if (node.session_id, node.parent_id, node.kind) == (session_id, parent_id, "main")
        ]

    def _keys(self, node: Node) -> list[tuple[Index, tuple[str, ...]]]:
        owner, session = node.owner, node.session_id
        keys: list[tuple[Index, tuple[str, ...]]] = [
            (self._histories, (owner, node.node_hash)),
            (self._in_session, (owner, session, node.node_hash)),
            (self._requests, (owner, node.request_hash)),
        ]
        alike = likeness(node.node_hash)
        if alike:
            keys.append((self._likenesses, (owner, session, alike)))
        return keys

    def _remove(self, node: Node) -> None:
        del self._turns[node.turn_id]
        session = self._sessions[node.owner, node.session_id]
        del session[node.turn_id]
        if not session:
            del self._sessions[node.owner, node.session_id]
        for index, key in self._keys(node):
            index.discard(key, node)
