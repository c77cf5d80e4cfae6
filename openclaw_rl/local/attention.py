"""Attention over slots, for any Hugging Face model that calls its attention by name.

A step of the engine is one flat sequence [1, N] of tokens of many sequences ("rows", each some
consecutive tokens of one slot). Everything in a decoder except attention works on tokens alone,
so the model's own code runs unchanged; its attention calls `slot_attention`, which writes the new
keys and values into the slots and lets each row see its own slot only. No padding between rows,
no mask for a row of one token, no key or value is ever moved.

`register()` makes it known to transformers; the engine passes the plan as `slot_plan=`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from openclaw_rl.local.cache import KVShape, Slot

NAME = "openclaw_slots"


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens `start .. start + count` of the sequence in `slot`."""

    slot: Slot
    start: int
    count: int


class StepPlan:
    """The rows of one step, and views of their slots made once for all layers.

    `pad` tokens at the end belong to no row; attention gives zeros for them.
    """

    def __init__(self, rows: list[Row], pad: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = rows
        self.pad = pad
        self.counts = [row.count for row in rows]
        self.dtype = dtype
        self.device = device
        self._masks: dict[tuple[int, int], torch.Tensor] = {}
        ends = [row.start + row.count for row in rows]
        pairs = list(zip(rows, ends, strict=True))
        # Indexed [layer][row]; one narrow and one unbind a row instead of one a row and layer.
        self.k_new = list(
            zip(*(r.slot.k[:, 0, :, r.start : e].unbind(0) for r, e in pairs), strict=True)
        )
        self.v_new = list(
            zip(*(r.slot.v[:, 0, :, r.start : e].unbind(0) for r, e in pairs), strict=True)
        )
        self.k_all = list(zip(*(r.slot.k[:, :, :, :e].unbind(0) for r, e in pairs), strict=True))
        self.v_all = list(zip(*(r.slot.v[:, :, :, :e].unbind(0) for r, e in pairs), strict=True))

    def mask(self, row: int, window: int) -> torch.Tensor:
        """Additive causal mask [count, start + count] of a row (window 0: no sliding window)."""
        key = (row, window)
        if key not in self._masks:
            start, count = self.rows[row].start, self.rows[row].count
            at = torch.arange(start, start + count, device=self.device)[:, None]
            seen = torch.arange(start + count, device=self.device)[None, :]
            hidden = seen > at
            if window:
                hidden |= seen <= at - window
            mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
            self._masks[key] = mask.masked_fill_(hidden, float("-inf"))
        return self._masks[key]


class ShapeProbe:
    """Passed as the plan of a dry run: learns the shapes of keys and values, computes nothing."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, int, int]] = {}

    def shape(self) -> KVShape | None:
        """The shape all layers share; None where they differ or no layer asked."""
        shapes = set(self.seen.values())
        if len(shapes) != 1 or sorted(self.seen) != list(range(len(self.seen))):
            return None
        heads, key_dim, value_dim = shapes.pop()
        return KVShape(len(self.seen), heads, key_dim, value_dim)


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
    if isinstance(slot_plan, ShapeProbe):
        slot_plan.seen[layer] = (kv_heads, key.shape[-1], value.shape[-1])
        return query.new_zeros(1, query.shape[2], heads, value.shape[-1]), None
    plan = slot_plan
    group = heads // kv_heads
    sizes = plan.counts if not plan.pad else [*plan.counts, plan.pad]
    rows = len(plan.counts)
    k_new, v_new = plan.k_new[layer], plan.v_new[layer]
    torch._foreach_copy_(
        [*k_new, *v_new],
        [*torch.split(key[0], sizes, 1)[:rows], *torch.split(value[0], sizes, 1)[:rows]],
    )
    window = sliding_window or 0
    # A row of one token: its query heads of a group stand where a longer row has its tokens.
    grouped = query.view(kv_heads, group, -1, query.shape[-1]).permute(2, 0, 1, 3)
    outs: list[torch.Tensor] = []
    for i, (q, k, v) in enumerate(
        zip(torch.split(grouped, sizes)[:rows], plan.k_all[layer], plan.v_all[layer], strict=True)
    ):
        count = plan.counts[i]
        if count == 1:
            if window and k.shape[2] > window:
                k, v = k[:, :, -window:], v[:, :, -window:]
            outs.append(
                scaled_dot_product_attention(q, k, v, scale=scaling).view(1, heads, v.shape[-1])
            )
            continue
        q = q.permute(1, 2, 0, 3).reshape(1, heads, count, -1)
        if plan.rows[i].start == 0 and not (window and count > window):
            out = scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scaling, enable_gqa=group > 1
            )
        else:
            out = scaled_dot_product_attention(
                q, k, v, attn_mask=plan.mask(i, window), scale=scaling, enable_gqa=group > 1
            )
        outs.append(out[0].transpose(0, 1))
    if plan.pad:
        outs.append(query.new_zeros(plan.pad, heads, value.shape[-1]))
    return torch.cat(outs)[None], None


def register() -> None:
    """Makes `attn_implementation="openclaw_slots"` known to transformers (idempotent)."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, slot_attention)
