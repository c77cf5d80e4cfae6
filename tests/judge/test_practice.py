"""Practice: which turns are made, of what, and when none are."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.engine.chat import ChatTokenizer
from openclaw_rl.errors import JournalError
from openclaw_rl.journal.store import Journal
from openclaw_rl.judge.models import Models
from openclaw_rl.judge.practice import Practice
from openclaw_rl.rewards import feedback, hindsight
from openclaw_rl.types import State, Verdict
from tests.fakes.engine import FakeEngine, Fault, logprob_of
from tests.fakes.model import tiny_tokenizer
from tests.judge.helpers import FakeChat, add_turn, make_args, record

WISH = "Too long, please answer in one short sentence."
RULE = "please answer in one short sentence."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("model"))


class Bench:
    """A journal, a fake engine that serves policy and teacher, and the practice on both."""

    def __init__(self, journal: Journal, engine: FakeEngine, args: Any, rule: Any) -> None:
        self.journal, self.engine, self.args = journal, engine, args
        self.models = args.judge_models = Models(args, journal)
        self.practice = Practice(journal, self.models, args, rule)

    def judged(self, n: int, score: float | None, hint: str | None = None, **given: Any) -> None:
        """`n` live turns, each opening a session with the same question, with this verdict; leased,
        so that none is ready."""
        given.setdefault("request_hash", "rain")
        for _ in range(n):
            name = f"live-{self.journal.outcomes().seen}"
            add_turn(
                self.journal, name, "so", sampling={"max_new_tokens": 7, "top_p": 0.5}, **given
            )
            assert self.journal.claim("w", 99, 1000.0, 60.0)
            self.journal.write_verdict(name, "w", Verdict(score=score, hint=hint))
            self.journal.lease(self.journal.outcomes().seen, "host", [name])

    def ready(self) -> list[Any]:
        return [self.journal.turn(head.turn_id) for head in self.journal.ready()]


@pytest.fixture
async def bench(tmp_path: Path, folder: Path) -> AsyncIterator[Bench]:
    path = tmp_path / "journal.db"
    args = make_args(path, hf_checkpoint=str(folder), practice=4.0, rollout_temperature=0.6)
    async with FakeEngine() as engine:
        with Journal.open(path) as journal:
            for role, url in (("policy", engine.url), ("teacher", engine.url + "/base")):
                journal.publish(role, url, {"engine": "sglang", "weight_version": "0"}, time.time())
            journal.publish("rollout", "", {"batch_size": 4, "session_share": 0.25}, time.time())
            bench = Bench(journal, engine, args, feedback.standing_rule)
            yield bench
            await bench.models.close()


async def test_a_batch_is_filled_up_with_past_questions_answered_again(bench: Bench) -> None:
    bench.judged(2, -1.0, WISH)
    assert await bench.practice.fill() == 4
    turns = bench.ready()
    assert len(turns) == 4
    for turn in turns:
        assert turn.source == "practice"
        assert turn.session_id.startswith("practice-")
        assert turn.prompt_ids == [1, 2, 3]
        assert turn.messages[-1]["content"] == "What is rain?"
        # Where a reply ends is the question's, how it is drawn is ours: it can be trained.
        assert turn.sampling == {"max_new_tokens": 7, "temperature": 0.6}
        at = len(turn.prompt_ids)
        assert turn.output_logprobs == [
            logprob_of(token, at + i) for i, token in enumerate(turn.output_ids)
        ]
        assert set(turn.output_versions) == {"0"}
        assert turn.verdict.score is None
        assert turn.verdict.hint == RULE
        assert len(turn.verdict.teacher_log_probs) == len(turn.output_ids)
    asked = [request for request in bench.engine.requests if not request.base]
    assert {request.sampling["temperature"] for request in asked} == {0.6}
    assert bench.journal.outcomes().balanced()


async def test_the_teacher_has_the_rule_in_view_and_the_policy_has_not(
    bench: Bench, folder: Path
) -> None:
    bench.judged(1, -1.0, WISH)
    await bench.practice.fill()
    text = ChatTokenizer.load(str(folder)).decode
    for request in bench.engine.requests:
        assert (RULE in text(request.ids)) is request.base


async def test_over_the_top_k_practice_has_candidates_of_both(bench: Bench) -> None:
    bench.args.opd_top_k, bench.args.opd_subset = 4, "student"
    bench.judged(1, -1.0, WISH)
    assert await bench.practice.fill() == 4
    for turn in bench.ready():
        assert turn.topk.width == 4
        assert len(turn.topk.ids) == len(turn.output_ids)
        for token, own, theirs in zip(
            turn.output_ids, turn.topk.ids, turn.verdict.teacher_topk.ids, strict=True
        ):
            assert token in own
            assert {one for one in theirs if one >= 0} <= set(own)


@pytest.mark.parametrize("why", ["content", "no_correction", "paused", "budget", "full", "no_host"])
async def test_no_practice_without_a_reason(bench: Bench, why: str) -> None:
    if why == "no_correction":
        bench.judged(4, -1.0, None)
    else:
        bench.judged(2, -1.0, WISH)
    if why == "content":
        bench.judged(8, 1.0)
    if why == "paused":
        bench.journal.ask("pause", "by hand", 0.0)
    if why == "budget":
        bench.args.practice = 1.5
    if why == "full":
        bench.args.practice = 8.0
        assert await bench.practice.fill() == 4
    if why == "no_host":
        bench.journal.publish("rollout", "", {"batch_size": 0, "session_share": 1.0}, 0.0)
    assert await bench.practice.fill() == 0


def told(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


async def test_a_reply_that_fits_another_question_as_well_is_blamed_not_distilled(
    bench: Bench,
) -> None:
    """The fake's log-probs depend on the place only: after a question of the same length every
    reply is as likely."""
    bench.judged(1, -1.0, WISH)
    bench.judged(1, -1.0, WISH, messages=told("What is snow?"), request_hash="snow")
    assert await bench.practice.fill() == 4
    for turn in bench.ready():
        assert turn.verdict.score == -1.0
        assert not turn.verdict.has_teacher
    assert bench.models.counters["practice_vague"] == 4
    # No opinion of the person: they said nothing.
    assert len(bench.journal.opinions(9)) == 2


async def test_a_question_whose_own_turn_was_dropped_can_be_practised(bench: Bench) -> None:
    bench.judged(1, -1.0, WISH)
    bench.judged(1, None)  # nothing said, nothing to learn
    assert bench.journal.outcomes().dropped == {"no_signal": 1}
    assert await bench.practice.fill() == len(bench.ready()) == 4


@pytest.mark.parametrize("why", ["tools", "rewards_off", "one_question"])
async def test_where_that_says_nothing_practice_is_distilled(bench: Bench, why: str) -> None:
    tool = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}
    given = {"tools": (tool,)} if why == "tools" else {}
    bench.args.w_rl = 0.0 if why == "rewards_off" else 1.0
    bench.judged(1, -1.0, WISH, **given)
    if why != "one_question":
        bench.judged(1, -1.0, WISH, messages=told("What is snow?"), request_hash="snow", **given)
    assert await bench.practice.fill() == 4
    assert all(turn.verdict.has_teacher for turn in bench.ready())


async def test_a_correction_without_a_score_is_a_reason(bench: Bench) -> None:
    """Distillation alone (`opd`), or signals routed by a hook: a hint, and no reward."""
    bench.judged(5, 1.0)
    bench.judged(1, None, WISH)
    bench.judged(1, 0.0, WISH)
    assert await bench.practice.fill() == 4
    assert {turn.verdict.hint for turn in bench.ready()} == {RULE}


async def test_a_correction_about_one_answer_is_no_rule(bench: Bench) -> None:
    bench.judged(2, -1.0, "That is wrong, it is Canberra.")
    assert await bench.practice.fill() == 0
    bench.judged(1, -1.0, WISH)
    bench.judged(1, -1.0, "That is wrong, it is Lima.")
    await bench.practice.fill()
    assert {turn.verdict.hint for turn in bench.ready()} == {RULE}


@pytest.mark.parametrize(
    ("correction", "rule"),
    [
        ("Too long, please be brief.", "please be brief."),
        ("Please do not use a list, write plain sentences.",
         "Please do not use a list, write plain sentences."),
        ("You did not answer about rain, please answer my question in one short sentence.",
         "please answer my question in one short sentence."),
        ("That is not what I asked, please tell me about rain in one short sentence.", None),
        ("That is wrong, it is Canberra.", None),
        ("You forgot the milk.", None),
    ],
)  # fmt: skip
async def test_the_wish_in_a_correction_is_the_rule(correction: str, rule: str | None) -> None:
    assert await feedback.standing_rule(None, [correction]) == rule


async def test_a_long_time_of_content_buys_no_burst_of_practice(bench: Bench) -> None:
    bench.judged(4, 1.0)
    bench.judged(4, -1.0, WISH)
    bench.args.practice, made = 3.0, 0
    while n := await bench.practice.fill():
        made += n
        bench.journal.lease(1000 + made, "host", [head.turn_id for head in bench.journal.ready()])
    assert made == 12


async def test_the_judge_writes_one_rule_out_of_all_corrections(bench: Bench) -> None:
    async with FakeChat() as chat:
        bench.args.judge_url, bench.args.judge_model = chat.url, "judge"
        chat.default = '{"why": "", "hint": "Answer in one sentence.", "verdict": 1}'
        practice = Practice(bench.journal, bench.models, bench.args, hindsight.standing_rule)
        bench.judged(1, -1.0, WISH)
        bench.judged(1, -1.0, "Please do not use a list.")
        assert await practice.fill() == 4
        shown = str(chat.bodies[0]["messages"][-1]["content"])
        assert shown.index(WISH) < shown.index("Please do not use a list.")
    assert {turn.verdict.hint for turn in bench.ready()} == {"Answer in one sentence."}


async def test_the_questions_are_of_the_one_who_corrected(bench: Bench) -> None:
    bench.judged(1, -1.0, WISH, owner="ann", prompt_ids=[7, 8])
    bench.judged(1, 1.0, owner="bob", prompt_ids=[9, 9])
    await bench.practice.fill()
    assert {(turn.owner, tuple(turn.prompt_ids)) for turn in bench.ready()} == {("ann", (7, 8))}


async def test_a_policy_that_is_away_costs_the_attempt_only(bench: Bench) -> None:
    bench.judged(2, -1.0, WISH)
    bench.engine.faults.extend([Fault(status=400, message="no")])
    assert await bench.practice.fill() == 3
    assert bench.models.counters["practice_failed"] == 1
    assert bench.journal.outcomes().balanced()


async def test_no_conversation_goes_on_from_practice(bench: Bench) -> None:
    bench.judged(1, -1.0, WISH)
    await bench.practice.fill()
    assert {head.source for head in bench.journal.heads(100)} == {"key"}
    # Nor is it an opinion, an opening, or live.
    assert len(bench.journal.opinions(100)) == 1
    assert len(bench.journal.openings("", 100, 100)) == 1
    assert bench.journal.practised(9) == (1, 4)


async def test_practice_is_purged_with_the_session_of_its_question(bench: Bench) -> None:
    bench.judged(1, -1.0, WISH)
    await bench.practice.fill()
    assert len(bench.ready()) == 4
    assert bench.journal.purge(session_id="session-of-live-0") == 5
    assert bench.journal.ready() == []
    assert bench.journal.outcomes().balanced()


async def test_a_rule_hook_that_raises_costs_the_practice_and_is_told(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(args: Any, corrections: Any) -> str:
        raise KeyError(corrections[0])

    practice = Practice(bench.journal, bench.models, bench.args, broken)
    bench.judged(1, -1.0, WISH)
    assert await practice.fill() == 0
    assert bench.models.counters["standing_rule_failed"] == 1
    assert "KeyError" in caplog.text
    assert WISH not in caplog.text


async def test_anchors_have_the_base_itself_as_teacher(bench: Bench, folder: Path) -> None:
    bench.args.practice_anchors = 0.5
    bench.judged(1, -1.0, WISH)
    await bench.practice.fill()
    turns = bench.ready()
    assert sorted(turn.verdict.hint is None for turn in turns) == [False, False, True, True]
    text = ChatTokenizer.load(str(folder)).decode
    plain = [request for request in bench.engine.requests if RULE not in text(request.ids)]
    assert len(plain) == 6  # four replies of the policy, two scores of the base


def test_a_practice_turn_without_a_value_for_each_token_is_refused(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "j.db") as journal:
        with pytest.raises(JournalError, match="one teacher value"):
            journal.record_practice(record("p"), Verdict(hint="x", teacher_log_probs=[-1.0]))
        assert journal.outcomes().seen == 0
        journal.record_practice(record("p"), Verdict(hint="x", teacher_log_probs=[-1.0] * 3))
        assert [head.state for head in journal.ready()] == [State.READY]
