from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.session.segments import build_segments
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
    assert sorted(turn.turn_id for segment in segments for turn in segment) == sorted(wanted)
    for segment in segments:
        leaf = tokens[segment[-1].turn_id]
        for turn in segment:
            # The segment's tokens up to the turn's end are its own prompt and output: merging
            # trains the same tokens under the same prefix.
            own = tokens[turn.turn_id]
            assert leaf[: turn.prompt_len + turn.output_len] == own
            assert own[turn.prompt_len :] == outputs[turn.turn_id]


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
    assert {segment[-1].turn_id for segment in build_segments(turns, wanted)} == ends


def test_a_session_that_keeps_history_is_one_segment():
    turns, length = [], 0
    for n in range(20):
        turns.append(head(f"t{n}", f"t{n - 1}" if n else None, length + 30, 50))
        length += 80
    assert build_segments(turns[::-1], ids(turns)) == [turns]


def test_case_25_a_template_that_drops_reasoning_makes_separate_segments():
    turns = [head(f"t{n}", None, 30 + 40 * n, 50) for n in range(3)]
    assert build_segments(turns, ids(turns)) == [[turn] for turn in turns]


def test_what_branches_shares_its_trunk_once():
    trunk = head("a", None, 5, 5)
    left, right = head("l", "a", 12, 3), head("r", "a", 13, 3)
    assert build_segments([trunk, left, right], {"a", "l", "r"}) == [[trunk, left], [right]]


def test_turns_that_are_not_wanted_join_what_is():
    chain = [
        head("a", None, 5, 5),
        head("b", "a", 12, 3),
        head("c", "b", 20, 4),
        head("d", "c", 30, 4),
    ]
    assert build_segments(chain, {"a", "c"}) == [[chain[0], chain[2]]]
    assert build_segments([], {"a"}) == []
    assert build_segments(chain, set()) == []


def test_a_long_chain_is_fast():
    turns = [head(f"t{n}", f"t{n - 1}" if n else None, 10 * n + 5, 5) for n in range(20000)]
    random.Random(0).shuffle(turns)
    [segment] = build_segments(turns, ids(turns))
    assert len(segment) == 20000
