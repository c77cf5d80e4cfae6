"""What the gateway remembers of recent turns: the exact tokens and the reply, bounded in bytes.

A request that continues a turn begins with that turn's tokens, so they are kept ready; whatever
was evicted is read from the journal again. Least recently used turns go first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from openclaw_rl.types import Message

OVERHEAD_BYTES = 1000
"""Python's objects around one entry, roughly; keeps tiny turns from being counted as free."""


@dataclass(frozen=True, slots=True)
class KnownTurn:
    """A finished turn: its reply and, unless outgrown, its tokens.

    `tokens` is prompt and output (int32), the last `output_len` of them the output; `rendered_len`
    and `rendered_sha` describe the prompt's text.
    """

    reply: Message
    tokens: array[int] | None
    output_len: int
    rendered_len: int
    rendered_sha: str

    @property
    def bytes(self) -> int:
        """About what it costs in memory."""
        return OVERHEAD_BYTES + 4 * len(self.tokens or ()) + message_bytes(self.reply)


def compact(tokens: Sequence[int]) -> array[int]:
    """Token ids at four bytes each."""
    return array("i", tokens)


def message_bytes(message: Message) -> int:
    """About the memory of a reply's texts."""
    size = sum(len(value) for value in message.values() if isinstance(value, str))
    for call in message.get("tool_calls") or ():
        size += 100 + len(str(call.get("function", {}).get("arguments", "")))
    return size


class KnownTurns:
    """Least-recently-used turns within `limit` bytes. For one event loop, hence without a lock."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._turns: OrderedDict[str, KnownTurn] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._turns)

    def __contains__(self, turn_id: str) -> bool:
        return turn_id in self._turns

    def get(self, turn_id: str) -> KnownTurn | None:
        """The turn, which then counts as recently used."""
        turn = self._turns.get(turn_id)
        if turn is not None:
            self._turns.move_to_end(turn_id)
        return turn

    def put(self, turn_id: str, turn: KnownTurn) -> None:
        """Remember a turn; one that is larger than the whole limit is not kept."""
        self.forget(turn_id)
        if turn.bytes > self._limit:
            return
        self._turns[turn_id] = turn
        self.bytes += turn.bytes
        while self.bytes > self._limit:
            _, old = self._turns.popitem(last=False)
            self.bytes -= old.bytes

    def outgrow(self, turn_id: str) -> None:
        """A later turn holds this one's tokens as its beginning: keep the reply only.

        A long session then costs its length, not the sum of its prompts. Should a branch need the
        tokens after all, the journal has them.
        """
        turn = self._turns.get(turn_id)
        if turn is not None and turn.tokens is not None:
            slim = replace(turn, tokens=None)
            self.bytes -= turn.bytes - slim.bytes
            self._turns[turn_id] = slim

    def forget(self, turn_id: str) -> None:
        """Drop one turn, if it is there."""
        turn = self._turns.pop(turn_id, None)
        if turn is not None:
            self.bytes -= turn.bytes
