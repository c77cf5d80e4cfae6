"""TokenSignals: a number to slime's log, tensors to the losses."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch

from openclaw_rl.losses.signals import TokenSignals

NAN = math.nan


def signals() -> TokenSignals:
    return TokenSignals(
        weights=torch.tensor([1.0, 0.5, 2.0]),
        teacher_log_probs=torch.tensor([NAN, -1.0, NAN]),
        topk_ids=torch.tensor([[3, 4], [-1, -1], [-1, -1]]),
        topk_log_probs=torch.tensor([[-1.0, -2.0], [NAN, NAN], [NAN, NAN]]),
    )


def test_it_is_the_number_of_tokens_with_a_teacher():
    assert signals() == 2.0
    assert sum([signals(), signals()]) / 2 == 2.0
    assert TokenSignals(torch.ones(3)) == 0.0
    assert TokenSignals(torch.ones(0)) == 0.0


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))]
)
def test_it_survives_transport(again):
    before, after = signals(), again(signals())
    assert isinstance(after, TokenSignals)
    assert after == before
    for name in ("weights", "teacher_log_probs", "topk_ids", "topk_log_probs"):
        torch.testing.assert_close(getattr(after, name), getattr(before, name), equal_nan=True)


@pytest.mark.parametrize(
    "given", [{"teacher_log_probs": torch.ones(2)}, {"topk_log_probs": torch.zeros(2, 2)}]
)
def test_what_does_not_line_up_is_refused(given):
    with pytest.raises(ValueError, match="2 tokens with 3 weights"):
        TokenSignals(torch.ones(3), **given)
