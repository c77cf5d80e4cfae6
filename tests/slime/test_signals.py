from __future__ import annotations

import math
import pickle
from argparse import Namespace

import pytest
import torch

from openclaw_rl.errors import HookError
from openclaw_rl.hooks import Sample
from openclaw_rl.slime import compute_advantages, convert_samples_to_train_data
from openclaw_rl.slime.samples import Shape, fill
from openclaw_rl.types import TopK
from tests.slime.kit import tensors

NAN = math.nan


def merged(**given) -> Sample:
    """Two turns of 3 and 1 tokens with 2 tokens of the user in between."""
    turns = [
        {"turn_id": "a", "start": 0, "end": 3, "reward": 1.0},
        {"turn_id": "b", "start": 5, "end": 6, "reward": -1.0},
    ]
    fields = {
        "tokens": [9, 9, 1, 2, 3, 4, 5, 6],
        "response_length": 6,
        "loss_mask": [1, 1, 1, 0, 0, 1],
        "rollout_log_probs": [-0.5] * 6,
        "reward": 0.0,
        "metadata": {"turns": turns, "step": 0},
        "status": Sample.Status.TRUNCATED,
    }
    return Sample(**{**fields, **given})


def single(**given) -> Sample:
    """One turn of 2 tokens."""
    turns = [{"turn_id": "c", "start": 0, "end": 2, "reward": 1.0}]
    fields = {
        "tokens": [9, 7, 8],
        "response_length": 2,
        "loss_mask": [1, 1],
        "rollout_log_probs": [-0.5] * 2,
        "reward": 1.0,
        "metadata": {"turns": turns, "step": 0},
    }
    return Sample(**{**fields, **given})


def test_a_turn_weighs_what_it_would_weigh_alone():
    samples = fill([merged(), single()], 5, Shape(3, 1, 1, 1))
    data = convert_samples_to_train_data(Namespace(), samples)
    first, second, filler = data["source_names"]
    assert data["rollout_mask_sums"] == [4, 2, 0]
    assert first.weights.tolist() == pytest.approx([4 / 3] * 3 + [0, 0, 4])
    assert first.rewards.tolist() == [1, 1, 1, 0, 0, -1]
    assert second.weights.tolist() == [1, 1]
    assert filler.weights.tolist() == [0]
    assert data["loss_masks"][2] == [0]
    assert data["rollout_ids"] == data["sample_indices"] == [15, 16, 17]
    assert data["truncated"] == [1, 0, 0]
    assert data["rewards"] == data["raw_reward"] == [0.0, 1.0, 0.0]
    # None of these may reach slime's own keys: NaN would poison a mean that it logs.
    assert not {"teacher_log_probs", "turns"} & data.keys()


def test_replayed_turns_leave_slime_its_own_old_log_probs():
    """What no engine sampled has none: a NaN would spread through slime's means."""
    turns = [{"turn_id": "p", "start": 0, "end": 2, "reward": 1.0, "off_policy": True}]
    past = single(rollout_log_probs=[NAN, NAN], metadata={"turns": turns, "step": 0})
    data = convert_samples_to_train_data(Namespace(), fill([past, merged()], 0, Shape(2, 1, 1, 1)))
    assert "rollout_log_probs" not in data
    assert [signals.weights.sum().item() for signals in data["source_names"]] == [2, 8]
    sampled = convert_samples_to_train_data(Namespace(), fill([merged()], 0, Shape(1, 1, 1, 1)))
    assert sampled["rollout_log_probs"] == [[-0.5] * 6]


def test_per_token_the_fillers_are_taken_out_of_the_number_of_tokens():
    samples = fill([merged(), single()], 0, Shape(4, 1, 1, 1))
    args = Namespace(calculate_per_token_loss=True, global_batch_size=4)
    first, second, *_ = convert_samples_to_train_data(args, samples)["source_names"]
    # 6 trained tokens; slime divides by 8, because each of two fillers counts as one.
    assert first.weights.tolist() == pytest.approx([8 / 6] * 3 + [0, 0, 8 / 6])
    assert second.weights.tolist() == pytest.approx([8 / 6] * 2)


def test_per_token_each_step_has_its_own_number_of_tokens():
    late = single()
    late.metadata["step"] = 1
    samples = fill([merged(), late], 0, Shape(2, 2, 1, 1))
    args = Namespace(calculate_per_token_loss=True, global_batch_size=2)
    signals = convert_samples_to_train_data(args, samples)["source_names"]
    assert signals[0].weights.max().item() == pytest.approx(5 / 4)
    assert signals[2].weights.tolist() == pytest.approx([3 / 2] * 2)


def test_case_31_mixed_teachers_are_nan_where_there_is_none():
    taught = merged(teacher_log_probs=[-1.0, NAN, -2.0, NAN, NAN, NAN])
    data = convert_samples_to_train_data(Namespace(), [taught, single()])
    first, second = data["source_names"]
    assert first.teacher_log_probs.isfinite().sum() == 2
    assert second.teacher_log_probs.isnan().all()
    untaught = convert_samples_to_train_data(Namespace(), [merged(), single()])
    assert all(one.teacher_log_probs is None for one in untaught["source_names"])


def test_a_sample_carries_its_own_candidates():
    known = single()
    known.metadata["topk"] = TopK([[4, 5]] * 2, [[-0.1, NAN]] * 2)
    first, second = convert_samples_to_train_data(Namespace(), [merged(), known])["source_names"]
    assert first.topk_ids is None
    assert second.topk_ids.tolist() == [[4, 5], [4, 5]]
    torch.testing.assert_close(
        second.topk_log_probs, torch.tensor([[-0.1, NAN]] * 2), equal_nan=True
    )


def test_samples_of_another_rollout_function_are_weighed_as_slime_would():
    siblings = [
        Sample(tokens=[1, 2, 3], response_length=2, loss_mask=[1, 0], reward=0.5, rollout_id=7,
               rollout_log_probs=[0.0, 0.0]),
        Sample(tokens=[1, 2], response_length=1, reward=0.5, rollout_id=7, rollout_log_probs=[0.0]),
    ]  # fmt: skip
    for per_token in (False, True):
        args = Namespace(calculate_per_token_loss=per_token)
        data = convert_samples_to_train_data(args, siblings)
        assert data["rollout_mask_sums"] == [2, 2]
        assert [one.weights.tolist() for one in data["source_names"]] == [[1, 1], [1]]
        assert data["source_names"][0].rewards.tolist() == [0.5, 0.5]


def test_the_reward_key_is_respected():
    data = convert_samples_to_train_data(
        Namespace(reward_key="quality"),
        [Sample(tokens=[1, 2], response_length=1, reward={"quality": 0.25, "score": 9.0})],
    )
    assert data["rewards"] == [0.25]
    assert data["source_names"][0].rewards.tolist() == [0.25]


def test_a_turn_outside_its_response_is_refused():
    bad = single()
    bad.metadata["turns"][0]["end"] = 3
    with pytest.raises(HookError, match=r"\[0, 3\) is outside a response of 2"):
        convert_samples_to_train_data(Namespace(), [bad])


def test_the_advantage_of_a_token_is_its_own_turns_reward():
    data = tensors(convert_samples_to_train_data(Namespace(), [merged(), single()]))
    # As on their way to a training rank.
    data["source_names"] = pickle.loads(pickle.dumps(data["source_names"]))
    compute_advantages(Namespace(), data)
    assert [one.tolist() for one in data["advantages"]] == [[1, 1, 1, 0, 0, -1], [1, 1]]
    assert [one.tolist() for one in data["returns"]] == [[1, 1, 1, 0, 0, -1], [1, 1]]
    assert all(one.dtype == torch.float32 for one in data["advantages"])
    assert data["values"][0].weights.tolist() == pytest.approx([4 / 3] * 3 + [0, 0, 4])
    # slime logs a list that holds no tensors by its sum.
    assert sum(data["values"]) == 0.0


def test_a_batch_of_another_conversion_is_one_clear_error():
    with pytest.raises(HookError, match="--custom-convert-samples-to-train-data-path"):
        compute_advantages(Namespace(), {"source_names": ["unknown"]})
