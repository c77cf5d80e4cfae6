from __future__ import annotations

import dataclasses
import math
import os
import sqlite3
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openclaw_rl.errors import JournalError
from openclaw_rl.journal import Journal
from openclaw_rl.journal.database import LAYOUT
from openclaw_rl.types import State, TopK, Turn, Verdict
from tests.journal.build import USER, chain, judged, record


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest.fixture
def journal(path: Path):
    with Journal.open(path) as opened:
        yield opened


def assert_same(turn, rec: Turn) -> None:
    for field in dataclasses.fields(Turn):
        got, want = getattr(turn, field.name), getattr(rec, field.name)
        if isinstance(want, (list, tuple)):
            got, want = list(got), list(want)
        assert got == want, field.name


# -- what goes in comes out ----------------------------------------------------------------


def test_a_turn_comes_back_as_it_was_given(journal: Journal):
    rec = record(
        prompt_ids=[0, 2**31 - 1],
        output_ids=[3, 4],
        output_logprobs=[-0.25, -1e-3],
        output_versions=["3", "4"],
        messages=(
            {"role": "system", "content": "a\ud800b 中"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "z": 1, "a": 2}]},
        ),
        tools=({"type": "function", "function": {"name": "f"}},),
        template_kwargs={"enable_thinking": False},
        sampling={"temperature": 0.6, "stop": ["x"]},
        finish_reason="length",
        truncated=True,
        off_policy=True,
    )
    rec = dataclasses.replace(rec, output_logprobs=[-0.25, float_32(-1e-3)])
    journal.record_turn(rec)
    turn = journal.turn("t1")
    assert_same(turn, rec)
    assert list(turn.messages[1]["tool_calls"][0]) == ["id", "z", "a"]  # templates print the order
    assert turn.state is State.WAITING
    assert turn.next_state is None
    assert journal.turn("t2") is None


def float_32(value: float) -> float:
    import struct

    return struct.unpack("f", struct.pack("f", value))[0]


def test_a_long_session_comes_back_whole_and_costs_what_it_adds(journal: Journal, path: Path):
    turns = chain(200)
    sizes = []
    for rec in turns:
        journal.record_turn(rec)
        sizes.append(len(rec.prompt_ids))
    for rec in (turns[0], turns[1], turns[57], turns[199]):
        assert_same(journal.turn(rec.turn_id), rec)
        assert journal.tokens(rec.turn_id) == [*rec.prompt_ids, *rec.output_ids]
    with sqlite3.connect(path) as db:
        tails = [row[0] for row in db.execute("SELECT length(prompt_tail) / 4 FROM payloads")]
        messages = db.execute("SELECT count(*) FROM messages").fetchone()[0]
    assert sizes[199] == 998
    assert tails == [3] + [2] * 199
    assert messages == 1 + 200 + 200


def test_turn_200_looks_up_no_more_than_turn_2(journal: Journal):
    statements: list[str] = []
    counts = []
    for rec in chain(200):
        statements.clear()
        journal._db.set_trace_callback(statements.append)
        journal.record_turn(rec)
        counts.append(len(statements))
    assert counts[199] == counts[2]


def test_messages_that_differ_from_the_parents_are_kept_exactly(journal: Journal):
    parent, child = chain(2)
    system = {"role": "system", "content": "It is 10:01."}  # changes with every request
    transient = {"role": "user", "content": "[internal] memory flush"}
    child = dataclasses.replace(child, messages=(system, transient, *child.messages[1:]))
    journal.record_turn(parent)
    journal.record_turn(child)
    assert_same(journal.turn(parent.turn_id), parent)
    assert_same(journal.turn(child.turn_id), child)


def test_a_prefix_that_is_claimed_but_does_not_hold_is_stored_in_full(journal: Journal):
    parent, child = chain(2)
    child = dataclasses.replace(child, prompt_ids=[999, *child.prompt_ids[1:]])
    journal.record_turn(parent)
    journal.record_turn(child)
    turn = journal.turn(child.turn_id)
    assert turn.prompt_ids == child.prompt_ids
    assert not turn.shares_tokens
    assert journal.outcomes().counters == {"prefix_mismatch": 1}
    orphan = record("o", parent_id="gone", shares_tokens=True, prompt_ids=[1, 2])
    journal.record_turn(orphan)
    assert journal.tokens("o") == [1, 2, 7, 8, 9]


@pytest.mark.parametrize(
    ("given_fields", "reason"),
    [
        ({"output_logprobs": []}, "logprobs_missing"),
        ({"output_logprobs": [-0.5, -0.5]}, "logprobs_missing"),
        ({"output_logprobs": [-0.5, math.nan, -0.5]}, "logprobs_invalid"),
        ({"output_versions": ["1"]}, "versions_missing"),
        ({"output_versions": ["1", "1", ""]}, "versions_missing"),
        ({"output_ids": []}, "empty_output"),
        ({"drop_reason": "engine_lied"}, "engine_lied"),
    ],
)
def test_case_24_a_turn_that_does_not_line_up_is_dropped_with_its_reason(
    journal: Journal, given_fields, reason
):
    rec = record(**given_fields)
    journal.record_turn(rec)
    turn = journal.turn("t1")
    assert turn.state is State.DROPPED
    assert turn.drop_reason == reason
    assert len(turn.output_logprobs) == len(rec.output_logprobs)  # nothing padded
    outcomes = journal.outcomes()
    assert outcomes.dropped == {reason: 1}
    assert outcomes.balanced()
    assert not journal.set_next_state("t1", USER)


def test_the_same_turn_twice_is_refused(journal: Journal):
    journal.record_turn(record())
    with pytest.raises(JournalError, match="already recorded"):
        journal.record_turn(record())
    assert journal.outcomes().seen == 1


def test_token_ids_that_are_none_are_refused_and_nothing_is_kept(journal: Journal):
    with pytest.raises(JournalError, match="token ids"):
        journal.record_turn(record(output_ids=[2**31]))
    assert journal.outcomes().seen == 0


# -- the states ----------------------------------------------------------------------------


def test_the_first_next_state_wins(journal: Journal):
    journal.record_turn(record())
    assert journal.set_next_state("t1", ()) is False
    assert journal.set_next_state("t1", USER) is True
    assert journal.set_next_state("t1", ({"role": "user", "content": "no"},)) is False
    assert journal.set_next_state("unknown", USER) is False
    assert journal.turn("t1").next_state == USER


def test_only_turns_that_wait_are_superseded(journal: Journal):
    for turn_id in ("t1", "t2", "t3"):
        journal.record_turn(record(turn_id=turn_id))
    journal.record_turn(record(turn_id="aside", kind="side"))
    journal.set_next_state("t2", USER)
    assert journal.supersede(("t1", "t2", "aside", "unknown")) == 1
    assert (journal.turn("t1").state, journal.turn("t1").drop_reason) == (State.DROPPED, "retried")
    states = [journal.turn(turn_id).state for turn_id in ("t2", "t3", "aside")]
    assert states == [State.JUDGING, State.WAITING, State.SIDE]


def test_a_side_turn_has_one_state_only(journal: Journal):
    journal.record_turn(record(kind="side", drop_reason="whatever"))
    assert not journal.set_next_state("t1", USER)
    assert not journal.drop("t1", "retried", 101.0)
    assert journal.turn("t1").state is State.SIDE
    outcomes = journal.outcomes()
    assert (outcomes.seen, outcomes.main, outcomes.side) == (1, 0, 1)


def test_case_19_a_turn_without_a_next_state_takes_no_place(journal: Journal):
    first, last = chain(2)
    judged(journal, first)
    journal.record_turn(last)
    assert [turn.turn_id for turn in journal.ready()] == [first.turn_id]
    assert journal.end_session("s1", owner="someone else") == 0
    assert journal.end_session("s1") == 1
    assert journal.outcomes().dropped == {"session_ended": 1}
    assert journal.turn(first.turn_id).state is State.READY


def test_expiry_drops_what_nothing_followed(journal: Journal):
    journal.record_turn(record("old", created=100.0))
    journal.record_turn(record("new", created=190.0))
    assert journal.run_retention(200.0, next_state_ttl=50.0) == {"no_next_state": 1}
    assert journal.outcomes().dropped == {"no_next_state": 1}
    assert journal.turn("old").state is State.DROPPED
    assert journal.turn("new").state is State.WAITING


def test_claims_expire_and_are_held_by_one_judge(journal: Journal):
    journal.record_turn(record())
    journal.set_next_state("t1", USER)
    assert [t.turn_id for t in journal.claim("a", 5, 110.0, 60.0)] == ["t1"]
    assert journal.claim("b", 5, 169.0, 60.0) == []
    [again] = journal.claim("b", 5, 170.0, 60.0)
    assert again.attempts == 2
    assert journal.write_verdict("t1", "a", Verdict(score=1.0)) is None  # too late
    journal.extend_claims("b", 500.0)
    assert journal.claim("c", 5, 499.0, 60.0) == []
    assert journal.release_claims("b") == 1
    [again] = journal.claim("c", 5, 499.0, 60.0)
    assert again.attempts == 2
    assert journal.write_verdict("t1", "c", Verdict(score=-1.0, votes=(-1, None)))
    verdict = journal.turn("t1").verdict
    assert (verdict.score, verdict.votes) == (-1.0, (-1, None))


def test_case_53_a_judge_whose_claim_ran_out_ends_nothing(journal: Journal):
    journal.record_turn(record())
    journal.set_next_state("t1", USER)
    journal.claim("a", 1, 110.0, 60.0)
    assert not journal.drop("t1", "retried", 120.0)  # held
    [_] = journal.claim("b", 1, 170.0, 60.0)
    assert not journal.drop_claimed("t1", "a", "reward_timeout")
    assert journal.postpone("t1", "a", "judge_unavailable", 171.0) is None
    assert journal.write_verdict("t1", "b", Verdict(score=1.0)) is State.READY
    assert not journal.drop_claimed("t1", "a", "reward_timeout")
    journal.extend_claims("a", 500.0)
    assert journal.turn("t1").state is State.READY
    assert journal.outcomes().dropped == {}


def test_the_judge_that_holds_a_turn_can_end_it(journal: Journal):
    journal.record_turn(record())
    assert not journal.drop_claimed("t1", "a", "reward_failed")  # waiting: nobody has it
    journal.set_next_state("t1", USER)
    journal.claim("a", 1, 110.0, 60.0)
    assert journal.drop_claimed("t1", "a", "reward_failed")
    assert journal.outcomes().dropped == {"reward_failed": 1}


@pytest.mark.parametrize(
    ("verdict", "state"),
    [
        (Verdict(score=1.0), State.READY),
        (Verdict(score=0.0), State.DROPPED),
        (Verdict(score=None), State.DROPPED),
        (Verdict(score=None, hint="be shorter, please"), State.DROPPED),
        (Verdict(score=0.0, teacher_log_probs=[math.nan] * 3), State.DROPPED),
        (Verdict(score=0.0, teacher_log_probs=[math.nan, -1.0, math.nan]), State.READY),
    ],
)
def test_only_a_signal_makes_a_turn_ready(journal: Journal, verdict: Verdict, state: State):
    journal.record_turn(record())
    journal.set_next_state("t1", USER)
    journal.claim("w", 1, 110.0, 60.0)
    assert journal.write_verdict("t1", "w", verdict) is state
    assert journal.outcomes().dropped == ({} if state is State.READY else {"no_signal": 1})
    assert journal.turn("t1").verdict.hint == verdict.hint


def test_a_verdict_that_does_not_fit_is_refused(journal: Journal):
    journal.record_turn(record())
    journal.set_next_state("t1", USER)
    journal.claim("w", 1, 110.0, 60.0)
    for wrong in (Verdict(score=math.nan), Verdict(score=1.0, teacher_log_probs=[-1.0])):
        with pytest.raises(JournalError):
            journal.write_verdict("t1", "w", wrong)
    assert journal.turn("t1").state is State.JUDGING


def test_case_27_a_judge_that_is_down_is_asked_again_and_at_last_given_up(journal: Journal):
    journal.record_turn(record())
    journal.set_next_state("t1", USER)
    now = 110.0
    for _ in range(2):
        journal.claim("w", 1, now, 60.0)
        assert journal.postpone("t1", "w", "judge_down", now + 30, max_attempts=3) is State.JUDGING
        assert journal.claim("w", 1, now + 29, 60.0) == []
        now += 30
    journal.claim("w", 1, now, 60.0)
    assert journal.postpone("t1", "w", "judge_down", now, max_attempts=3) is State.DROPPED
    assert journal.postpone("t1", "w", "judge_down", now) is None
    outcomes = journal.outcomes()
    assert outcomes.dropped == {"judge_down": 1}
    assert outcomes.counters == {"postponed:judge_down": 3}
    assert journal.turn("t1").verdict is None


def test_a_turn_that_kills_its_judges_is_given_up(journal: Journal):
    journal.record_turn(record())
    journal.set_next_state("t1", USER)
    now = 110.0
    while journal.claim("w", 1, now, 60.0):
        now += 60.0
    assert journal.turn("t1").attempts == 20
    assert journal.outcomes().dropped == {"judge_lost": 1}


def test_a_turn_is_trained_once(journal: Journal):
    for n in range(3):
        judged(journal, record(f"t{n}", created=100.0 + n))
    assert not journal.lease(1, "h", ["t0", "unknown"])
    assert not journal.lease(1, "h", [])
    assert journal.lease(1, "h", ["t1", "t0"])
    assert not journal.lease(2, "h", ["t1", "t2"])  # all or nothing
    assert journal.turn("t2").state is State.READY
    with pytest.raises(JournalError, match="unfinished"):
        journal.lease(1, "h", ["t2"])
    assert journal.lease(1, "other host", ["t2"])
    assert journal.leases("h") == {1: ["t0", "t1"]}
    assert not journal.drop("t0", "late", 301.0)
    assert journal.give_back(1, "h") == 2
    assert journal.leases("h") == {}
    assert journal.lease(1, "h", ["t0", "t1"])
    assert journal.drop_leased(1, "h", ["t1", "t2"], "misfit") == 1
    assert journal.mark_trained(1, "h", "5") == 1
    assert journal.mark_trained(1, "h", "6") == 0
    assert journal.give_back(1, "h") == 0
    assert journal.turn("t0").trained_version == "5"
    outcomes = journal.outcomes()
    assert (outcomes.trained, outcomes.leased, outcomes.dropped) == (1, 1, {"misfit": 1})
    assert outcomes.balanced()


def test_ready_turns_of_a_quiet_session_are_not_hidden_by_a_busy_one(journal: Journal):
    for rec in chain(10, "busy"):
        judged(journal, rec)
    judged(journal, record("quiet", session_id="quiet", created=500.0))
    assert "quiet" in [turn.turn_id for turn in journal.ready(4)]
    found = journal.ready()
    assert [turn.created for turn in found] == sorted(turn.created for turn in found)
    assert found[0].min_version == found[0].max_version == "1"


def test_versions_are_ordered_as_numbers(journal: Journal):
    judged(journal, record(output_versions=["10", "9", "9"], sampling={}))
    [turn] = journal.ready()
    assert (turn.min_version, turn.max_version, turn.sampling) == ("9", "10", {})


def test_lineage_reaches_back_to_where_the_tokens_begin(journal: Journal):
    turns = chain(4)
    turns[1] = dataclasses.replace(turns[1], shares_tokens=False)
    for rec in turns:
        journal.record_turn(rec)
    found = journal.lineage(["s1-3"])
    assert [(x.turn_id, x.parent_id, x.shares_tokens) for x in found] == [
        ("s1-1", "s1-0", False),
        ("s1-2", "s1-1", True),
        ("s1-3", "s1-2", True),
    ]
    assert (found[2].prompt_len, found[2].output_len) == (len(turns[3].prompt_ids), 3)
    assert [list(x.output_ids) for x in found] == [[], [], turns[3].output_ids]
    assert journal.lineage(["unknown"]) == []


def test_heads_come_back_parents_first(journal: Journal):
    for rec in chain(3):
        journal.record_turn(rec)
    journal.set_next_state("s1-1", USER)
    journal.drop("s1-2", "retried", 200.0)
    heads = journal.heads(2)
    assert [(head.turn_id, head.next_state, head.drop_reason) for head in heads] == [
        ("s1-1", (), None),
        ("s1-2", None, "retried"),
    ]
    assert (heads[1].parent_id, heads[1].node_hash) == ("s1-1", "node-s1-2")
    assert (heads[1].prompt_len, heads[1].output_len) == (13, 3)
    assert not heads[1].prompt_ids


def test_endpoints_and_counters(journal: Journal):
    assert journal.endpoint("policy") is None
    journal.publish("policy", "http://a", {"weight_version": "1"}, 1.0)
    journal.publish("policy", "http://b", {"weight_version": "2"}, 2.0)
    endpoint = journal.endpoint("policy")
    assert (endpoint.url, endpoint.info, endpoint.published) == (
        "http://b",
        {"weight_version": "2"},
        2.0,
    )
    journal.count("disconnected")
    journal.count("disconnected", 2)
    assert journal.outcomes().counters == {"disconnected": 3}


def test_case_47_a_journal_belongs_to_one_model(journal: Journal, path: Path):
    journal.bind({"base": "sha:1"})
    journal.bind({"base": "sha:1", "lora_rank": 16, "lora_alpha": 32.0})  # the host knows more
    journal.bind({"base": "sha:1", "lora_rank": 16, "lora_alpha": 32})
    with Journal.open(path) as other, pytest.raises(JournalError) as caught:
        other.bind({"base": "sha:2", "lora_rank": 16, "lora_alpha": 64})
    assert str(caught.value) == (
        f"the journal {path} belongs to another model (base sha:1 in the journal, sha:2 now; "
        "lora_alpha 32.0 in the journal, 64 now): use that one, or another journal"
    )


def test_judged_counts_verdicts_and_averages_the_newest_scores(journal: Journal):
    assert journal.judged(2) == (0, None)
    for n, score in enumerate([1.0, 1.0, -1.0]):
        judged(journal, record(f"t{n}"), score=score)
    assert journal.judged(2) == (3, 0.0)


def test_changed_tells_pollers_of_any_commit(journal: Journal, path: Path):
    with Journal.open(path) as other:
        assert journal.changed()
        assert not journal.changed()
        other.count("x")
        assert journal.changed()
        assert not journal.changed()
        journal.count("x")
        assert journal.changed()
        assert not journal.changed()


def test_threads_may_share_one_journal(journal: Journal):
    from concurrent.futures import ThreadPoolExecutor

    def work(n: int) -> None:
        make_one(n)
        assert journal.outcomes().balanced()

    def make_one(n: int) -> None:
        journal.record_turn(record(f"t{n}", session_id=f"s{n}"))
        assert journal.set_next_state(f"t{n}", USER)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(64)))
    assert journal.outcomes().judging == 64


# -- the file ------------------------------------------------------------------------------


def test_only_the_owner_can_read_the_files(path: Path):
    old = os.umask(0)
    try:
        with Journal.open(path) as journal:
            journal.record_turn(record())
            names = sorted(p.name for p in path.parent.iterdir())
            assert names == ["journal.db", "journal.db-shm", "journal.db-wal"]
            for name in names:
                assert stat.S_IMODE((path.parent / name).stat().st_mode) == 0o600, name
            path.chmod(0o644)
            with Journal.open(path):
                assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(old)


def test_what_is_no_journal_is_refused_with_a_reason(tmp_path: Path):
    with pytest.raises(JournalError, match="no journal at"):
        Journal.open(tmp_path / "none.db", create=False)
    (tmp_path / "text.db").write_text("hello " * 1000)
    with pytest.raises(JournalError, match="cannot be read as a journal"):
        Journal.open(tmp_path / "text.db")
    with sqlite3.connect(tmp_path / "other.db") as db:
        db.execute("CREATE TABLE x (y)")
    with pytest.raises(JournalError, match="not an openclaw-rl journal"):
        Journal.open(tmp_path / "other.db")
    (tmp_path / "empty.db").touch()
    with pytest.raises(JournalError, match="empty"):
        Journal.open(tmp_path / "empty.db", create=False)


@pytest.mark.parametrize(("version", "word"), [(99, "newer"), (0, "older")])
def test_another_layout_is_refused_with_a_reason(path: Path, version: int, word: str):
    Journal.open(path).close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {version}")
    with pytest.raises(JournalError, match=f"written by an? {word} openclaw-rl"):
        Journal.open(path)


@pytest.mark.parametrize("layout", [1, 2, 3, 4])
def test_a_journal_of_an_earlier_layout_opens_and_keeps_all(path: Path, layout: int):
    """Layout 1 had no candidates, layout 2 no fingerprint, and another name for the purged; all up
    to 3 had columns that nobody read, and none knew versions and requests."""
    with Journal.open(path) as journal:
        for rec in chain(3):
            journal.record_turn(rec)
        journal.record_turn(record("gone", session_id="gone"))
        journal.purge(session_id="gone")
        before = [journal.turn(rec.turn_id) for rec in chain(3)]
    with sqlite3.connect(path) as db:
        for table in ("versions", "requests"):
            db.execute(f"DROP TABLE {table}")
        if layout < 4:
            for column in ("temperature", "leased_at", "changed"):
                db.execute(f"ALTER TABLE turns ADD COLUMN {column} REAL")
            for column in ("reason TEXT", "created REAL"):
                db.execute(f"ALTER TABLE verdicts ADD COLUMN {column}")
        if layout < 3:
            db.execute("DROP TABLE fingerprint")
            db.execute("ALTER TABLE purged RENAME TO past")
        if layout == 1:
            for table in ("payloads", "verdicts"):
                for column in ("topk_ids", "topk_logprobs"):
                    db.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        db.execute(f"PRAGMA user_version = {layout}")
    with Journal.open(path, create=False) as journal, Journal.open(path) as other:
        assert [journal.turn(rec.turn_id) for rec in chain(3)] == before
        topk = TopK([[7, 8]] * 3, [[-0.5, -1.0]] * 3)
        other.record_turn(record("new", topk=topk))
        assert journal.turn("new").topk == topk
        other.bind({"base": "sha"})
        assert (journal.versions(), journal.asked()) == ([], {})
        assert journal.outcomes().dropped == {"purged": 1}
        assert journal.outcomes().balanced()
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (LAYOUT,)


def test_candidates_come_back_as_they_went_in(journal: Journal):
    topk = TopK([[7, 8], [9, -1], [2**31 - 1, 0]], [[-0.5, -1.25], [-0.125, math.nan], [-3, 0]])
    journal.record_turn(record("a", topk=topk))
    journal.record_turn(record("b", parent_id="a"))
    found = journal.turn("a").topk
    assert found.ids == topk.ids
    assert str(found.log_probs) == str([[float(v) for v in row] for row in topk.log_probs])
    assert journal.turn("b").topk is None
    assert "topk_missing" not in journal.outcomes().counters


@pytest.mark.parametrize("rows", [0, 2, 4])
def test_candidates_that_are_not_one_row_a_token_are_left_out_and_counted(
    journal: Journal, rows: int
):
    journal.record_turn(record("a", topk=TopK([[7]] * rows, [[-0.5]] * rows)))
    turn = journal.turn("a")
    assert (turn.topk, turn.state) == (None, State.WAITING)
    assert journal.outcomes().counters == {"topk_missing": 1}


def test_a_teachers_candidates_are_a_signal_of_their_own(journal: Journal):
    nothing = TopK([[-1, -1]] * 3, [[math.nan] * 2] * 3)
    some = TopK([[-1, -1], [5, -1], [-1, -1]], [[math.nan] * 2, [-0.5, math.nan], [math.nan] * 2])
    for turn_id, topk, state in (("a", nothing, State.DROPPED), ("b", some, State.READY)):
        journal.record_turn(record(turn_id))
        journal.set_next_state(turn_id, ({"role": "user", "content": "x"},))
        journal.claim("w", 1, 2.0, 60.0)
        with pytest.raises(JournalError, match="2 teacher values for 3 tokens"):
            journal.write_verdict(turn_id, "w", Verdict(teacher_topk=TopK([[1]] * 2, [[-1.0]] * 2)))
        assert journal.write_verdict(turn_id, "w", Verdict(teacher_topk=topk)) is state
        verdict = journal.turn(turn_id).verdict
        assert str(verdict.teacher_topk) == str(topk)
        [output] = journal.lineage([turn_id])
        assert str(output.verdict.teacher_topk) == str(topk)


def test_a_batch_that_fails_leaves_nothing(journal: Journal):
    def broken_off() -> None:
        with journal.batch():
            journal.record_turn(record())
            with pytest.raises(JournalError), journal.batch():
                journal.record_turn(record())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken_off()
    assert journal.outcomes().seen == 0
    journal.record_turn(record())


# -- deleting ------------------------------------------------------------------------------


def all_bytes(path: Path) -> bytes:
    return b"".join(p.read_bytes() for p in path.parent.iterdir())


def test_purging_a_session_removes_its_text_and_keeps_the_sums(journal: Journal, path: Path):
    secret = "my secret is 4711"
    for rec in chain(3, "a"):
        journal.record_turn(
            dataclasses.replace(rec, reply={"role": "assistant", "content": secret})
        )
    journal.set_next_state("a-1", ({"role": "user", "content": secret + "!"},))
    for rec in chain(2, "b", owner="bob"):
        journal.record_turn(rec)
    assert secret.encode() in all_bytes(path)
    assert journal.purge(session_id="a") == 3
    assert secret.encode() not in all_bytes(path)
    assert journal.turn_ids() == ["b-0", "b-1"]
    outcomes = journal.outcomes()
    assert (outcomes.seen, outcomes.waiting, outcomes.dropped) == (5, 2, {"purged": 3})
    assert outcomes.balanced()
    assert journal.purge(owner="nobody") == 0
    assert journal.purge(owner="bob", session_id="a") == 0
    assert journal.purge(owner="bob") == 2
    assert journal.outcomes().dropped == {"purged": 5}
    with pytest.raises(JournalError):
        journal.purge()


def test_purging_by_age_keeps_what_remains_whole(journal: Journal):
    turns = chain(6)
    judged(journal, turns[0])
    assert journal.lease(1, "h", [turns[0].turn_id])
    for rec in turns[1:]:
        journal.record_turn(rec)
    assert journal.purge(older_than=104.0) == 3
    assert journal.turn_ids() == ["s1-0", "s1-4", "s1-5"]  # a leased turn stays
    for n in (0, 4, 5):
        turn = journal.turn(f"s1-{n}")
        assert turn.prompt_ids == turns[n].prompt_ids
        assert turn.messages == turns[n].messages
    assert not journal.turn("s1-4").shares_tokens
    assert journal.turn("s1-5").shares_tokens
    assert journal.outcomes().balanced()


def test_retention_leaves_what_a_judge_holds(journal: Journal):
    for name in ("held", "free"):
        journal.record_turn(record(name))
        journal.set_next_state(name, USER)
    journal.claim("w", 1, 200.0, 60.0)
    assert journal.purge(older_than=199.0) == 1
    assert journal.purge(max_bytes=1) == 0
    assert journal.turn_ids() == ["held"]
    assert journal.write_verdict("held", "w", Verdict(score=1.0)) is State.READY


def content(path: Path) -> int:
    with sqlite3.connect(path) as db:
        pages = "SELECT (page_count - freelist_count) * page_size FROM pragma_page_count, "
        return db.execute(pages + "pragma_freelist_count, pragma_page_size").fetchone()[0]


def test_purging_by_size_goes_from_the_oldest_on_and_spares_the_unfinished(
    journal: Journal, path: Path
):
    for n in range(150):
        journal.record_turn(
            record(
                f"t{n}",
                session_id=f"s{n}",
                created=100.0 + n,
                prompt_ids=list(range(3000)),
                drop_reason="retried" if n % 2 else None,
            )
        )
    before = content(path)
    removed = journal.purge(max_bytes=before * 3 // 4)
    assert 0 < removed < 100
    assert content(path) <= before * 3 // 4
    left = journal.turn_ids()
    assert [t for t in left if int(t[1:]) % 2 == 0] == [f"t{n}" for n in range(0, 150, 2)]
    assert "t1" not in left
    assert "t149" in left
    assert path.stat().st_size <= before
    assert journal.purge(max_bytes=10**9) == 0
    assert journal.outcomes().balanced()


def test_retention_expires_and_purges(journal: Journal):
    for rec in chain(200):  # created at 100, 101, ... 299
        journal.record_turn(rec)
    assert journal.run_retention(300.0, next_state_ttl=1000.0) == {}
    done = journal.run_retention(300.0, next_state_ttl=50.0, max_age=100.0, max_bytes=10**9)
    assert done == {"no_next_state": 150, "purged": 100}
    outcomes = journal.outcomes()
    assert (outcomes.seen, outcomes.waiting, outcomes.dropped) == (200, 50, {"no_next_state": 150})
    assert outcomes.balanced()
    assert len(journal.tokens("s1-199")) == 1 + 200 * 5


# -- whatever happens ----------------------------------------------------------------------

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["record", "side", "next", "drop", "claim", "verdict", "postpone", "lease", "trained",
             "back", "end", "expire", "purge", "age"]
        ),
        st.integers(0, 9),
        st.sampled_from([1.0, 0.0, -1.0]),
    ),
    max_size=60,
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(actions=ACTIONS)
def test_the_outcomes_always_add_up(actions, tmp_path_factory):
    path = tmp_path_factory.mktemp("outcomes") / "journal.db"
    seen = 0
    trained: list[str] = []
    with Journal.open(path) as journal:
        for step, (action, n, score) in enumerate(actions):
            now = 100.0 + step
            name = f"t{n}"
            if action in ("record", "side"):
                kind = "side" if action == "side" else "main"
                try:
                    journal.record_turn(
                        record(name, session_id=f"s{n % 3}", kind=kind, created=now)
                    )
                    seen += 1
                except JournalError:
                    assert journal.turn(name) is not None
            elif action == "next":
                journal.set_next_state(name, USER)
            elif action == "drop":
                journal.drop(name, "told", now)
            elif action == "claim":
                journal.claim("w", n, now, 5.0)
            elif action == "verdict":
                journal.write_verdict(name, "w", Verdict(score=score))
            elif action == "postpone":
                journal.postpone(name, "w", "down", now, max_attempts=2)
            elif action == "lease":
                ready = [turn.turn_id for turn in journal.ready()][: n + 1]
                if not journal.leases("h"):
                    assert journal.lease(0, "h", ready) is bool(ready)
            elif action == "trained":
                ids = journal.leases("h").get(0, [])
                assert journal.mark_trained(0, "h", "2") == len(ids)
                trained += ids
            elif action == "back":
                journal.give_back(0, "h")
            elif action == "end":
                journal.end_session(f"s{n % 3}")
            elif action == "expire":
                journal.run_retention(now, next_state_ttl=float(n))
            elif action == "purge":
                journal.purge(session_id=f"s{n % 3}")
            else:
                journal.purge(older_than=now - 3 * n)
            outcomes = journal.outcomes()
            assert outcomes.balanced(), (action, outcomes)
            assert outcomes.seen == seen
            assert outcomes.trained == len(trained)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_was_removed_while_in_use_takes_no_more_turns(path, journal, replaced):
    for file in (path, *path.parent.glob("journal.db-*")):
        file.unlink()
    if replaced:
        Journal.open(path).close()
    with pytest.raises(JournalError, match="removed or replaced"):
        journal.record_turn(record("t1"))


def test_by_source_counts_purged_turns_too(journal: Journal):
    journal.record_turn(record("named"))
    journal.record_turn(record("opened", source="new", session_id="s2"))
    journal.record_turn(record("aside", source="new", session_id="s3", kind="side"))
    judged(journal, record("followed", source="new", session_id="s4"))
    expected = {
        "header:x-session-id": {"bound": 1, "side": 0, "unbound": 0},
        "new": {"bound": 1, "side": 1, "unbound": 1},
    }
    assert journal.outcomes().by_source == expected
    assert journal.purge(session_id="s3") == journal.purge(session_id="s4") == 1
    assert journal.outcomes().by_source == expected
    assert journal.outcomes().unbound == 1
