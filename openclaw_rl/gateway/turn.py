"""One request under way: what was asked, and the reply as it comes in.

Guarantee: `output_ids` are the ids that the engine sampled, in order; events are what the client
may see of them. The two are kept apart: nothing that is shown is ever tokenised again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from openclaw_rl.engine.chat import ChatTokenizer, TextStream
from openclaw_rl.engine.types import Delta, Finish
from openclaw_rl.session.tracker import Placement
from openclaw_rl.types import Message, TopK, Turn
from openclaw_rl.wire.dialect import Ending, Head, TokenLogprob, Usage
from openclaw_rl.wire.reply import END_THINK, ReplyEvent, ReplyParser
from openclaw_rl.wire.request import ChatRequest

Shown = tuple[list[ReplyEvent], list[TokenLogprob] | None]
"""What a client may see of a delta: events, and log-probs where it asked for them."""


class StopCut:
    """Cuts a streamed text at the first stop string: neither it nor the beginning of one is shown.

    Feed text in pieces, get what may be shown. `matched` is the stop string that was met; its
    tokens were sampled and stay in the recorded turn.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The part of all text so far that is new and certain to come before any stop string."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        held = self._held + text
        met = [(at, stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if met:
            found, self.matched = min(met, key=lambda one: one[0])
            self._held = ""
            return held[:found]
        keep = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """What was held back in case a stop string followed."""
        held, self._held = self._held, ""
        return held


@dataclass(slots=True)
class OpenTurn:
    """A turn until it is recorded. `record` is all that was known of it when it began, `started`
    then on the monotonic clock; `top_k` candidates of each token are kept for training."""

    request: ChatRequest
    placement: Placement
    record: Turn
    head: Head
    tokenizer: ChatTokenizer
    parser: ReplyParser
    top_k: int
    started: float
    text: TextStream = field(init=False)
    stops: StopCut = field(init=False)
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
    waits: bool = False
    """Whether the engine has kept it waiting."""

    def __post_init__(self) -> None:
        self.text = self.tokenizer.stream()
        self.stops = StopCut(stop_strings(self.record.sampling))
        if self.record.kind != "main":
            self.top_k = 0  # side turns are never trained

    def take(self, delta: Delta) -> Shown:
        """Add what the engine sent; returns what the client may see of it by now."""
        self.output_ids += delta.ids
        self.versions += [delta.version] * len(delta.ids)
        # None, or fewer than tokens: nothing is padded, see `lines_up`.
        self.logprobs += delta.logprobs or ()
        if self.top_k and delta.top:
            # Token by token: at the end of a long reply it would hold up everybody's.
            kept = TopK.of_candidates(delta.top, self.top_k)
            self.candidate_ids += kept.ids
            self.candidate_log_probs += kept.log_probs
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        text = self.stops.push(self.text.push(delta.ids))
        events = self.parser.feed(text) if text else []
        if delta.finish is not None:
            self.finish = delta.finish
            events += self.parser.feed(self.stops.push(self.text.finish()) + self.stops.finish())
            events += self.parser.finish()
        self.tool_calls += sum(event.kind == "tool_call" for event in events)
        return events, self._token_logprobs(delta) if self.request.logprobs else None

    def finished(self, reply: Message, node_hash: str, drop_reason: str | None) -> Turn:
        """The record of the whole turn."""
        return dataclasses.replace(
            self.record,
            output_ids=self.output_ids,
            output_logprobs=self.logprobs,
            output_versions=self.versions,
            finish_reason=self.finish_reason,
            truncated=self.finish_reason == "length",
            reply=reply,
            node_hash=node_hash,
            topk=TopK(self.candidate_ids, self.candidate_log_probs) if self.top_k else None,
            drop_reason=drop_reason,
        )

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        """OpenAI's word for the end of the reply."""
        if self.finish is not None and self.finish.type == "length":
            return "length"
        return "tool_calls" if self.tool_calls else "stop"

    @property
    def usage(self) -> Usage:
        """The true counts so far."""
        prompt = len(self.record.prompt_ids)
        return Usage(
            prompt,
            len(self.output_ids),
            min(self.cached_tokens, prompt),
            self.reasoning_tokens if self.finish is not None else 0,
        )

    @property
    def ending(self) -> Ending:
        """How the finished reply ended, for any dialect."""
        sampling, matched = self.record.sampling, self.stops.matched
        if matched is None and self.finish and self.finish.matched in stop_strings(sampling):
            matched = str(self.finish.matched)
        asked = self.request.max_tokens
        return Ending(
            reason=self.finish_reason,
            usage=self.usage,
            stop_sequence=matched,
            context_full=asked is not None and sampling["max_new_tokens"] < asked,
        )

    @property
    def reasoning_tokens(self) -> int:
        """How many of the output tokens are reasoning, the token that ends it included."""
        reply = self.parser.message()
        if not reply.get("reasoning_content"):
            return 0
        end = self.tokenizer.added_tokens.get(END_THINK)
        if end in self.output_ids:
            return self.output_ids.index(end) + 1
        # Never ended: all of it. Ended by several tokens: not to be told apart, so not claimed.
        return 0 if reply.get("content") or reply.get("tool_calls") else len(self.output_ids)

    @property
    def asked_candidates(self) -> int:
        """Candidates of each token to ask the engine for, for the client and for the record."""
        return max(self.request.top_logprobs if self.request.logprobs else 0, self.top_k)

    def lines_up(self) -> bool:
        """Whether every token has its log-prob. If not, the journal drops the turn, counted."""
        return len(self.logprobs) == len(self.output_ids)

    def _token_logprobs(self, delta: Delta) -> list[TokenLogprob]:
        """What the engine said about each new token, with as many candidates for its place as the
        client wants; nothing where it said nothing."""
        if delta.logprobs is None or len(delta.logprobs) != len(delta.ids):
            return []
        decode, shown = self.tokenizer.decode, self.request.top_logprobs
        tops = (
            delta.top if delta.top and len(delta.top) == len(delta.ids) else [()] * len(delta.ids)
        )
        return [
            TokenLogprob(
                decode([token]),
                logprob,
                None,
                [TokenLogprob(decode([other]), value) for value, other in top[:shown]],
            )
            for token, logprob, top in zip(delta.ids, delta.logprobs, tops, strict=True)
        ]


def stop_strings(sampling: Mapping[str, Any]) -> Sequence[str]:
    """The stop strings of a request's sampling parameters."""
    stop = sampling.get("stop") or ()
    return [stop] if isinstance(stop, str) else list(stop)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
