"""Reading plain words (general rules; the examples are only examples)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.rewards.words import read_opinion

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
    "I like how you kept it short.",
    "You're right, thanks.",
    "Well done!",
    "Awesome 👍",
    "👍",
    "Spot on.",
    "Ok, great, thanks.",
    "That explanation was clear, thanks!",
    "Perfect, thanks, not too long and not too short.",
    "What a great answer!",
    "Nice work",
    "Oh nice.",
    "This is very helpful.",
    "Your answer is great.",
    "[Mon 2026-11-30 01:29 UTC] Perfect, thanks.",
    "Sounds good.",
    "LGTM",
    "I love this answer",
    "That is a great answer.",
]

DISPLEASED = [  # text, the correction (None: nothing to learn)
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
    ("👎 Too long", "Too long"),
    ("Almost, but the date is wrong.", "="),
    ("The second paragraph is too long.", "="),
    ("The first sentence is good but the second one is wrong.", "="),
    ("I asked about rivers, not banks.", "="),
    ("Please provide more details.", "="),
    ("Use Celsius instead.", "="),
    ("I hate it when you use emojis.", "="),
    ("That helps, but I need it in Python.", "="),
    ("In German please.", "="),
    ("No, not that one.", "="),
    ("I still get the same error.", "="),
    ("Great, another wrong answer.", "="),
    ("That's wrong.", None),
    ("No.", None),
    ("Wrong!", None),
    ("That is not correct.", None),
    ("👎", None),
]

NOTHING = [
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
    opinion = read_opinion(text)
    assert (opinion.score, opinion.correction) == (1.0, None)


@pytest.mark.parametrize(("text", "correction"), DISPLEASED)
def test_corrections(text: str, correction: str | None) -> None:
    opinion = read_opinion(text)
    assert opinion.score == -1.0
    assert opinion.correction == (text if correction == "=" else correction)


@pytest.mark.parametrize("text", NOTHING)
def test_nothing_said(text: str) -> None:
    opinion = read_opinion(text)
    assert (opinion.score, opinion.correction) == (0.0, None)


@pytest.mark.parametrize("following", NEXT)
def test_the_next_question_is_no_part_of_the_opinion(following: str) -> None:
    for text in CONTENT:
        text = text if text[-1] in ".!👍" or text == "thanks" else text + "."
        assert read_opinion(f"{text} {following}").score == 1.0, text
    for text, correction in DISPLEASED:
        opinion = read_opinion(f"{text} {following}")
        assert opinion.score == -1.0, text
        if correction == "=" and text[-1] in ".!?":
            assert opinion.correction == text


def test_no_answers_a_question_of_the_reply() -> None:
    assert read_opinion("No.", reply_asked=True).score == 0.0
    assert read_opinion("No, it is Tuesday.", reply_asked=True).score == 0.0
    assert read_opinion("In German please.", reply_asked=True).score == 0.0
    assert read_opinion("No, that's wrong.", reply_asked=True).score == -1.0


def test_a_question_after_a_comma_is_cut_off() -> None:
    assert read_opinion("Too long, what is rain?").correction == "Too long"
    assert read_opinion("Wrong, it is Canberra, now what is rain?").correction == (
        "Wrong, it is Canberra"
    )


@given(st.text(max_size=200))
def test_any_text_can_be_read(text: str) -> None:
    opinion = read_opinion(text)
    assert opinion.score in (-1.0, 0.0, 1.0)
    assert opinion.correction is None or opinion.score == -1.0
