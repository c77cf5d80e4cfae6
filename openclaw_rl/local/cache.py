"""Keys and values of sequences: one slot a sequence, each as long as its sequence needs.

Guarantees:
- the capacity of all slots together never exceeds the budget given (in tokens);
- a slot is handed out again for a prompt only up to the longest common prefix of ids that were
  computed by the same weights (`tag`), so reuse never changes what is computed;
- idle slots go in the order of their last use, before anybody is refused.

A slot is never concatenated to: it has spare room and is copied once when it outgrows it (by
half). The engine thread owns all of this; nothing here locks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

_BLOCK = 64  # capacities are multiples of this many tokens
_HEADROOM = 128  # spare room of a new slot: most replies then need no copy


@dataclass(frozen=True, slots=True)
class KVShape:
    """Shape of the keys and values of one token, equal in all layers."""

    layers: int
    heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.layers * self.heads * (self.key_dim + self.value_dim) * dtype.itemsize


class Slot:
    """Keys [layers, 1, heads, capacity, key_dim], values alike, and the ids they belong to."""

    __slots__ = ("busy", "capacity", "ids", "k", "length", "tag", "used", "v")

    def __init__(self, shape: KVShape, capacity: int, dtype: torch.dtype, device: torch.device):
        self.capacity = capacity
        self.k = torch.empty(
            shape.layers, 1, shape.heads, capacity, shape.key_dim, dtype=dtype, device=device
        )
        self.v = torch.empty(
            shape.layers, 1, shape.heads, capacity, shape.value_dim, dtype=dtype, device=device
        )
        self.ids = np.empty(capacity, dtype=np.int64)
        self.length = 0  # tokens whose keys and values are there
        self.tag: str | None = None  # whose weights made them; None: more than one version
        self.busy = True
        self.used = 0

    def copy_prefix(self, other: Slot, length: int) -> None:
        """Takes over the first `length` tokens of another slot."""
        self.k[:, :, :, :length].copy_(other.k[:, :, :, :length])
        self.v[:, :, :, :length].copy_(other.v[:, :, :, :length])
        self.ids[:length] = other.ids[:length]
        self.length = length


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Number of leading ids in which both agree."""
    n = min(len(a), len(b))
    if n == 0:
        return 0
    differ = a[:n] != b[:n]
    first = int(differ.argmax())
    return first if differ[first] else n


def round_up(tokens: int) -> int:
    """To whole blocks, as capacities are."""
    return -(-tokens // _BLOCK) * _BLOCK


class SlotPool:
    """All slots, and the rules by which they are lent, kept and given up."""

    def __init__(
        self, shape: KVShape, budget: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = shape
        self.budget = budget - budget % _BLOCK
        self.dtype = dtype
        self.device = device
        self.slots: list[Slot] = []
        self._clock = 0

    @property
    def allocated(self) -> int:
        """Capacity of all slots, in tokens."""
        return sum(slot.capacity for slot in self.slots)

    @property
    def cached(self) -> int:
        """Tokens held by idle slots, for reuse."""
        return sum(slot.length for slot in self.slots if not slot.busy)

    def match(self, ids: np.ndarray, tag: str, limit: int) -> tuple[Slot | None, int]:
        """The slot that shares the longest prefix of `ids[:limit]` under these weights. Idle
        slots win over busy ones where both share as much."""
        best: Slot | None = None
        length = 0
        wanted = ids[:limit]
        for slot in self.slots:
            if slot.tag != tag or slot.length < length:
                continue
            n = common_prefix(slot.ids[: slot.length], wanted)
            if n > length or (n == length and n and best is not None and best.busy > slot.busy):
                best, length = slot, n
        return best, length

    def acquire(self, ids: Sequence[int], tag: str, limit: int) -> tuple[Slot, int] | None:
        """A busy slot for a sequence that begins with `ids`, and how many of them it already
        holds (at most `limit`). None: there is no room now."""
        wanted = np.asarray(ids, dtype=np.int64)
        donor, length = self.match(wanted, tag, limit)
        # A donor that loses little is continued; one that loses much keeps its own sequence (a
        # shared system prompt must not cost another session its whole cache).
        if donor is not None and not donor.busy and length * 2 >= donor.length:
            donor.busy = True
            donor.length = length
            if self.ensure(donor, len(wanted)):
                return donor, length
            donor.busy = False
            return None
        capacity = min(round_up(len(wanted) + _HEADROOM), self.budget)
        if capacity < len(wanted) or not self._make_room(capacity, keep=donor):
            # The donor itself may be what stands in the way.
            if donor is not None and not donor.busy and self._make_room(capacity):
                donor, length = None, 0
            else:
                return None
        slot = Slot(self.shape, capacity, self.dtype, self.device)
        slot.tag = tag
        self._touch(slot)
        self.slots.append(slot)
        if donor is not None and length:
            slot.copy_prefix(donor, length)
            self._touch(donor)
        return slot, length

    def ensure(self, slot: Slot, length: int) -> bool:
        """Makes the slot hold `length` tokens. False: there is no room now (slot unchanged)."""
        self._touch(slot)
        if length <= slot.capacity:
            return True
        free = self.budget - self.allocated
        capacity = round_up(max(length, slot.capacity + slot.capacity // 2))
        if capacity - slot.capacity > free and not self._make_room(capacity - slot.capacity):
            capacity = round_up(length)
            if not self._make_room(capacity - slot.capacity):
                return False
        grown = Slot(self.shape, capacity, self.dtype, self.device)
        grown.copy_prefix(slot, slot.length)
        slot.k, slot.v, slot.ids, slot.capacity = grown.k, grown.v, grown.ids, capacity
        return True

    def release(self, slot: Slot) -> None:
        """The sequence has ended. Kept for its prefix if one version of weights made all of it."""
        slot.busy = False
        if slot.tag is None or slot.length == 0:
            self.slots.remove(slot)
        else:
            self._touch(slot)

    def drop(self, tag: str) -> None:
        """These weights serve no longer: forgets their idle slots; busy ones count as mixed."""
        for slot in list(self.slots):
            if slot.tag == tag:
                slot.tag = None
                if not slot.busy:
                    self.slots.remove(slot)

    def flush(self) -> None:
        """Forgets all idle slots."""
        self.slots = [slot for slot in self.slots if slot.busy]

    def _touch(self, slot: Slot) -> None:
        self._clock += 1
        slot.used = self._clock

    def _make_room(self, tokens: int, keep: Slot | None = None) -> bool:
        """Gives up idle slots, the longest unused first, until `tokens` fit. Gives up nothing if
        they would not fit even then."""
        missing = self.allocated + tokens - self.budget
        if missing <= 0:
            return True
        idle = sorted((s for s in self.slots if not s.busy and s is not keep), key=lambda s: s.used)
        if sum(slot.capacity for slot in idle) < missing:
            return False
        for slot in idle:
            if missing <= 0:
                break
            self.slots.remove(slot)
            missing -= slot.capacity
        return True
