"""From leased turns to samples: one sample a segment. Pure but for the reading it is handed.

Guarantees: each turn's sampled tokens are in exactly one sample, unmasked, with the log-probs,
reward, teacher values (and candidates) and versions of that turn; every other token is masked, and
its values mean nothing. Nothing is padded, cut or tokenised again. A turn that does not line up is
left out and named with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from openclaw_rl.hooks import Sample
from openclaw_rl.journal.records import Lineage, Output
from openclaw_rl.session.segments import Segment, SegmentTurn, Span, build_segments
from openclaw_rl.types import NO_ID


@dataclass(slots=True)
class Built:
    """`misfits`: turn id -> why it is in no sample. `distinct`: tokens of the segments if each
    were counted once; `total` counts them as often as they are trained on or read."""

    samples: list[Sample] = field(default_factory=list)
    misfits: dict[str, str] = field(default_factory=dict)
    total: int = 0
    distinct: int = 0

    def __iadd__(self, other: Built) -> Built:
        """Append what another step built."""
        self.samples += other.samples
        self.misfits |= other.misfits
        self.total += other.total
        self.distinct += other.distinct
        return self


def build_samples(
    outputs: Sequence[Output],
    lineage: Sequence[Lineage],
    tokens_of: Callable[[str], list[int]],
    first_index: int,
    max_tokens: int | None = None,
) -> Built:
    """One sample for each segment of `outputs`.

    `lineage` holds these turns and their ancestors, `tokens_of` gives prompt and output ids of a
    turn. Samples are numbered from `first_index` on, each a rollout of its own. A turn that ends
    beyond `max_tokens`, counted from the session's first token, is left out as `too_long`; those
    before it make a segment that ends where the last of them does.
    """
    built = Built()
    fitting: dict[str, Output] = {}
    for output in outputs:
        reason = _misfit(output)
        if max_tokens and output.prompt_len + len(output.output_ids) > max_tokens:
            reason = reason or "too_long"
        if reason is None:
            fitting[output.turn_id] = output
        else:
            built.misfits[output.turn_id] = reason
    verdicts = [output.verdict for output in fitting.values() if output.verdict is not None]
    taught = any(any(map(math.isfinite, v.teacher_log_probs or ())) for v in verdicts)
    candidates = [v.teacher_topk for v in verdicts if v.teacher_topk is not None]
    k = max((topk.width for topk in candidates), default=0)
    turns = [
        SegmentTurn(x.turn_id, x.parent_id, x.prompt_len, x.output_len, x.turn_id in fitting)
        for x in lineage
    ]
    for segment in build_segments(turns):
        tokens = tokens_of(segment.leaf_id)
        members = _aligned(segment, tokens, fitting, built)
        if members:
            index = first_index + len(built.samples)
            built.samples.append(_sample(tokens, members, fitting, taught, index))
            if k:
                built.samples[-1].metadata["topk"] = _topk(built.samples[-1], fitting, k)
            built.total += len(built.samples[-1].tokens)
    built.distinct = _distinct(turns)
    return built


def _misfit(output: Output) -> str | None:
    """The journal has checked the lengths already; this is the last look before training."""
    length = len(output.output_ids)
    verdict = output.verdict
    if verdict is None:
        return "verdict_missing"
    sampled = 0 if output.off_policy else length
    if not sampled == len(output.output_logprobs) == len(output.output_versions):
        return "misaligned"
    if verdict.teacher_log_probs is not None and len(verdict.teacher_log_probs) != length:
        return "misaligned"
    if verdict.teacher_topk is not None and len(verdict.teacher_topk.ids) != length:
        return "misaligned"
    return None


def _aligned(
    segment: Segment, tokens: list[int], fitting: dict[str, Output], built: Built
) -> list[Span]:
    members = []
    for span in segment.members:
        if tokens[span.start : span.end] == list(fitting[span.turn_id].output_ids):
            members.append(span)
        else:
            built.misfits[span.turn_id] = "misaligned"
    return members


def _sample(
    tokens: list[int],
    members: list[Span],
    outputs: dict[str, Output],
    taught: bool,
    index: int,
) -> Sample:
    begin = members[0].start
    # After the last member comes nothing, unless the leaf itself did not line up.
    tokens = tokens[: members[-1].end]
    length = len(tokens) - begin
    mask = [0] * length
    log_probs = [0.0] * length
    teacher = [math.nan] * length
    versions: list[str] = []
    turns = []
    rewards = []
    for span in members:
        output = outputs[span.turn_id]
        start, end = span.start - begin, span.end - begin
        mask[start:end] = [1] * (end - start)
        log_probs[start:end] = output.output_logprobs or [math.nan] * (end - start)
        verdict = output.verdict
        assert verdict is not None  # `_misfit` saw to it
        if verdict.teacher_log_probs is not None:
            teacher[start:end] = verdict.teacher_log_probs
        rewards.append(verdict.score or 0.0)
        own_versions = list(dict.fromkeys(output.output_versions))
        versions.extend(own_versions)
        turns.append(
            {
                "turn_id": span.turn_id,
                "start": start,
                "end": end,
                "reward": rewards[-1],
                "has_teacher": verdict.taught,
                "versions": own_versions,
                "off_policy": output.off_policy,
                "created": output.created,
            }
        )
    leaf = outputs[members[-1].turn_id]
    return Sample(
        index=index,
        group_index=index,
        rollout_id=index,
        tokens=tokens,
        response_length=length,
        loss_mask=mask,
        reward=math.fsum(rewards) / len(rewards),
        weight_versions=versions,
        rollout_log_probs=log_probs,
        teacher_log_probs=teacher if taught else None,
        session_id=leaf.session_id,
        status=Sample.Status.TRUNCATED if leaf.truncated else Sample.Status.COMPLETED,
        metadata={"turns": turns, "session_id": leaf.session_id},
    )


def _topk(sample: Sample, outputs: dict[str, Output], k: int) -> dict[str, list[Any]]:
    """The teacher's candidates of each response token, each turn's own; -1 and NaN elsewhere."""
    ids = [[NO_ID] * k for _ in range(sample.response_length)]
    log_probs = [[math.nan] * k for _ in range(sample.response_length)]
    for turn in sample.metadata["turns"]:
        verdict = outputs[turn["turn_id"]].verdict
        if verdict is None or verdict.teacher_topk is None:
            continue
        topk = verdict.teacher_topk
        rows = zip(topk.ids, topk.log_probs, strict=True)
        for at, (own_ids, own) in enumerate(rows, turn["start"]):
            ids[at][: len(own_ids)], log_probs[at][: len(own)] = own_ids, own
    return {"ids": ids, "log_probs": log_probs}


def _distinct(turns: Sequence[SegmentTurn]) -> int:
    by_id = {turn.turn_id: turn for turn in turns}
    count = 0
    for turn in turns:
        parent = by_id.get(turn.parent_id or "")
        shared = parent.prompt_len + parent.output_len if parent else 0
        count += turn.prompt_len + turn.output_len - shared
    return count
