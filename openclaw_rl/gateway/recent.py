"""A bounded memory of turn ids."""

from __future__ import annotations

from collections import OrderedDict


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
