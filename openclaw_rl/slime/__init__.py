"""Hooks for stock slime, by dotted path, in the order in which slime calls them each rollout:

    generate_rollout               in its RolloutManager: `rollout.wait_for_batch` gives segments,
                                   `samples.py` makes slime's own samples of them
    convert_samples_to_train_data  there: `rollout.train_data.convert`, ours as `SampleSignals`
                                   under slime's `source_names`
    compute_advantages             on the last-stage ranks: takes them out again, as `advantages`,
                                   `returns` and the `TokenSignals` of the loss
    openclaw_rl.losses.*           on each micro-batch

Importing it needs neither torch nor slime: the gateway's machine may not have them. See README.md.
"""

from openclaw_rl.slime.rollout import generate_rollout
from openclaw_rl.slime.signals import compute_advantages, convert_samples_to_train_data

__all__ = ["compute_advantages", "convert_samples_to_train_data", "generate_rollout"]
