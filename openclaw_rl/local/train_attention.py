"""Causal attention for training on a CPU in bfloat16: written out for short sequences.

torch's fused attention has a backward pass on the CPU that is several times slower in bfloat16
than plain matrix products as long as the score matrix is small (4 sequences of 125 tokens, 9
heads: 49 ms against 7 ms; equal at 500 tokens; at 1000 the fused one wins, and needs no score
matrix). Everything but that case goes to transformers' own sdpa function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAME = "openclaw_train"
SHORT = 256  # tokens


def train_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: `[B, heads, L, D]` in, `[B, L, heads, D]` out."""
    length = query.shape[2]
    plain = (
        attention_mask is None  # transformers gives a mask wherever it is not simply causal
        and query.device.type == "cpu"
        and query.dtype == torch.bfloat16
        and length == key.shape[2]
        and length <= SHORT
        and getattr(module, "is_causal", False)
        and not dropout
        and not any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "position_bias"))
    )
    if not plain:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out, None
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu_(1)
    scores = (query @ key.transpose(-1, -2)).mul_(scale).masked_fill_(future, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), None


def use(model: Any) -> None:
    """Make `model` (with sdpa attention) attend by `train_attention`; others are left alone."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    if model.config._attn_implementation != "sdpa":
        return
    AttentionInterface.register(NAME, train_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
