"""What a user's message says about the reply before it, by general rules of English.

Guarantees: pure; only the sentences at the beginning of the message that speak of the reply are
read, and what follows them (the next question, the next task) is neither judged nor part of the
correction; when in doubt the message says nothing.

How: the message is cut into sentences and those into clauses. A clause is recognised by how it
begins ("too long", "you did not", "that is wrong", "please be", "perfect", "thanks"). Questions
say nothing unless they ask for the reply to be done over ("can you make it shorter?").
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise

from openclaw_rl.rewards import english

MAX_READ = 1500
"""Characters at the beginning of a message that are read: opinions come first."""

MAX_CORRECTION_SENTENCES = 4


@dataclass(frozen=True, slots=True)
class Opinion:
    """`score` is 1.0 (content), -1.0 (displeased) or 0.0 (nothing said); `correction` holds the
    displeased user's own sentences about the reply, where they say more than "no"."""

    score: float
    correction: str | None = None


class _Says(Enum):
    PRAISE = "praise"
    COMPLAINT = "complaint"
    """The reply was wrong or not what was wanted."""
    WISH = "wish"
    """How replies should look: a complaint, unless praise came first."""
    OPENER = "opener"
    """"Well", "ok", "hi": says nothing, reading goes on."""
    NO = "no"
    """Only "no": what it means is told by what stands around it."""
    REFUSAL = "refusal"
    """"No thanks": polite, neither praise nor complaint."""
    QUESTION = "question"
    REQUEST = "request"
    OTHER = "other"


_APPROVING, _DISAPPROVING = "👍👏🙏💯🎉😍🥰❤", "👎😡🤬😠🤮"
_ENVELOPE = re.compile(r"\s*\[[^\]\n]{0,60}\d{1,2}:\d{2}[^\]\n]{0,24}\]\s*")
"""The time that agents put before a user's words: `[Mon 2026-11-30 01:29 UTC] `."""
_QUOTATION = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|\"[^\"\n]*\"|“[^”\n]*”|«[^»\n]*»|^[ \t]*>.*$|https?://\S+",
    re.S | re.M,
)
_ONE_CLAUSE = re.compile(r"\b(?:no, (?=thank|thx)|actually,)")
_SENTENCE_END = re.compile(r"[.!?…]+[\"')\]*_”’]*(?=\s|$)|\n+|[👍👏🙏💯🎉😍🥰❤👎😡🤬😠🤮\ufe0f]+")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|etc|vs|mr|mrs|ms|dr|st|approx|fig)\.$")
_CLAUSE_END = re.compile(
    r"[,;:()…]+(?!\d)|\s[-–—]+\s|—|[.!?]+(?=\s|$)|\s(?=(?:but|however|although|though)\b)"
    r"|(?:(?<=thanks)|(?<=thank you)|(?<=perfect)|(?<=great))\s"
    r"(?=(?:what|how|why|who|when|where|which|can|could|now|and)\b)"
)


@dataclass(frozen=True, slots=True)
class _Clause:
    start: int
    end: int
    text: str
    says: _Says


def read_opinion(text: str, *, reply_asked: bool = False) -> Opinion:
    """Read what `text` says about the reply it follows.

    `reply_asked`: that reply ended with a question, so that "no" or "in German" may merely answer
    it.
    """
    text = text[:MAX_READ]
    plain = _mask(text)
    praised = complained = explainable = False
    parts: list[tuple[int, int]] = []
    for start, end in _sentences(plain):
        clauses = _clauses(plain, start, end, reply_asked)
        if not clauses:
            continue
        heard = _heard(clauses, praised, reply_asked)
        if heard is _Says.OPENER:
            continue
        if heard is _Says.PRAISE:
            praised = True
        elif heard in (_Says.COMPLAINT, _Says.WISH):
            complained = True
            explainable = heard is _Says.COMPLAINT
            parts.append((clauses[0].start, _end_of_opinion(clauses, end)))
        elif explainable and _explains(clauses):
            parts.append((start, end))
            explainable = False  # one sentence says what is right; more would be a story
        else:
            break
        if any(clause.says is _Says.QUESTION for clause in clauses):
            break  # the next question has begun
        if len(parts) >= MAX_CORRECTION_SENTENCES:
            break
    if complained:
        return Opinion(-1.0, _correction(text, parts))
    return Opinion(1.0) if praised else Opinion(_emoji(text))


def _mask(text: str) -> str:
    """`text` in lower case, of the same length, with blanks for what the user did not say now."""
    text = "".join(low if len(low := char.lower()) == 1 else char for char in text)
    text = text.replace("’", "'").replace("‘", "'")
    text = _QUOTATION.sub(lambda match: _blank(match[0]), text)
    text = _ONE_CLAUSE.sub(lambda match: match[0].replace(",", " "), text)
    envelope = _ENVELOPE.match(text)
    return text if envelope is None else _blank(envelope[0]) + text[envelope.end() :]


def _blank(text: str) -> str:
    return "".join("\n" if char == "\n" else " " for char in text)


def _emoji(text: str) -> float:
    first = text.lstrip()[:1]
    if not first:
        return 0.0
    return 1.0 if first in _APPROVING else -1.0 if first in _DISAPPROVING else 0.0


def _sentences(plain: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each sentence with its end mark, blanks around it left out."""
    start = 0
    for match in _SENTENCE_END.finditer(plain):
        if _ABBREVIATION.search(plain, start, match.end()):
            continue
        yield from _stripped(plain, start, match.end())
        start = match.end()
    yield from _stripped(plain, start, len(plain))


def _stripped(plain: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    piece = plain[start:end]
    if any(char.isalnum() for char in piece):
        yield start + len(piece) - len(piece.lstrip()), start + len(piece.rstrip())


def _clauses(plain: str, start: int, end: int, reply_asked: bool) -> list[_Clause]:
    asks = plain[start:end].rstrip(" \t\"')*_”’").endswith("?")
    spans, at = [], start
    for match in _CLAUSE_END.finditer(plain, start, end):
        spans.append((at, match.start()))
        at = match.end()
    spans.append((at, end))
    clauses: list[_Clause] = []
    for begin, stop in spans:
        words = " ".join(re.sub(r"[^\w'\-]+", " ", plain[begin:stop]).split())
        if not words:
            continue
        begin += len(plain[begin:stop]) - len(plain[begin:stop].lstrip())
        clauses.append(_Clause(begin, stop, words, _classify(words, reply_asked)))
    if asks and clauses:
        # What is asked is the last clause; it says nothing about the reply unless it asks for it
        # to be done over. "That's wrong, isn't it?" still says so in its first clause.
        last = clauses[-1]
        if not english.DO_OVER.match(last.text):
            clauses[-1] = replace(last, says=_Says.QUESTION)
    return clauses


def _classify(words: str, reply_asked: bool) -> _Says:
    if english.NO.match(words):
        return _Says.NO
    negated = english.NO_AND.match(words)
    if negated:
        words = words[negated.end() :]
        if reply_asked or english.FINE.match(words):
            return _Says.REFUSAL
        return _Says.COMPLAINT
    bare = english.LEADING.sub("", words, count=1) if english.LEADING.match(words) else words
    contrast = english.BUT.match(words) is not None
    if contrast and english.BUT_WRONG.search(words):
        return _Says.COMPLAINT
    for says, pattern in _ORDER:
        if pattern is english.FRAGMENTS and reply_asked:
            continue  # "in German, please" answers "in which language?"
        if any(pattern.match(form) for form in (words, bare)):
            return _Says.COMPLAINT if contrast and says is _Says.WISH else says
    return _Says.OTHER


_ORDER = (
    (_Says.OPENER, english.OPENERS),
    (_Says.REFUSAL, english.REFUSALS),
    (_Says.WISH, english.DO_OVER),
    (_Says.PRAISE, english.EXCLAMATION),
    (_Says.QUESTION, english.WH_WORD),
    (_Says.COMPLAINT, english.COMPLAINTS),
    (_Says.WISH, english.WISHES),
    (_Says.WISH, english.FRAGMENTS),
    (_Says.PRAISE, english.PRAISES),
    (_Says.REQUEST, english.REQUEST),
    (_Says.QUESTION, english.ASKS),
)


def _heard(clauses: list[_Clause], praised: bool, reply_asked: bool) -> _Says | None:
    """What a sentence says about the reply; None: nothing, and reading ends here."""
    told = [clause for clause in clauses if clause.says is not _Says.OPENER]
    if not told:
        return _Says.OPENER
    kinds = [clause.says for clause in told]
    first = told[0]
    if first.says is _Says.NO:
        return _after_no(told, reply_asked)
    if first.says in (_Says.QUESTION, _Says.REQUEST):
        return None
    for clause in told:
        if clause.says is _Says.COMPLAINT:
            on_reply = english.TO_THE_REPLY.match(clause.text) is not None
            if first.says is not _Says.OTHER or on_reply:
                return _Says.COMPLAINT
    if first.says is _Says.PRAISE:
        return _Says.PRAISE
    if first.says is _Says.OTHER and not english.THIS_HELPED.match(first.text):
        return None
    if _Says.PRAISE in kinds and _Says.QUESTION not in kinds:
        return _Says.PRAISE
    wished = first.says is _Says.WISH and not praised
    if wished and not {_Says.QUESTION, _Says.REQUEST} & set(kinds):
        return _Says.WISH
    return None


def _after_no(told: list[_Clause], reply_asked: bool) -> _Says | None:
    """ "No." and "No, it is Tuesday" contradict the reply; "No, that is all" does not."""
    if len(told) == 1:
        return None if reply_asked else _Says.COMPLAINT
    following = told[1]
    if following.says in (_Says.COMPLAINT, _Says.WISH, _Says.NO):
        return _Says.COMPLAINT
    if not reply_asked and english.OTHER_ONE.match(following.text):
        return _Says.COMPLAINT
    if english.FINE.match(following.text) or following.says is not _Says.OTHER:
        return None
    contradicts = not reply_asked and english.PRONOUN.match(following.text)
    return _Says.COMPLAINT if contradicts else None


def _end_of_opinion(clauses: list[_Clause], end: int) -> int:
    """Where the part of a sentence ends that speaks of the reply."""
    for before, clause in pairwise(clauses):
        told = clause.says in (_Says.COMPLAINT, _Says.WISH)
        if clause.says is _Says.QUESTION or (not told and english.NEXT_TASK.match(clause.text)):
            return before.end
    return end


def _explains(clauses: list[_Clause]) -> bool:
    """Whether a sentence after a complaint can be its explanation ("It is Canberra.")."""
    if any(clause.says is not _Says.OTHER for clause in clauses):
        return False
    first = clauses[0].text
    return not (english.FIRST_PERSON.match(first) or english.NEXT_TASK.match(first))


def _correction(text: str, parts: list[tuple[int, int]]) -> str | None:
    said = " ".join(" ".join(text[start:end].split()).rstrip(" ,;:-–—(") for start, end in parts)
    if english.BARE.fullmatch(said.lower().replace("’", "'")):
        return None
    return said
