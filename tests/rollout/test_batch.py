from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.rollout.batch import Rules, age, choose, sampled_as_trained
from openclaw_rl.types import Turn


def ready(turn_id: str, session: str = "s", created: float = 1.0, **given_fields) -> Turn:
    fields = {"min_version": "1", "max_version": "1"}
    return Turn(turn_id=turn_id, session_id=session, created=created, **{**fields, **given_fields})


def test_case_29_what_does_not_fit_waits_for_the_next_batch():
    turns = [ready(f"t{n:02}", f"s{n % 5}", created=float(n)) for n in range(20)]
    choice = choose(reversed(turns), Rules(16), "1")
    assert choice.take == tuple(f"t{n:02}" for n in range(16))  # older turns first
    assert choice.held == {"next_batch": 4}
    left = [turn for turn in turns if turn.turn_id not in choice.take]
    assert choose(left, Rules(4, session_share=1.0), "1").take == tuple(t.turn_id for t in left)


def test_case_32_one_session_gives_no_more_than_its_share():
    turns = [ready(f"a{n:02}", "loop", created=float(n)) for n in range(40)]
    others = [ready(f"b{n:02}", f"s{n}", created=100.0 + n) for n in range(12)]
    choice = choose(turns + others, Rules(16), "1")
    assert choice.take == ("a00", "a01", "a02", "a03", *(f"b{n:02}" for n in range(12)))
    assert choice.held == {"session_share": 36}
    # What the others cannot fill is the busy one's: nobody waits for them.
    choice = choose(turns + others[:3], Rules(16), "1")
    assert choice.take == (*(f"a{n:02}" for n in range(13)), "b00", "b01", "b02")


def test_case_32_two_busy_sessions_are_cut_evenly():
    turns = [ready(f"a{n:02}", "a", created=float(n)) for n in range(40)]
    turns += [ready(f"b{n:02}", "b", created=100.0 + n) for n in range(40)]
    take = choose(turns, Rules(16), "1").take
    assert Counter(turn_id[0] for turn_id in take) == {"a": 8, "b": 8}


def test_case_56_one_person_alone_fills_a_batch():
    turns = [ready(f"t{n:02}", created=float(n)) for n in range(20)]
    assert choose(turns, Rules(16), "1").take == tuple(f"t{n:02}" for n in range(16))
    assert len(choose(turns[:15], Rules(16), "1").take) == 15


def test_practice_only_fills_up_what_live_turns_leave():
    practice = [ready(f"p{n:02}", f"p{n}", created=float(n), source="practice") for n in range(12)]
    live = [ready(f"t{n:02}", "talk", created=50.0 + n) for n in range(10)]
    choice = choose(practice + live, Rules(16), "1")
    assert choice.take == (*(f"p{n:02}" for n in range(6)), *(f"t{n:02}" for n in range(10)))
    assert choice.held == {"next_batch": 6}


def test_sessions_of_different_owners_are_different_sessions():
    turns = [ready(f"{owner}{n}", "main", owner=owner) for owner in "ab" for n in range(3)]
    assert Counter(t[0] for t in choose(turns, Rules(4, 0.25), "1").take) == {"a": 2, "b": 2}


@pytest.mark.parametrize(
    ("batch", "share", "cap"),
    [(16, 0.25, 4), (3, 0.25, 1), (6, 0.25, 1), (16, 1.0, 16), (1, 0.25, 1)],
)
def test_the_share_is_at_least_one_turn(batch: int, share: float, cap: int):
    assert Rules(batch, share).session_cap == cap


def test_turns_that_do_not_fit_the_trainer_are_named_with_their_reason():
    rules = Rules(4, 1.0, max_staleness=8, temperature=0.6)
    warm = {"temperature": 0.6}
    turns = [
        ready("fits", sampling=warm, min_version="2"),
        ready("old", sampling=warm, min_version="1", max_version="9"),
        ready("hot", sampling={"temperature": 1.0}, min_version="2"),
        ready("young", sampling=warm, min_version="11"),
        ready("unknown", sampling=warm, min_version="default"),
        ready("replayed", off_policy=True, min_version=""),
    ]
    choice = choose(turns, rules, "10")
    assert choice.drop == {"old": "stale", "hot": "sampling"}
    assert set(choice.take) == {"fits", "young", "unknown", "replayed"}
    assert choose(turns, Rules(5, 1.0, max_staleness=None), "99").drop == {}
    assert choose(turns, rules, None).drop == {"hot": "sampling"}


@pytest.mark.parametrize(
    ("sampling", "at_one", "at_its_own"),
    [
        ({}, True, True),
        (
            {"temperature": 1.0, "max_new_tokens": 9, "stop": ["x"], "stop_token_ids": [2]},
            True,
            True,
        ),
        ({"temperature": 0.6}, False, True),
        ({"temperature": 0.0}, False, False),
        (
            {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
            True,
            True,
        ),
        ({"presence_penalty": 0.5}, False, False),
        ({"frequency_penalty": -0.1}, False, False),
        ({"repetition_penalty": 1.05}, False, False),
        ({"top_p": 1.0, "min_p": 0.0, "top_k": -1}, True, True),
        ({"top_p": 0.9}, False, False),
        ({"top_k": 20}, False, False),
        ({"min_p": 0.05}, False, False),
        ({"logit_bias": {"7": 5.0}}, False, False),
        ({"json_schema": "{}"}, False, False),
        ({"regex": "a+"}, False, False),
        ({"ebnf": "root ::= x"}, False, False),
        ({"structural_tag": "{}"}, False, False),
        ({"min_new_tokens": 4}, False, False),
    ],
)
def test_case_46_only_what_is_sampled_as_trained_is_trained(sampling, at_one, at_its_own):
    assert sampled_as_trained(sampling, 1.0) is at_one
    assert sampled_as_trained(sampling, None) is at_its_own


def test_age_is_counted_in_versions():
    assert age(ready("a", min_version="9"), "10") == 1
    assert age(ready("a", min_version="11"), "10") == 0
    assert age(ready("a", min_version="default"), "10") is None
    assert age(ready("a"), None) is None


@given(
    sessions=st.lists(st.integers(0, 6), max_size=60),
    batch=st.integers(1, 20),
    share=st.sampled_from([0.1, 0.25, 0.5, 1.0]),
)
def test_every_ready_turn_is_taken_held_or_dropped(sessions, batch, share):
    rules = Rules(batch, share)
    turns = [ready(f"t{n:03}", f"s{s}", created=float(n)) for n, s in enumerate(sessions)]
    choice = choose(turns, rules, "1")
    assert len(choice.take) + len(choice.drop) + sum(choice.held.values()) == len(turns)
    assert len(choice.take) <= batch
    by_id = {turn.turn_id: turn for turn in turns}
    given_turns = Counter(by_id[turn_id].session_id for turn_id in choice.take)
    assert len(choice.take) == min(batch, len(turns))  # nobody waits for others
    # Beyond its share a session only has places that the others cannot fill.
    left = Counter(turn.session_id for turn in turns) - given_turns
    most = max(given_turns.values(), default=0)
    if most > rules.session_cap:
        assert all(given_turns[session] >= most - 1 for session in left)
    for one, other in itertools.pairwise(turns):  # older ones first
        if one.session_id == other.session_id and other.turn_id in choice.take:
            assert one.turn_id in choice.take
