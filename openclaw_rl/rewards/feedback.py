"""Reward from what the user says, without an LLM: thumbs, scores, English thanks and corrections.

Guarantees: explicit feedback (`/v1/feedback`, or a message of role `feedback`) decides before
words do; a next state without a word of the user scores 0. Of a message the sentences at its
beginning are read, each by how it begins, up to the first that says nothing about the reply (the
next question, the next task); those that complain are the correction, which is the hint.

Limits: English only, no irony, and only the common ways to thank and to complain: other opinions
count as nothing, and now and then a sentence is misread. A default that needs no LLM; where
judgement matters, take `prm`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from openclaw_rl.hooks import Sample
from openclaw_rl.judge.prompts import text_of
from openclaw_rl.types import Message

_THUMBS = {"up": 1.0, "down": -1.0}
MAX_READ = 1500
"""Characters at the beginning of a message that are read: opinions come first."""

_OPENER = r"(?:(?:well|oh|ok|okay|hi|hello|hey|hm+|sorry|yes|yeah|so|and|almost)\b[\s,.!]*)*"
_IT = (
    r"(?:that|this|it|(?:your|the|that|this) (?:last |first |second )?(?:answer|reply|response"
    r"|code|solution|explanation|summary|text|result|sentence|paragraph|one|date))"
)
_IS = r"(?: i| wa|')s(?: (?:still|just|a|an|bit|little|way|far|much|so|very|really|now))*"
_GOOD = (
    r"(?:perfect|great|excellent|awesome|wonderful|fantastic|brilliant|amazing|lovely|nice|good"
    r"|right|correct|helpful|clear|spot on|(?:exactly )?what i (?:wanted|needed|meant))"
)
_BAD = (
    r"(?:wrong|incorrect|false|inaccurate|useless|unhelpful|incomplete|empty|missing|cut off"
    r"|off topic|confusing|unclear|nonsense|terrible|awful|bad|broken|outdated|made up)"
)
_TOO = (
    r"too (?:long|short|wordy|verbose|brief|vague|general|complicated|technical|detailed|formal"
    r"|(?:much|little|many)(?! \w+ (?:to|for)\b)(?! cooks))"
)
_FORM = (
    r"(?:brief|concise|short(?:er)?|long(?:er)?|clear(?:er)?|simpl(?:e|er)|formal|specific"
    r"|precise|direct|details?|detailed|sentences?|words|paragraphs?|bullet points|markdown"
    r"|emojis?|plain|polite|friendl(?:y|ier)|cheerful|encouraging|english|german|french|spanish|metric|celsius)"
)
_NO_TOPIC = r"(?!.*\b(?:how|what|why|when|where|who|which)\b)"


def _begins(*patterns: str) -> re.Pattern[str]:
    return re.compile(_OPENER + "(?:" + "|".join(patterns) + ")", re.IGNORECASE)


_PRAISE = _begins(
    rf"(?:(?:{_IT}{_IS} |what a )?{_GOOD}(?: (?:answer|reply|job|work|explanation|now))?)"
    r"(?=\W*$|[,;!])",
    r"much better\b|(?:many )?thanks\b(?! to\b)|thank you\b(?! notes?\b)|thx\b|lgtm\b|well done\b",
    r"exactly what i\b|you(?:'re| are) right\b|sounds good\b|[👍👏🙏❤🎉💯]",
    rf"{_IT} (?:works|helps|worked|helped)\b(?! for\b)|i (?:love|like) (?:it|this|that)(?=\W*$|,)",
)
_COMPLAINT = _begins(
    rf"(?:{_IT}{_IS} |you're )?(?:way |much |far |still )?{_TOO}\b(?! (?:for an?|hot|to)\b)",
    rf"(?:{_IT}{_IS} |still |completely ){_BAD}\b|{_BAD}(?=\W*$|,)",
    rf"{_IT}(?:{_IS} not| ?isn't)(?! (?:perfect|bad|sure|too)\b) ",
    rf"{_IT} (?:still )?(?:does not|doesn't|did not|didn't|fails|should)\b",
    r"not (?:right|correct|true|helpful|enough|what i)\b",
    r"you (?:did not|didn't|forgot|missed|ignored|misunderstood|skipped|left out|keep|made an?)\b",
    r"i (?:did not|didn't|never) (?:ask|mean|want|say)\b|i (?:only )?(?:asked|meant)\b(?! to\b)",
    r"i (?:do not|don't) (?:like|want|understand) (?:it|this|that|your)\b|i still get\b",
    rf"actually,? (?:it|that){_IS} (?!{_GOOD}\b)",
    r"no(?=\W*$)|no, (?:i meant|it's|it is|not|you)|[👎😡]",
    r"no, that(?:'s| is| was) (?:not|wrong|incorrect)\b",
)
_WISH = _begins(
    rf"(?:please |just )*be (?:more |less |a bit )*{_FORM}\b",
    rf"(?:please |just )*(?:keep|make) (?:it|that|this|your answers?)\b.*\b{_FORM}\b",
    rf"(?:please |just )*(?:answer|reply|rewrite|explain it|say it|provide|add"
    r"|give me (?:only |just )?(?:more|one|a (?:shorter|longer|simpler)))"
    rf"\b{_NO_TOPIC}"
    rf"(?!.* of the\b).*\b{_FORM}\b",
    r"(?:please )?(?:don't|do not|stop) (?:use|using|add|adding|apologi|repeat)",
    r"(?:please )?(?:try again|(?:shorten|simplify|rephrase|redo|fix) (?:it|that)\b)",
    rf"(?:more|less|fewer) {_FORM}\b|(?:shorter|longer|simpler|clearer)\b",
    rf"in [\w ]*\b{_FORM},? please\b|(?:can|could) you (?:please )?(?:make it|be|shorten it)\b",
    r"use .*\binstead\b",
)
_WHAT_IT_IS = _begins(rf"(?!this\b){_IT}{_IS} [^,;]*[,;] (?=please )")
_BARE = _begins(
    rf"(?:no\W*)?(?:{_IT}{_IS} (?:not )?)?(?:wrong|incorrect|false|right|correct|true)?\W*"
)
_EXPLAINS = re.compile(r"(?:it|the|he|she|they)\b", re.IGNORECASE)
_ONLY_OPENER = _begins(r"\W*")
_NOT_SAID = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|\"[^\"\n]*\"|“[^”\n]*”|'\w[^'\n]*'|^[ \t]*>.*$"
    r"|\A\s*\[[^\]\n]*\d:\d\d[^\]\n]*\]",  # the time that agents put before a user's words
    re.S | re.M,
)
_SENTENCE = re.compile(r"[👍👎😡]|[^\n👍👎😡]+?(?:[.!?]+[\"')]*(?=\s|$)|(?=[\n👍👎😡])|\Z)")


async def custom_rm(args: Any, sample: Sample, **kwargs: Any) -> dict[str, Any]:
    """Score `sample.metadata["next_state"]`: `{"score": 1.0 | 0.0 | -1.0, "hint": str | None}`.

    An explicit score between -1 and 1 is kept as it is, a larger one cut to that range.
    """
    next_state = sample.metadata.get("next_state") or ()
    explicit = [message for message in next_state if message.get("role") == "feedback"]
    if explicit:
        score, hint = _explicit(explicit[-1])
    else:
        words = "\n".join(_said(m) for m in next_state if m.get("role") == "user")
        reply = text_of(sample.metadata.get("reply") or {})
        score, hint = read_words(words, reply_asked=reply.rstrip(" \n*_\"')").endswith("?"))
    return {"score": score, "hint": hint}


_CLAUSE = re.compile(r"[^,;.!?]+")


async def standing_rule(args: Any, corrections: Sequence[str], **kwargs: Any) -> str | None:
    """The wish in the newest correction that has one for every reply, as it was said: "Too long,
    please be brief." says "please be brief."; what was wrong with one answer, or is asked about one
    topic, holds for no other. Corrections are newest first."""
    for correction in corrections:
        for clause in _CLAUSE.finditer(correction):
            if _WISH.match(clause[0].strip()) and not re.search(
                r"\babout\b", correction[clause.start() :]
            ):
                return correction[clause.start() :].strip()
    return None


def _said(message: Message) -> str:
    """The user's words; parts that are not text are left out."""
    content = message.get("content")
    if isinstance(content, list):
        content = [part for part in content if isinstance(part, Mapping) and "text" in part]
    return text_of({"content": content})


def _explicit(message: Message) -> tuple[float, str | None]:
    text = text_of(message).strip()
    score = message.get("score")
    if isinstance(score, int | float) and math.isfinite(score):
        value = max(-1.0, min(1.0, float(score)))
    elif message.get("thumb") in _THUMBS:
        value = _THUMBS[str(message["thumb"])]
    else:
        return read_words(text)
    return value, text or None if value < 0 else None


def read_words(text: str, *, reply_asked: bool = False) -> tuple[float, str | None]:
    """Score (1.0, -1.0, or 0.0 for nothing said) and correction: the displeased user's own
    sentences, None where they say no more than "no".

    `reply_asked`: that reply ended with a question, so that "no" or "in German" may merely answer.
    """
    text = text[:MAX_READ]
    said = _NOT_SAID.sub(lambda match: " " * len(match[0]), text.replace("’", "'"))
    praised, corrections = False, list[str]()
    for match in _SENTENCE.finditer(said):
        words = " ".join(match[0].split())
        if not words.strip(" .!?'\","):
            continue
        _, _, rest = words.partition(" but ")
        # "That is one block, please answer in two paragraphs": the wish says what it was.
        told = _WHAT_IT_IS.match(words)
        wished = _WISH.match(words[told.end() :] if told else words)
        wish = wished and not (praised or reply_asked)
        answers = reply_asked and re.match(r"no\b(?!, that's)", words, re.IGNORECASE)
        complaint = _COMPLAINT.match(words) and not answers
        contrast = rest and (_COMPLAINT.match(rest) or _WISH.match(rest))
        # One sentence after a complaint may say what is right ("It is Canberra.").
        explains = len(corrections) == 1 and _EXPLAINS.match(words)
        if complaint or wish or contrast or (explains and not words.endswith("?")):
            sentence = " ".join(text[match.start() : match.end()].split())
            if words.endswith("?") and not (wish or contrast):
                sentence = sentence.rpartition(",")[0] or sentence  # "Too long, what is rain?"
            corrections.append(sentence)
        elif _PRAISE.match(words) and not words.endswith("?"):
            praised = True
        elif not _ONLY_OPENER.fullmatch(words):
            break
    if not corrections:
        return float(praised), None
    correction = " ".join(corrections)
    return -1.0, None if _BARE.fullmatch(correction) else correction
