"""From leased turns to samples: one sample a segment. Pure but for the reading it is handed.

Guarantees: each turn's sampled tokens are in exactly one sample, unmasked, with the log-probs,
reward, teacher values (and candidates) and versions of that turn; every other token is masked, and
its values mean nothing. Nothing is padded, cut or tokenised again. A turn that does not line up is
left out and named with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from openclaw_rl.hooks import Sample
from openclaw_rl.session.segments import Span, build_segments, token_parent
from openclaw_rl.types import NO_ID, TopK, Turn


def build_samples(
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
    misfits: dict[str, str] = {}
    fitting: dict[str, Turn] = {}
    for turn in lineage:
        if turn.turn_id in wanted:
            reason = _misfit(turn, max_tokens)
            if reason is None:
                fitting[turn.turn_id] = turn
            else:
                misfits[turn.turn_id] = reason
    verdicts = [turn.verdict for turn in fitting.values() if turn.verdict is not None]
    with_teacher = any(any(map(math.isfinite, v.teacher_log_probs or ())) for v in verdicts)
    k = max((v.teacher_topk.width for v in verdicts if v.teacher_topk is not None), default=0)
    samples: list[Sample] = []
    for segment in build_segments(lineage, fitting):
        tokens = tokens_of(segment.leaf_id)
        members = []
        for span in segment.members:
            if tokens[span.start : span.end] == list(fitting[span.turn_id].output_ids):
                members.append(span)
            else:
                misfits[span.turn_id] = "misaligned"
        if members:
            sample = _sample(tokens, members, fitting, first_index + len(samples), with_teacher)
            if k:
                sample.metadata["topk"] = _topk(sample, fitting, k)
            samples.append(sample)
    return samples, misfits


def distinct_tokens(lineage: Sequence[Turn]) -> int:
    """Tokens of these turns if what they share with their parents is counted once."""
    by_id = {turn.turn_id: turn for turn in lineage}
    count = 0
    for turn in lineage:
        parent = token_parent(turn, by_id)
        shared = parent.prompt_len + parent.output_len if parent else 0
        count += turn.prompt_len + turn.output_len - shared
    return count


def _misfit(turn: Turn, max_tokens: int | None) -> str | None:
    """The journal has checked the lengths already; this is the last look before training."""
    length = len(turn.output_ids)
    verdict = turn.verdict
    if verdict is None:
        return "verdict_missing"
    sampled = 0 if turn.off_policy else length
    if not sampled == len(turn.output_logprobs) == len(turn.output_versions):
        return "misaligned"
    topk = verdict.teacher_topk
    for values in (verdict.teacher_log_probs, None if topk is None else topk.ids):
        if values is not None and len(values) != length:
            return "misaligned"
    return "too_long" if max_tokens and turn.prompt_len + length > max_tokens else None


def _sample(
    tokens: list[int],
    members: Sequence[Span],
    turns: Mapping[str, Turn],
    index: int,
    with_teacher: bool,
) -> Sample:
    begin = members[0].start
    # After the last member comes nothing, unless the leaf itself did not line up.
    tokens = tokens[: members[-1].end]
    length = len(tokens) - begin
    mask = [0] * length
    log_probs = [0.0] * length
    teacher = [math.nan] * length
    about = []
    for span in members:
        turn = turns[span.turn_id]
        start, end = span.start - begin, span.end - begin
        mask[start:end] = [1] * (end - start)
        log_probs[start:end] = turn.output_logprobs or [math.nan] * (end - start)
        if turn.verdict is not None and turn.verdict.teacher_log_probs is not None:
            teacher[start:end] = turn.verdict.teacher_log_probs
        about.append(_about(turn, start, end))
    leaf = turns[members[-1].turn_id]
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
        metadata={"turns": about, "session_id": leaf.session_id},
    )


def _about(turn: Turn, start: int, end: int) -> dict[str, Any]:
    """What `metadata["turns"]` says of a turn; `temperature` None: it was not sampled here."""
    assert turn.verdict is not None  # `_misfit` saw to it
    temperature = turn.sampling.get("temperature")
    return {
        "turn_id": turn.turn_id,
        "start": start,
        "end": end,
        "reward": turn.verdict.score or 0.0,
        "has_teacher": turn.verdict.has_teacher,
        "temperature": None if turn.off_policy else 1.0 if temperature is None else temperature,
        "versions": list(dict.fromkeys(turn.output_versions)),
        "off_policy": turn.off_policy,
        "created": turn.created,
    }


def _topk(sample: Sample, turns: Mapping[str, Turn], k: int) -> TopK:
    """The teacher's candidates of each response token, each turn's own; -1 and NaN elsewhere."""
    ids = [[NO_ID] * k for _ in range(sample.response_length)]
    log_probs = [[math.nan] * k for _ in range(sample.response_length)]
    for turn in sample.metadata["turns"]:
        verdict = turns[turn["turn_id"]].verdict
        if verdict is None or verdict.teacher_topk is None:
            continue
        topk = verdict.teacher_topk
        rows = zip(topk.ids, topk.log_probs, strict=True)
        for at, (own_ids, own) in enumerate(rows, turn["start"]):
            ids[at][: len(own_ids)], log_probs[at][: len(own)] = own_ids, own
    return TopK(ids, log_probs)
