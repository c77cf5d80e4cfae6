"""`TopK`: what is no candidate is named as none, and what cannot be right is refused."""

import math

import pytest

from openclaw_rl.types import TopK

NAN = math.nan


def plain(topk: TopK) -> list[list[tuple[int, float | None]]]:
    return [
        [(i, None if math.isnan(v) else v) for i, v in zip(ids, values, strict=True)]
        for ids, values in zip(topk.ids, topk.log_probs, strict=True)
    ]


def test_nothing_known_is_one_thing_however_it_was_said():
    ids, values = [[5, None, 7], [-100, 8, 9]], [[-1, -2, None], [-0.5, NAN, -math.inf]]
    topk = TopK.of(ids, values, 2)
    assert plain(topk) == [[(5, -1.0), (-1, None), (-1, None)], [(-1, None)] * 3]
    assert (topk.width, topk.known) == (3, True)
    assert not TopK.of([[3]], [[None]], 1).known


def test_candidates_are_cut_and_filled_up_to_k():
    topk = TopK.of_candidates([[(-0.1, 4), (-0.2, 5), (-0.3, 6)], [(-1.0, 4)], []], 2)
    assert plain(topk) == [[(4, -0.1), (5, -0.2)], [(4, -1.0), (-1, None)], [(-1, None)] * 2]


@pytest.mark.parametrize(
    ("ids", "values", "said"),
    [
        ([[1]], [[-1.0]], "1 and 1 rows for 2 tokens"),
        ([[1], [2]], [[-1.0]], "2 and 1 rows"),
        ([[1], [2, 3]], [[-1.0], [-1.0, -2.0]], "different widths"),
        ([[1], [2]], [[-1.0], [-1.0, -2.0]], "different widths"),
        ([[1, 1], [2, 3]], [[-1.0, -1.0], [-1.0, -1.0]], "twice"),
        ([[1], [2]], [[0.3], [0.7]], "above 0"),
        ([[2**31], [2]], [[-1.0], [-1.0]], "not a token id"),
    ],
)
def test_what_cannot_be_right_is_refused(ids, values, said):
    with pytest.raises(ValueError, match=said):
        TopK.of(ids, values, 2)


def test_an_id_that_is_unknown_twice_is_no_double():
    assert plain(TopK.of([[-1, -1]], [[None, None]], 1)) == [[(-1, None)] * 2]


def test_hooks_get_and_give_plain_lists():
    given = {"ids": [[1, 2]], "log_probs": [[-0.5, -1.5]]}
    assert TopK.of_mapping(given, 1).as_dict() == given
