"""Hooks for stock slime, by dotted path; see README.md of this package.

Importing it needs neither torch nor slime: the gateway's machine may not have them.
"""

from openclaw_rl.slime.convert import compute_advantages, convert_samples_to_train_data
from openclaw_rl.slime.rollout import generate_rollout

__all__ = ["compute_advantages", "convert_samples_to_train_data", "generate_rollout"]
