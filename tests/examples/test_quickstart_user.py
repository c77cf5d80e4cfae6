"""The quickstart's simulated user: what pleases, what is corrected, and how it is said."""

import importlib.util
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

_PATH = Path(__file__).parents[2] / "examples" / "quickstart" / "user.py"
_SPEC = importlib.util.spec_from_file_location("quickstart_user", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
user = importlib.util.module_from_spec(_SPEC)
sys.modules["quickstart_user"] = user
_SPEC.loader.exec_module(user)

RAIN = user.Question("What is rain?", "rain", ("rain", "water"))
Verdict = user.Verdict


def verdict(reply: str):
    return user.judge_reply(RAIN, reply).verdict


def sentence(words: int) -> str:
    """A finished sentence on rain of so many words."""
    return " ".join(["Rain"] + ["falls"] * (words - 1)) + "."


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (1, Verdict.TOO_SHORT),
        (5, Verdict.TOO_SHORT),
        (6, Verdict.PLEASED),
        (25, Verdict.PLEASED),
        (26, Verdict.TOO_LONG),
        (80, Verdict.TOO_LONG),
    ],
)
def test_length_bounds(words, expected):
    assert verdict(sentence(words)) is expected


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("Rain is water. It falls from clouds.", Verdict.PLEASED),
        ("Rain is water. It falls down. It is wet.", Verdict.TOO_LONG),
        ("Rain brings:\n- water for plants\n- water for people.", Verdict.TOO_LONG),
        ("Rain is water, e.g. drops of it, etc. from a cloud. It falls down.", Verdict.PLEASED),
        ("Rain is 3.5 parts water and falls from the sky.", Verdict.PLEASED),
    ],
)
def test_sentences_are_counted(reply, expected):
    assert verdict(reply) is expected


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("", Verdict.EMPTY),
        (" \n ", Verdict.EMPTY),
        ("...", Verdict.EMPTY),
        ("Rain is water that falls from the", Verdict.UNFINISHED),
        ("Rain is water that falls from clouds:", Verdict.UNFINISHED),
        ("Rain is water that falls from clouds!", Verdict.PLEASED),
        ('It is what people call "liquid rain."', Verdict.PLEASED),
        ("Cats are small animals that live with people.", Verdict.OFF_TOPIC),
        ("The train is a very fast vehicle indeed.", Verdict.OFF_TOPIC),
        ("A RAINY day brings drops from the sky.", Verdict.PLEASED),
    ],
)
def test_other_faults(reply, expected):
    assert verdict(reply) is expected


def test_questions_are_many_distinct_and_disjoint():
    train = {q.text for q in user.TRAIN_QUESTIONS}
    held_out = {q.text for q in user.HELD_OUT_QUESTIONS}
    assert len(train) == len(user.TRAIN_QUESTIONS) >= 48
    assert len(held_out) == len(user.HELD_OUT_QUESTIONS) >= 24
    assert not train & held_out
    for question in user.TRAIN_QUESTIONS + user.HELD_OUT_QUESTIONS:
        assert question.text.endswith("?")
        assert question.subject
        assert question.stems


@pytest.mark.parametrize("fault", [v for v in Verdict if v is not Verdict.PLEASED])
def test_a_displeased_user_always_says_what_to_do(fault):
    rng = random.Random(0)
    said = {user.react(user.Opinion(fault, "rain"), rng) for _ in range(100)}
    assert len(said) == len(user.PHRASES[fault]) > 1
    assert all("sentence" in text and "{" not in text for text in said)
    if fault is Verdict.OFF_TOPIC:
        assert all("about rain" in text for text in said)


def test_a_pleased_user_is_sometimes_silent():
    rng = random.Random(1)
    opinion = user.Opinion(Verdict.PLEASED, "rain")
    said = Counter(user.react(opinion, rng) for _ in range(2000))
    assert set(said) == {"", *user.PHRASES[Verdict.PLEASED]}
    assert 0.15 < said[""] / 2000 < 0.25
    assert all(user.react(opinion, rng, silent_share=0.0) for _ in range(50))


def test_a_conversation_reacts_asks_on_and_closes():
    questions = user.TRAIN_QUESTIONS[:2]
    talk = user.Conversation(questions, random.Random(0))
    assert talk.opening() == questions[0].text
    second = talk.answer("word " * 60)
    assert second.endswith(" " + questions[1].text)
    assert second.removesuffix(" " + questions[1].text) in user.PHRASES[Verdict.TOO_LONG]
    assert not talk.finished
    assert talk.answer("") in user.PHRASES[Verdict.EMPTY]
    assert talk.finished
    assert [o.verdict for o in talk.opinions] == [Verdict.TOO_LONG, Verdict.EMPTY]
    with pytest.raises(ValueError, match="over"):
        talk.answer("again")


def test_silence_leaves_only_the_next_question_and_a_goodbye():
    questions = (RAIN, user.TRAIN_QUESTIONS[1])
    talk = user.Conversation(questions, random.Random(0), silent_share=1.0)
    assert talk.answer(sentence(8)) == questions[1].text
    assert talk.answer("The sky is blue as it scatters light.") == user.GOODBYE


def test_a_seed_fixes_the_conversation():
    def script(seed: int) -> list[str]:
        talk = user.draw_conversation(random.Random(seed), length=4)
        said = [talk.opening()]
        while not talk.finished:
            said.append(talk.answer(sentence(9)))
        return said

    assert script(3) == script(3)
    assert len({tuple(script(seed)) for seed in range(5)}) == 5
    assert len(script(3)) == 5
