"""What is said of replies, on replies that training really led to."""

import pytest

from openclaw_rl.guards import measures as m

BALLOON = "A hot air balloon is a hot air balloon is a hot air balloon."
AIR = "You can't fly in the air, but you can fly in the air"
GLAD = ["Awesome, I'm glad of you.", "A great question, I'm glad of you."]
HEALTHY = [
    "Leaves turn red because the green pigment breaks down.",
    "Check the frame, the brakes and the chain before you pay.",
    "Soak the spot in cold water, then dab it with vinegar.",
]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Don't stop!", ["don", "t", "stop"]),
        (" .\n…", []),
        ("北京 is big", ["北", "京", "is", "big"]),
        ("Größe ß", ["grösse", "ss"]),
    ],
)
def test_words(text, said):
    assert m.words(text) == said


@pytest.mark.parametrize(
    "text",
    [
        BALLOON,
        AIR,
        "I like the green tea. I like green tea.",  # sentences, no run of four words
        "天气很好,天气很好",
    ],
)
def test_a_reply_that_repeats_itself(text):
    assert m.repeats(text)


@pytest.mark.parametrize("text", [*HEALTHY, *GLAD, "", "No. No. No.", "Yes, a dog or a cat."])
def test_a_reply_that_does_not(text):
    assert not m.repeats(text)


def test_a_loop_is_most_of_a_reply_however_long_it_is():
    assert m.loops(BALLOON)
    assert not m.loops(AIR)
    assert not m.loops(" ".join(HEALTHY) + " " + HEALTHY[0])
    assert not m.loops("")


def test_rouge_l_is_twice_the_common_subsequence_by_the_lengths():
    assert m.rouge_l(["a", "b", "c", "d"], ["a", "x", "c"]) == pytest.approx(4 / 7)
    assert m.rouge_l(["a", "b"], ["b", "a"]) == pytest.approx(0.5)
    assert m.rouge_l([], ["a"]) == 0
    assert m.rouge_l([], []) == 1


def test_similarity_is_between_replies_to_different_questions():
    assert m.similarity([AIR] * 4) == 1
    assert m.similarity(HEALTHY) < 0.2
    assert m.similarity([GLAD[0], GLAD[1], GLAD[0], GLAD[0]]) > 0.8
    assert m.similarity([AIR]) == 0


def test_sound_replies_say_something_of_their_own():
    assert m.sound(HEALTHY) == 1
    assert m.sound([*HEALTHY, BALLOON]) == 0.75
    assert m.sound([*HEALTHY, "..."]) == 0.75
    assert m.sound([*HEALTHY[:2], GLAD[0], GLAD[0]]) == 0.5
    assert m.sound([]) == 0


def test_a_mean_is_over_tokens_and_of_nothing_0():
    assert m.mean_of_tokens([[1.0, 1.0, 1.0], [5.0]]) == 2
    assert m.mean_of_tokens([[], []]) == 0


def test_what_fits_every_question_is_vague():
    """Nats of a reply's tokens after its own question, and after two others."""
    likely = [-0.5] * 16
    assert m.vague(likely, [likely, likely])
    assert m.vague(likely, [[-1.0] * 16, [-1.2] * 16])  # 9.6 in all, 0.6 a token
    assert not m.vague(likely, [[-1.5] * 16, [-1.3] * 16])  # 14.4 in all
    assert not m.vague(likely * 4, [[-0.8] * 64])  # 19.2 in all, though 0.3 a token
    assert not m.vague([-0.5], [[-9.0]])  # a name: 8.5 in all, all of it in one token
    assert m.vague([], [[]])
