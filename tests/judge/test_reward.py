"""What reward functions may return."""

from __future__ import annotations

import math

import pytest

from openclaw_rl.judge.reward import BadReward, read_reward
from openclaw_rl.types import Verdict


class Number:
    def __float__(self) -> float:
        return 0.25


def test_numbers() -> None:
    assert read_reward(1, 3) == Verdict(score=1.0)
    assert read_reward(None, 3) == Verdict(score=None)
    assert read_reward(Number(), 3).score == 0.25


def test_dicts() -> None:
    verdict = read_reward({"score": -1, "hint": " x "}, 3)
    assert (verdict.score, verdict.hint) == (-1.0, "x")
    verdict = read_reward({"teacher_log_probs": [-1, None, float("-inf")]}, 3)
    assert verdict.score is None
    assert verdict.teacher_log_probs is not None
    assert verdict.teacher_log_probs[0] == -1.0
    assert all(math.isnan(value) for value in verdict.teacher_log_probs[1:])


def test_candidates_of_a_custom_teacher() -> None:
    given = {"ids": [[4, 5]] * 3, "log_probs": [[-0.5, None]] * 3}
    verdict = read_reward({"teacher_topk": given}, 3)
    assert verdict.teacher_topk is not None
    assert verdict.teacher_topk.ids == [[4, -1]] * 3
    nothing = {"ids": [[-1]] * 3, "log_probs": [[None]] * 3}
    assert read_reward({"teacher_topk": nothing}, 3).teacher_topk is None


def test_reward_key_is_respected() -> None:
    assert read_reward({"score": 1.0, "mine": -1.0}, 1, "mine").score == -1.0
    assert read_reward({"score": 1.0}, 1, "mine").score == 1.0
    assert read_reward(0.5, 1, "mine").score == 0.5


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (math.nan, "reward_nan"),
        (math.inf, "reward_nan"),
        ({"score": math.nan}, "reward_nan"),
        ("1.0", "reward_invalid"),
        ([1.0, 2.0], "reward_invalid"),
        ({}, "reward_invalid"),
        ({"reward": 1.0}, "reward_invalid"),
        ({"score": 1.0, "hint": 5}, "reward_invalid"),
        ({"score": 1.0, "teacher_log_probs": [-1.0]}, "reward_invalid"),
        ({"score": 1.0, "teacher_log_probs": ["a", "b", "c"]}, "reward_invalid"),
        ({"score": 1.0, "teacher_log_probs": 3}, "reward_invalid"),
        ({"score": 1.0, "teacher_topk": {"ids": [[1]] * 3}}, "reward_invalid"),
        ({"score": 1.0, "teacher_topk": [[1]] * 3}, "reward_invalid"),
        ({"teacher_topk": {"ids": [[1]] * 2, "log_probs": [[-1.0]] * 2}}, "reward_invalid"),
        ({"teacher_topk": {"ids": [[1]] * 3, "log_probs": [[0.5]] * 3}}, "reward_invalid"),
    ],
)
def test_case_34_unusable_rewards(result: object, reason: str) -> None:
    with pytest.raises(BadReward) as error:
        read_reward(result, 3)
    assert error.value.reason == reason


def test_what_is_said_of_a_reward_quotes_nothing_of_it() -> None:
    for result in (
        "secret",
        {"score": "secret"},
        {"teacher_log_probs": ["secret"] * 3},
        {"teacher_topk": {"ids": [["secret"]] * 3, "log_probs": [[-1.0]] * 3}},
        {"teacher_topk": {"ids": [[1]] * 3, "log_probs": [["secret"]] * 3}},
    ):
        with pytest.raises(BadReward) as error:
            read_reward(result, 3)
        assert "secret" not in str(error.value)
