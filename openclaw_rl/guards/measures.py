"""Measures of replies as text: no model, no tokenizer. Words are compared without case; a Chinese,
Japanese or Korean character is a word of its own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import fmean

GRAM = 4
"""Words in a row that a short reply does not say twice (what 2604.08527 counts in its loops)."""
ALIKE = 0.8
"""ROUGE-L F1 from which two texts count as the same. CLaaS alerts above 0.85 between samples of one
question; between different ones the base is at 0.15."""

ABOUT, ABOUT_TOKEN = 12.0, 1.5
"""Nats, in all or a token, that a reply says of its question. By SmolLM2-135M, of 133 replies to
everyday questions: "I'm a helpful AI", "The answer to this question is a classic example of a
cognitive bias" and the like 1 to 12, replies on the subject 14 to 50; "Paris." is short, not
vague."""

_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_CJK}]|(?:(?![{_CJK}])\w)+")
_SENTENCE_END = re.compile(r"[.!?\u3002\uff01\uff1f]+\s*|\n+")


def words(text: str) -> list[str]:
    """The words of a text; none where it is only white space and punctuation, which a reward for
    brevity may lead to."""
    return _WORD.findall(text.casefold())


def repeats(text: str) -> bool:
    """Whether a reply repeats itself: `GRAM` words in a row twice, or two sentences of as many
    words that are `ALIKE`. The base does so too at times: compare shares."""
    said = words(text)
    grams = _grams(said)
    if len(set(grams)) < len(grams):
        return True
    sentences = [words(part) for part in _SENTENCE_END.split(text)]
    long = [sentence for sentence in sentences if len(sentence) >= GRAM]
    return any(rouge_l(a, b) >= ALIKE for a, b in combinations(long, 2))


def loops(text: str) -> bool:
    """Whether most of a reply, of any length, is what it said before: less than half of its runs of
    `GRAM` words are distinct."""
    grams = _grams(words(text))
    return 2 * len(set(grams)) < len(grams)


def rouge_l(a: Sequence[str], b: Sequence[str]) -> float:
    """ROUGE-L F1 of two texts in words: twice their longest common subsequence by their lengths
    (Lin 2004, beta 1). 1.0 for two empty ones."""
    if not a and not b:
        return 1.0
    row = [0] * (len(b) + 1)
    for word in a:
        before = row
        row = [0]
        for at, other in enumerate(b):
            row.append(before[at] + 1 if word == other else max(before[at + 1], row[at]))
    return 2 * row[-1] / (len(a) + len(b))


def similarity(texts: Iterable[str]) -> float:
    """Mean ROUGE-L F1 between the replies to different questions; 0.0 for less than two."""
    pairs = combinations(map(words, texts), 2)
    return _mean(rouge_l(a, b) for a, b in pairs)


def sound(texts: Sequence[str]) -> float:
    """Share of the replies to different questions that say something, do not repeat themselves, and
    are not what another question was answered."""
    said = [words(text) for text in texts]
    alike = set[int]()
    for one, other in combinations(range(len(said)), 2):
        if rouge_l(said[one], said[other]) >= ALIKE:
            alike |= {one, other}
    return share(bool(said[at]) and at not in alike and not repeats(texts[at])
                 for at in range(len(texts)))  # fmt: skip


def vague(own: Sequence[float], elsewhere: Iterable[Sequence[float]]) -> bool:
    """Whether a reply fits other questions nearly as well: `own` are the log-probs of its tokens
    after its own question, `elsewhere` those after others, of a model that has not learnt to say
    it. The difference is the pointwise mutual information of question and reply; a reply with
    less than `ABOUT` of it, and less than `ABOUT_TOKEN` a token, is vague, as is an empty one."""
    about = sum(own) - _mean(map(sum, elsewhere))
    return (about < ABOUT and about < ABOUT_TOKEN * len(own)) or not own


def share(flags: Iterable[bool]) -> float:
    """Which part of them is true; 0.0 of none."""
    return _mean(map(float, flags))


def mean_of_tokens(values: Iterable[Iterable[float]]) -> float:
    """The mean over the tokens of all replies; 0.0 without tokens."""
    return _mean(value for row in values for value in row)


def _grams(said: Sequence[str]) -> list[tuple[str, ...]]:
    return [tuple(said[at : at + GRAM]) for at in range(len(said) - GRAM + 1)]


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return fmean(found) if found else 0.0
