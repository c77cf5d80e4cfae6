"""Simulated people for `benchmarks.learning`: each has one wish about replies and says so in words.

Nothing here scores a reply for the trainer: a person reacts in plain English, and what the reaction
means has to be read out of it. `PEOPLE` holds them by the letters of `docs/learning.md`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from examples.quickstart.user import (
    HELD_OUT_QUESTIONS,
    PHRASES,
    TRAIN_QUESTIONS,
    Question,
    Verdict,
    count_words,
    judge_reply,
)

Complaint = Callable[[Question, str], str]
"""What a person says of a reply to a question; "" where it pleases."""

_THANKS = PHRASES[Verdict.PLEASED]
_LIST = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s", re.MULTILINE)
_MARKUP = re.compile(r"\*\*|__|\\boxed|^#+ ", re.MULTILINE)
_WARM = re.compile(
    r"[^.!?]*(?:!|\b(?:great|good|wonderful|lovely|excellent|fantastic|sure|of course|hello|hi"
    r"|welcome|dear|friend|glad|happy|delighted|beautiful|amazing|love|fun)\b)", re.I,
)  # fmt: skip
"""A first sentence that is warm: by a word, or by its exclamation mark."""
_CHEER = re.compile(
    r"(?:!|\b(?:hope|luck|enjoy|fun|keep|happy|help you|you can|wonderful|beautiful|amazing)\b"
    r"[^.!?]*[.!?]?)\W*$", re.I,
)  # fmt: skip
"""A last sentence that encourages."""


def strictly_on_subject(question: Question, reply: str) -> bool:
    """Whether a reply holds two of its question's word stems: one may be an echo of the question,
    or luck. Stricter than what any person here asks for."""
    found = [s for s in question.stems if re.search(rf"\b{re.escape(s)}", reply, re.IGNORECASE)]
    return len(found) >= 2


def _two_sided(question: Question, reply: str) -> str:
    verdict = judge_reply(question, reply).verdict
    if verdict is Verdict.PLEASED:
        return ""
    return _one_of(reply, PHRASES[verdict]).format(subject=question.subject)


def _no_lists(_: Question, reply: str) -> str:
    if not reply.strip():
        return "Your answer is empty, please answer in plain sentences."
    if _LIST.search(reply):
        return _one_of(reply, (
            "Please do not use a list, write plain sentences in one paragraph.",
            "That is a list, please answer in plain sentences without numbers.",
        ))  # fmt: skip
    if _MARKUP.search(reply):
        return "Please do not use bold or boxed text, write plain sentences."
    return ""


def _long(_: Question, reply: str) -> str:
    paragraphs = [part for part in re.split(r"\n\s*\n", reply.strip()) if part.strip()]
    if count_words(reply) < 40:
        return "That is too short, please explain it in two detailed paragraphs."
    if len(paragraphs) < 2:
        return "That is one block, please answer in two detailed paragraphs."
    if _LIST.search(reply):
        return "That is a list, please answer in two detailed paragraphs."
    return ""


def _warm(_: Question, reply: str) -> str:
    if not _WARM.match(reply):
        return "That is too formal, please be friendly and cheerful!"
    if not _CHEER.search(reply):
        return "Please be friendly and cheerful until the last word, and brief!"
    return ""


def _brief(_: Question, reply: str) -> str:
    if not reply.strip():
        return "Your answer is empty, please answer in one short sentence."
    if count_words(reply) > 15:
        return _one_of(reply, (
            "Too long, please answer in one short sentence.",
            "That is too long, please be brief.",
            "Shorter, please be brief, one short sentence is enough.",
        ))  # fmt: skip
    return ""


def _one_of(reply: str, phrases: Sequence[str]) -> str:
    return phrases[len(reply) % len(phrases)]


@dataclass(frozen=True)
class Person:
    """Somebody with a wish; from session `changes_at` on with the wish `then`.

    `wrong`: the share of reactions that are the opposite of what they think. `max_tokens`: where
    their client cuts a reply. `held_out`: what a version is asked beside their own `questions`.
    """

    name: str
    wish: str
    complaint_now: Complaint
    max_tokens: int = 64
    then: Complaint | None = None
    changes_at: int = 0
    wrong: float = 0.0
    silent: float = 0.2
    questions: Sequence[Question] = TRAIN_QUESTIONS
    held_out: Sequence[Question] = HELD_OUT_QUESTIONS

    def complaint(self, question: Question, reply: str, session: int) -> str:
        """What they think of a reply in their session number `session`; "" where it pleases."""
        changed = self.then is not None and session >= self.changes_at
        return (self.then if changed and self.then else self.complaint_now)(question, reply)

    def react(self, complaint: str, rng: random.Random) -> str:
        """What they say; "" where a pleased person says nothing."""
        if rng.random() < self.wrong:
            complaint = "" if complaint else _TOO_LONG
        elif not complaint and rng.random() < self.silent:
            return ""
        return complaint or rng.choice(_THANKS)


_TOO_LONG = "Too long, please answer in one short sentence."
_HOW_TO = tuple(
    Question(f"How do I {what}?", what, tuple(stems.split()))
    for what, stems in (
        ("boil an egg", "egg boil water pot"),
        ("make tea", "tea water boil cup"),
        ("clean a window", "window clean glass cloth"),
        ("save money", "money sav budget spend"),
        ("learn a new language", "language learn practic word"),
        ("plant a tree", "tree plant hole soil"),
        ("cook rice", "rice cook water boil"),
        ("write a letter", "letter write address"),
        ("change a tire", "tire wheel jack car"),
        ("fall asleep faster", "sleep bed relax"),
        ("grow tomatoes", "tomato plant soil water"),
        ("paint a wall", "paint wall brush"),
        ("pack a suitcase", "suitcase pack cloth"),
        ("prepare for an exam", "exam study prepar"),
        ("stop a nosebleed", "nose bleed blood"),
        ("iron a shirt", "iron shirt"),
        ("make pancakes", "pancake flour batter milk"),
        ("train a puppy", "puppy train dog"),
        ("remove a stain", "stain remov wash"),
        ("build a campfire", "fire wood camp"),
    )
)
_HELD_OUT_HOW_TO = tuple(
    Question(f"How do I {what}?", what, tuple(stems.split()))
    for what, stems in (
        ("make coffee", "coffee water bean brew"),
        ("wash my hands", "hand soap water wash"),
        ("bake a cake", "cake bak flour oven"),
        ("take care of a dog", "dog food walk pet"),
        ("fix a flat bicycle tire", "tire tube bicycle pump"),
        ("start running", "run shoe slow"),
        ("make a salad", "salad lettuce vegetable"),
        ("clean a kitchen", "kitchen clean wipe"),
        ("write a resume", "resume job experience"),
        ("sew on a button", "button needle thread"),
        ("make new friends", "friend people meet"),
        ("draw a face", "face draw eye"),
        ("store vegetables", "vegetable fridge store"),
        ("fold a shirt", "shirt fold sleeve"),
        ("plan a birthday party", "party birthday guest"),
        ("set a table", "table plate fork"),
    )
)

PEOPLE: Mapping[str, Person] = {
    person.name: person
    for person in (
        Person("a", "one or two short sentences, on the subject", _two_sided),
        Person("b", "no lists, no bold, nothing boxed", _no_lists, max_tokens=96,
               questions=_HOW_TO, held_out=_HELD_OUT_HOW_TO),
        Person("c", "at least 40 words, in two paragraphs", _long, max_tokens=128),
        Person("d", "a warm opening and an encouraging end", _warm),
        Person("e", "as a; then at least 40 words, in two paragraphs", _two_sided, max_tokens=96,
               then=_long, changes_at=15),
        Person("f", "as a, wrong in a tenth of the reactions", _two_sided, wrong=0.1),
        Person("g", "nothing but brevity: at most 15 words", _brief),
    )
}  # fmt: skip
