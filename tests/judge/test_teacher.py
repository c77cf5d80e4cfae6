"""The choice of hint and candidates: closed forms, ties, what is missing."""

from __future__ import annotations

import math

import pytest

from openclaw_rl.engine.types import Scores
from openclaw_rl.judge.teacher import (
    overlap,
    teacher_list,
    values_over_top_k,
)
from openclaw_rl.types import TopK


def student(*rows: list[int]) -> TopK:
    return TopK(rows, [[-0.5 * (at + 1) for at in range(len(row))] for row in rows])


def listed(*ids: int) -> list[tuple[float, int]]:
    """A teacher's list in which the log-prob tells the id: -id/100."""
    return [(-one / 100, one) for one in ids]


def plain(topk: TopK) -> list[list[tuple[int, float]]]:
    """Rows as (id, log-prob), without what is none."""
    found = []
    for ids, values in zip(topk.ids, topk.log_probs, strict=True):
        assert [i < 0 for i in ids] == [math.isnan(v) for v in values]
        found.append([(i, v) for i, v in zip(ids, values, strict=True) if i >= 0])
    return found


def test_a_teacher_is_asked_for_more_than_k() -> None:
    assert [teacher_list(k) for k in (0, 1, 4, 5, 6, 50)] == [0, 20, 20, 20, 24, 200]


def test_overlap_is_between_k_and_k() -> None:
    top = [listed(3, 1, 2), listed(9, 8, 1), listed(1, 2, 3)]
    assert overlap(student([1, 2, 9], [1, 2, 3], [-1, -1, 1]), top, 2) == 1
    assert overlap(student([1, 2, 9], [1, 2, 3], [-1, -1, 1]), top, 3) == 4


# Two tokens, 7 and 8 sampled. The teacher knows 7 without listing it.
def learn(scored, policy=None, **options):
    return values_over_top_k(scored, policy, [7, 8], **({"k": 2} | options))


POLICY = student([7, 1, 2], [8, 3, 4])
SCORES = Scores([-2.5, -0.08], [listed(1, 5, 6, 2), listed(8, 9, 4)])


@pytest.mark.parametrize(
    ("subset", "expected"),
    [
        ("student", [[(7, -2.5), (1, -0.01)], [(8, -0.08)]]),
        ("teacher", [[(1, -0.01), (5, -0.05)], [(8, -0.08), (9, -0.09)]]),
        ("overlap", [[(1, -0.01)], [(8, -0.08)]]),
    ],
)
def test_whose_candidates(subset, expected) -> None:
    values = learn({"h": SCORES}, POLICY, subset=subset)
    assert values is not None
    assert plain(values.topk) == expected
    assert values.topk.width == 2
    assert (values.hint, values.log_probs) == ("h", [-2.5, -0.08])


def test_a_longer_list_of_the_teachers_names_more_of_the_policys() -> None:
    values = learn({"h": SCORES}, POLICY, k=3, subset="student")
    assert plain(values.topk) == [[(7, -2.5), (1, -0.01), (2, -0.02)], [(8, -0.08), (4, -0.04)]]


def test_the_hint_with_the_largest_overlap_teaches_and_the_first_of_equals() -> None:
    one = Scores([-0.1, -0.2], [[(-0.1, 7), (-1, 2)], [(-0.2, 9), (-1, 10)]])
    two = Scores([-0.3, -0.4], [[(-0.3, 5), (-1, 6)], [(-0.4, 8), (-1, 3)]])
    values = learn({"one": one, "two": two}, POLICY, subset="student")
    assert (values.hint, values.log_probs) == ("two", [-0.3, -0.4])
    assert plain(values.topk) == [[(7, -0.3)], [(8, -0.4), (3, -1)]]
    assert learn({"one": one, "again": one}, POLICY, subset="student").hint == "one"


def test_a_hint_without_lists_is_no_choice() -> None:
    blind = Scores([-0.1, -0.1])
    values = learn({"blind": blind, "h": SCORES}, POLICY, subset="student")
    assert (values.hint, values.log_probs) == ("h", [-2.5, -0.08])
    assert learn({"blind": blind}, POLICY, subset="student") is None


@pytest.mark.parametrize("subset", ["student", "overlap"])
def test_without_the_policys_candidates_there_are_no_values_over_them(subset) -> None:
    assert learn({"h": SCORES}, subset=subset) is None


def test_the_teachers_own_need_none_of_the_policys() -> None:
    other = Scores([-1.0, -1.0], [listed(7, 1), listed(8, 3)])
    values = learn({"h": SCORES, "other": other}, None, subset="teacher")
    assert values.hint == "h"
    assert plain(values.topk)[0] == [(1, -0.01), (5, -0.05)]


def test_a_token_without_a_list_has_no_candidates() -> None:
    scores = Scores([-1.0, -1.0], [[], listed(8)])
    values = learn({"h": scores}, POLICY, subset="teacher")
    assert plain(values.topk) == [[], [(8, -0.08)]]
