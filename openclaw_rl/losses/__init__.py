"""Losses with slime's custom-loss signature; see README.md of this package."""

from __future__ import annotations

from openclaw_rl.losses.policy import combined_loss, grpo_loss, opd_loss, topk_opd_loss

__all__ = ["combined_loss", "grpo_loss", "opd_loss", "topk_opd_loss"]
