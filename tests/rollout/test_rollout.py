from __future__ import annotations

import dataclasses
import inspect
import logging
import math
import threading
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.errors import ConfigError, HookError
from openclaw_rl.hooks import Sample
from openclaw_rl.journal import Journal
from openclaw_rl.rollout import generate_rollout
from openclaw_rl.rollout.samples import segment_samples
from openclaw_rl.types import State, TopK, Verdict
from tests.journal.build import chain, judged, record


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest.fixture
def journal(path: Path):
    with Journal.open(path) as opened:
        yield opened


def arguments(path: Path, batch: int, **given: Any) -> Namespace:
    fields = {"session_share": 1.0, "host_name": "h", "rollout_poll_seconds": 0.01}
    return Namespace(journal_path=str(path), rollout_batch_size=batch, **{**fields, **given})


def samples_of(output) -> list[Sample]:
    assert all(len(group) == 1 for group in output.samples)
    samples = [group[0] for group in output.samples]
    for sample in samples:
        sample.validate()
    return samples


def turn_ids(samples: list[Sample]) -> list[str]:
    return [turn["turn_id"] for sample in samples for turn in sample.metadata["turns"]]


class Background:
    """generate_rollout in a thread, with the means to stop it."""

    def __init__(self, args: Namespace, rollout_id: int = 0) -> None:
        self.output: Any = None
        self.error: BaseException | None = None
        args.stop_event = self.stop = threading.Event()

        def run() -> None:
            try:
                self.output = generate_rollout(args, rollout_id, None)
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def result(self) -> Any:
        self.thread.join(20)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.output


def test_it_has_the_signature_of_slimes_rollout_functions():
    assert str(inspect.signature(generate_rollout)).startswith(
        "(args: 'Any', rollout_id: 'int', data_source: 'Any', evaluation: 'bool' = False)"
    )


def test_a_session_that_keeps_history_is_one_sample(journal: Journal, path: Path):
    turns = chain(20)
    for n, rec in enumerate(turns):
        rec = dataclasses.replace(
            rec,
            output_logprobs=[-0.25 * n, -0.5, -0.125],
            output_versions=["3", "3", "4"] if n == 7 else ["3"] * 3,
        )
        turns[n] = rec
        judged(journal, rec, score=-1.0 if n % 2 else 1.0)
    output = generate_rollout(arguments(path, 20), 3, None)
    [sample] = samples_of(output)
    assert sample.tokens == [*turns[-1].prompt_ids, *turns[-1].output_ids]
    assert sample.response_length == len(sample.tokens) - len(turns[0].prompt_ids)
    response = sample.tokens[-sample.response_length :]
    trained = []
    for n, (rec, turn) in enumerate(zip(turns, sample.metadata["turns"], strict=True)):
        span = slice(turn["start"], turn["end"])
        assert response[span] == rec.output_ids
        assert sample.rollout_log_probs[span] == rec.output_logprobs
        assert turn["reward"] == (-1.0 if n % 2 else 1.0)
        assert turn["versions"] == (["3", "4"] if n == 7 else ["3"])
        assert turn["has_teacher"] is False
        trained += range(turn["start"], turn["end"])
    assert [i for i, keep in enumerate(sample.loss_mask) if keep] == trained
    assert all(
        value == 0.0
        for value, keep in zip(sample.rollout_log_probs, sample.loss_mask, strict=True)
        if not keep
    )
    assert sample.reward == 0.0
    assert sample.teacher_log_probs is None
    assert sample.status is Sample.Status.COMPLETED
    metrics = output.metrics
    assert metrics["rollout/turns"] == 20
    assert metrics["rollout/samples"] == 1
    assert metrics["rollout/tokens_trained"] == 60
    assert metrics["rollout/tokens_per_distinct"] <= 1.05
    assert metrics["rollout/age_versions_max"] == 0
    assert journal.outcomes().leased == 20


def test_a_turn_beyond_the_longest_sample_is_dropped_and_those_before_it_stay(
    journal: Journal, path: Path
):
    turns = chain(6)
    for rec in turns:
        judged(journal, rec)
    ends = [len(rec.prompt_ids) + len(rec.output_ids) for rec in turns]
    args = arguments(path, 6)
    args.max_sample_tokens = ends[3]
    [sample] = samples_of(generate_rollout(args, 0, None))
    assert sample.tokens == [*turns[3].prompt_ids, *turns[3].output_ids]
    assert turn_ids([sample]) == [rec.turn_id for rec in turns[:4]]
    assert journal.outcomes().dropped == {"too_long": 2}


def test_case_25_a_template_that_drops_reasoning_trains_each_token_once(
    journal: Journal, path: Path
):
    turns = [dataclasses.replace(rec, shares_tokens=False) for rec in chain(3)]
    for rec in turns:
        judged(journal, rec)
    samples = samples_of(generate_rollout(arguments(path, 3), 0, None))
    assert [sample.tokens for sample in samples] == [[*t.prompt_ids, *t.output_ids] for t in turns]
    assert [sample.loss_mask for sample in samples] == [[1, 1, 1]] * 3
    assert turn_ids(samples) == ["s1-0", "s1-1", "s1-2"]
    numbers = [(sample.index, sample.rollout_id) for sample in samples]
    assert len(set(numbers)) == 3


def test_case_19_the_last_turn_takes_no_place(journal: Journal, path: Path):
    first, last = chain(2)
    judged(journal, first)
    journal.record_turn(last)
    waiting = Background(arguments(path, 2))
    other = record("other", session_id="s2")
    assert waiting.output is None
    judged(journal, other)
    samples = samples_of(waiting.result())
    assert sorted(turn_ids(samples)) == ["other", "s1-0"]
    assert journal.turn(last.turn_id).state is State.WAITING


def test_turns_that_carry_no_signal_are_context_only(journal: Journal, path: Path):
    first, silent, last = chain(3)
    judged(journal, first)
    journal.record_turn(silent)
    journal.drop(silent.turn_id, "no_signal", 300.0)
    judged(journal, last)
    [sample] = samples_of(generate_rollout(arguments(path, 2), 0, None))
    assert turn_ids([sample]) == ["s1-0", "s1-2"]
    #                       first    question  silent   question  last
    assert sample.loss_mask == [1] * 3 + [0] * 2 + [0] * 3 + [0] * 2 + [1] * 3


def test_case_29_four_of_twenty_remain_also_after_a_restart(journal: Journal, path: Path):
    for n in range(20):
        judged(journal, record(f"t{n:02}", session_id=f"s{n}", created=100.0 + n))
    args = arguments(path, 16)
    assert len(turn_ids(samples_of(generate_rollout(args, 0, None)))) == 16
    assert journal.mark_trained(0, "h", "2") == 16
    waiting = Background(args, 1)  # the next batch is not full
    waiting.stop.set()
    assert waiting.result().samples == []
    outcomes = journal.outcomes()
    assert (outcomes.ready, outcomes.trained, outcomes.leased) == (4, 16, 0)
    with Journal.open(path) as again:
        assert [turn.turn_id for turn in again.ready()] == ["t16", "t17", "t18", "t19"]
    output = generate_rollout(arguments(path, 4), 1, None)
    assert turn_ids(samples_of(output)) == ["t16", "t17", "t18", "t19"]


def test_case_31_turns_with_and_without_a_teacher(journal: Journal, path: Path):
    taught, untaught = chain(2)
    judged(journal, taught, hint="be brief, please", teacher_log_probs=[-1.0, math.nan, -2.0])
    judged(journal, untaught)
    judged(journal, record("alone", session_id="s2"))
    samples = samples_of(generate_rollout(arguments(path, 3), 0, None))
    merged, alone = sorted(samples, key=lambda sample: -len(sample.tokens))
    # All samples of a batch have the values or none (slime's rule); NaN is "no teacher here".
    values = merged.teacher_log_probs
    assert (values[0], values[2]) == (-1.0, -2.0)
    assert [i for i, value in enumerate(values) if not math.isnan(value)] == [0, 2]
    assert all(map(math.isnan, alone.teacher_log_probs))
    assert [turn["has_teacher"] for turn in merged.metadata["turns"]] == [True, False]


def test_merged_turns_keep_their_own_candidates_of_the_teacher(journal: Journal, path: Path):
    nan = math.nan
    first, bare, wide = chain(3)
    narrow = TopK([[4, -1], [5, 6], [-1, -1]], [[-1.0, nan], [-0.5, -2.0], [nan, nan]])
    broad = TopK([[7, 8, 9]] * 3, [[-0.25, -0.5, -4.0]] * 3)
    judged(journal, first, score=None, teacher_topk=narrow)
    judged(journal, bare)
    judged(journal, wide, teacher_log_probs=[-1.0] * 3, teacher_topk=broad)
    judged(journal, record("alone", session_id="s2"))
    samples = samples_of(generate_rollout(arguments(path, 4), 0, None))
    merged, alone = sorted(samples, key=lambda sample: -len(sample.tokens))
    ids, values = merged.metadata["topk"].ids, merged.metadata["topk"].log_probs
    assert len(ids) == len(values) == merged.response_length
    assert {len(row) for row in (*ids, *values)} == {3}
    spans = [slice(turn["start"], turn["end"]) for turn in merged.metadata["turns"]]
    assert ids[spans[0]] == [[4, -1, -1], [5, 6, -1], [-1, -1, -1]]
    assert [[v for v in row if v == v] for row in values[spans[0]]] == [[-1.0], [-0.5, -2.0], []]
    assert ids[spans[2]] == broad.ids
    assert values[spans[2]] == broad.log_probs
    outside = [row for at, row in enumerate(ids) if not any(s.start <= at < s.stop for s in spans)]
    assert {token for row in (*outside, *ids[spans[1]]) for token in row} == {-1}
    # All samples of a batch have them, or none.
    assert alone.metadata["topk"].ids == [[-1] * 3] * alone.response_length
    assert [turn["has_teacher"] for turn in merged.metadata["turns"]] == [True, False, True]


def test_without_candidates_a_sample_has_none(journal: Journal, path: Path):
    judged(journal, record("a"), teacher_log_probs=[-1.0, -1.0, -1.0])
    [sample] = samples_of(generate_rollout(arguments(path, 1), 0, None))
    assert "topk" not in sample.metadata


def test_case_56_one_conversation_fills_a_batch_at_once(journal: Journal, path: Path):
    for rec in chain(20):
        judged(journal, rec)
    output = generate_rollout(arguments(path, 16, session_share=0.25), 0, None)
    assert turn_ids(samples_of(output)) == [f"s1-{n}" for n in range(16)]


def test_case_32_a_busy_session_is_capped_where_others_can_fill_the_batch(
    journal: Journal, path: Path
):
    for rec in chain(40):
        judged(journal, rec)
    for n in range(12):
        judged(journal, record(f"o{n}", session_id=f"other{n}", created=500.0))
    output = generate_rollout(arguments(path, 16, session_share=0.25), 0, None)
    ids = turn_ids(samples_of(output))
    assert sum(turn_id.startswith("s1-") for turn_id in ids) == 4
    assert output.metrics["rollout/held_session_share"] == 36
    assert output.metrics["rollout/largest_session_share"] == 0.25


def test_the_progress_line_says_what_the_batch_waits_for(
    journal: Journal, path: Path, caplog: pytest.LogCaptureFixture
):
    first, last = chain(2)
    judged(journal, first)
    journal.record_turn(last)
    stop = threading.Event()
    with caplog.at_level(logging.INFO, "openclaw_rl.rollout"):
        args = arguments(path, 16, stop_event=stop, while_waiting=stop.set)
        assert generate_rollout(args, 3, None).samples == []
    assert "[rollout] 3: 1 of 16 turns ready; 1 wait for a next state, 0 are judged" in caplog.text


def test_merged_turns_stay_in_the_steps_of_their_turns(journal: Journal, path: Path):
    """Which turns share a step must not depend on what is merged."""
    turns = chain(4)
    for rec in turns:
        judged(journal, rec)
    for n in range(4):
        judged(journal, record(f"o{n}", session_id=f"o{n}", created=101.5 + n))
    samples = samples_of(generate_rollout(arguments(path, 8, segment_steps=2), 0, None))
    by_step = {0: set(), 1: set()}
    for sample in samples:
        by_step[sample.metadata["step"]] |= set(turn_ids([sample]))
    ordered = ["s1-0", "s1-1", "o0", "s1-2", "o1", "s1-3", "o2", "o3"]  # by their age
    assert by_step == {0: set(ordered[:4]), 1: set(ordered[4:])}
    assert len({sample.index for sample in samples}) == len(samples)


def test_a_host_that_recomputes_at_any_temperature_is_told_each_turns_own(
    journal: Journal, path: Path
):
    judged(journal, record("cool", sampling={"temperature": 0.25}))
    judged(journal, record("plain", session_id="b", sampling={}))
    judged(journal, record("cut", session_id="c", sampling={"temperature": 0.25, "top_p": 0.9}))
    args = arguments(path, 2, rollout_temperature=1.0, any_temperature=True)
    samples = samples_of(generate_rollout(args, 0, None))
    told = {t["turn_id"]: t["temperature"] for s in samples for t in s.metadata["turns"]}
    assert told == {"cool": 0.25, "plain": 1.0}
    assert journal.outcomes().dropped == {"sampling": 1}


def test_stale_and_misfitting_turns_are_dropped_and_counted(journal: Journal, path: Path):
    journal.publish("policy", "http://x", {"weight_version": "12"}, 1.0)
    judged(journal, record("stale", output_versions=["3", "12", "12"]))
    judged(journal, record("hot", session_id="b", sampling={"temperature": 1.3}))
    judged(journal, record("fits", session_id="c", output_versions=["4", "12", "12"]))
    output = generate_rollout(arguments(path, 1, rollout_temperature=1.0), 0, None)
    assert turn_ids(samples_of(output)) == ["fits"]
    assert journal.outcomes().dropped == {"stale": 1, "sampling": 1}
    assert output.metrics["rollout/dropped_stale"] == 1
    assert output.metrics["rollout/age_versions_max"] == 8


def test_without_a_published_version_the_newest_turn_tells_it(journal: Journal, path: Path):
    judged(journal, record("old", output_versions=["1"] * 3, created=1.0))
    judged(journal, record("new", session_id="b", output_versions=["10"] * 3, created=2.0))
    assert turn_ids(samples_of(generate_rollout(arguments(path, 1), 0, None))) == ["new"]
    assert journal.outcomes().dropped == {"stale": 1}


def test_case_33_an_unfinished_lease_is_taken_up_again(journal: Journal, path: Path):
    for n in range(4):
        judged(journal, record(f"t{n}", session_id=f"s{n}", created=100.0 + n))
    args = arguments(path, 2)
    before = samples_of(generate_rollout(args, 5, None))
    again = samples_of(generate_rollout(args, 5, None))  # the host died in between
    assert [sample.tokens for sample in again] == [sample.tokens for sample in before]
    assert [sample.index for sample in again] == [sample.index for sample in before]
    other = samples_of(generate_rollout(args, 6, None))
    assert not set(turn_ids(other)) & set(turn_ids(before))
    assert journal.give_back(5, "h") == 2
    assert journal.outcomes().ready == 2


def test_case_30_a_lease_with_nothing_left_to_train_makes_no_step(journal: Journal, path: Path):
    judged(journal, record("gone", session_id="s1"))
    assert journal.lease(0, "h", ["gone"])
    # Damage that only a fault elsewhere could do: the log-probs of a leased turn are cut short.
    with journal.batch() as db:
        db.execute("UPDATE payloads SET output_logprobs = x'00000000'")
    waiting = Background(arguments(path, 1))
    judged(journal, record("good", session_id="s2"))
    assert turn_ids(samples_of(waiting.result())) == ["good"]
    outcomes = journal.outcomes()
    assert outcomes.dropped == {"misaligned": 1}
    assert outcomes.counters["empty_batches"] == 1
    assert outcomes.leased == 1


def test_a_turn_whose_tokens_are_not_its_segments_is_left_out_and_the_others_stay():
    turns = [dataclasses.replace(turn, verdict=Verdict(score=1.0)) for turn in chain(3)]
    ids = [turn.turn_id for turn in turns]
    whole = [*turns[-1].prompt_ids, *turns[-1].output_ids]
    damaged = [*whole[:-1], whole[-1] + 1]
    [sample], misfits = segment_samples(turns, ids, lambda _: damaged, 0)
    assert misfits == {ids[-1]: "misaligned"}
    assert turn_ids([sample]) == ids[:-1]
    assert sample.tokens == [*turns[1].prompt_ids, *turns[1].output_ids]  # none of it is paid for
    sample.validate()


def test_two_hosts_never_get_the_same_turn(journal: Journal, path: Path):
    for n in range(40):
        judged(journal, record(f"t{n}", session_id=f"s{n}", created=100.0 + n))
    hosts = [Background(arguments(path, 8, host_name=f"h{n}"), n) for n in range(5)]
    ids = [turn_id for host in hosts for turn_id in turn_ids(samples_of(host.result()))]
    assert sorted(ids) == sorted(f"t{n}" for n in range(40))


def test_a_truncated_reply_is_marked(journal: Journal, path: Path):
    judged(journal, record(finish_reason="length", truncated=True))
    [sample] = samples_of(generate_rollout(arguments(path, 1), 0, None))
    assert sample.status is Sample.Status.TRUNCATED


def test_misuse_is_one_clear_error(path: Path):
    with pytest.raises(ConfigError, match="journal_path"):
        generate_rollout(Namespace(rollout_batch_size=1), 0, None)
    with pytest.raises(HookError, match="evaluation"):
        generate_rollout(arguments(path, 1), 0, None, evaluation=True)


class Polls:
    """Awaits polls of a rollout that waits (`while_waiting`)."""

    def __init__(self) -> None:
        self._polls = threading.Semaphore(0)

    def __call__(self) -> None:
        self._polls.release()

    def another(self) -> None:
        """Until one poll that began after this call has ended."""
        while self._polls.acquire(blocking=False):
            pass
        for _ in range(2):
            assert self._polls.acquire(timeout=20)


@pytest.mark.parametrize("unfinished", [False, True])
def test_nothing_is_leased_or_taken_up_while_training_is_paused(
    journal: Journal, path: Path, caplog: pytest.LogCaptureFixture, unfinished: bool
):
    judged(journal, record())
    if unfinished:
        assert journal.lease(3, "h", ["t1"])
    journal.ask("pause", "by hand", 1.0)
    polls = Polls()
    with caplog.at_level(logging.INFO, "openclaw_rl.rollout"):
        waiting = Background(arguments(path, 1, while_waiting=polls), 3)
        polls.another()
        assert waiting.output is None
        assert journal.outcomes().leased == unfinished
        assert "[rollout] 3: training is paused (by hand)" in caplog.text
        journal.answered("pause", "by hand")
        assert turn_ids(samples_of(waiting.result())) == ["t1"]


def test_a_pause_that_comes_while_a_batch_is_waited_for_holds_it(journal: Journal, path: Path):
    polls = Polls()
    waiting = Background(arguments(path, 1, while_waiting=polls))
    polls.another()
    journal.ask("pause", "by hand", 1.0)
    judged(journal, record())
    polls.another()
    assert waiting.output is None
    assert journal.outcomes().ready == 1
    journal.answered("pause", "by hand")
    assert turn_ids(samples_of(waiting.result())) == ["t1"]
