"""Keys and values of sequences, and attention over them for any Hugging Face model that calls its
attention by name.

Each sequence has a slot of its own, as long as it needs. Guarantees: the capacity of all slots
never exceeds the budget (in tokens); a slot is handed out again for a prompt only up to the
longest common prefix of ids that were computed by the same weights (`tag`); idle slots are evicted
by their last use, before anybody is refused.

A step of the engine is one flat sequence [1, N] of tokens of many rows, each some consecutive
tokens of one slot. Everything in a decoder except attention works on tokens alone, so the model's
own code runs unchanged; its attention calls `slot_attention`, which writes the new keys and values
into the slots and lets each row see its own slot only. The engine thread owns all of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

ATTENTION = "openclaw_slots"
"""The name under which transformers knows `slot_attention`."""
_BLOCK = 64  # capacities are multiples of this many tokens
_HEADROOM = 128  # spare room of a new slot: most replies then need no copy


class KVShape(NamedTuple):
    """Shape of the keys and values of one token, equal in all layers."""

    layers: int
    heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.layers * self.heads * (self.key_dim + self.value_dim) * dtype.itemsize


class Slot:
    """Keys [layers, heads, capacity, key_dim], values alike, and the ids they belong to."""

    def __init__(
        self, shape: KVShape, capacity: int, tag: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = (shape.layers, shape.heads, capacity)
        self.k = torch.empty(*size, shape.key_dim, dtype=dtype, device=device)
        self.v = torch.empty(*size, shape.value_dim, dtype=dtype, device=device)
        self.ids = np.empty(capacity, dtype=np.int64)
        self.length = 0  # tokens whose keys and values are there
        self.tag: str | None = tag  # whose weights made them; None: more than one version
        self.busy = True

    @property
    def capacity(self) -> int:
        return len(self.ids)

    def copy_prefix(self, other: Slot, length: int) -> None:
        """Takes over the first `length` tokens of another slot."""
        self.k[:, :, :length] = other.k[:, :, :length]
        self.v[:, :, :length] = other.v[:, :, :length]
        self.ids[:length] = other.ids[:length]
        self.length = length


def round_up(tokens: int) -> int:
    """To whole blocks, as capacities are."""
    return -(-tokens // _BLOCK) * _BLOCK


class SlotPool:
    """All slots, and the rules by which they are lent, kept and evicted."""

    def __init__(
        self, shape: KVShape, budget: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.budget = budget - budget % _BLOCK
        self.slots: list[Slot] = []  # the longest unused first

    @property
    def allocated(self) -> int:
        """Capacity of all slots, in tokens."""
        return sum(slot.capacity for slot in self.slots)

    def match(self, ids: np.ndarray, tag: str) -> tuple[Slot | None, int]:
        """The slot that shares the longest prefix of `ids` under these weights, an idle one where
        there is a choice, and how long it is."""
        found: tuple[Slot | None, int] = None, 0
        for slot in sorted(self.slots, key=lambda slot: slot.busy):
            if slot.tag == tag:
                size = min(slot.length, len(ids))
                same = slot.ids[:size] == ids[:size]
                length = size if same.all() else int(same.argmin())
                if length > found[1]:
                    found = slot, length
        return found

    def acquire(self, ids: Sequence[int], tag: str, limit: int) -> tuple[Slot, int] | None:
        """A busy slot for a sequence that begins with `ids`, and how many of them it already
        holds (at most `limit`). None: there is no room now."""
        wanted = np.asarray(ids, dtype=np.int64)
        donor, length = self.match(wanted[:limit], tag)
        # One that would lose much is copied from: a shared system prompt must not cost another
        # session its whole cache.
        if donor is not None and not donor.busy and length * 2 >= donor.length:
            donor.busy, donor.length = True, length
            if self.ensure(donor, len(wanted)):
                return donor, length
            donor.busy = False
            return None
        capacity = min(round_up(len(wanted) + _HEADROOM), self.budget)
        if donor is not None:
            self._touch(donor)  # evicted last, and copied from all the same
        if not self._evict(capacity):
            return None
        slot = Slot(self.shape, capacity, tag, self.dtype, self.device)
        self.slots.append(slot)
        if donor is not None:
            slot.copy_prefix(donor, length)
        return slot, length

    def ensure(self, slot: Slot, length: int) -> bool:
        """Makes the slot hold `length` tokens. False: there is no room now (slot unchanged)."""
        self._touch(slot)
        if length <= slot.capacity:
            return True
        # Half as much again where there is room, so that a long reply is copied a few times only.
        for capacity in (round_up(max(length, slot.capacity * 3 // 2)), round_up(length)):
            if self._evict(capacity - slot.capacity):
                grown = Slot(self.shape, capacity, "", self.dtype, self.device)
                grown.copy_prefix(slot, slot.length)
                slot.k, slot.v, slot.ids = grown.k, grown.v, grown.ids
                return True
        return False

    def release(self, slot: Slot) -> None:
        """The sequence has ended. Kept for its prefix if one version of weights made all of it."""
        slot.busy = False
        if slot.tag is None or slot.length == 0:
            self.slots.remove(slot)

    def drop(self, tag: str) -> None:
        """These weights serve no longer: forgets their idle slots; busy ones count as mixed."""
        self.slots = [slot for slot in self.slots if slot.busy or slot.tag != tag]
        for slot in self.slots:
            if slot.tag == tag:
                slot.tag = None

    def _touch(self, slot: Slot) -> None:
        self.slots.remove(slot)
        self.slots.append(slot)

    def _evict(self, tokens: int) -> bool:
        """Evicts idle slots, the longest unused first, until `tokens` fit. Evicts nothing if they
        would not fit even then."""
        missing = self.allocated + tokens - self.budget
        idle = [slot for slot in self.slots if not slot.busy]
        if sum(slot.capacity for slot in idle) < missing:
            return False
        while missing > 0:
            missing -= idle[0].capacity
            self.slots.remove(idle.pop(0))
        return True


class Row(NamedTuple):
    """Tokens `start .. end` of the sequence in `slot`, computed in one step."""

    slot: Slot
    start: int
    end: int


class StepPlan:
    """The rows of one step, and views of their slots made once for all layers."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.counts = [row.end - row.start for row in rows]
        self._masks: dict[tuple[int, int], torch.Tensor] = {}
        # Indexed [layer][row]; one narrow and one unbind a row instead of one a row and layer.
        new = [(t[:, :, r.start : r.end].unbind(0)) for r in rows for t in (r.slot.k, r.slot.v)]
        self.new = list(zip(*new, strict=True))  # k and v of the first row, of the second, ...
        self.k = list(zip(*(r.slot.k[:, None, :, : r.end].unbind(0) for r in rows), strict=True))
        self.v = list(zip(*(r.slot.v[:, None, :, : r.end].unbind(0) for r in rows), strict=True))

    def mask(self, index: int, window: int, device: torch.device) -> torch.Tensor:
        """Which tokens [count, end] those of a row see (window 0: no sliding window)."""
        if (index, window) not in self._masks:
            row = self.rows[index]
            at = torch.arange(row.start, row.end, device=device)[:, None]
            seen = torch.arange(row.end, device=device)[None, :]
            self._masks[index, window] = (seen <= at) & (seen > at - (window or row.end))
        return self._masks[index, window]


ShapeProbe = dict[int, tuple[int, int, int]]
"""Passed as the plan of a dry run: learns heads and dimensions of each layer."""


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    slot_plan: StepPlan | ShapeProbe | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface. query [1, heads, N, D], key and value [1, kv_heads, N,
    D]; returns [1, N, heads, D_v]. The mask is None: rows are told apart by the plan."""
    if slot_plan is None:
        raise NotImplementedError("this model does not pass attention arguments through")
    if softcap is not None or s_aux is not None:
        raise NotImplementedError("attention with soft caps or sinks is not served")
    layer: int = module.layer_idx  # type: ignore[assignment]
    heads, kv_heads = query.shape[1], key.shape[1]
    if isinstance(slot_plan, dict):
        slot_plan[layer] = (kv_heads, key.shape[-1], value.shape[-1])
        return query.new_zeros(1, query.shape[2], heads, value.shape[-1]), None
    plan, group, window = slot_plan, heads // kv_heads, sliding_window or 0
    parts = zip(
        torch.split(key[0], plan.counts, 1), torch.split(value[0], plan.counts, 1), strict=True
    )
    torch._foreach_copy_(plan.new[layer], [part for pair in parts for part in pair])
    # A row of one token: its query heads of a group stand where a longer row has its tokens.
    grouped = query.view(kv_heads, group, -1, query.shape[-1]).permute(2, 0, 1, 3)
    rows = zip(
        plan.counts, torch.split(grouped, plan.counts), plan.k[layer], plan.v[layer], strict=True
    )
    outs: list[torch.Tensor] = []
    for i, (count, q, k, v) in enumerate(rows):
        if count == 1:
            if window:
                k, v = k[:, :, -window:], v[:, :, -window:]
            out = scaled_dot_product_attention(q, k, v, scale=scaling)
            outs.append(out.view(1, heads, v.shape[-1]))
            continue
        whole = count == k.shape[2] and not (window and count > window)
        out = scaled_dot_product_attention(
            q.permute(1, 2, 0, 3).reshape(1, heads, count, -1),
            k,
            v,
            attn_mask=None if whole else plan.mask(i, window, query.device),
            is_causal=whole,
            scale=scaling,
            enable_gqa=group > 1,
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)[None], None
