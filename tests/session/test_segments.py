from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.session.segments import Segment, SegmentTurn, Span, build_segments


@st.composite
def forests(draw: st.DrawFn):
    """Turns with real tokens: some continue an earlier one token for token, some do not."""
    turns: list[SegmentTurn] = []
    tokens: dict[str, list[int]] = {}
    outputs: dict[str, list[int]] = {}
    fresh = itertools.count()
    for n in range(draw(st.integers(1, 12))):
        parent = draw(st.sampled_from([None, *range(n)]))
        added = [next(fresh) for _ in range(draw(st.integers(1, 3)))]
        output = [next(fresh) for _ in range(draw(st.integers(1, 3)))]
        before = [] if parent is None else tokens[f"t{parent}"]
        prompt = [*before, *added]
        tokens[f"t{n}"], outputs[f"t{n}"] = prompt + output, output
        turns.append(
            SegmentTurn(
                f"t{n}",
                None if parent is None else f"t{parent}",
                len(prompt),
                len(output),
                draw(st.booleans()),
            )
        )
    order = draw(st.permutations(turns))
    return order, tokens, outputs


@given(forest=forests())
def test_each_sampled_token_is_in_exactly_one_place(forest):
    turns, tokens, outputs = forest
    segments = build_segments(turns)
    members = [span for segment in segments for span in segment.members]
    wanted = [turn.turn_id for turn in turns if turn.wanted]
    assert sorted(span.turn_id for span in members) == sorted(wanted)
    for segment in segments:
        assert segment.members[-1].turn_id == segment.leaf_id
        ends = [0]
        for span in segment.members:
            assert span.start >= ends[-1]
            ends.append(span.end)
            assert span.end - span.start == len(outputs[span.turn_id])
            # The segment's tokens up to the span's end are the member's own prompt and output:
            # merging trains the same tokens under the same prefix.
            assert tokens[segment.leaf_id][: span.end] == tokens[span.turn_id]
        assert ends[-1] == len(tokens[segment.leaf_id])


@given(forest=forests())
def test_there_are_as_few_segments_as_possible(forest):
    turns, _, _ = forest
    parents = {turn.turn_id: turn.parent_id for turn in turns}

    def ancestors(turn_id: str) -> set[str]:
        found = set()
        while (above := parents[turn_id]) is not None:
            found.add(above)
            turn_id = above
        return found

    wanted = {turn.turn_id for turn in turns if turn.wanted}
    # No two of these lie on one chain, so each needs a segment of its own.
    ends = wanted - {above for turn_id in wanted for above in ancestors(turn_id)}
    assert {segment.leaf_id for segment in build_segments(turns)} == ends


def test_a_session_that_keeps_history_costs_its_own_length():
    turns, length = [], 0
    for n in range(20):
        turns.append(SegmentTurn(f"t{n}", f"t{n - 1}" if n else None, length + 30, 50))
        length += 80
    [segment] = build_segments(turns)
    assert len(segment.members) == 20
    assert segment.members[-1].end == length  # distinct tokens, each once: a ratio of 1


def test_case_25_a_template_that_drops_reasoning_makes_separate_segments():
    turns = [SegmentTurn(f"t{n}", None, 30 + 40 * n, 50) for n in range(3)]
    assert build_segments(turns) == [
        Segment(turn.turn_id, (Span(turn.turn_id, turn.prompt_len, turn.prompt_len + 50),))
        for turn in turns
    ]


def test_what_branches_shares_its_trunk_once():
    trunk = SegmentTurn("a", None, 5, 5)
    left, right = SegmentTurn("l", "a", 12, 3), SegmentTurn("r", "a", 13, 3)
    assert build_segments([trunk, left, right]) == [
        Segment("l", (Span("a", 5, 10), Span("l", 12, 15))),
        Segment("r", (Span("r", 13, 16),)),
    ]


def test_turns_that_are_not_wanted_join_what_is():
    chain = [
        SegmentTurn("a", None, 5, 5),
        SegmentTurn("b", "a", 12, 3, wanted=False),
        SegmentTurn("c", "b", 20, 4),
        SegmentTurn("d", "c", 30, 4, wanted=False),
    ]
    assert build_segments(chain) == [Segment("c", (Span("a", 5, 10), Span("c", 20, 24)))]
    assert build_segments([]) == []
    assert build_segments(chain[1:2]) == []


def test_a_long_chain_is_fast():
    turns = [SegmentTurn(f"t{n}", f"t{n - 1}" if n else None, 10 * n + 5, 5) for n in range(20000)]
    random.Random(0).shuffle(turns)
    [segment] = build_segments(turns)
    assert len(segment.members) == 20000


@pytest.mark.parametrize(
    "turns",
    [
        [SegmentTurn("a", None, 1, 1), SegmentTurn("a", None, 1, 1)],
        [SegmentTurn("a", None, 5, 5), SegmentTurn("b", "a", 9, 1)],
        [SegmentTurn("a", "b", 5, 0), SegmentTurn("b", "a", 5, 0)],
    ],
)
def test_what_cannot_be_is_refused(turns):
    with pytest.raises(ValueError, match=r"named twice|shorter|itself"):
        build_segments(turns)
