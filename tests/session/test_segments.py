from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.session.segments import Segment, Span, build_segments
from openclaw_rl.types import Turn


def head(turn_id: str, parent_id: str | None, prompt_len: int, output_len: int) -> Turn:
    """A turn whose prompt begins with all of its parent's tokens."""
    return Turn(
        turn_id=turn_id,
        session_id="s",
        parent_id=parent_id,
        shares_tokens=parent_id is not None,
        prompt_len=prompt_len,
        output_len=output_len,
    )


def ids(turns: list[Turn]) -> set[str]:
    return {turn.turn_id for turn in turns}


@st.composite
def forests(draw: st.DrawFn):
    """Turns with real tokens: some continue an earlier one token for token, some do not."""
    turns: list[Turn] = []
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
        above = None if parent is None else f"t{parent}"
        turns.append(head(f"t{n}", above, len(prompt), len(output)))
    order = draw(st.permutations(turns))
    wanted = draw(st.sets(st.sampled_from(sorted(tokens))))
    return order, wanted, tokens, outputs


@given(forest=forests())
def test_each_sampled_token_is_in_exactly_one_place(forest):
    turns, wanted, tokens, outputs = forest
    segments = build_segments(turns, wanted)
    members = [span for segment in segments for span in segment.members]
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
    turns, wanted, _, _ = forest
    parents = {turn.turn_id: turn.parent_id for turn in turns}

    def ancestors(turn_id: str) -> set[str]:
        found = set()
        while (above := parents[turn_id]) is not None:
            found.add(above)
            turn_id = above
        return found

    # No two of these lie on one chain, so each needs a segment of its own.
    ends = wanted - {above for turn_id in wanted for above in ancestors(turn_id)}
    assert {segment.leaf_id for segment in build_segments(turns, wanted)} == ends


def test_a_session_that_keeps_history_costs_its_own_length():
    turns, length = [], 0
    for n in range(20):
        turns.append(head(f"t{n}", f"t{n - 1}" if n else None, length + 30, 50))
        length += 80
    [segment] = build_segments(turns, ids(turns))
    assert len(segment.members) == 20
    assert segment.members[-1].end == length  # distinct tokens, each once: a ratio of 1


def test_case_25_a_template_that_drops_reasoning_makes_separate_segments():
    turns = [head(f"t{n}", None, 30 + 40 * n, 50) for n in range(3)]
    assert build_segments(turns, ids(turns)) == [
        Segment(turn.turn_id, (Span(turn.turn_id, turn.prompt_len, turn.prompt_len + 50),))
        for turn in turns
    ]


def test_what_branches_shares_its_trunk_once():
    trunk = head("a", None, 5, 5)
    left, right = head("l", "a", 12, 3), head("r", "a", 13, 3)
    assert build_segments([trunk, left, right], {"a", "l", "r"}) == [
        Segment("l", (Span("a", 5, 10), Span("l", 12, 15))),
        Segment("r", (Span("r", 13, 16),)),
    ]


def test_turns_that_are_not_wanted_join_what_is():
    chain = [
        head("a", None, 5, 5),
        head("b", "a", 12, 3),
        head("c", "b", 20, 4),
        head("d", "c", 30, 4),
    ]
    assert build_segments(chain, {"a", "c"}) == [
        Segment("c", (Span("a", 5, 10), Span("c", 20, 24)))
    ]
    assert build_segments([], {"a"}) == []
    assert build_segments(chain, set()) == []


def test_a_long_chain_is_fast():
    turns = [head(f"t{n}", f"t{n - 1}" if n else None, 10 * n + 5, 5) for n in range(20000)]
    random.Random(0).shuffle(turns)
    [segment] = build_segments(turns, ids(turns))
    assert len(segment.members) == 20000


@pytest.mark.parametrize(
    "turns",
    [
        [head("a", None, 1, 1), head("a", None, 1, 1)],
        [head("a", None, 5, 5), head("b", "a", 9, 1)],
        [head("a", "b", 5, 0), head("b", "a", 5, 0)],
    ],
)
def test_what_cannot_be_is_refused(turns):
    with pytest.raises(ValueError, match=r"named twice|shorter|itself"):
        build_segments(turns, ids(turns))
