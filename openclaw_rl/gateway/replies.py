"""One reply on its way from the engine to the client: what is recorded of it, and what is shown.

Guarantees: the ids that the engine sampled are kept in order, apart from what is shown, which is
never tokenised again. A stream begins with the first token or keep-alive and is never silent for
longer than the keep-alive time, also while the engine is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import quote

from aiohttp import web

from openclaw_rl.engine.chat import ChatTokenizer, Prompt, TextStream
from openclaw_rl.engine.types import Delta, Finish
from openclaw_rl.session.tracker import Placement
from openclaw_rl.types import Message, TopK, Turn
from openclaw_rl.wire.dialect import (
    ChatRequest,
    Dialect,
    Ending,
    ReplyInfo,
    TokenLogprob,
    Usage,
    WireError,
)
from openclaw_rl.wire.reply import END_THINK, ReplyEvent, ReplyParser

Shown = tuple[list[ReplyEvent], list[TokenLogprob] | None]
"""What a client may see of a delta: events, and log-probs where it asked for them."""

_PRINTABLE = "".join(map(chr, range(33, 127))).replace("%", "")


class ClientGone(Exception):
    """The client closed its connection."""


class StopCut:
    """Cuts a streamed text at the first stop string: neither it nor the beginning of one is shown.

    `matched` is the stop string that was met; its tokens were sampled and stay in the record.
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
        text = self._held + text
        met = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if met:
            end, self.matched = min(met)
            self._held = ""
            return text[:end]
        held = max(n for s in self._stops for n in range(len(s)) if text.endswith(s[:n]))
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back in case a stop string followed."""
        held, self._held = self._held, ""
        return held


@dataclass(slots=True)
class OpenTurn:
    """A turn under way: its parts, until `complete` makes one record of them. It began at `started`
    of `time.perf_counter`; `top_k` candidates of each token are kept for training."""

    request: ChatRequest
    placement: Placement
    prompt: Prompt
    sampling: Mapping[str, Any]
    info: ReplyInfo
    tokenizer: ChatTokenizer
    parser: ReplyParser
    top_k: int
    started: float
    text: TextStream = field(init=False)
    stops: StopCut = field(init=False)
    first_token_seconds: float | None = None
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    candidate_ids: list[Sequence[int]] = field(default_factory=list)
    candidate_log_probs: list[Sequence[float]] = field(default_factory=list)
    finish: Finish | None = None
    reply: Message = field(default_factory=dict)
    """What was said, as soon as all was."""
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        self.text = self.tokenizer.stream()
        self.stops = StopCut(_stop_strings(self.sampling))

    def take(self, delta: Delta) -> Shown:
        """Add what the engine sent; returns what the client may see of it by now."""
        self.output_ids += delta.ids
        self.versions += [delta.version] * len(delta.ids)
        self.logprobs += delta.logprobs or ()  # nothing is padded: the journal drops such a turn
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
            self.reply = self.parser.message()
        return events, self._token_logprobs(delta) if self.request.logprobs else None

    def complete(self, head: Turn) -> Turn:
        """The turn for the journal: `head`, which says where it belongs, with all that was asked
        and said."""
        return replace(
            head,
            messages=self.prompt.messages,
            tools=self.request.tools,
            template_kwargs=self.request.template_kwargs,
            prompt_ids=self.prompt.ids,
            shares_tokens=self.prompt.shares_tokens,
            rendered_len=len(self.prompt.text),
            rendered_sha=self.prompt.sha,
            sampling=self.sampling,
            output_ids=self.output_ids,
            output_logprobs=self.logprobs,
            output_versions=self.versions,
            topk=TopK(self.candidate_ids, self.candidate_log_probs) if self.top_k else None,
            reply=self.reply,
            finish_reason=self.finish_reason,
            truncated=self.finish_reason == "length",
        )

    @property
    def asked_candidates(self) -> int:
        """Candidates of each token to ask the engine for, for the client and for the record."""
        return max(self.request.top_logprobs if self.request.logprobs else 0, self.top_k)

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        """OpenAI's word for the end of a complete reply."""
        if self.finish is not None and self.finish.type == "length":
            return "length"
        return "tool_calls" if self.reply.get("tool_calls") else "stop"

    @property
    def usage(self) -> Usage:
        """The true counts so far; reasoning is counted when the reply is complete."""
        prompt, reply, reasoning = len(self.prompt.ids), self.reply, 0
        if reply.get("reasoning_content"):
            end = self.tokenizer.added_tokens.get(END_THINK)
            if end in self.output_ids:
                reasoning = self.output_ids.index(end) + 1
            elif not (reply.get("content") or reply.get("tool_calls")):
                reasoning = len(self.output_ids)
            # Else it was ended by several tokens: not to be told apart, so not claimed.
        return Usage(prompt, len(self.output_ids), min(self.cached_tokens, prompt), reasoning)

    @property
    def ending(self) -> Ending:
        """How the finished reply ended, for any dialect."""
        matched = self.stops.matched
        if matched is None and self.finish and self.finish.matched in _stop_strings(self.sampling):
            matched = str(self.finish.matched)
        asked = self.request.max_tokens
        return Ending(
            reason=self.finish_reason,
            usage=self.usage,
            stop_sequence=matched,
            context_full=asked is not None and self.sampling["max_new_tokens"] < asked,
        )

    def _token_logprobs(self, delta: Delta) -> list[TokenLogprob]:
        """What the engine said about each new token, with as many candidates for its place as the
        client wants; nothing where it said nothing."""
        count, decode = len(delta.ids), self.tokenizer.decode
        if delta.logprobs is None or len(delta.logprobs) != count:
            return []
        tops = delta.top if delta.top and len(delta.top) == count else [[]] * count
        return [
            TokenLogprob(
                decode([token]),
                logprob,
                top=[
                    TokenLogprob(decode([other]), value)
                    for value, other in top[: self.request.top_logprobs]
                ],
            )
            for token, logprob, top in zip(delta.ids, delta.logprobs, tops, strict=True)
        ]


class StreamedReply:
    """Writes one reply as it is made. Until `began`, an error can still be a plain response."""

    def __init__(
        self, http: web.Request, turn: OpenTurn, dialect: Dialect, keepalive_seconds: float
    ) -> None:
        self._http = http
        self.turn = turn
        self._dialect = dialect
        self._keepalive_seconds = keepalive_seconds
        self._stream = dialect.stream(turn.info)
        self._clock = asyncio.get_running_loop().time
        self._last_write = self._clock()
        self._writing = asyncio.Lock()
        self._response: web.StreamResponse | None = None

    @property
    def began(self) -> bool:
        """Whether anything was sent."""
        return self._response is not None

    async def show(self, shown: Shown) -> None:
        """Send what became visible, in one write. Raises `ClientGone`."""
        events, tokens = shown
        data = b""
        for event in events:
            data += self._stream.event(event, tokens)
            tokens = None if tokens is None else []
        if tokens:
            data += self._stream.logprobs(tokens)
        if data or not self.began:
            await self._send(data)

    async def end(self, error: WireError | None = None) -> web.StreamResponse:
        """Send how the reply ended and the counts, or the error that broke it."""
        data = self._stream.end(self.turn.ending) if error is None else self._stream.fail(error)
        return await self._send(data, last=True)

    async def keep_alive(self) -> None:
        """Runs beside the reply until cancelled; what is sent meanwhile puts the next one off."""
        with contextlib.suppress(ClientGone):  # the reply's own task finds out by itself
            while True:
                rest = self._last_write + self._keepalive_seconds - self._clock()
                if rest > 0:
                    await asyncio.sleep(rest)
                else:
                    await self._send(self._stream.keepalive())

    async def _send(self, data: bytes, last: bool = False) -> web.StreamResponse:
        self._last_write = self._clock()
        try:
            async with self._writing:  # the keep-alive and the first token may come together
                response = self._response
                if response is None:
                    data = self._stream.start(self.turn.usage) + data
                    response = self._response = web.StreamResponse(
                        headers={
                            "Content-Type": "text/event-stream; charset=utf-8",
                            "Cache-Control": "no-cache",
                            "X-Accel-Buffering": "no",  # reverse proxies would hold tokens back
                            **_headers(self.turn, self._dialect),
                        }
                    )
                    await response.prepare(self._http)
                if last:
                    await response.write_eof(data)
                elif data:
                    await response.write(data)
                return response
        except ConnectionError as error:
            raise ClientGone from error


def whole_reply(
    turn: OpenTurn,
    dialect: Dialect,
    events: Sequence[ReplyEvent],
    logprobs: Sequence[TokenLogprob],
) -> web.Response:
    """A finished reply in one piece."""
    asked = logprobs if turn.request.logprobs else None
    body = dialect.whole(turn.info, events, turn.ending, asked)
    return web.Response(
        body=json.dumps(body, ensure_ascii=False).encode("utf-8", "replace"),
        content_type="application/json",
        headers=_headers(turn, dialect),
    )


def _headers(turn: OpenTurn, dialect: Dialect) -> dict[str, str]:
    """A session id may be any text, a header may not."""
    turn_id, place = turn.info.turn_id, turn.placement.turn
    own = {dialect.id_header: f"req_{turn_id}"} if dialect.id_header else {}
    return {
        "X-Turn-Id": turn_id,
        "X-Session-Id": quote(place.session_id, safe=_PRINTABLE),
        "X-Session-Source": place.source,
        "X-Turn-Type": place.kind,
        **own,
    }


def _stop_strings(sampling: Mapping[str, Any]) -> Sequence[str]:
    stop = sampling.get("stop") or ()
    return [stop] if isinstance(stop, str) else list(stop)
