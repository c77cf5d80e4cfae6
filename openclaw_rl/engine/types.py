"""What an engine gives, whoever made it: token ids, each with its log-prob and the weight version
that made it. Nothing here knows a kind of engine; everything above knows only this."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

OnWait = Callable[[str], None]
"""Called with a short reason each time generation is held up (engine away, or aborted)."""

Candidates = list[tuple[float, int]]
"""The likeliest tokens of one position as (natural-log probability, id), likeliest first."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a reply ended. `abort`: because `Engine.abort` was called for it, never otherwise.

    `matched` is the stop token id or stop string, where the engine says so.
    """

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None


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


def join(first: Delta, second: Delta) -> Delta | None:
    """Both as one, or None where that would lose something (another version, a gap in log-probs).

    `first` must not have a finish.
    """
    if first.version != second.version or (first.top is None) != (second.top is None):
        return None
    if first.logprobs is None or second.logprobs is None:
        return None
    return Delta(
        ids=first.ids + second.ids,
        logprobs=first.logprobs + second.logprobs,
        version=first.version,
        finish=second.finish,
        cached_tokens=max(first.cached_tokens, second.cached_tokens),
        top=None if first.top is None or second.top is None else first.top + second.top,
    )


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
    abort_by_id: bool
    """Else a request ends by closing its connection."""
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

    @property
    def abilities(self) -> Abilities: ...

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
        its place. `start` is at least 1: nothing precedes the first id."""
        ...

    async def abort(self, rid: str) -> None:
        """End the request: its stream gives `Finish("abort")` next. Unknown rids are ignored."""
        ...

    async def health(self) -> bool: ...

    async def model_info(self) -> dict[str, Any]:
        """What the engine says of its model: `model_path`, `context_length` where it tells."""
        ...

    async def adapters(self) -> frozenset[str]:
        """Names of the adapters that the engine holds. Raises EngineUnavailable."""
        ...

    async def load_adapter(self, name: str, path: str) -> None:
        """Let the engine load a PEFT folder, at the path where it sees it, under a new name.
        Requests under way go on. Raises EngineUnavailable or EngineRefused."""
        ...

    async def unload_adapter(self, name: str) -> None: ...


@dataclass(slots=True)
class Reply:
    """A whole reply: one version per id; `logprobs` None as soon as one is missing."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    finish: Finish | None = None
    cached_tokens: int = 0

    def add(self, delta: Delta) -> None:
        self.ids += delta.ids
        self.versions += [delta.version] * len(delta.ids)
        if delta.logprobs is None:
            self.logprobs = None
        elif self.logprobs is not None:
            self.logprobs += delta.logprobs
        self.finish = delta.finish or self.finish
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)


async def collect(deltas: AsyncGenerator[Delta, None]) -> Reply:
    """The whole reply of `Engine.generate`. Closes the stream (and so aborts) on cancellation."""
    reply = Reply()
    async with aclosing(deltas):
        async for delta in deltas:
            reply.add(delta)
    return reply
