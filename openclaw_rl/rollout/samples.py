"""From leased turns to samples: one sample a segment. Pure but for the reading it is handed.

Guarantees: each turn's sampled tokens are in exactly one sample, unmasked, with the log-probs,
reward, teacher values (and candidates) and versions of that turn; every other token is masked, and
its values mean nothing. Nothing is padded, cut or tokenised again. A turn that does not line up is
left out and named with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from openclaw_rl.hooks import Sample
from openclaw_rl.session.segments import build_segments, token_parent
from openclaw_rl.types import NO_ID, TopK, Turn, Verdict


def segment_samples(
    lineage: Sequence[Turn],
    wanted: Collection[str],
    tokens_of: Callable[[str], list[int]],
    first_index: int,
    max_tokens: int | None = None,
) -> tuple[list[Sample], dict[str, str]]:
    """One sample for each segment of the `wanted` turns (ids), and why which of them is in none.

    `lineage` holds these turns with their outputs and verdicts, and the heads of their ancestors;
    `tokens_of` gives prompt and output ids of a turn. Samples are numbered from `first_index` on,
    each a rollout of its own. A turn that ends beyond `max_tokens`, counted from the session's
    first token, is left out as `too_long`; those before it make a segment that ends where the last
    of them does.
    """
    found = [turn for turn in lineage if turn.turn_id in wanted]
    misfits = {t.turn_id: reason for t in found if (reason := _misfit(t, max_tokens))}
    fitting = {turn.turn_id: _verdict(turn) for turn in found if turn.turn_id not in misfits}
    teachers = [verdict.teacher_log_probs or () for verdict in fitting.values()]
    with_teacher = any(math.isfinite(value) for values in teachers for value in values)
    k = max((v.teacher_topk.width for v in fitting.values() if v.teacher_topk), default=0)
    samples: list[Sample] = []
    for segment in build_segments(lineage, fitting):
        tokens = tokens_of(segment[-1].turn_id)
        turns = []
        for turn in segment:
            end = turn.prompt_len + turn.output_len
            if tokens[turn.prompt_len : end] == list(turn.output_ids):
                turns.append(turn)
            else:
                misfits[turn.turn_id] = "misaligned"
        if turns:
            index = first_index + len(samples)
            samples.append(_segment_sample(tokens, turns, index, with_teacher, k))
    return samples, misfits


def distinct_tokens(lineage: Sequence[Turn]) -> int:
    """Tokens of these turns if what they share with their parents is counted once."""
    by_id = {turn.turn_id: turn for turn in lineage}
    parents = (token_parent(turn, by_id) for turn in lineage)
    shared = sum(parent.prompt_len + parent.output_len for parent in parents if parent)
    return sum(turn.prompt_len + turn.output_len for turn in lineage) - shared


def _verdict(turn: Turn) -> Verdict:
    return turn.verdict or Verdict()


def _misfit(turn: Turn, max_tokens: int | None) -> str | None:
    """The journal has checked the lengths already; this is the last look before training."""
    length = len(turn.output_ids)
    sampled = 0 if turn.off_policy else length
    if not sampled == len(turn.output_logprobs) == len(turn.output_versions):
        return "misaligned"
    return "too_long" if max_tokens and turn.prompt_len + length > max_tokens else None


def _segment_sample(
    tokens: list[int], turns: Sequence[Turn], index: int, with_teacher: bool, k: int
) -> Sample:
    """`tokens` are the segment's; `k`: how many of a teacher's candidates a token has."""
    leaf, begin = turns[-1], turns[0].prompt_len
    # After the last of them comes nothing, unless the segment's own leaf did not line up.
    tokens = tokens[: leaf.prompt_len + leaf.output_len]
    length = len(tokens) - begin
    mask = [0] * length
    log_probs = [0.0] * length
    teacher = [math.nan] * length
    ids = [[NO_ID] * k for _ in mask]
    values = [[math.nan] * k for _ in mask]
    about = []
    for turn in turns:
        verdict = _verdict(turn)
        start = turn.prompt_len - begin
        end = start + turn.output_len
        mask[start:end] = [1] * turn.output_len
        log_probs[start:end] = turn.output_logprobs or [math.nan] * turn.output_len
        if verdict.teacher_log_probs is not None:
            teacher[start:end] = verdict.teacher_log_probs
        if topk := verdict.teacher_topk:
            for at in range(turn.output_len):
                ids[start + at][: topk.width] = topk.ids[at]
                values[start + at][: topk.width] = topk.log_probs[at]
        about.append(_about(turn, start, end))
    metadata: dict[str, Any] = {"turns": about, "session_id": leaf.session_id}
    if k:
        metadata["topk"] = TopK(ids, values)
    return Sample(
        index=index,
        group_index=index,
        rollout_id=index,
        tokens=tokens,
        response_length=length,
        loss_mask=mask,
        reward=math.fsum(turn["reward"] for turn in about) / len(about),
        weight_versions=[version for turn in about for version in turn["versions"]],
        rollout_log_probs=log_probs,
        teacher_log_probs=teacher if with_teacher else None,
        session_id=leaf.session_id,
        status=Sample.Status.TRUNCATED if leaf.truncated else Sample.Status.COMPLETED,
        metadata=metadata,
    )


def _about(turn: Turn, start: int, end: int) -> dict[str, Any]:
    """What `metadata["turns"]` says of a turn; `temperature` None: it was not sampled here."""
    verdict, temperature = _verdict(turn), turn.sampling.get("temperature")
    return {
        "turn_id": turn.turn_id,
        "start": start,
        "end": end,
        "reward": verdict.score or 0.0,
        "has_teacher": verdict.has_teacher,
        "temperature": None if turn.off_policy else 1.0 if temperature is None else temperature,
        "versions": list(dict.fromkeys(turn.output_versions)),
        "off_policy": turn.off_policy,
        "created": turn.created,
    }
