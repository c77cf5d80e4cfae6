"""What an engine gives, whoever made it: token ids, each with its log-prob and the weight version
that made it. Nothing here knows a kind of engine; everything above knows only this."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

OnWait = Callable[[str], None]
"""Called with a short reason each time generation is held up (engine away, or aborted)."""

Candidates = list[tuple[float, int]]
"""The likeliest tokens of one position as (natural-log probability, id), likeliest first."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a reply ended. `matched` is the stop string that was met, where the engine says so.

    `abort`: the engine broke it off. The client goes on then, so its readers never see that.
    """

    type: Literal["stop", "length", "abort"]
    matched: str | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """Newly generated tokens.

    `logprobs` has one natural-log probability per id, at the temperature sampled from, or is None
    where the engine did not give a finite one for each. With penalties, cuts or grammars it may be
    of another distribution: what is trained is decided by the request's parameters.
    `version` is the weight version that made these ids ("" where the engine does not say).
    The last delta has `finish`, and may have no ids. `top` has, per id, the candidates asked for
    by `top_logprobs` (None where the engine gave none).
    """

    ids: list[int]
    logprobs: list[float] | None
    version: str
    finish: Finish | None = None
    cached_tokens: int = 0
    top: list[Candidates] | None = None


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """`deltas` up to the finish, those that follow each other as one where that loses nothing (not
    across versions, nor over a gap in log-probs)."""
    result: list[Delta] = []
    for delta in deltas:
        last = result[-1] if result else None
        if (
            last is not None
            and last.version == delta.version
            and (last.logprobs is not None and delta.logprobs is not None)
            and (last.top is None) == (delta.top is None)
        ):
            result[-1] = replace(
                delta,
                ids=last.ids + delta.ids,
                logprobs=last.logprobs + delta.logprobs,
                cached_tokens=max(last.cached_tokens, delta.cached_tokens),
                top=None if delta.top is None else [*(last.top or ()), *delta.top],
            )
        else:
            result.append(delta)
        if delta.finish is not None:
            break
    return result


@dataclass(frozen=True, slots=True)
class Scores:
    """How likely given tokens are (temperature 1): one natural-log probability each, and, where
    asked for and given, the likeliest tokens in the place of each."""

    log_probs: list[float]
    top: list[Candidates] | None = None


@dataclass(frozen=True, slots=True)
class Abilities:
    """What an engine can do beyond what all do. Checked before anything starts."""

    top_logprobs: int
    """Most candidates of a position."""
    any_temperature: bool
    """Log-probs are at the temperature sampled from. Else they are given at temperature 1, and
    are missing otherwise."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """Weights that an engine holds under a name, and the weight version they are."""

    name: str
    version: str


class Engine(Protocol):
    """The narrow waist: SGLang, vLLM and the embedded engine, told apart by nobody above."""

    def generate(
        self,
        ids: Sequence[int],
        sampling: Mapping[str, Any],
        *,
        rid: str,
        routing_key: str | None = None,
        top_logprobs: int = 0,
        interval: int | None = 1,
        on_wait: OnWait | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """The reply to `ids`. `sampling` has SGLang's names; `max_new_tokens` (at least 1) is
        required. `rid` must be unique and of a fixed length: engines abort by prefix. `interval`
        says how many tokens may come together after the first, which costs less; None: nobody reads
        along, so as many as the engine likes.

        Use it under `contextlib.aclosing`: closing aborts at the engine. Raises EngineRefused
        (ContextOverflow) and EngineUnavailable."""
        ...

    async def score(self, ids: Sequence[int], start: int, top: int = 0) -> Scores:
        """How likely each of `ids[start:]` is, given all ids before it, and the `top` likeliest in
        its place. `start` is at least 1: nothing precedes the first id. Raises as `generate`."""
        ...


@dataclass(slots=True)
class Reply:
    """A whole reply: one version per id, and candidates where they were asked for; `logprobs` None
    as soon as one is missing."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    top: list[Candidates] = field(default_factory=list)
    finish: Finish | None = None
    cached_tokens: int = 0


async def collect(deltas: AsyncGenerator[Delta, None]) -> Reply:
    """The whole reply of `Engine.generate`. Closes the stream (and so aborts) on cancellation."""
    reply = Reply()
    async with aclosing(deltas):
        async for delta in deltas:
            reply.ids += delta.ids
            reply.versions += [delta.version] * len(delta.ids)
            if delta.logprobs is None:
                reply.logprobs = None
            elif reply.logprobs is not None:
                reply.logprobs += delta.logprobs
            reply.top += delta.top or ()
            reply.finish = delta.finish or reply.finish
            reply.cached_tokens = max(reply.cached_tokens, delta.cached_tokens)
    return reply
