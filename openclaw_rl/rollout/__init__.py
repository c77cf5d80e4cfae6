"""Batches for the trainer, out of the journal. See README.md of this package."""

from openclaw_rl.rollout.rollout import RolloutFnTrainOutput, generate_rollout, wait_for_batch

__all__ = ["RolloutFnTrainOutput", "generate_rollout", "wait_for_batch"]
