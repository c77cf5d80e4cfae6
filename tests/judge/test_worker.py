"""`JudgeWorker` on a real journal (CASES 14, 27, 28, 34)."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.engine.chat import ChatTokenizer
from openclaw_rl.errors import EngineUnavailable
from openclaw_rl.hooks import Sample, load_hook
from openclaw_rl.journal.store import Journal
from openclaw_rl.judge import worker as worker_module
from openclaw_rl.judge.worker import JudgeWorker
from openclaw_rl.rewards import exit_code, feedback, prm
from openclaw_rl.types import State, TopK, Verdict
from tests.fakes.engine import FakeEngine, Fault, logprob_of
from tests.fakes.model import tiny_tokenizer
from tests.fakes.vllm import FakeVLLM
from tests.judge.helpers import (
    Clock,
    FakeChat,
    add_turn,
    judge_all,
    make_args,
    make_worker,
    until,
    user,
)

SECRET = "my secret words"


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal.open(tmp_path / "journal.db") as journal:
        yield journal


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("model"))


def state(journal: Journal, turn_id: str = "t1") -> State:
    turn = journal.turn(turn_id)
    assert turn is not None
    return turn.state


def verdict(journal: Journal, turn_id: str = "t1") -> Any:
    turn = journal.turn(turn_id)
    assert turn is not None
    return turn.verdict


async def run_until(worker: JudgeWorker, done: Any) -> None:
    """Let `worker` run until `done()`, which another thread looks at."""
    running = asyncio.create_task(worker.run())
    await asyncio.to_thread(until, done)
    worker.stop()
    await running


async def test_the_sample_is_the_turn(journal: Journal) -> None:
    seen: list[Sample] = []

    async def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
        sample.validate()
        seen.append(sample)
        sample.metadata["messages"][0]["content"] = "changed"
        return 0.5

    add_turn(
        journal, "t1", "next", truncated=True, finish_reason="length",
        template_kwargs={"enable_thinking": False}, tools=[{"type": "function"}],
        output_versions=["1", "1", "2"],
    )  # fmt: skip
    await judge_all(journal, reward, make_args())
    sample = seen[0]
    assert sample.tokens == [1, 2, 3, 11, 12, 2]
    assert sample.response_length == 3
    assert sample.response == "Water."
    assert sample.rollout_log_probs == [-0.5] * 3
    assert sample.weight_versions == ["1", "1", "2"]
    assert sample.status is Sample.Status.TRUNCATED
    assert sample.session_id == "session-of-t1"
    assert sample.metadata["next_state"] == [user("next")]
    assert sample.metadata["reply"]["content"] == "Water."
    assert sample.metadata["tools"] == [{"type": "function"}]
    assert sample.metadata["template_kwargs"] == {"enable_thinking": False}
    assert sample.metadata["finish_reason"] == "length"
    turn = journal.turn("t1")
    assert turn is not None
    assert turn.state is State.READY
    assert turn.messages[0]["content"] == "What is rain?"
    assert turn.verdict.score == 0.5


async def test_plain_words_and_no_signal(journal: Journal) -> None:
    add_turn(journal, "t1", "Perfect, thanks. And snow?")
    add_turn(journal, "t2", "And snow?")
    await judge_all(journal, feedback.custom_rm, make_args())
    assert (state(journal), verdict(journal).score) == (State.READY, 1.0)
    assert state(journal, "t2") is State.DROPPED
    assert journal.outcomes().dropped == {"no_signal": 1}
    assert journal.outcomes().balanced()


async def test_a_score_without_weight_takes_no_place_in_a_batch(journal: Journal) -> None:
    """Distillation alone: praise is recorded, but there is nothing to learn from it."""
    add_turn(journal, "t1", "Perfect, thanks.")
    await judge_all(journal, feedback.custom_rm, make_args(w_rl=0.0))
    assert (state(journal), verdict(journal).score) == (State.DROPPED, 1.0)
    assert journal.outcomes().dropped == {"no_signal": 1}


async def test_case_14_two_tool_results_of_which_the_first_failed(journal: Journal) -> None:
    results = [
        {"role": "tool", "tool_call_id": "a", "content": "boom\nExit code: 1"},
        {"role": "tool", "tool_call_id": "b", "content": "fine\nExit code: 0"},
    ]
    add_turn(journal, "t1", results)
    await judge_all(journal, exit_code.custom_rm, make_args())
    assert verdict(journal).score == -1.0


async def test_a_correction_is_the_hint_for_the_teacher(journal: Journal, model: Path) -> None:
    add_turn(journal, "t1", "Too long, one sentence please. What is snow?")
    async with FakeEngine() as engine:
        args = make_args(hf_checkpoint=str(model))
        journal.publish("teacher", engine.url, {}, 1.0)
        await judge_all(journal, feedback.custom_rm, args)
        assert len(engine.requests) == 1
    found = verdict(journal)
    assert (found.score, found.hint) == (-1.0, "Too long, one sentence please.")
    chat = ChatTokenizer.load(model)
    hinted = [user("What is rain?\n\n[hint]\nToo long, one sentence please.")]
    start = len(chat.encode(chat.render(hinted)))
    assert list(found.teacher_log_probs) == [
        logprob_of(token, start + at) for at, token in enumerate([11, 12, 2])
    ]


async def test_a_teacher_elsewhere_is_spoken_to_as_the_policys_engine(
    journal: Journal, model: Path
) -> None:
    """Which kind that is may be found out only after the judge has started."""
    add_turn(journal, "t1", "Too long, one sentence please. What is snow?")
    async with FakeVLLM() as engine:
        args = make_args(hf_checkpoint=str(model), teacher_url=engine.url, engine_kind="auto")
        journal.publish("policy", "http://127.0.0.1:9", {"engine": "vllm"}, 1.0)
        await judge_all(journal, feedback.custom_rm, args)
        (asked,) = engine.raw
    start = len(asked["prompt"]) - 3
    assert list(verdict(journal).teacher_log_probs) == [
        logprob_of(token, start + at) for at, token in enumerate([11, 12, 2])
    ]


@pytest.mark.parametrize("own", [None, "its-own"])
async def test_the_engines_key_goes_to_no_other_server(
    journal: Journal, model: Path, own: str | None
) -> None:
    add_turn(journal, "t1", "Too long, one sentence please. What is snow?")
    async with FakeEngine() as elsewhere:
        args = make_args(hf_checkpoint=str(model), engine_api_key="secret", teacher_api_key=own)
        args.engine_url, args.teacher_url = "http://127.0.0.1:9", elsewhere.url
        await judge_all(journal, feedback.custom_rm, args)
        (asked,) = elsewhere.requests
        assert asked.headers.get("authorization") == (own and f"Bearer {own}")


async def test_the_engine_gets_its_key_as_teacher_too(journal: Journal, model: Path) -> None:
    add_turn(journal, "t1", "Too long, one sentence please. What is snow?")
    async with FakeEngine() as engine:
        args = make_args(hf_checkpoint=str(model), engine_api_key="secret")
        args.engine_url, args.teacher_url = engine.url, f"{engine.url}/base"
        await judge_all(journal, feedback.custom_rm, args)
        (asked,) = engine.requests
        assert asked.headers["authorization"] == "Bearer secret"


async def test_over_the_top_k_the_verdict_holds_the_teachers_candidates(
    journal: Journal, model: Path
) -> None:
    own = TopK([[11, 12], [12, 13], [2, 99]], [[-0.1, -3.0]] * 3)
    add_turn(journal, "t1", "Too long, one sentence please. What is snow?", topk=own)
    async with FakeEngine() as engine:
        args = make_args(hf_checkpoint=str(model), teacher_url=engine.url, opd_top_k=2)
        await judge_all(journal, feedback.custom_rm, args)
        start = len(engine.requests[0].ids) - 3
    found = verdict(journal)
    assert found.teacher_topk.ids == [[11, 12], [12, 13], [2, -1]]
    sampled = [logprob_of(token, start + at) for at, token in enumerate([11, 12, 2])]
    assert [row[0] for row in found.teacher_topk.log_probs] == sampled
    assert list(found.teacher_log_probs) == sampled
    assert math.isnan(found.teacher_topk.log_probs[2][1])
    assert state(journal) is State.READY


async def test_over_the_top_k_values_of_the_sampled_tokens_alone_are_no_signal(
    journal: Journal,
) -> None:
    def values(args: Any, sample: Sample) -> Any:
        return {"teacher_log_probs": [-1.0] * sample.response_length}

    add_turn(journal, "t1", "x")
    await judge_all(journal, values, make_args(opd_top_k=2))
    assert journal.outcomes().dropped == {"no_signal": 1}
    assert journal.outcomes().counters["teacher_topk_none"] == 1

    def candidates(args: Any, sample: Sample) -> Any:
        own = sample.metadata["student_topk"]
        return {"teacher_topk": {"ids": own["ids"], "log_probs": own["log_probs"]}}

    add_turn(journal, "t2", "x", topk=TopK([[5, 6]] * 3, [[-0.5, -1.0]] * 3))
    await judge_all(journal, candidates, make_args(opd_top_k=2))
    assert journal.turn("t2").verdict.teacher_topk == TopK([[5, 6]] * 3, [[-0.5, -1.0]] * 3)
    assert journal.outcomes().ready == 1


async def test_no_teacher_is_asked_without_distillation(journal: Journal) -> None:
    add_turn(journal, "t1", "Too long, one sentence please.")
    await judge_all(journal, feedback.custom_rm, make_args(w_opd=0.0))
    assert verdict(journal).teacher_log_probs is None
    assert state(journal) is State.READY


def raises(args: Any, sample: Sample) -> float:
    raise ValueError(SECRET)


async def raises_later(args: Any, sample: Sample) -> float:
    await asyncio.sleep(0)
    raise KeyError(SECRET)


async def hangs(args: Any, sample: Sample) -> float:
    await asyncio.Event().wait()
    return 1.0


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        (raises, "reward_failed"),
        (raises_later, "reward_failed"),
        (hangs, "reward_timeout"),
        (lambda args, sample: math.nan, "reward_nan"),
        (lambda args, sample: {"score": math.inf}, "reward_nan"),
        (lambda args, sample: "good", "reward_invalid"),
        (lambda args, sample: {"score": 1.0, "teacher_log_probs": [-1.0]}, "reward_invalid"),
        (lambda args, sample: next(iter(())), "reward_failed"),
    ],
)
async def test_case_34_a_bad_reward_drops_its_turn_only(
    journal: Journal, caplog: pytest.LogCaptureFixture, reward: Any, reason: str
) -> None:
    async def mixed(args: Any, sample: Sample) -> Any:
        if sample.metadata["turn_id"] != "bad":
            return 1.0
        result = reward(args, sample)
        return await result if asyncio.iscoroutine(result) else result

    for turn_id in ("good1", "bad", "good2"):
        add_turn(journal, turn_id, SECRET)
    with caplog.at_level(logging.INFO):
        await judge_all(journal, mixed, make_args(judge_timeout=0.3))
    assert journal.outcomes().dropped == {reason: 1}
    assert journal.outcomes().ready == 2
    assert journal.outcomes().balanced()
    assert SECRET not in caplog.text


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
@pytest.mark.parametrize("plain", [True, False])
async def test_case_34_a_reward_that_wants_to_end_the_judge_drops_its_turn_only(
    journal: Journal, kind: type[BaseException], plain: bool
) -> None:
    def reward(args: Any, sample: Sample) -> float:
        if sample.metadata["turn_id"] == "bad":
            raise kind
        return 1.0

    async def waiting(args: Any, sample: Sample) -> float:
        return reward(args, sample)

    for turn_id in ("good1", "bad", "good2"):
        add_turn(journal, turn_id, "x")
    await judge_all(journal, reward if plain else waiting, make_args())
    assert journal.outcomes().dropped == {"reward_failed": 1}
    assert journal.outcomes().ready == 2


async def test_case_34_a_plain_function_that_never_returns(journal: Journal) -> None:
    end = threading.Event()
    add_turn(journal, "t1", "x")
    await judge_all(journal, lambda args, sample: end.wait(20), make_args(judge_timeout=0.2))
    end.set()
    assert journal.outcomes().dropped == {"reward_timeout": 1}


async def test_plain_functions_and_reward_key(journal: Journal) -> None:
    add_turn(journal, "t1", "x")
    main = threading.get_ident()
    threads = []

    def reward(args: Any, sample: Sample, **kwargs: Any) -> dict[str, float]:
        threads.append(threading.get_ident())
        return {"score": 1.0, "mine": -0.25}

    await judge_all(journal, reward, make_args(reward_key="mine"))
    assert verdict(journal).score == -0.25
    assert threads != [main]


async def test_case_27_a_judge_that_is_down_costs_time_and_no_score(journal: Journal) -> None:
    clock = Clock()
    args = make_args(judge_concurrency=3)
    for n in range(5):
        add_turn(journal, f"t{n}", "x")
    async with FakeChat() as fake:
        args.prm_url = fake.url
        fake.default = 503
        worker = make_worker(journal, prm.custom_rm, args, clock=clock)
        await worker.run_until_idle()
        assert journal.outcomes().judging == 5
        assert len(fake.bodies) == 3  # then it rests
        await worker.run_until_idle()
        assert len(fake.bodies) == 3
        clock.now += worker_module.REST_SECONDS
        await worker.run_until_idle()
        assert len(fake.bodies) == 4  # one turn finds out
        assert journal.outcomes().counters["postponed:judge_unavailable"] == 4
        assert journal.outcomes().dropped == {}
        fake.default = '{"verdict": 1}'
        clock.now += 60
        await worker.run_until_idle()
        await worker.run_until_idle()
        await args.judge_models.close()
    assert journal.outcomes().ready == 5
    assert all(verdict(journal, f"t{n}").score == 1.0 for n in range(5))


async def test_case_27_a_clock_set_back_does_not_prolong_a_rest(journal: Journal) -> None:
    clock, args = Clock(), make_args()
    clock.now = 10_000.0
    add_turn(journal, "t1", "x")
    async with FakeChat() as fake:
        args.prm_url = fake.url
        fake.default = 503
        worker = make_worker(journal, prm.custom_rm, args, clock=clock)
        await worker.run_until_idle()
        clock.now -= 3600
        fake.default = '{"verdict": 1}'
        add_turn(journal, "t2", "x")
        await worker.run_until_idle()
        await args.judge_models.close()
    assert state(journal, "t2") is State.READY


async def test_case_27_an_endpoint_that_is_not_published_yet(journal: Journal, model: Path) -> None:
    clock, args = Clock(), make_args(hf_checkpoint=str(model))
    add_turn(journal, "t1", "x")
    worker = make_worker(journal, prm.custom_rm, args, clock=clock)
    await worker.run_until_idle()
    assert journal.outcomes().counters == {"postponed:judge_unavailable": 1}
    async with FakeEngine(tokenizer=ChatTokenizer.load(model)) as engine:
        engine.say('{"why": "", "verdict": -1}')
        journal.publish("judge", f"{engine.url}/base", {}, 1.0)
        clock.now += 10
        await worker.run_until_idle()
        assert engine.requests[0].base
        await args.judge_models.close()
    assert verdict(journal).score == -1.0
    assert list(verdict(journal).votes) == [-1.0]


async def test_case_26_no_verdict_is_asked_again_and_then_dropped(journal: Journal) -> None:
    clock, args = Clock(), make_args()
    add_turn(journal, "t1", "x")
    async with FakeChat() as fake:
        fake.default = "I cannot say."
        args.prm_url = fake.url
        worker = make_worker(journal, prm.custom_rm, args, clock=clock)
        for attempt in range(worker_module.ABSTENTIONS):
            assert state(journal) is State.JUDGING, attempt
            await worker.run_until_idle()
            clock.now += 600
        await args.judge_models.close()
    assert len(fake.bodies) == worker_module.ABSTENTIONS
    assert journal.outcomes().dropped == {"no_verdict": 1}
    assert journal.outcomes().counters["postponed:no_verdict"] == 3


async def test_case_27_an_outage_is_no_abstention(journal: Journal, model: Path) -> None:
    clock, args = Clock(), make_args(hf_checkpoint=str(model))
    add_turn(journal, "t1", "x")
    worker = make_worker(journal, prm.custom_rm, args, clock=clock)
    for _ in range(worker_module.ABSTENTIONS):
        await worker.run_until_idle()  # nobody is there
        clock.now += 600
    async with FakeChat() as fake:
        fake.default = "I cannot say."
        args.prm_url = fake.url
        await worker.run_until_idle()
        await args.judge_models.close()
    assert journal.outcomes().counters["postponed:no_verdict"] == 1
    assert state(journal) is State.JUDGING


async def test_case_27_a_judge_that_is_only_slow_costs_no_turn(journal: Journal) -> None:
    clock, args = Clock(), make_args(judge_timeout=2.0)  # of which the votes have 1.2 s
    add_turn(journal, "t1", "x")
    async with FakeChat() as fake:
        fake.hold = asyncio.Event()
        args.prm_url = fake.url
        worker = make_worker(journal, prm.custom_rm, args, clock=clock)
        for _ in range(worker_module.ABSTENTIONS):
            await worker.run_until_idle()
            assert state(journal) is State.JUDGING
            clock.now += 600
        fake.hold.set()
        args.judge_timeout = 20.0
        await worker.run_until_idle()
        await args.judge_models.close()
    assert state(journal) is State.READY
    assert journal.outcomes().counters["postponed:judge_unavailable"] == 3


async def test_a_refusal_is_tried_again(journal: Journal) -> None:
    add_turn(journal, "t1", "x")
    async with FakeChat() as fake:
        fake.default = 401
        await judge_all(journal, prm.custom_rm, make_args(prm_url=fake.url))
    assert journal.outcomes().counters["postponed:judge_refused"] == 1
    assert state(journal) is State.JUDGING


async def test_a_teacher_away_keeps_the_turn(journal: Journal, model: Path) -> None:
    add_turn(journal, "t1", "Too long, one sentence please.")
    async with FakeEngine() as engine:
        engine.faults += [Fault(status=500)] * 3
        args = make_args(hf_checkpoint=str(model), teacher_url=engine.url)
        await judge_all(journal, feedback.custom_rm, args)
    assert state(journal) is State.JUDGING
    assert journal.outcomes().counters["postponed:judge_unavailable"] == 1


async def test_turns_are_judged_at_the_same_time(journal: Journal) -> None:
    for n in range(9):
        add_turn(journal, f"t{n}", "x")
    async with FakeChat() as fake:
        fake.hold = asyncio.Event()
        args = make_args(prm_url=fake.url, judge_concurrency=4)
        worker = make_worker(journal, prm.custom_rm, args)
        running = asyncio.create_task(worker.run_until_idle())
        async with asyncio.timeout(10), fake.arrived:
            await fake.arrived.wait_for(lambda: len(fake.bodies) == 4)
        fake.hold.set()
        await running
        await args.judge_models.close()
        assert fake.most_at_once == 4
    assert journal.outcomes().ready == 9


async def test_a_stopped_worker_gives_back_and_a_dead_one_is_replaced(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "STOP_SECONDS", 0.05)
    clock, started = Clock(), asyncio.Event()

    async def slow(args: Any, sample: Sample) -> float:
        started.set()
        await asyncio.Event().wait()
        return 1.0

    add_turn(journal, "t1", "x")
    worker = make_worker(journal, slow, make_args(), clock=clock)
    running = asyncio.create_task(worker.run())
    await asyncio.wait_for(started.wait(), 10)
    assert journal.claim("other", 9, clock.now, 60.0) == []
    worker.stop()
    await asyncio.wait_for(running, 10)
    turn = journal.turn("t1")
    assert turn is not None
    assert (turn.state, turn.attempts) == (State.JUDGING, 0)

    (turn,) = journal.claim("dead", 1, clock.now, worker_module.CLAIM_SECONDS)
    live = make_worker(journal, lambda args, sample: 1.0, make_args(), clock=clock, name="live")
    await live.run_until_idle()
    assert state(journal) is State.JUDGING
    clock.now += worker_module.CLAIM_SECONDS + 1
    await live.run_until_idle()
    assert state(journal) is State.READY


async def test_a_running_worker_sees_new_turns(journal: Journal, tmp_path: Path) -> None:
    judged = asyncio.Event()

    def reward(args: Any, sample: Sample) -> float:
        return 1.0

    loop = asyncio.get_running_loop()
    write = journal.write_verdict

    def write_and_tell(*values: Any, **named: Any) -> Any:
        result = write(*values, **named)
        loop.call_soon_threadsafe(judged.set)
        return result

    journal.write_verdict = write_and_tell  # type: ignore[method-assign]
    worker = make_worker(journal, reward, make_args())
    running = asyncio.create_task(worker.run())
    with Journal.open(tmp_path / "journal.db") as other:
        for turn_id in ("t1", "t2"):
            judged.clear()
            add_turn(other, turn_id, "x")
            await asyncio.wait_for(judged.wait(), 10)
    worker.stop()
    await asyncio.wait_for(running, 10)
    assert journal.outcomes().ready == 2


async def test_case_53_a_turn_that_another_one_judged_meanwhile_is_not_dropped(
    journal: Journal, tmp_path: Path
) -> None:
    clock = Clock()

    def slow(args: Any, sample: Sample) -> float:
        clock.now += worker_module.CLAIM_SECONDS + 1
        with Journal.open(tmp_path / "journal.db") as other:
            assert [turn.turn_id for turn in other.claim("other", 1, clock.now, 60.0)] == ["t1"]
            other.write_verdict("t1", "other", Verdict(score=1.0))
        raise ValueError

    add_turn(journal, "t1", "x")
    await judge_all(journal, slow, make_args(), clock=clock)
    assert (state(journal), verdict(journal).score) == (State.READY, 1.0)
    assert journal.outcomes().dropped == {}


async def test_case_53_a_reward_that_blocks_the_event_loop_keeps_its_claim(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "RENEW_SECONDS", 0.01)
    clock, renewed, taken = Clock(), threading.Event(), []
    extend = Journal.extend_claims

    def extend_and_tell(self: Journal, worker: str, until: float) -> Any:
        found = extend(self, worker, until)
        if clock.now > 1000.0:
            renewed.set()
        return found

    async def blocks(args: Any, sample: Sample) -> float:
        for _ in range(3):
            clock.now += worker_module.CLAIM_SECONDS * 0.75
            renewed.clear()
            renewed.wait(10)
            with Journal.open(tmp_path / "journal.db") as other:
                taken.extend(other.claim("other", 1, clock.now, 60.0))
        return 1.0

    monkeypatch.setattr(Journal, "extend_claims", extend_and_tell)
    add_turn(journal, "t1", "x")
    worker = make_worker(journal, blocks, make_args(tmp_path / "journal.db"), clock=clock)
    await run_until(worker, lambda: state(journal) is not State.JUDGING)
    assert taken == []
    assert verdict(journal).score == 1.0


async def test_case_53_after_sleep_a_turn_under_way_is_not_taken_again(
    journal: Journal, tmp_path: Path
) -> None:
    clock, begun, end = Clock(), [], asyncio.Event()

    async def reward(args: Any, sample: Sample) -> float:
        begun.append(sample.metadata["turn_id"])
        if sample.metadata["turn_id"] == "t1":
            clock.now += 3600.0
            await end.wait()
        return 1.0

    add_turn(journal, "t1", "x")
    worker = make_worker(journal, reward, make_args(tmp_path / "journal.db"), clock=clock)
    running = asyncio.create_task(run_until(worker, lambda: journal.outcomes().ready == 2))
    await asyncio.to_thread(until, lambda: begun)
    add_turn(journal, "t2", "x")
    await asyncio.to_thread(until, lambda: state(journal, "t2") is State.READY)
    end.set()
    await running
    assert begun == ["t1", "t2"]


async def test_case_53_a_worker_that_lost_its_claim_abandons_the_turn(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "RENEW_SECONDS", 0.01)
    clock, abandoned = Clock(), asyncio.Event()

    async def reward(args: Any, sample: Sample) -> float:
        clock.now += 3600.0
        with Journal.open(tmp_path / "journal.db") as other:
            assert len(other.claim("other", 1, clock.now, 60.0)) == 1
        try:
            await asyncio.Event().wait()
        finally:
            abandoned.set()
        return -1.0

    add_turn(journal, "t1", "x")
    worker = make_worker(journal, reward, make_args(tmp_path / "journal.db"), clock=clock)
    running = asyncio.create_task(worker.run())
    await asyncio.wait_for(abandoned.wait(), 10)
    worker.stop()
    await running
    assert journal.write_verdict("t1", "other", Verdict(score=1.0)) is State.READY


async def test_the_journal_is_never_waited_for_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    path, on_the_loop, open_journal = tmp_path / "journal.db", set(), Journal.open
    loops_thread = threading.get_ident()

    class Watched:
        def __init__(self, journal: Journal) -> None:
            self.journal = journal

        def __getattr__(self, name: str) -> Any:
            if threading.get_ident() == loops_thread and callable(getattr(self.journal, name)):
                return lambda *values, **more: self.note(name, *values, **more)
            return getattr(self.journal, name)

        def note(self, name: str, *values: Any, **more: Any) -> Any:
            if threading.get_ident() == loops_thread:
                on_the_loop.add(name)
            return getattr(self.journal, name)(*values, **more)

    async with FakeEngine(tokenizer=ChatTokenizer.load(model)) as engine:
        with open_journal(path) as journal:
            add_turn(journal, "t1", "x")
            journal.publish("judge", engine.url, {}, 1.0)
            engine.say('{"why": "", "hint": "Answer in metric units.", "verdict": 1}')
            args = make_args(
                path, hf_checkpoint=str(model), teacher_url=engine.url,
                custom_rm_path="openclaw_rl.rewards.hindsight",
            )  # fmt: skip
            opened = lambda *values, **more: Watched(open_journal(*values, **more))  # noqa: E731
            monkeypatch.setattr(Journal, "open", opened)
            running = asyncio.create_task(worker_module.run_judge(args))
            await asyncio.to_thread(until, lambda: journal.outcomes().ready == 1)
            os.kill(os.getpid(), signal.SIGTERM)
            await running
    assert on_the_loop == set()


async def test_log_lines_hold_numbers_only(
    journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    add_turn(journal, "t1", f"That's wrong, {SECRET}.", messages=(user(SECRET),))
    with caplog.at_level(logging.INFO):
        await judge_all(journal, feedback.custom_rm, make_args(w_opd=0))
    lines = [r.getMessage() for r in caplog.records if "verdict turn=t1" in r.getMessage()]
    assert len(lines) == 1
    assert "score=-1" in lines[0]
    assert SECRET not in caplog.text


async def test_a_users_reward_may_ask_for_another_try(journal: Journal) -> None:
    def reward(args: Any, sample: Sample) -> float:
        raise EngineUnavailable("my service is away")

    add_turn(journal, "t1", "x")
    await judge_all(journal, reward, make_args())
    assert state(journal) is State.JUDGING


async def test_the_example_reward(journal: Journal, model: Path) -> None:
    path = Path(__file__).parents[2] / "examples" / "my_method" / "custom_rm.py"
    reward = load_hook(str(path), default_name="custom_rm", flag="--custom-rm-path")
    long = {"role": "assistant", "content": "word " * 200}
    add_turn(journal, "long", "What is snow?", reply=long)
    add_turn(journal, "short", "What is snow?")
    add_turn(journal, "liked", "Perfect, thanks.", reply=long)
    async with FakeEngine() as engine:
        args = make_args(teacher_url=engine.url, w_opd=0)
        await judge_all(journal, reward, args)
    assert verdict(journal, "long").score == -0.5
    assert verdict(journal, "long").hint == "Keep the answer under 120 words."
    assert state(journal, "short") is State.DROPPED
    assert verdict(journal, "liked").score == 1.0
