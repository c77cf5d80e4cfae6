"""Merging changes the cost, never the gradient."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from openclaw_rl.journal import Journal
from openclaw_rl.losses.signals import TokenSignals
from openclaw_rl.slime import (
    compute_advantages,
    convert_samples_to_train_data,
    generate_rollout,
)
from tests.journal.build import chain, judged
from tests.slime.kit import (
    Prefix,
    conversations,
    fill_journal,
    gradient,
    plain_step,
    slime_args,
    tensors,
    unmerged,
)

pytestmark = pytest.mark.slow


def clipped(args: Namespace, batch: dict, logits: torch.Tensor, reduce):
    """A loss with every kind of term: a ratio's, a gap's to the teacher, an entropy."""
    begin, terms = 0, []
    values = batch.get("values") or [None] * len(batch["tokens"])
    teachers = batch.get("teacher_log_probs") or [None] * len(batch["tokens"])
    for i, tokens in enumerate(batch["tokens"]):
        length = batch["response_lengths"][i]
        end = begin + batch["total_lengths"][i]
        log_p = logits[0, end - length - 1 : end - 1].log_softmax(-1)
        own = log_p.gather(1, tokens[-length:, None])[:, 0]
        signals = values[i]
        teacher = signals.teacher_log_probs if isinstance(signals, TokenSignals) else teachers[i]
        gap = torch.zeros_like(own)
        if teacher is not None:
            gap = torch.where(teacher.isfinite(), teacher.nan_to_num() - own.detach(), gap)
        term = -(own - batch["rollout_log_probs"][i]).exp() * (batch["advantages"][i] + gap)
        term = term + 0.01 * (log_p.exp() * log_p).sum(-1)
        terms.append(term * signals.weights if isinstance(signals, TokenSignals) else term)
        begin = end
    return reduce(torch.cat(terms)), {}


def rollout_data(args: Namespace, rollout_id: int = 0) -> dict:
    """What slime's training ranks get, up to the loss."""
    output = generate_rollout(args, rollout_id, None)
    args.openclaw_rl_run.close()
    data = tensors(convert_samples_to_train_data(args, [s for g in output.samples for s in g]))
    compute_advantages(args, data)
    return data


@pytest.mark.parametrize("per_token", [False, True], ids=["per_rollout", "per_token"])
@pytest.mark.parametrize("seed", range(12))
def test_merged_turns_have_the_gradient_of_separate_ones(
    tmp_path: Path, seed: int, per_token: bool
):
    turns = conversations(seed)
    ready = fill_journal(tmp_path / "journal.db", turns)
    args = slime_args(
        tmp_path / "journal.db", len(ready), calculate_per_token_loss=per_token,
        actor_num_gpus_per_node=4,
    )  # fmt: skip
    merged, separate = rollout_data(args), unmerged(turns, ready)
    model = Prefix(seed)
    wanted = gradient(model, plain_step(args, clipped, model, separate))
    found = gradient(model, plain_step(args, clipped, model, merged))
    assert wanted.abs().max() > 1e-3
    assert (found - wanted).abs().max() <= 1e-6 * max(1.0, float(wanted.abs().max()))


def test_a_long_session_costs_its_own_length(tmp_path: Path):
    path = tmp_path / "journal.db"
    with Journal.open(path) as journal:
        turns = chain(20)
        for turn in turns:
            judged(journal, turn)
    args = slime_args(path, 20)
    data = rollout_data(args)
    distinct = len(turns[-1].prompt_ids) + len(turns[-1].output_ids)
    fillers = 2 * 19
    assert sum(data["total_lengths"]) - fillers <= 1.05 * distinct
    assert sum(int(mask.sum()) for mask in data["loss_masks"]) == sum(
        len(turn.output_ids) for turn in turns
    )
    assert sum(len(turn.prompt_ids) + len(turn.output_ids) for turn in turns) > 9 * distinct
