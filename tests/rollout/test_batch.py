from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.journal import ReadyTurn
from openclaw_rl.rollout.batch import Rules, age, choose


def ready(turn_id: str, session: str = "s", created: float = 1.0, **given_fields) -> ReadyTurn:
    fields = {"owner": "", "min_version": "1", "max_version": "1", "temperature": 1.0}
    return ReadyTurn(
        turn_id=turn_id,
        session_id=session,
        created=created,
        output_len=3,
        **{**fields, **given_fields},
    )


def test_case_29_what_does_not_fit_waits_for_the_next_batch():
    turns = [ready(f"t{n:02}", f"s{n % 5}", created=float(n)) for n in range(20)]
    choice = choose(reversed(turns), Rules(16), "1")
    assert choice.take == tuple(f"t{n:02}" for n in range(16))  # older turns first
    assert choice.held == {"next_batch": 4}
    left = [turn for turn in turns if turn.turn_id not in choice.take]
    assert choose(left, Rules(4, session_share=1.0), "1").take == tuple(t.turn_id for t in left)


def test_case_32_one_session_gives_no_more_than_its_share():
    turns = [ready(f"a{n:02}", "loop", created=float(n)) for n in range(40)]
    choice = choose(turns, Rules(16), "1")
    assert choice.take == ("a00", "a01", "a02", "a03")
    assert choice.held == {"session_share": 36}
    assert choice.sessions == 1
    others = [ready(f"b{n:02}", f"s{n}", created=100.0 + n) for n in range(12)]
    choice = choose(turns + others, Rules(16), "1")
    assert len(choice.take) == 16
    assert sum(turn_id.startswith("a") for turn_id in choice.take) == 4


def test_sessions_of_different_owners_are_different_sessions():
    turns = [ready(f"{owner}{n}", "main", owner=owner) for owner in "ab" for n in range(3)]
    assert Counter(t[0] for t in choose(turns, Rules(4, 0.25), "1").take) == {"a": 1, "b": 1}


@pytest.mark.parametrize(
    ("batch", "share", "cap"),
    [(16, 0.25, 4), (3, 0.25, 1), (6, 0.25, 1), (16, 1.0, 16), (1, 0.25, 1)],
)
def test_the_share_is_at_least_one_turn(batch: int, share: float, cap: int):
    assert Rules(batch, share).session_cap == cap


def test_turns_that_do_not_fit_the_trainer_are_named_with_their_reason():
    rules = Rules(4, 1.0, max_staleness=8, temperature=0.6)
    turns = [
        ready("fits", temperature=0.6, min_version="2"),
        ready("old", temperature=0.6, min_version="1", max_version="9"),
        ready("hot", temperature=1.0, min_version="2"),
        ready("young", temperature=0.6, min_version="11"),
        ready("unknown", temperature=0.6, min_version="default"),
    ]
    choice = choose(turns, rules, "10")
    assert choice.drop == {"old": "stale", "hot": "temperature"}
    assert set(choice.take) == {"fits", "young", "unknown"}
    assert choose(turns, Rules(5, 1.0, max_staleness=None), "99").drop == {}
    assert choose(turns, rules, None).drop == {"hot": "temperature"}


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
    assert all(n <= rules.session_cap for n in given_turns.values())
    # No batch is left waiting that the rules would allow to be full.
    possible = sum(min(n, rules.session_cap) for n in Counter(sessions).values())
    assert len(choice.take) == min(batch, possible)
