"""The loss in `examples/my_method` loads as people pass it, and does what it says."""

from __future__ import annotations

import importlib
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from openclaw_rl.hooks import load_hook
from openclaw_rl.losses import combined_loss, opd_loss
from tests.losses.test_losses import make, run

FOLDER = Path(__file__).parents[2] / "examples" / "my_method"


@pytest.fixture
def example():
    path = str(FOLDER / "custom_loss.py")
    return load_hook(path, default_name="custom_loss", flag="--custom-loss-function-path")


def test_it_loads_by_slimes_rule_too(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    module, _, name = "custom_loss.custom_loss".rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize(("reward", "share"), [(1.0, 1.0), (-1.0, 0.5), (0.0, 1.0)])
def test_blame_counts_half(example, reward, share):
    batch, logits, masks = make([(3, 4), (2, 5)], teacher="none")
    batch["advantages"] = [torch.full((r,), reward) for r in batch["response_lengths"]]
    _, grad, metrics = run(example, Namespace(), batch, logits, masks)
    _, whole, others = run(combined_loss, Namespace(), batch, logits, masks)
    torch.testing.assert_close(grad, share * whole)
    assert metrics["blame_share"].item() == (2.0 if reward < 0 else 0.0)  # summed over samples
    assert set(metrics) == {*others, "blame_share"}
    assert batch["advantages"][0].eq(reward).all()  # the trainer's own tensors stay as they were


def test_the_distillation_term_is_left_alone(example):
    batch, logits, masks = make([(3, 4)], teacher="all")
    batch["advantages"] = [torch.zeros(4)]
    _, grad, _ = run(example, Namespace(), batch, logits, masks)
    _, whole, _ = run(opd_loss, Namespace(), batch, logits, masks)
    assert torch.equal(grad, whole)
