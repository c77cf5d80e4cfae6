"""Which hint teaches, and which candidates of each token: the choice that distillation over the top
K makes before it begins. Pure.

Guarantees: ties go to the hint named first; every log-prob is one the teacher gave for that token,
with the chosen hint in view; where it gave none the candidate is left out (id -1, log-prob NaN)
and counted, never guessed.

Source: OpenClaw-RL (arXiv 2603.10165 v2): hints are chosen by how far the likeliest tokens of the
hinted teacher and those of the policy overlap. A hint under which the teacher would speak quite
otherwise says little about these very tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from openclaw_rl.types import TopK

Candidates = Sequence[tuple[float, int]]
Subset = Literal["student", "teacher", "overlap"]
HintChoice = Literal["sequence", "token"]


@dataclass(frozen=True, slots=True)
class Opinion:
    """How likely the teacher finds the sampled tokens of a reply with `hint` in view, and its
    likeliest tokens in the place of each (more than K of them, likeliest first), if it gave any."""

    hint: str
    log_probs: Sequence[float]
    top: Sequence[Candidates] | None = None


@dataclass(frozen=True, slots=True)
class Lesson:
    """What is learnt of the opinions on one reply. `unknown`: how many of the policy's candidates
    have no log-prob of the teacher's."""

    hint: str
    log_probs: Sequence[float]
    topk: TopK | None = None
    unknown: int = 0


def teacher_list(k: int) -> int:
    """Likeliest tokens to ask a teacher for, so that few of the policy's K are not among them."""
    return max(4 * k, 20) if k > 0 else 0


def overlaps(student: TopK, top: Sequence[Candidates], k: int) -> list[int]:
    """For each token, how many of the policy's first `k` candidates are among the teacher's."""
    return [
        len({token for token in row[:k] if token >= 0} & {token for _, token in one[:k]})
        for row, one in zip(student.ids, top, strict=True)
    ]


def choose_hints(scores: Sequence[Sequence[int]], choice: HintChoice) -> list[int]:
    """For each token, which hint counts, of the overlaps of each hint.

    "sequence": the one with the largest sum, for all tokens. "token": the largest of that token;
    of equal ones that which is best for the whole reply, so that hints do not change for nothing.
    """
    order = sorted(range(len(scores)), key=lambda hint: (-sum(scores[hint]), hint))
    if choice == "sequence":
        return [order[0]] * len(scores[0])
    # `max` keeps the first of equals.
    return [max(order, key=lambda hint: scores[hint][at]) for at in range(len(scores[0]))]


def lesson_of(
    opinions: Sequence[Opinion],
    student: TopK | None,
    sampled: Sequence[int],
    *,
    k: int,
    subset: Subset,
    choice: HintChoice,
) -> Lesson | None:
    """The lesson over the top `k`, or None where the candidates for it are missing: the teacher
    gave none, or the policy's were not recorded (without them "teacher" takes the first hint).

    `student` are the policy's candidates, `sampled` the ids of the reply, one a token.
    """
    opinions = [opinion for opinion in opinions if opinion.top is not None]
    if not opinions or (student is None and subset != "teacher"):
        return None
    tops = [opinion.top for opinion in opinions if opinion.top is not None]
    if student is None or len(tops) == 1:
        chosen = [0] * len(sampled)
    else:
        chosen = choose_hints([overlaps(student, top, k) for top in tops], choice)
    rows: list[list[tuple[float, int]]] = []
    log_probs = []
    unknown = 0
    for at, (token, hint) in enumerate(zip(sampled, chosen, strict=True)):
        log_probs.append(opinions[hint].log_probs[at])
        likeliest = tops[hint][at]
        own = [] if student is None else [one for one in student.ids[at][:k] if one >= 0]
        # The sampled token's own value is known whether it is among the likeliest or not.
        known = {token: log_probs[-1]} | {one: value for value, one in likeliest}
        unknown += sum(one not in known for one in own)
        if subset == "teacher":
            wanted = [one for _, one in likeliest[:k]]
        elif subset == "student":
            wanted = own
        else:
            theirs = {one for _, one in likeliest[:k]}
            wanted = [one for one in own if one in theirs]
        rows.append([(known[one], one) for one in wanted if one in known])
    best = max(range(len(opinions)), key=lambda hint: (chosen.count(hint), -hint))
    return Lesson(opinions[best].hint, log_probs, TopK.of_candidates(rows, k), unknown)
