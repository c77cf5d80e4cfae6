"""From samples to turns, micro-batches and loss calls."""

from __future__ import annotations

import math
from argparse import Namespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.errors import HookError
from openclaw_rl.hooks import Sample
from openclaw_rl.local import data as d
from openclaw_rl.rollout.train_data import TurnRange, convert, turn_ranges
from tests.local.tiny import conversation

pytestmark = pytest.mark.slow

ARGS = Namespace()


def data_of(*samples: Sample) -> tuple[d.RolloutData, list[TurnRange]]:
    given = convert(ARGS, list(samples))
    data, turns = d.to_tensors(given), turn_ranges(given)
    d.default_advantages(data, turns)
    return data, turns


def test_each_turn_has_its_own_reward_on_its_own_tokens():
    merged, single = conversation(2, 4)
    data, _ = data_of(merged)
    for turn, alone in zip(merged.metadata["turns"], single, strict=True):
        values = data["advantages"][0][turn["start"] : turn["end"]]
        assert values.tolist() == [alone.reward] * alone.response_length
    between = data["loss_masks"][0] == 0
    assert data["advantages"][0][between].abs().sum() == 0


@given(st.integers(0, 200), st.integers(1, 5), st.integers(2, 13))
def test_every_trained_token_is_in_exactly_one_piece(seed, turns, rows):
    merged, _ = conversation(seed, turns)
    data, ranges = data_of(merged)
    assert len(ranges) == sum(turn.share for turn in ranges) == turns
    pieces = [piece for _, some in d.loss_calls(ranges, rows) for piece in some]
    covered = torch.zeros(merged.response_length)
    for piece in pieces:
        covered[piece.start : piece.end] += 1
    assert covered.tolist() == merged.loss_mask
    reduce = d.reducer(pieces, d.loss_batch(data, pieces)["loss_masks"])
    assert float(reduce(torch.ones(int(covered.sum())))) == pytest.approx(turns)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(1, 100))
def test_micro_batches_keep_to_the_budget_and_lose_nothing(lengths, budget):
    turns = [TurnRange(i, 0, n, n) for i, n in enumerate(lengths)]
    groups = d.micro_batches({"total_lengths": lengths}, turns, budget)
    assert sorted(i for g in groups for i in g) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or max(lengths[i] for i in group) * len(group) <= budget


@given(st.lists(st.integers(1, 9), min_size=1, max_size=10), st.integers(2, 20))
def test_calls_of_a_loss_are_bounded_and_of_one_temperature(sizes, rows):
    turns = [TurnRange(i, 0, n, n, temperature=1 + i % 2) for i, n in enumerate(sizes)]
    calls = list(d.loss_calls(turns, rows))
    assert sum(piece.end - piece.start for _, some in calls for piece in some) == sum(sizes)
    for temperature, some in calls:
        assert sum(piece.end - piece.start + 1 for piece in some) <= rows
        assert {piece.temperature for piece in some} == {temperature}


def test_a_loss_batch_keeps_one_token_before_each_turn():
    merged, single = conversation(4, 3)
    batch = d.loss_batch(*data_of(merged))
    for k, alone in enumerate(single):
        n = alone.response_length
        assert batch["unconcat_tokens"][k].tolist() == alone.tokens[-n - 1 :]
        assert batch["total_lengths"][k] == n + 1
        assert batch["rollout_log_probs"][k].tolist() == pytest.approx(alone.rollout_log_probs)
        assert batch["rollout_mask_sums"][k].item() == n


def test_a_loss_batch_carries_the_candidates_of_each_turn_as_signals():
    merged, single = conversation(5, 3, top_k=2)
    data, turns = data_of(merged)
    taught = [s for s in single if s.metadata["turns"][0]["has_teacher"]]
    assert taught
    pieces = [piece for _, some in d.loss_calls(turns, 4) for piece in some]
    batch = d.loss_batch(data, pieces)
    ids = torch.cat([signals.topk_ids for signals in batch["values"]])
    values = torch.cat([signals.topk_log_probs for signals in batch["values"]])
    assert ids.tolist() == [row for s in single for row in s.metadata["topk"].ids]
    wanted = [row for s in single for row in s.metadata["topk"].log_probs]
    torch.testing.assert_close(values, torch.tensor(wanted), equal_nan=True)
    for piece, signals in zip(pieces, batch["values"], strict=True):
        assert signals.weights.tolist() == [1.0] * (piece.end - piece.start)
    teacher = torch.cat([signals.teacher_log_probs for signals in batch["values"]])
    assert int(teacher.isfinite().sum()) == sum(s.response_length for s in taught)


def test_samples_with_and_without_candidates_go_together():
    _, (one,) = conversation(1, 1, top_k=2)
    _, (other,) = conversation(2, 1)
    first, second = d.loss_batch(*data_of(one, other))["values"]
    assert first.topk_ids.shape == (one.response_length, 2)
    assert second.topk_ids is None
    assert "values" not in d.loss_batch(*data_of(other))


def test_candidates_that_do_not_line_up_are_refused():
    _, (sample,) = conversation(1, 1, top_k=2)
    sample.metadata["topk"].ids.append([1, 2])
    with pytest.raises(HookError, match="per-token values"):
        data_of(sample)


def test_a_masked_nan_stays_out_of_the_sum():
    turns = [TurnRange(0, 0, 2, 1)]
    total = d.reducer(turns, [torch.tensor([1.0, 0.0])])(torch.tensor([3.0, math.nan]))
    assert total.item() == 3.0


def test_conversion_carries_slimes_keys():
    _, many = conversation(1, 2)
    many[0].teacher_log_probs = None
    many[1].status = Sample.Status.TRUNCATED
    data = convert(ARGS, [[s] for s in many])
    assert data["rollout_mask_sums"] == [s.response_length for s in many]
    assert data["truncated"] == [0, 1]
    names = "tokens response_lengths rewards raw_reward sample_indices rollout_ids loss_masks"
    assert set(data) >= {*names.split(), "rollout_log_probs", "teacher_log_probs"}
    tensors = d.to_tensors(data)
    assert tensors["teacher_log_probs"][0].isnan().all()
    many[0].teacher_log_probs = many[1].teacher_log_probs = None
    assert "teacher_log_probs" not in convert(ARGS, many)


def test_what_does_not_line_up_is_refused_not_padded():
    _, (sample, _) = conversation(1, 2)
    sample.rollout_log_probs = [0.0]
    if sample.response_length == 1:
        sample.rollout_log_probs = []
    with pytest.raises(HookError, match="line up"):
        convert(ARGS, [sample])
    data = {"tokens": [[1, 2]], "response_lengths": [2], "rewards": [0.0]}
    with pytest.raises(HookError, match="no prompt"):
        d.to_tensors(data)
    data = {"tokens": [[1, 2, 3]], "response_lengths": [2], "loss_masks": [[1]], "rewards": [0.0]}
    with pytest.raises(HookError, match="1 per-token values"):
        d.to_tensors(data)


def test_turns_outside_the_response_are_refused():
    merged, _ = conversation(1, 2)
    merged.metadata["turns"][-1]["end"] += 1
    with pytest.raises(HookError, match="outside"):
        data_of(merged)


def test_reward_key_names_the_score_of_a_dict():
    _, (sample,) = conversation(1, 1)
    sample.reward = {"helpful": 0.5, "score": 1.0}
    assert convert(ARGS, [sample])["rewards"] == [1.0]
    assert convert(Namespace(reward_key="helpful"), [sample])["rewards"] == [0.5]
