"""One request under way: what was asked, and the reply as it comes in.

Guarantee: `output_ids` are the ids that the engine sampled, in order; `events` are what the client
may see of them. The two are kept apart: nothing that is shown is ever tokenised again.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from openclaw_rl.engine.chat import TextStream
from openclaw_rl.engine.types import Delta, Finish
from openclaw_rl.gateway.auth import Caller
from openclaw_rl.gateway.stops import StopCut
from openclaw_rl.session.types import Placement, RequestView
from openclaw_rl.types import Message, TopK
from openclaw_rl.wire.dialect import Ending, Usage
from openclaw_rl.wire.reply import ReplyEvent, ReplyParser
from openclaw_rl.wire.request import ChatRequest


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is served: `messages` with the recorded replies put back, and their exact tokens.

    `shares_tokens`: `ids` begins with the parent's prompt and output, token for token.
    """

    messages: tuple[Message, ...]
    ids: array[int]
    shares_tokens: bool
    rendered_len: int
    rendered_sha: str
    in_reasoning: bool


@dataclass(slots=True)
class OpenTurn:
    """A turn until it is recorded. Times: `created` since the epoch, `started` monotonic."""

    turn_id: str
    owner: str
    request: ChatRequest
    placement: Placement
    prompt: Prompt
    sampling: Mapping[str, Any]
    text: TextStream
    stops: StopCut
    parser: ReplyParser
    end_of_reasoning: int | None
    """The token `</think>`, where the model has one."""
    top_k: int
    """Candidates of each token to keep, if the turn is a main one."""
    created: float
    started: float
    prepare_seconds: float = 0.0
    first_token_seconds: float | None = None
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    candidate_ids: list[Sequence[int]] = field(default_factory=list)
    candidate_log_probs: list[Sequence[float]] = field(default_factory=list)
    finish: Finish | None = None
    cached_tokens: int = 0
    tool_calls: int = 0

    def take(self, delta: Delta) -> list[ReplyEvent]:
        """Add what the engine sent; returns what the client may see of it by now."""
        self.output_ids += delta.ids
        self.versions += [delta.version] * len(delta.ids)
        # None, or fewer than tokens: nothing is padded, see `lines_up`.
        self.logprobs += delta.logprobs or ()
        if self.keeps_topk and delta.top:
            # Token by token: at the end of a long reply it would hold up everybody's.
            kept = TopK.of_candidates(delta.top, self.top_k)
            self.candidate_ids += kept.ids
            self.candidate_log_probs += kept.log_probs
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        events = self.parser.feed(self.stops.push(self.text.push(delta.ids)))
        if delta.finish is not None:
            self.finish = delta.finish
            events += self.parser.feed(self.stops.push(self.text.finish()) + self.stops.finish())
            events += self.parser.finish()
        self.tool_calls += sum(event.kind == "tool_call" for event in events)
        return events

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        """OpenAI's word for the end of the reply."""
        if self.finish is not None and self.finish.type == "length":
            return "length"
        return "tool_calls" if self.tool_calls else "stop"

    @property
    def usage(self) -> Usage:
        """The true counts so far."""
        return Usage(
            len(self.prompt.ids),
            len(self.output_ids),
            min(self.cached_tokens, len(self.prompt.ids)),
            self.reasoning_tokens if self.finish is not None else 0,
        )

    @property
    def ending(self) -> Ending:
        """How the finished reply ended, for any dialect."""
        matched = self.stops.matched
        if matched is None and self.finish and self.finish.matched in stop_strings(self.sampling):
            matched = str(self.finish.matched)
        asked = self.request.max_tokens
        return Ending(
            reason=self.finish_reason,
            usage=self.usage,
            stop_sequence=matched,
            context_full=asked is not None and self.sampling["max_new_tokens"] < asked,
        )

    @property
    def reasoning_tokens(self) -> int:
        """How many of the output tokens are reasoning, the token that ends it included."""
        reply = self.parser.message()
        if not reply.get("reasoning_content"):
            return 0
        if self.end_of_reasoning in self.output_ids:
            return self.output_ids.index(self.end_of_reasoning) + 1
        # Never ended: all of it. Ended by several tokens: not to be told apart, so not claimed.
        return 0 if reply.get("content") or reply.get("tool_calls") else len(self.output_ids)

    @property
    def keeps_topk(self) -> bool:
        """Whether candidates are recorded: side turns are never trained."""
        return self.top_k > 0 and self.placement.kind == "main"

    @property
    def asked_candidates(self) -> int:
        """Candidates of each token to ask the engine for, for the client and for the record."""
        shown = self.request.top_logprobs if self.request.logprobs else 0
        return max(shown, self.top_k if self.keeps_topk else 0)

    def topk(self) -> TopK | None:
        """What the journal keeps of the candidates. Where the engine left some out, there are
        fewer rows than tokens, and it keeps none, counted."""
        return TopK(self.candidate_ids, self.candidate_log_probs) if self.keeps_topk else None

    def lines_up(self) -> bool:
        """Whether every token has its log-prob. If not, the journal drops the turn, counted."""
        return len(self.logprobs) == len(self.output_ids)


def fit_max_tokens(
    asked: int | None, default: int | None, prompt_tokens: int, context_length: int
) -> int:
    """Tokens the reply may have: what was asked, cut to what is left of the context.

    The result is below 1 where the prompt alone fills the context.
    """
    left = context_length - prompt_tokens
    wanted = asked if asked is not None else default
    return left if wanted is None else min(wanted, left)


def stop_strings(sampling: Mapping[str, Any]) -> Sequence[str]:
    """The stop strings of a request's sampling parameters."""
    stop = sampling.get("stop") or ()
    return [stop] if isinstance(stop, str) else list(stop)


def view_of(request: ChatRequest, caller: Caller, headers: Mapping[str, str]) -> RequestView:
    """What the session tracker reads of a request. `headers` have lower-case names."""
    return RequestView(
        messages=request.messages,
        headers=headers,
        owner=caller.owner,
        hints=request.hints,
        key_session=caller.key_session,
        has_tools=bool(request.tools),
    )
