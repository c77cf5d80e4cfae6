"""Losses with slime's custom-loss signature; see README.md of this package.

Guarantees: a term exists only where its signal exists; the tensor arithmetic (`terms.py`) knows
no host; the logits are never copied as a whole.
"""

from __future__ import annotations

from openclaw_rl.losses.policy import combined_loss, grpo_loss, opd_loss, topk_opd_loss

__all__ = ["combined_loss", "grpo_loss", "opd_loss", "topk_opd_loss"]
