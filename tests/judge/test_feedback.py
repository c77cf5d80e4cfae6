"""The feedback reward, on its own and against the quickstart's simulated user."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.quickstart import user as quickstart
from openclaw_rl.hooks import Sample
from openclaw_rl.rewards.feedback import custom_rm, read_words


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
async def test_explicit_feedback(message: dict[str, Any], score: float, hint: str | None) -> None:
    reward = await custom_rm(None, Sample(metadata={"next_state": feedback(**message)}))
    assert reward == {"score": score, "hint": hint}


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
                if verdict is quickstart.Verdict.PLEASED:
                    assert read_words(text) == (1.0, None), text
                else:
                    assert read_words(text) == (-1.0, said), text


def test_the_quickstarts_questions_say_nothing() -> None:
    for text in [quickstart.GOODBYE, *(question.text for question in QUESTIONS)]:
        assert read_words(text) == (0.0, None), text


CONTENT = [
    "Perfect, thanks.",
    "Great, thank you!",
    "Thanks, that is just right.",
    "Good answer, thanks.",
    "thanks",
    "Thank you so much for the quick help.",
    "thx!",
    "Exactly what I needed.",
    "That's exactly what I wanted.",
    "That is perfect now.",
    "Much better, thank you.",
    "Yes, that works.",
    "It works now, thanks!",
    "That helped a lot.",
    "I love it.",
    "You're right, thanks.",
    "Well done!",
    "Awesome 👍",
    "👍",
    "Spot on.",
    "Ok, great, thanks.",
    "Perfect, thanks, not too long and not too short.",
    "What a great answer!",
    "Nice work",
    "Oh nice.",
    "This is very helpful.",
    "Your answer is great.",
    "[Mon 2026-11-30 01:29 UTC] Perfect, thanks.",
    "Sounds good.",
    "LGTM",
    "That is a great answer.",
]

DISPLEASED = [  # text, the correction (None: nothing to learn)
    ("That is one block, please answer in two detailed paragraphs.", "="),
    ("That is a list, please answer in plain sentences without numbers.", "="),
    ("Please be friendly and cheerful!", "="),
    ("Too long, please answer in one short sentence.", "="),
    ("That is too much, please keep it to one short sentence.", "="),
    ("Please be brief, one short sentence is enough.", "="),
    ("You did not say anything, please answer in one full sentence.", "="),
    ("That is not what I asked, please tell me about boiling an egg in one short sentence.", "="),
    ("That's wrong. The capital is Canberra.", "="),
    ("No, I meant Paris in Texas.", "="),
    ("No, it is Tuesday.", "="),
    ("Actually, it's Tuesday.", "="),
    ("It should be 42.", "="),
    ("You forgot the units.", "="),
    ("You forgot node.js 3.5, i.e. the new one.", "="),
    ("Don't use markdown.", "="),
    ("Please stop using bullet points.", "="),
    ("Shorter, please.", "="),
    ("In one sentence please.", "="),
    ("Can you make it shorter?", "="),
    ("Could you be more specific?", "="),
    ("Good, but too long.", "="),
    ("Thanks, but that's wrong, it is on Monday.", "="),
    ("Thanks, but can you shorten it?", "="),
    ("That doesn't work.", "="),
    ("This still doesn't compile.", "="),
    ("I asked for metric units.", "="),
    ("Your answer is empty.", "="),
    ("Sorry, that's too technical for me.", "="),
    ("It’s too vague.", "="),
    ("You keep apologizing.", "="),
    ("More detail please.", "="),
    ("I don't understand your answer.", "="),
    ("The answer should be in German.", "="),
    ("Hmm, that isn't what I meant.", "="),
    ("That's not enough.", "="),
    ("Almost, but the date is wrong.", "="),
    ("The second paragraph is too long.", "="),
    ("The first sentence is good but the second one is wrong.", "="),
    ("I asked about rivers, not banks.", "="),
    ("Please provide more details.", "="),
    ("Use Celsius instead.", "="),
    ("In German please.", "="),
    ("No, not that one.", "="),
    ("No, that is wrong. Say it shorter.", "="),
    ("No, that was not the question.", "="),
    ("I still get the same error.", "="),
    ("That's wrong.", None),
    ("No.", None),
    ("Wrong!", None),
    ("That is not correct.", None),
    ("👎", None),
]

NOTHING = [
    "This is a new task, please answer in short sentences.",
    "That is my landlord, please write a short letter.",
    "",
    "What is rain?",
    "What does thanks mean?",
    "How do I correct a typo?",
    "How do I say 'thank you' in French?",
    "Why is my code wrong?",
    "Is that wrong?",
    "What is too long for a tweet?",
    "Is it too long for a tweet?",
    "No thanks.",
    "No, thank you.",
    "no, thanks",
    "Not perfect.",
    "It's not perfect.",
    "Not bad.",
    "No problem.",
    "No, that's all.",
    "No, that's fine.",
    "No, that is fine.",
    "That is all for today.",
    "Never mind.",
    "You don't have to apologize.",
    "Good morning!",
    "Hello",
    "ok",
    "Thanks to the rain, my garden is green.",
    "Great Britain left the EU in which year?",
    "Perfect numbers are fascinating, tell me about them.",
    "Write a short story about cats.",
    "Give me a short summary of the French Revolution.",
    "Give me a detailed plan for a trip to Rome.",
    "Make a list of fruits.",
    "Please explain in one sentence how magnets work.",
    "In one sentence, what is gravity?",
    "Please answer in French: what is rain?",
    "How do I boil an egg? Thanks!",
    "Please translate this into German, thanks.",
    "I live in Berlin. What should I wear today?",
    "My boss said that I am wrong. What should I do?",
    "It is too hot in my room. How do I cool it?",
    "Too many cooks spoil the broth, what does it mean?",
    "Write an email that says that the invoice is wrong.",
    "Correct this sentence: he go home.",
    "Fix this code: print(",
    "Tell me a joke.",
    'The word "perfect" has many meanings.',
    "> That's wrong.",
    "```\nwrong\n```",
    "Das ist falsch.",
    "Can you write a short poem?",
    "Do not forget to buy milk is what I must remember.",
    "Correct me if I am wrong, the Earth is round?",
    "You should visit Rome, people say. Is that so?",
    "I meant to ask you about rivers.",
    "It was a great day. What should I write in my diary?",
    "I love this city, what should I visit?",
    "Write two sentences about rain.",
    "I like tea, but the weather is bad. What can I do?",
    "Great question.",
    "My answer is wrong, can you help me find the mistake?",
    "I don't understand gravity. Can you explain it?",
    "German",
    "Thank you notes are hard to write, can you help?",
]

NEXT = [
    "What is rain?",
    "How do I make tea?",
    "Why do dogs bark?",
    "Can you tell me about short sentences?",
    "Tell me about the Moon.",
    "Now write a poem about it.",
    "And who is wrong in this story?",
    "I live in Rome. What should I see there?",
]


@pytest.mark.parametrize("text", CONTENT)
def test_praise(text: str) -> None:
    assert read_words(text) == (1.0, None)


@pytest.mark.parametrize(("text", "correction"), DISPLEASED)
def test_corrections(text: str, correction: str | None) -> None:
    assert read_words(text) == (-1.0, text if correction == "=" else correction)


@pytest.mark.parametrize("text", NOTHING)
def test_nothing_said(text: str) -> None:
    assert read_words(text) == (0.0, None)


@pytest.mark.parametrize("following", NEXT)
def test_the_next_question_is_no_part_of_the_opinion(following: str) -> None:
    for text in CONTENT:
        text = text if text[-1] in ".!👍" else text + "."
        assert read_words(f"{text} {following}")[0] == 1.0, text
    for text, correction in DISPLEASED:
        score, found = read_words(f"{text} {following}")
        assert score == -1.0, text
        if correction == "=" and text[-1] in ".!?":
            assert found == text


def test_no_answers_a_question_of_the_reply() -> None:
    assert read_words("No.", reply_asked=True)[0] == 0.0
    assert read_words("No, it is Tuesday.", reply_asked=True)[0] == 0.0
    assert read_words("In German please.", reply_asked=True)[0] == 0.0
    assert read_words("No, that's wrong.", reply_asked=True)[0] == -1.0


def test_a_question_after_a_comma_is_cut_off() -> None:
    assert read_words("Too long, what is rain?")[1] == "Too long"
    text = "Wrong, it is Canberra, now what is rain?"
    assert read_words(text)[1] == "Wrong, it is Canberra"


@given(st.text(max_size=200))
def test_any_text_can_be_read(text: str) -> None:
    score, correction = read_words(text)
    assert score in (-1.0, 0.0, 1.0)
    assert correction is None or score == -1.0
