"""The values that go into the journal and come out of it: plain, frozen, no I/O.

Units: times are seconds since the epoch, log-probabilities natural logarithms. Log-probabilities
are kept as float32, which is what engines compute; a value that is a float32 already comes back
unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from openclaw_rl.session.types import Kind, Message
from openclaw_rl.topk import TopK


class State(StrEnum):
    """Where a turn is. `SIDE` is the only state of a side turn; the others are those of a main one.

    waiting -> judging -> ready -> leased -> trained; leased -> ready when a lease is given back;
    any of waiting, judging, ready, leased -> dropped (with a reason).
    """

    WAITING = "waiting"
    JUDGING = "judging"
    READY = "ready"
    LEASED = "leased"
    TRAINED = "trained"
    DROPPED = "dropped"
    SIDE = "side"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One reply of the policy, complete, as the gateway writes it before the client sees its end.

    `messages[:matched]` mean the same as the parent's messages and its reply. `shares_tokens`
    says that `prompt_ids` begins with the parent's prompt and output ids; the journal checks it
    and stores the prompt in full (and counts `prefix_mismatch`) where it does not hold.
    The per-token sequences have one entry for each of `output_ids`; a main turn in which they do
    not, or whose log-probs are not finite, or which has no output at all is recorded as dropped.
    `topk` holds the policy's own candidates for each output token, where they were asked for; if
    it is not one row a token, the turn is kept without it, counted as `topk_missing`.
    """

    turn_id: str
    session_id: str
    source: str
    owner: str
    kind: Kind
    kind_reason: str
    parent_id: str | None
    matched: int
    shares_tokens: bool
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    output_logprobs: Sequence[float]
    output_versions: Sequence[str]
    finish_reason: str
    truncated: bool
    messages: Sequence[Message]
    reply: Message
    tools: Sequence[Mapping[str, Any]]
    template_kwargs: Mapping[str, Any]
    sampling: Mapping[str, Any]
    """What the engine sampled with (`temperature`, ...); no temperature means 1.0, SGLang's own
    default."""
    request_hash: str
    node_hash: str
    rendered_len: int
    rendered_sha: str
    created: float
    drop_reason: str | None = None
    off_policy: bool = False
    """A reply that was not sampled here: its ids are the template's, and it has neither log-probs
    nor versions."""
    topk: TopK | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a judge found. `score` None: no opinion. `teacher_log_probs` has one value for each
    output token, NaN where the teacher has none; `teacher_topk` one row of candidates, with the
    teacher's log-probs. `votes` may hold None for an abstention."""

    score: float | None = None
    hint: str | None = None
    teacher_log_probs: Sequence[float] | None = None
    teacher_topk: TopK | None = None
    votes: Sequence[float | None] = ()
    reason: str = ""
    created: float = 0.0

    @property
    def taught(self) -> bool:
        """Whether a teacher has a value for any token."""
        values = self.teacher_log_probs or ()
        topk = self.teacher_topk
        return any(map(math.isfinite, values)) or (topk is not None and topk.known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn(TurnRecord):
    """A recorded turn, its prompt and messages put together again, and what became of it."""

    state: State = State.WAITING
    next_state: tuple[Message, ...] | None = None
    attempts: int = 0
    verdict: Verdict | None = None
    lease_host: str | None = None
    lease_rollout: int | None = None
    trained_version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyTurn:
    """What choosing a batch needs of a ready turn. Versions are those of its first and newest
    weights: `min_version` by number where both are numbers, else by order of appearance."""

    turn_id: str
    session_id: str
    owner: str
    created: float
    min_version: str
    max_version: str
    temperature: float
    output_len: int
    off_policy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Lengths of a turn in tokens. `parent_id` only where the prompt begins with the parent's
    prompt and output, token for token."""

    turn_id: str
    parent_id: str | None
    prompt_len: int
    output_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The sampled part of a turn and its verdict: what a training sample takes of it."""

    turn_id: str
    session_id: str
    created: float
    prompt_len: int
    output_ids: Sequence[int]
    output_logprobs: Sequence[float]
    output_versions: Sequence[str]
    truncated: bool
    verdict: Verdict | None
    off_policy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Turns that `host` took for rollout `rollout_id` and has neither trained nor given back."""

    host: str
    rollout_id: int
    turn_ids: tuple[str, ...]
    created: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Address of an engine. `info["weight_version"]`, where given for the policy, is the version
    that is served now."""

    role: str
    url: str
    info: Mapping[str, Any]
    published: float


@dataclass(frozen=True, slots=True)
class SourceCount:
    """Turns whose session was recognised by one source. `bound`: main turns that belong to a
    conversation, `unbound`: main turns without any name of which nothing followed (yet)."""

    bound: int = 0
    side: int = 0
    unbound: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRow:
    """A session at a glance: when its newest turn was made, and how many are in which state."""

    session_id: str
    owner: str
    last: float
    states: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fates:
    """How many turns ended where. Turns that were purged since are still counted."""

    seen: int = 0
    main: int = 0
    side: int = 0
    waiting: int = 0
    judging: int = 0
    ready: int = 0
    leased: int = 0
    trained: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    by_source: Mapping[str, SourceCount] = field(default_factory=dict)

    @property
    def unbound(self) -> int:
        """Main turns that nothing ties to a conversation."""
        return sum(count.unbound for count in self.by_source.values())

    def balanced(self) -> bool:
        """Whether `seen == main + side` and `main` is the sum of its fates: it always is."""
        ends = self.waiting + self.judging + self.ready + self.leased + self.trained
        return self.seen == self.main + self.side and self.main == ends + sum(self.dropped.values())
