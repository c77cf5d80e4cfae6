"""What travels between packages: messages, the turn, its verdict, candidates of a token.

Plain values, no I/O, nothing of ours. Units: times are seconds since the epoch, log-probs natural
logarithms (kept as float32, which is what engines compute).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

Message = Mapping[str, Any]
"""A Chat Completions message: `role`, `content` (str or None), `reasoning_content`,
`tool_calls` (arguments as the JSON text that was sent), `tool_call_id`."""

Kind = Literal["main", "side"]

NO_ID = -1
_POSITIVE = 1e-3
"""A log-prob may exceed 0 by rounding, not by more."""


@dataclass(frozen=True, slots=True)
class TopK:
    """For each token of a reply, K candidate tokens in its place with a log-prob each.

    The policy's own (what it might have said) and a teacher's (how likely it finds them) have the
    same form. `ids` and `log_probs` are [R][K], as many rows as tokens, all of one width; an id is
    -1 exactly where its log-prob is NaN: nothing is known there, and nothing is put in its place.
    """

    ids: Sequence[Sequence[int]]
    log_probs: Sequence[Sequence[float]]

    @classmethod
    def of(cls, ids: Any, log_probs: Any, tokens: int) -> TopK:
        """From untrusted lists, for a reply of `tokens` tokens.

        None and values that are not finite become "nothing known". Raises `ValueError` where the
        shapes do not fit, an id is twice in a row, or a log-prob is above 0.
        """
        rows = [[_id(value) for value in row] for row in ids]
        values = [[_log_prob(value) for value in row] for row in log_probs]
        if not len(rows) == len(values) == tokens:
            raise ValueError(f"{len(rows)} and {len(values)} rows for {tokens} tokens")
        if len({*map(len, rows), *map(len, values)}) > 1:
            raise ValueError("rows of different widths")
        for row, value in zip(rows, values, strict=True):
            for at, known in enumerate(value):
                if math.isnan(known) or row[at] < 0:
                    row[at], value[at] = NO_ID, math.nan
            named = [token for token in row if token >= 0]
            if len(set(named)) < len(named):
                raise ValueError("an id is twice among the candidates of a token")
        return cls(rows, values)

    @classmethod
    def of_candidates(cls, lists: Sequence[Sequence[tuple[float, int]]], k: int) -> TopK:
        """The first `k` of each list of (log-prob, id); shorter lists are filled up with none."""
        ids, values = [], []
        for one in lists:
            none = max(0, k - len(one))
            ids.append([token for _, token in one[:k]] + [NO_ID] * none)
            values.append([value for value, _ in one[:k]] + [math.nan] * none)
        return cls(ids, values)

    @classmethod
    def of_mapping(cls, value: Mapping[str, Any], tokens: int) -> TopK:
        """From `{"ids": ..., "log_probs": ...}`. Raises `ValueError`, `TypeError`, `KeyError`."""
        return cls.of(value["ids"], value["log_probs"], tokens)

    def as_dict(self) -> dict[str, list[Any]]:
        """Plain lists, as hooks see them."""
        return {
            "ids": [list(row) for row in self.ids],
            "log_probs": [list(row) for row in self.log_probs],
        }

    @property
    def width(self) -> int:
        """K; 0 for no tokens."""
        return len(self.ids[0]) if self.ids else 0

    @property
    def known(self) -> bool:
        """Whether anything is known of any token."""
        return any(token >= 0 for row in self.ids for token in row)


def _id(value: Any) -> int:
    if value is None:
        return NO_ID
    number = int(value)
    if number != value or number >= 2**31:
        raise ValueError("a candidate's id is not a token id")
    return max(number, NO_ID)


def _log_prob(value: Any) -> float:
    number = math.nan if value is None else float(value)
    if number > _POSITIVE:
        raise ValueError("a candidate's log-prob is above 0")
    return number if math.isfinite(number) else math.nan


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
class Verdict:
    """What a judge found. `score` None: no opinion. `teacher_log_probs` has one value for each
    output token, NaN where the teacher has none; `teacher_topk` one row of candidates, with the
    teacher's log-probs. `votes` may hold None for an abstention."""

    score: float | None = None
    hint: str | None = None
    teacher_log_probs: Sequence[float] | None = None
    teacher_topk: TopK | None = None
    votes: Sequence[float | None] = ()

    @property
    def has_teacher(self) -> bool:
        """Whether a teacher has a value for any token."""
        values = self.teacher_log_probs or ()
        topk = self.teacher_topk
        return any(map(math.isfinite, values)) or (topk is not None and topk.known)


@dataclass(slots=True, kw_only=True)
class Turn:
    """One reply of the policy and what became of it: the one record from the gateway to the sample.

    It is made when the reply is whole: `Tracker.commit` gives its head (who speaks, where it
    belongs), `OpenTurn.complete` of the gateway all that was asked and said. The journal stores it
    before the client sees the end of the reply, and adds the fields from `state` on. A
    *head* is a turn without its payload: no ids, messages or log-probs, but their lengths and
    versions, which otherwise follow from the payload.

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
    source: str = ""
    """How the session was recognised (`header:x-session-id`, `history`, ...)."""
    owner: str = ""
    kind: Kind = "main"
    kind_reason: str = ""
    parent_id: str | None = None
    matched: int = 0
    shares_tokens: bool = False
    request_hash: str = ""
    node_hash: str = ""
    """Of the history with the reply; like `request_hash` opaque to all but `session`."""
    created: float = 0.0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """What the engine sampled with (`temperature`, ...); no temperature means 1.0, SGLang's own
    default."""
    finish_reason: str = ""
    truncated: bool = False
    off_policy: bool = False
    """A reply that was not sampled here: its ids are the template's, and it has neither log-probs
    nor versions."""
    drop_reason: str | None = None

    prompt_len: int = 0
    output_len: int = 0
    min_version: str = ""
    max_version: str = ""
    """Its oldest and newest weights: by number where all are numbers, else by appearance."""

    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    output_logprobs: Sequence[float] = ()
    output_versions: Sequence[str] = ()
    topk: TopK | None = None
    messages: Sequence[Message] = ()
    reply: Message = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    rendered_len: int = 0
    rendered_sha: str = ""

    state: State = State.WAITING
    next_state: Sequence[Message] | None = None
    """What followed; None: nothing yet. Of a head: empty where something has."""
    attempts: int = 0
    verdict: Verdict | None = None
    lease_host: str | None = None
    lease_rollout: int | None = None
    trained_version: str | None = None

    def __post_init__(self) -> None:
        if self.prompt_ids:
            self.prompt_len = len(self.prompt_ids)
        if self.output_ids:
            self.output_len = len(self.output_ids)
        if self.output_versions:
            self.min_version, self.max_version = _version_bounds(self.output_versions)

    def head(self) -> Turn:
        """This turn without its payload."""
        return replace(
            self,
            prompt_ids=(),
            output_ids=(),
            output_logprobs=(),
            output_versions=(),
            topk=None,
            messages=(),
            reply={},
            tools=(),
            template_kwargs={},
            next_state=None if self.next_state is None else (),
        )


def _version_bounds(versions: Sequence[str]) -> tuple[str, str]:
    distinct = list(dict.fromkeys(versions))
    if all(version.isdecimal() for version in distinct):
        distinct.sort(key=int)
    return distinct[0], distinct[-1]
