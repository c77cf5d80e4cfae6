"""Small memories of recent turns, bounded in number; the oldest are forgotten first."""

from __future__ import annotations

from collections import OrderedDict

from openclaw_rl.gateway.auth import Caller


class RecentIds:
    """A set of turn ids that forgets the oldest beyond `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ids: OrderedDict[str | None, None] = OrderedDict()

    def add(self, turn_id: str) -> None:
        """Remember an id."""
        self._ids[turn_id] = None
        if len(self._ids) > self._limit:
            self._ids.popitem(last=False)

    def __contains__(self, turn_id: str | None) -> bool:
        return turn_id in self._ids


class NewestTurns:
    """The newest turn of each owner's sessions, for feedback that names only the session."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._turns: OrderedDict[tuple[str, str], str] = OrderedDict()

    def note(self, owner: str, session_id: str, turn_id: str) -> None:
        """This turn is the session's newest now."""
        self._turns[owner, session_id] = turn_id
        self._turns.move_to_end((owner, session_id))
        while len(self._turns) > self._limit:
            self._turns.popitem(last=False)

    def of(self, session_id: str, caller: Caller) -> str | None:
        """The newest turn of the caller's session (of anybody's, where no key is asked for)."""
        mine = self._turns.get((caller.owner, session_id))
        if mine is not None or not caller.anybody:
            return mine
        same = (turn for (_, name), turn in reversed(self._turns.items()) if name == session_id)
        return next(same, None)


class Endings:
    """When sessions were last told to have ended, for replies that were under way then."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ended: OrderedDict[tuple[str, str | None], float] = OrderedDict()

    def note(self, session_id: str, owner: str | None, at: float) -> None:
        """The session of `owner` (None: of everybody who has one of that name) ends now."""
        self._ended[session_id, owner] = at
        self._ended.move_to_end((session_id, owner))
        while len(self._ended) > self._limit:
            self._ended.popitem(last=False)

    def since(self, session_id: str, owner: str, began: float) -> bool:
        """Whether the session has ended since a turn of it began."""
        return any(self._ended.get((session_id, one), began) > began for one in (owner, None))
