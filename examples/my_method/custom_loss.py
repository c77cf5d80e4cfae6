"""A loss of your own: copy this file, change it, and pass it with

    openclaw-rl up --model ... --custom-loss-function-path ./my_method/custom_loss.py

(slime imports dotted paths only: put the folder on PYTHONPATH and pass
`--loss-type custom_loss --custom-loss-function-path custom_loss.custom_loss`.)

The trainer calls `custom_loss(args, batch, logits, sum_of_sample_mean)` for each micro-batch and
goes backward from what it returns: the loss and a dict of detached scalars to log. `logits` is
`[1, T, V]` over the entries of `batch` laid end to end. An entry is a turn on one machine, a sample
(of one turn or several) on slime: `unconcat_tokens`, `total_lengths`, `response_lengths`, and per
response token `advantages`, `log_probs` (the old policy), `rollout_log_probs`, `ref_log_probs`.
`values` holds `TokenSignals` (token weights, teacher values): always on slime, on one machine with
--opd-top-k only; without it the teacher is in `teacher_log_probs`, and all weights are 1.
`sum_of_sample_mean` turns a `[number of response tokens]` tensor into the scalar; it masks and
averages. Log the same names in every micro-batch.
"""

import torch

from openclaw_rl.losses import combined_loss

BLAME = 0.5


def custom_loss(args, batch, logits, sum_of_sample_mean):
    """`combined_loss`, in which blame counts half as much as praise.

    Users complain more readily than they praise; pushing a reply down also says nothing about
    what should take its place, which the distillation term (left alone here) does.
    """
    advantages = [torch.where(a < 0, BLAME * a, a) for a in batch["advantages"]]
    softened = {**batch, "advantages": advantages}
    loss, metrics = combined_loss(args, softened, logits, sum_of_sample_mean)
    blamed = torch.cat([(a < 0).to(a.dtype) for a in advantages])
    metrics["blame_share"] = sum_of_sample_mean(blamed).detach()
    return loss, metrics
