"""The teacher: how likely the same reply is to a model that was given a hint before, and, of
several hints, which one teaches.

Guarantees: the teacher sees the same messages, tools and template arguments as the policy did,
with the hint at the end of the last user message. Every log-prob is one that the teacher gave for
that token under the chosen hint; a candidate to which it gave none is left out, never guessed.
Ties go to the hint named first. A teacher that is away raises `EngineUnavailable`; one that cannot
hold the turn gives None, and a counter says why.

Source of the choice: OpenClaw-RL (arXiv 2603.10165 v2): hints are chosen by how far the likeliest
tokens of the hinted teacher and those of the policy overlap. A hint under which the teacher would
speak quite otherwise says little about these very tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from openclaw_rl.engine.chat import ChatTokenizer
from openclaw_rl.engine.types import Candidates, Engine, Scores
from openclaw_rl.errors import EngineError, EngineUnavailable
from openclaw_rl.hooks import Sample
from openclaw_rl.judge.client import is_overflow
from openclaw_rl.judge.prompts import defuse
from openclaw_rl.types import Message, TopK

Subset = Literal["student", "teacher", "overlap"]
"""Whose candidates are learnt from."""


@dataclass(frozen=True, slots=True)
class TeacherValues:
    """Natural-log probability of each token of a reply with `hint` in view (temperature 1), and
    over the top K those of the candidates."""

    hint: str
    log_probs: Sequence[float]
    topk: TopK | None = None


def teacher_list(k: int) -> int:
    """Likeliest tokens to ask a teacher for, so that few of the policy's K are not among them."""
    return max(4 * k, 20) if k > 0 else 0


def hinted_messages(messages: Sequence[Message], hint: str) -> list[dict[str, Any]] | None:
    """`messages` with the hint at the end of the last user message; None without such a one. An
    empty hint leaves them as they are."""
    hinted = [dict(message) for message in messages]
    if not hint:
        return hinted
    addition = f"\n\n[hint]\n{defuse(hint.strip())}"
    for message in reversed(hinted):
        if message.get("role") == "user":
            content = message.get("content") or ""
            if isinstance(content, str):
                message["content"] = content + addition
            else:
                message["content"] = [*content, {"type": "text", "text": addition}]
            return hinted
    return None


async def teach(
    engine: Engine,
    chat: ChatTokenizer,
    sample: Sample,
    hints: Sequence[str],
    *,
    k: int,
    subset: Subset,
    count: Callable[[str], None],
) -> TeacherValues | None:
    """What the teacher says of the response with one of `hints` in view: of the sampled tokens
    under the first, or, with `k`, over the top k under the one that `values_over_top_k` chooses.
    None where it says nothing that could be learnt from, counted. `chat` is the *policy's*
    tokenizer and template. Raises `EngineUnavailable`.
    """
    metadata = sample.metadata
    response = sample.tokens[len(sample.tokens) - sample.response_length :]

    async def score(hint: str) -> Scores | EngineUnavailable | None:
        hinted = hinted_messages(metadata["messages"], hint)
        if hinted is None:
            count("teacher_no_user_message")
            return None

        def encode() -> list[int]:
            text = chat.render(hinted, metadata.get("tools"), metadata.get("template_kwargs"))
            return chat.encode(text)

        try:
            prompt = await asyncio.to_thread(encode)
            return await engine.score([*prompt, *response], len(prompt), teacher_list(k))
        except EngineUnavailable as error:
            return error
        except EngineError as error:
            count("teacher_overflow" if is_overflow(error) else "teacher_failed")
            return None

    scored: dict[str, Scores] = {}
    for hint, scores in zip(hints, await asyncio.gather(*map(score, hints)), strict=True):
        if isinstance(scores, EngineUnavailable):
            raise scores
        if scores is not None:
            scored[hint] = scores
    if not scored:
        return None
    if k == 0:
        hint, scores = next(iter(scored.items()))
        return TeacherValues(hint, scores.log_probs)
    recorded = metadata.get("student_topk")
    student = None if recorded is None else TopK.of_mapping(recorded, len(response))
    values = values_over_top_k(scored, student, response, k=k, subset=subset)
    if values is None:
        count("teacher_topk_none" if recorded is not None else "teacher_topk_no_policy")
    return values


def overlap(student: TopK, top: Sequence[Candidates], k: int) -> int:
    """How many of the policy's first `k` candidates of each token are among the teacher's."""
    return sum(
        len({token for token in row[:k] if token >= 0} & {token for _, token in one[:k]})
        for row, one in zip(student.ids, top, strict=True)
    )


def values_over_top_k(
    scored: Mapping[str, Scores],
    student: TopK | None,
    sampled: Sequence[int],
    *,
    k: int,
    subset: Subset,
) -> TeacherValues | None:
    """What is learnt over the top `k`, of the hint under which policy and teacher overlap most;
    None where the candidates are missing: the teacher gave none, or the policy's (`student`) were
    not recorded (without them "teacher" takes the first hint). `sampled`: the ids of the reply.
    """
    given = [(hint, scores.log_probs, scores.top) for hint, scores in scored.items() if scores.top]
    if not given or (student is None and subset != "teacher"):
        return None
    hint, log_probs, tops = given[0]
    if student is not None:  # `max` keeps the first of equals
        hint, log_probs, tops = max(given, key=lambda one: overlap(student, one[2], k))
    rows: list[list[tuple[float, int]]] = []
    for at, (token, likeliest) in enumerate(zip(sampled, tops, strict=True)):
        own = [] if student is None else [one for one in student.ids[at][:k] if one >= 0]
        # The sampled token's own value is known whether it is among the likeliest or not.
        known = {token: log_probs[at]} | {one: value for value, one in likeliest}
        theirs = [one for _, one in likeliest[:k]]
        wanted = theirs if subset == "teacher" else own
        if subset == "overlap":
            wanted = [one for one in own if one in theirs]
        rows.append([(known[one], one) for one in wanted if one in known])
    return TeacherValues(hint, log_probs, TopK.of_candidates(rows, k))
