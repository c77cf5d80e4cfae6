"""The people of `benchmarks.learning`, and what its table says of a run."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.learning import alike, repeats, row, samples, served_at
from benchmarks.people import PEOPLE, strictly_on_subject
from examples.quickstart.user import TRAIN_QUESTIONS
from openclaw_rl.rewards.feedback import read_words, standing_rule

LIST = "1. Boil water.\n2. Add the egg.\n3. Wait."
BOLD = "The **egg** needs ten minutes."
SHORT = "Rain is water that falls from clouds."
LONG = "Rain is water that falls from clouds when small drops become heavy enough. " * 2
PARAGRAPHS = f"{LONG}\n\n{LONG}"
WARM = "Hello friend! Rain is water that falls from clouds. Enjoy it!"
REPLIES = ("", LIST, BOLD, SHORT, LONG, LONG * 3, PARAGRAPHS, WARM)
RAIN = next(question for question in TRAIN_QUESTIONS if "rain" in question.text)


@pytest.mark.parametrize(
    ("name", "pleasing", "displeasing"),
    [
        ("a", SHORT, (LONG * 3, "Rain.", "", "Boats sail on the sea every day.")),
        ("b", SHORT, (LIST, BOLD, "")),
        ("c", PARAGRAPHS, (SHORT, LONG * 2, f"{PARAGRAPHS}\n{LIST}")),
        ("d", WARM, (SHORT, "Hello friend! Rain is water.", f"{SHORT} Enjoy it!")),
        ("g", "Rain.", (LONG, "")),
    ],
)
def test_each_person_has_a_wish(name: str, pleasing: str, displeasing: tuple[str, ...]) -> None:
    person = PEOPLE[name]
    assert person.complaint(RAIN, pleasing, 0) == ""
    for reply in displeasing:
        assert person.complaint(RAIN, reply, 0), reply


def test_a_wish_changes_at_its_session() -> None:
    person = PEOPLE["e"]
    assert not person.complaint(RAIN, SHORT, person.changes_at - 1)
    assert person.complaint(RAIN, SHORT, person.changes_at)


@pytest.mark.parametrize("name", PEOPLE)
async def test_whatever_a_person_complains_of_is_read(name: str) -> None:
    """A complaint that the reward does not understand would teach nothing, and nobody would see."""
    person, rules = PEOPLE[name], 0
    for session in (0, 99):
        for reply in REPLIES:
            if complaint := person.complaint(RAIN, reply, session):
                assert read_words(f"{complaint} What is snow?") == (-1.0, complaint)
                rules += await standing_rule(None, [complaint]) is not None
    assert rules


def test_on_the_subject_is_more_than_an_echo() -> None:
    assert strictly_on_subject(RAIN, "Rain is water that falls from clouds.")
    assert not strictly_on_subject(RAIN, "A great question about rain.")


def test_the_third_pleased_session_in_a_row_counts() -> None:
    shares = [{"pleased": share} for share in (1, 0.75, 1, 1, 1, 1, 0, 1, 1, 1)]
    assert served_at(shares) == 5
    assert served_at(shares, 6) == 10
    assert served_at(shares[:4]) is None


def test_what_a_collapse_looks_like_is_measured() -> None:
    assert repeats("a hot air balloon is a hot air balloon is a hot air balloon")
    assert not repeats(SHORT)
    same = "You can't fly in the air, but you can fly in the air"
    assert alike([same, same, same]) == pytest.approx(1.0)
    assert alike([SHORT, "Gears turn the hands", "Fish use gills"]) == 0


def version(number: int, session: int) -> dict[str, Any]:
    return {
        "kind": "version", "session": session, "version": number, "pleased": number / 20,
        "words": 50.0 - number, "strict": 0.8, "repeats": 0.5, "alike": 0.1, "kl": 0.2,
        "harm": -0.01 * number, "answers": 5, "replies": [f"reply <{number}>"],
    }  # fmt: skip


def test_a_run_is_a_row_and_its_samples_are_of_every_tenth_version() -> None:
    plan = {"kind": "plan", "run": "a-combined-0", "person": "a"}
    sessions = [
        {"kind": "session", "pleased": share, "corrections": at, "base_log_prob": -1.0}
        for at, share in enumerate((0.0, 0.5, 1.0, 1.0, 1.0, 0.5, 1.0))
    ]
    run = [plan, *(version(number, number) for number in range(13)), *sessions]
    found = row(run)
    assert found["three in a row"] == "5"
    assert found["corrections until then"] == "4"
    assert found["pleased after it"] == "0.75 of 2"
    assert found["uncoached"] == "0.00 > 0.60"
    assert found["harm, worst"] == "-0.120, -0.120"
    text = samples(run)
    assert [n for n in range(13) if f"reply <{n}>" in text] == [0, 10, 12]
