r"""Votes of a judge on one turn: several are asked for at once, and each text is read.

Guarantees: only what stands after the end of the reasoning is read; a judge that was cut off, took
too long, failed or gives no verdict abstains (`Vote.score is None`, never 0); the last verdict
counts; what the judge quotes from the fenced data is no verdict. A prompt that does not fit is
shortened until it does. `EngineUnavailable` is raised only where no vote told anything and the
endpoint was away or too slow, so that the turn can wait.

A JSON object with a `verdict` is asked for; `\boxed{1}` and `verdict: 1` at the beginning of a line
or at the end are understood too, with `1.0`, `+1`, blanks and unicode minus signs.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from openclaw_rl.errors import EngineError, EngineTooSlow, EngineUnavailable
from openclaw_rl.hooks import Sample
from openclaw_rl.judge.client import JudgeClient, is_overflow
from openclaw_rl.judge.prompts import Question, new_nonce

MAX_TOKENS, FEWEST_TOKENS = 2048, 256
"""Of a judge's answer, reasoning included."""
MOST_CHARACTERS, FEWEST_CHARACTERS = 48_000, 400
"""Of the data in a prompt: halved, as the tokens are, until the judge's context holds it."""


_MINUS = str.maketrans(dict.fromkeys("−‐‑‒–—﹣－⁻", "-") | {"＋": "+"})
_NUMBER = r"([+-]?\s*\d+(?:\.\d*)?)"
_SAYS = r"""(?:\\boxed\s*\{\s*(?:\\text\s*\{\s*)?|\bverdict["'*]*\s*[:=][\s*"']*)"""
_LOOSE_VERDICT = re.compile(
    rf"""^[\s*#$-]*{_SAYS}{_NUMBER}(?![\d.%/])(?!\s*(?:or|to|,|\|)\s)"""
    rf"""|{_SAYS}{_NUMBER}[\s"'`*.,;$}})\]]*\Z""",
    re.I | re.M,
)
"""At the beginning of a line, or at the end of the text: elsewhere it may be quoted."""
_LOOSE_HINT = re.compile(
    r"""<hint>(.*?)</hint>"""
    r"""|["']hint["']\s*:\s*["'](.*?)["']\s*,?\s*(?:["'](?:why|verdict)["']\s*:|\}|\Z)"""
    r"""|^[\s*]*hint\**\s*:[ \t*]*(\S.*?)[\s*]*$""",
    re.S | re.I | re.M,
)


@dataclass(frozen=True, slots=True)
class Vote:
    """`score` is -1.0, 0.0, 1.0 or None (an abstention); `hint` may come with it."""

    score: float | None = None
    hint: str | None = None


ABSTAINED = Vote()


async def ask(
    client: JudgeClient,
    sample: Sample,
    question: Question,
    *,
    m: int,
    temperature: float,
    seconds: float,
    count: Callable[[str], None],
) -> list[Vote]:
    """`m` votes, abstentions among them, each within `seconds`. Raises `EngineUnavailable`, and
    `EngineError` where all were refused."""
    nonce, limit, max_tokens = new_nonce(), MOST_CHARACTERS, MAX_TOKENS

    async def vote(messages: list[dict[str, str]]) -> Vote | EngineError:
        try:
            async with asyncio.timeout(seconds):
                completion = await client.complete(
                    messages, schema=question.schema, temperature=temperature, max_tokens=max_tokens
                )
        except TimeoutError:
            count("judge_timeout")
            return EngineTooSlow(f"the judge took longer than {seconds:g} s")
        except EngineError as error:
            return error
        if not completion.finished:
            return ABSTAINED
        return parse_vote(completion.text, in_reasoning=completion.in_reasoning, nonce=nonce)

    while limit >= FEWEST_CHARACTERS:
        messages = question.prompt(sample, nonce, limit)
        results = await asyncio.gather(*(vote(messages) for _ in range(m)))
        errors = [result for result in results if isinstance(result, EngineError)]
        if any(map(is_overflow, errors)):
            limit, max_tokens = limit // 2, max(FEWEST_TOKENS, max_tokens // 2)
            continue
        votes = [result if isinstance(result, Vote) else ABSTAINED for result in results]
        abstained = sum(vote.score is None for vote in votes)
        if errors and abstained == m:
            # Being away is the kinder explanation: it may pass.
            raise next((e for e in errors if isinstance(e, EngineUnavailable)), errors[0])
        for _ in range(abstained):
            count("judge_abstained")
        return votes
    count("judge_overflow")
    return [ABSTAINED] * m


def parse_vote(text: str, *, in_reasoning: bool = False, nonce: str = "") -> Vote:
    """Read one vote from a judge's whole completion.

    `in_reasoning`: the prompt left the judge inside its reasoning, so that a text without
    `</think>` is reasoning to its end. `nonce`: the one that fenced the data of this prompt.
    """
    _, ended, answer = text.rpartition("</think>")
    if "<think>" in answer or (in_reasoning and not ended):
        return ABSTAINED
    answer = _without_quotes(answer, nonce)
    found, rest = ABSTAINED, 0
    for end, value in _objects(answer):
        rest, score, hint = end, _score(value.get("verdict")), value.get("hint")
        if score is not None:
            found = Vote(score, hint.strip() or None if isinstance(hint, str) else None)
    for match in _LOOSE_VERDICT.finditer(answer.translate(_MINUS), rest):
        if (score := _score(match[1] or match[2])) is not None:
            found = Vote(score, _loose_hint(answer))
            if score > 0 and found.hint is None and re.search("[\"']hint[\"']", answer):
                found = ABSTAINED  # nearly JSON: not to be told from an answer without a hint
    return found


def _loose_hint(answer: str) -> str | None:
    hints = ["".join(groups) for groups in _LOOSE_HINT.findall(answer)]
    return hints[-1].strip(" *\"'\n") or None if hints else None


def majority(votes: Iterable[float | None]) -> float | None:
    """The score most votes gave, abstentions left out; a tie is 0, no vote at all is None."""
    counts = Counter(vote for vote in votes if vote is not None)
    if not counts:
        return None
    (score, most), *others = counts.most_common(2)
    return 0.0 if others and others[0][1] == most else score


def accepted_hints(votes: Sequence[Vote], min_chars: int, limit: int = 1) -> list[str]:
    """The `limit` longest hints that came with a positive verdict and are longer than `min_chars`,
    longest first; those that differ in case or white space only are one."""
    hints: dict[str, str] = {}
    for vote in votes:
        hint = (vote.hint or "").strip()
        if vote.score is not None and vote.score > 0 and len(hint) > min_chars:
            hints.setdefault(" ".join(hint.casefold().split()), hint)
    return sorted(hints.values(), key=len, reverse=True)[:limit]


def _objects(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (end position, value) of the outermost JSON objects in `text`."""
    decoder, start = json.JSONDecoder(strict=False), 0
    while (start := text.find("{", start)) >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            start += 1
            continue
        yield end, value
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


def _without_quotes(answer: str, nonce: str) -> str:
    """Remove what the judge repeats of the fenced data, and quotation lines (`> ...`)."""
    if nonce:
        # An opening fence without its end quotes to the end of the text.
        answer = re.sub(
            rf"<<<\s*(?!END)[^<>]*{nonce}\s*>>>.*?(?:<<<\s*END[^<>]*{nonce}\s*>>>|\Z)",
            "\n", answer, flags=re.S,
        )  # fmt: skip
    return re.sub(r"^[ \t]*>.*$", "", answer, flags=re.M)
