"""From leased turns to samples: one sample a segment. Pure but for the reading it is handed.

Guarantees: each turn's sampled tokens are in exactly one sample, unmasked, with the log-probs,
reward, teacher values and versions of that turn; every other token is masked, and its values mean
nothing. Nothing is padded, cut or tokenised again. A turn that does not line up is left out and
named with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from openclaw_rl.journal.records import Lineage, Output
from openclaw_rl.sample import Sample
from openclaw_rl.session.segments import Segment, SegmentTurn, Span, build_segments


@dataclass(slots=True)
class Built:
    """`misfits`: turn id -> why it is in no sample. `distinct`: tokens of the segments if each
    were counted once; `total` counts them as often as they are trained on or read."""

    samples: list[Sample] = field(default_factory=list)
    misfits: dict[str, str] = field(default_factory=dict)
    total: int = 0
    distinct: int = 0


def build_samples(
    outputs: Sequence[Output],
    lineage: Sequence[Lineage],
    tokens_of: Callable[[str], list[int]],
    first_index: int,
) -> Built:
    """One sample for each segment of `outputs`.

    `lineage` holds these turns and their ancestors, `tokens_of` gives prompt and output ids of a
    turn. Samples are numbered from `first_index` on, each a rollout of its own.
    """
    built = Built()
    fitting: dict[str, Output] = {}
    for output in outputs:
        reason = _misfit(output)
        if reason is None:
            fitting[output.turn_id] = output
        else:
            built.misfits[output.turn_id] = reason
    taught = any(_has_teacher(output) for output in fitting.values())
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
            built.total += len(built.samples[-1].tokens)
    built.distinct = _distinct(turns)
    return built


def _misfit(output: Output) -> str | None:
    """The journal has checked the lengths already; this is the last look before training."""
    length = len(output.output_ids)
    verdict = output.verdict
    if verdict is None:
        return "verdict_missing"
    if not length == len(output.output_logprobs) == len(output.output_versions):
        return "misaligned"
    if verdict.teacher_log_probs is not None and len(verdict.teacher_log_probs) != length:
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
        log_probs[start:end] = output.output_logprobs
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
                "has_teacher": _has_teacher(output),
                "versions": own_versions,
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


def _has_teacher(output: Output) -> bool:
    verdict = output.verdict
    values = verdict.teacher_log_probs if verdict is not None else None
    return values is not None and any(map(math.isfinite, values))


def _distinct(turns: Sequence[SegmentTurn]) -> int:
    by_id = {turn.turn_id: turn for turn in turns}
    count = 0
    for turn in turns:
        parent = by_id.get(turn.parent_id or "")
        shared = parent.prompt_len + parent.output_len if parent else 0
        count += turn.prompt_len + turn.output_len - shared
    return count
