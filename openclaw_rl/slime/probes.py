"""slime publishes weights without asking, so each version is probed afterwards: alarm and stop.

Guarantees: a version is probed at the beginning of a rollout, when slime changes no weights, and
what was measured is recorded. One beyond the limits is a line of error, a count, and a pause: no
batch is leased until `openclaw-rl resume`, while serving goes on. Engines that do not answer hold
nothing up: the next rollout probes again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast
from uuid import uuid4

from openclaw_rl.config import GuardsConfig, settings
from openclaw_rl.engine.chat import ChatTokenizer
from openclaw_rl.engine.client import EngineClient
from openclaw_rl.engine.transport import connections
from openclaw_rl.engine.types import collect
from openclaw_rl.errors import EngineError
from openclaw_rl.guards import Guard, Probes
from openclaw_rl.journal import Journal, Version

log = logging.getLogger("openclaw_rl.slime")

T = TypeVar("T")
Asked = TypeVar("Asked")

_WAIT_SECONDS = 60.0
"""For an engine that broke off a probe; the batch waits as long."""


class PublishedVersions:
    """Probes what the policy's engine serves. `args` may have the settings of `[guards]`, under
    the names of their flags."""

    def __init__(self, args: Any, journal: Journal) -> None:
        named = {one.name: getattr(args, one.attribute, None) for one in settings("guards")}
        given = {name: value for name, value in named.items() if value is not None}
        self.limits = GuardsConfig.model_validate(given)
        self._model, self._journal = args.hf_checkpoint, journal
        self._engines: tuple[str, str | None] | None = None
        self._guard: Guard | None = None
        self._probed: int | None = None

    def probe(self, version: str | None, rollout: int, policy: str, base: str | None) -> None:
        """Probe `version`, which has learnt through `rollout`, unless it, or one less than
        `guards.every` before it, was. `policy`, `base`: the engines' addresses; without a base only
        what needs none is measured."""
        if not self.limits.enabled or version is None or not version.isdecimal():
            return
        number = int(version)
        if self._probed is not None and 0 <= number - self._probed < self.limits.every:
            return
        try:
            reason, figures = self._guard_of(policy, base).examine()
        except EngineError as error:  # its words may quote a prompt
            log.warning("[slime] version %d could not be probed (%s)", number, type(error).__name__)
            return
        self._probed = number
        now = time.time()
        self._journal.record_version(
            Version(version=number, state="served", reason=reason, rollout=rollout, created=now,
                    figures=figures)
        )  # fmt: skip
        if reason:
            log.error("[slime] version %d is served and beyond the limits: %s; training is paused "
                      "until `openclaw-rl resume`", number, reason)  # fmt: skip
            self._journal.count("versions_beyond_limits")
            self._journal.ask("pause", f"version {number}: {reason}", now)

    def _guard_of(self, policy: str, base: str | None) -> Guard:
        if self._guard is None or self._engines != (policy, base):
            probes = Probes.load(self.limits.probes, ChatTokenizer.load(self._model))
            prober = EngineProber(policy, base, probes.ends)
            self._engines = policy, base
            self._guard = Guard(self.limits, self._journal, probes, prober, has_base=bool(base))
        return self._guard


class EngineProber:
    """A `guards.Prober` over the engines that serve policy and base."""

    def __init__(self, policy: str, base: str | None, ends: Collection[int]) -> None:
        self._policy, self._base, self._ends = policy, base, ends

    def reply(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, base: bool = False
    ) -> list[list[int]]:
        """See `guards.Prober`. Raises `EngineError`."""
        sampling = {"temperature": 0.0, "max_new_tokens": max_tokens}

        async def one(engine: EngineClient, prompt: Sequence[int]) -> list[int]:
            deltas = engine.generate(prompt, sampling, rid=uuid4().hex, interval=None)
            ids = (await collect(deltas)).ids
            return ids[:-1] if ids and ids[-1] in self._ends else ids

        return self._each(one, prompts, base)

    def score(
        self, prompts: Sequence[Sequence[int]], replies: Sequence[Sequence[int]], *, base: bool
    ) -> list[list[float]]:
        """See `guards.Prober`. Raises `EngineError`."""

        async def one(
            engine: EngineClient, both: tuple[Sequence[int], Sequence[int]]
        ) -> list[float]:
            prompt, reply = both
            return (await engine.score([*prompt, *reply], len(prompt))).log_probs

        return self._each(one, zip(prompts, replies, strict=True), base)

    def _each(
        self,
        ask: Callable[[EngineClient, Asked], Awaitable[T]],
        items: Iterable[Asked],
        base: bool,
    ) -> list[T]:
        """`ask` of each item, all at once: the engine knows how many it takes together."""
        url = self._base if base else self._policy
        assert url is not None

        async def all_of_them() -> list[T | BaseException]:
            async with connections() as http:
                engine = EngineClient("sglang", url, http, wait_seconds=_WAIT_SECONDS)
                asking = (ask(engine, item) for item in items)
                # One that fails does not take the connections away from the others.
                return await asyncio.gather(*asking, return_exceptions=True)

        answers = asyncio.run(all_of_them())
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return cast(list[T], answers)


def base_of(places: Mapping[str, tuple[str, Mapping[str, Any]]]) -> str | None:
    """The address of an engine that serves the policy's model as it was before training: one of the
    same folder at another address. `places`: address and what the engine says of itself, by
    role."""
    policy, info = places["policy"]
    path = info.get("model_path")
    for url, other in places.values():
        if url != policy and path is not None and other.get("model_path") == path:
            return url
    return None
