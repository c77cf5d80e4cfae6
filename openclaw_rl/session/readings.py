"""The last history read of each conversation, so that the next request is only compared with it and
not read again. Bounded in bytes and in number; least recently used conversations go first."""

from __future__ import annotations

from collections import OrderedDict

from openclaw_rl.session.canonical import History
from openclaw_rl.types import Message

Key = tuple[str, bool, str]

MAX_CHARS = 16 * 2**20
MAX_MESSAGES = 2**17
"""About 100 bytes of Python's objects stand around each."""


class Readings:
    """`History` by conversation. For one event loop, hence without a lock."""

    def __init__(self, max_chars: int = MAX_CHARS, max_messages: int = MAX_MESSAGES) -> None:
        self._limits = (max_chars, max_messages)
        self._kept: OrderedDict[Key, tuple[History, int]] = OrderedDict()
        self.chars = 0
        self.messages = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Key) -> History | None:
        """The last reading under this key."""
        kept = self._kept.get(key)
        return None if kept is None else kept[0]

    def put(self, key: Key, history: History) -> None:
        """Keep this reading in place of the one before."""
        self._forget(key)
        chars = sum(map(_chars, history.messages))
        self._kept[key] = (history, chars)
        self.chars += chars
        self.messages += len(history.messages)
        while self.chars > self._limits[0] or self.messages > self._limits[1]:
            self._forget(next(iter(self._kept)))

    def _forget(self, key: Key) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self.chars -= kept[1]
            self.messages -= len(kept[0].messages)


def _chars(message: Message) -> int:
    content, calls = message.get("content"), message.get("tool_calls")
    size = len(content) if isinstance(content, str) else len(str(content))
    return size + len(str(calls)) if calls else size
