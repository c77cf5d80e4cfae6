"""Continuing a known conversation token for token.

Guarantees: what was sampled is never tokenised again. Where the template would write the known
turn as it was sampled (the same by meaning: whitespace around calls and in their JSON may differ),
the new prompt is the known ids and the tokens of what follows them. Where it would not (history
rewritten, reasoning dropped), there is no continuation, and the prompt is encoded anew.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Meaning = Callable[[str], Any]
"""Turns the text of a reply into a value; equal values mean the same reply."""


@dataclass(frozen=True, slots=True)
class KnownPrompt:
    """A turn that was served: `rendered_len` characters of template text with hash `rendered_sha`
    (`text_sha`), and the ids of prompt and output (`tokens`, which ends with `output_ids`). An
    array of int32 is copied as a block, so a long history costs next to nothing."""

    rendered_len: int
    rendered_sha: str
    tokens: Sequence[int]
    output_ids: Sequence[int]


def text_sha(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def continuation(
    previous: KnownPrompt,
    rendered: str,
    *,
    encode: Callable[[str], list[int]],
    decode: Callable[[Sequence[int]], str],
    ends: Mapping[int, str],
    meaning: Meaning | None = None,
) -> array[int] | None:
    """The ids of `rendered` if it goes on from `previous`, else None.

    `ends` are the tokens that end a turn, id to text. A reply that was cut off has none; the
    template's is added then, as part of the prompt, not of what was sampled.
    """
    if len(rendered) <= previous.rendered_len:
        return None
    if text_sha(rendered[: previous.rendered_len]) != previous.rendered_sha:
        return None
    rest = rendered[previous.rendered_len :]
    found = [(at, token) for token, text in ends.items() if (at := rest.find(text)) >= 0]
    if not found:
        return None
    at, end = min(found)
    sampled = list(previous.output_ids)
    ended = bool(sampled) and sampled[-1] in ends
    if ended and sampled.pop() != end:
        return None  # another end token than the template writes
    if any(token in ends for token in sampled):
        return None
    meaning = meaning or reply_meaning
    if meaning(rest[:at]) != meaning(decode(sampled)):
        return None
    # The end token is encoded with what follows it: some of them swallow whitespace behind.
    tail = encode(rest[at:])
    if not tail or tail[0] != end:
        return None
    ids = array("i", previous.tokens)
    ids.extend(tail[1:] if ended else tail)
    return ids


_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def reply_meaning(text: str) -> tuple[Any, ...]:
    """Reasoning, content and tool calls of a reply's text; whitespace around them does not count,
    nor within the JSON of a call. An unclosed `<think>` or `<tool_call>` differs from a closed one.
    """
    head, closed, answer = text.partition("</think>")
    if closed:
        reasoning = head.strip().removeprefix("<think>").strip()
    elif text.lstrip().startswith("<think>"):
        return ("unfinished", text.strip().removeprefix("<think>").strip())
    else:
        reasoning, answer = "", text
    calls = tuple(one for call in _CALL.findall(answer) for one in _call_meaning(call))
    parts = (part.strip() for part in _CALL.split(answer)[::2])
    return (reasoning, "\n".join(filter(None, parts)), calls)


def _call_meaning(text: str) -> list[str]:
    """One text per call; some models write a list of calls in one mark."""
    try:
        value = json.loads(text)
        calls = value if isinstance(value, list) else [value]
        for call in calls:
            if isinstance(call, dict) and isinstance(call.get("arguments"), str):
                call["arguments"] = json.loads(call["arguments"])
        return [json.dumps(call, sort_keys=True) for call in calls]
    except (ValueError, RecursionError):
        return [text.strip()]
