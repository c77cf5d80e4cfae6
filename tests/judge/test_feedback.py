"""The feedback reward, on its own and against the quickstart's simulated user."""

from __future__ import annotations

from typing import Any

import pytest

from examples.quickstart import user as quickstart
from openclaw_rl.hooks import Sample
from openclaw_rl.rewards.feedback import custom_rm, opinion_of
from openclaw_rl.rewards.words import read_opinion


def feedback(**fields: Any) -> list[dict[str, Any]]:
    return [{"role": "feedback", "content": "", "thumb": None, "score": None, **fields}]


@pytest.mark.parametrize(
    ("message", "score", "hint"),
    [
        ({"thumb": "up"}, 1.0, None),
        ({"thumb": "down"}, -1.0, None),
        ({"thumb": "down", "content": "Use metric units."}, -1.0, "Use metric units."),
        ({"thumb": "up", "content": "Use metric units."}, 1.0, None),
        ({"score": 0.5}, 0.5, None),
        ({"score": -0.5, "content": "Too slow."}, -0.5, "Too slow."),
        ({"score": 0, "thumb": "up"}, 0.0, None),
        ({"score": -7}, -1.0, None),
        ({"score": float("nan"), "thumb": "up"}, 1.0, None),
        ({"content": "Too long."}, -1.0, "Too long."),
        ({"content": "thanks!"}, 1.0, None),
        ({"content": "hm"}, 0.0, None),
    ],
)
def test_explicit_feedback(message: dict[str, Any], score: float, hint: str | None) -> None:
    opinion = opinion_of(feedback(**message))
    assert (opinion.score, opinion.correction) == (score, hint)


async def test_explicit_feedback_decides_before_words() -> None:
    state = [{"role": "user", "content": "Perfect, thanks."}, *feedback(thumb="down")]
    assert await custom_rm(None, Sample(metadata={"next_state": state})) == {
        "score": -1.0,
        "hint": None,
    }


async def test_tool_results_alone_say_nothing() -> None:
    state = [{"role": "tool", "content": "Perfect, thanks.", "tool_call_id": "1"}]
    assert (await custom_rm(None, Sample(metadata={"next_state": state})))["score"] == 0.0
    assert (await custom_rm(None, Sample(metadata={})))["score"] == 0.0


async def test_text_parts_and_a_question_in_the_reply() -> None:
    parts = [{"type": "text", "text": "Too long."}, {"type": "image_url", "image_url": {}}]
    state = [{"role": "user", "content": parts}]
    reward = await custom_rm(None, Sample(metadata={"next_state": state}))
    assert reward == {"score": -1.0, "hint": "Too long."}
    state = [{"role": "user", "content": "No."}]
    asked = {"role": "assistant", "content": "Shall I go on?"}
    told = {"role": "assistant", "content": "It is Rome."}
    for reply, score in ((asked, 0.0), (told, -1.0)):
        sample = Sample(metadata={"next_state": state, "reply": reply})
        assert (await custom_rm(None, sample))["score"] == score


QUESTIONS = [*quickstart.TRAIN_QUESTIONS, *quickstart.HELD_OUT_QUESTIONS]


@pytest.mark.parametrize("verdict", list(quickstart.Verdict))
def test_the_quickstarts_user_is_read_right(verdict: quickstart.Verdict) -> None:
    """Every phrase about every subject, alone and before every question (a sample of pairs)."""
    for phrase in quickstart.PHRASES[verdict]:
        for at, about in enumerate(QUESTIONS):
            said = phrase.format(subject=about.subject)
            following = QUESTIONS if at < 3 else [QUESTIONS[(at * 7) % len(QUESTIONS)]]
            for text in [said, *(f"{said} {question.text}" for question in following)]:
                opinion = read_opinion(text)
                if verdict is quickstart.Verdict.PLEASED:
                    assert (opinion.score, opinion.correction) == (1.0, None), text
                else:
                    assert (opinion.score, opinion.correction) == (-1.0, said), text


def test_the_quickstarts_questions_say_nothing() -> None:
    for text in [quickstart.GOODBYE, *(question.text for question in QUESTIONS)]:
        assert read_opinion(text).score == 0.0, text
