"""Reward from what the user says, without an LLM.

Guarantees: explicit feedback (`/v1/feedback`, or a message of role `feedback`) decides before
words do; words are read by the rules of `words.py`; a next state without a word of the user
scores 0. A displeased user's own correction is the hint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from openclaw_rl.hooks import Sample
from openclaw_rl.judge.prompts import text_of
from openclaw_rl.rewards.words import Opinion, read_opinion

_THUMBS = {"up": 1.0, "down": -1.0}


async def custom_rm(args: Any, sample: Sample, **kwargs: Any) -> dict[str, Any]:
    """Score `sample.metadata["next_state"]`: `{"score": 1.0 | 0.0 | -1.0, "hint": str | None}`.

    An explicit score between -1 and 1 is kept as it is, a larger one cut to that range.
    """
    metadata = sample.metadata
    opinion = opinion_of(metadata.get("next_state") or (), metadata.get("reply"))
    return {"score": opinion.score, "hint": opinion.correction}


def opinion_of(
    next_state: Sequence[Mapping[str, Any]], reply: Mapping[str, Any] | None = None
) -> Opinion:
    """What the user of `next_state` thinks of `reply`."""
    explicit = [message for message in next_state if message.get("role") == "feedback"]
    if explicit:
        return _explicit(explicit[-1])
    words = "\n".join(_said(m) for m in next_state if m.get("role") == "user")
    asked = reply is not None and text_of(reply).rstrip(" \n*_\"')").endswith("?")
    return read_opinion(words, reply_asked=asked)


def _said(message: Mapping[str, Any]) -> str:
    """The user's words; parts that are no text are left out."""
    content = message.get("content")
    if isinstance(content, list):
        content = [part for part in content if isinstance(part, Mapping) and "text" in part]
        return text_of({"content": content})
    return text_of(message)


def _explicit(message: Mapping[str, Any]) -> Opinion:
    text = text_of(message).strip()
    score = message.get("score")
    if isinstance(score, int | float) and math.isfinite(score):
        value = max(-1.0, min(1.0, float(score)))
    elif message.get("thumb") in _THUMBS:
        value = _THUMBS[str(message["thumb"])]
    else:
        return read_opinion(text)
    return Opinion(value, text or None if value < 0 else None)
