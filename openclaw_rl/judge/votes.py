r"""Reading a judge's text: a verdict, a hint, or nothing.

Guarantees: only what stands after the end of the reasoning is read; a judge that was cut off, or
that gives no verdict, abstains (`Vote.score is None`, never 0); the last verdict counts; what the
judge quotes from the fenced data or between quotation marks is no verdict.

Two forms are understood: a JSON object with a `verdict` (asked for by `VERDICT_SCHEMA`), and
`\boxed{1}`. Both tolerate `1.0`, `+1`, blanks and unicode minus signs.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

THINK_END = "</think>"
THINK_START = "<think>"

VERDICT_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "why": {"type": "string"},
        "verdict": {"type": "integer", "enum": [-1, 0, 1]},
    },
    "required": ["why", "verdict"],
    "additionalProperties": False,
}
HINT_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "why": {"type": "string"},
        "hint": {"type": "string"},
        "verdict": {"type": "integer", "enum": [-1, 1]},
    },
    "required": ["why", "hint", "verdict"],
    "additionalProperties": False,
}

_MINUS = str.maketrans(dict.fromkeys("−‐‑‒–—﹣－⁻", "-") | {"＋": "+"})
_NUMBER = r"[+-]?\s*\d+(?:\.\d*)?"
_BOXED = re.compile(r"\\boxed\s*\{\s*(?:\\text\s*\{\s*)?(" + _NUMBER + r")\s*\}")
_NAMED = re.compile(
    r"""["']?\bverdict["'*]*\s*[:=][\s*"']*("""
    + _NUMBER
    + r""")(?![\d.%/])(?!\s*(?:or|to|,|\|)\s)""",
    re.I,
)
_HINT_TAG = re.compile(r"<hint>(.*?)</hint>", re.S | re.I)
_HINT_LINE = re.compile(r"""^[\s*"']*hint[*"']*\s*:\s*(.+?)\s*$""", re.I | re.M)
_OPENING, _CLOSING = "\"'`“‘«", "\"'`”’»"


@dataclass(frozen=True, slots=True)
class Vote:
    """One opinion: `score` is -1.0, 0.0, 1.0 or None (an abstention); `hint` may come with it."""

    score: float | None = None
    hint: str | None = None


ABSTAINED = Vote()


def parse_vote(
    text: str, *, in_reasoning: bool = False, finished: bool = True, nonce: str = ""
) -> Vote:
    """Read one vote from a judge's completion.

    `in_reasoning`: the prompt left the judge inside its reasoning, so that a text without
    `</think>` is reasoning to its end. `finished` False: the completion was cut off by a limit.
    `nonce`: the one that fenced the data of this judge's prompt.
    """
    if not finished:
        return ABSTAINED
    answer = answer_after_reasoning(text, in_reasoning=in_reasoning)
    if answer is None:
        return ABSTAINED
    answer = _without_quotes(answer, nonce)
    found = max(_verdicts(answer), key=lambda item: item[0], default=None)
    if found is None:
        return ABSTAINED
    _, score, hint = found
    return Vote(score, hint)


def answer_after_reasoning(text: str, *, in_reasoning: bool = False) -> str | None:
    """Return what follows the reasoning, or None where the reasoning did not end."""
    _, end, answer = text.rpartition(THINK_END)
    if end:
        return None if THINK_START in answer else answer
    return None if in_reasoning or THINK_START in text else text


def majority(votes: Iterable[float | None]) -> float | None:
    """The score most votes gave, abstentions left out; a tie is 0, no vote at all is None."""
    counts = Counter(vote for vote in votes if vote is not None)
    if not counts:
        return None
    (score, most), *others = counts.most_common(2)
    return 0.0 if others and others[0][1] == most else score


def choose_hints(votes: Sequence[Vote], min_chars: int, limit: int = 1) -> list[str]:
    """The `limit` longest hints that came with a positive verdict and are longer than `min_chars`,
    longest first; those that differ in case or white space only are one."""
    hints: dict[str, str] = {}
    for vote in votes:
        hint = (vote.hint or "").strip()
        if vote.score is not None and vote.score > 0 and len(hint) > min_chars:
            hints.setdefault(" ".join(hint.casefold().split()), hint)
    return sorted(hints.values(), key=len, reverse=True)[:limit]


def _verdicts(answer: str) -> Iterator[tuple[int, float, str | None]]:
    """Yield (end position, score, hint) of every verdict in `answer`."""
    spans = []
    for start, end, value in _objects(answer):
        spans.append((start, end))
        score = _score(value.get("verdict"))
        if score is not None:
            hint = value.get("hint")
            yield end, score, hint.strip() or None if isinstance(hint, str) else None
    # Same length as `answer`: positions fit. JSON texts are not searched a second time.
    plain = answer.translate(_MINUS)
    for start, end in spans:
        plain = plain[:start] + " " * (end - start) + plain[end:]
    for pattern in (_BOXED, _NAMED):
        for match in pattern.finditer(plain):
            score = _score(match[1])
            if score is not None and not _quoted(plain, match.start(), match.end()):
                yield match.end(), score, _loose_hint(answer)


def _objects(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield (start, end, value) of the outermost JSON objects in `text`."""
    decoder, start = json.JSONDecoder(strict=False), 0
    while (start := text.find("{", start)) >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            start += 1
            continue
        if isinstance(value, dict):
            yield start, end, value
        start = end


def _score(value: object) -> float | None:
    """-1.0, 0.0 or 1.0; None for anything else (a judge that says 0.7 did not answer)."""
    if isinstance(value, str):
        value = "".join(value.translate(_MINUS).split())
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number + 0.0 if number in (-1.0, 0.0, 1.0) else None


def _loose_hint(answer: str) -> str | None:
    tags = _HINT_TAG.findall(answer)
    if tags:
        return str(tags[-1]).strip() or None
    lines = _HINT_LINE.findall(answer)
    return str(lines[-1]).strip(" *\"'") or None if lines else None


def _quoted(text: str, start: int, end: int) -> bool:
    """Whether the match stands between quotation marks inside a longer line."""
    before, after = text[start - 1 : start], text[end : end + 1]
    if not before or before not in _OPENING or not after or after not in _CLOSING:
        return False
    line_start = text.rfind("\n", 0, start) + 1
    line_end = text.find("\n", end)
    line = text[line_start : line_end if line_end >= 0 else len(text)]
    return line.strip(" *.\"'`“”‘’«»") != text[start:end]


def _without_quotes(answer: str, nonce: str) -> str:
    """Remove what the judge repeats of the fenced data, and quotation lines (`> ...`)."""
    if nonce:
        fence = re.escape(nonce)
        # An opening fence without its end quotes to the end of the text.
        answer = re.sub(
            rf"<<<\s*(?!END)[^<>]*{fence}\s*>>>.*?(?:<<<\s*END[^<>]*{fence}\s*>>>|\Z)",
            "\n", answer, flags=re.S,
        )  # fmt: skip
    return re.sub(r"^[ \t]*>.*$", "", answer, flags=re.M)
