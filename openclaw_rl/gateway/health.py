"""What `/healthz` and `/metrics` tell: states and counts, never texts, addresses or keys.

`/healthz` answers 200 as long as the gateway serves; what is not well is said in the body.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any, Literal

from openclaw_rl.errors import OpenClawRLError
from openclaw_rl.gateway.metrics import Labels
from openclaw_rl.journal.records import Endpoint, Fates

EngineState = Literal["ok", "waiting", "unknown"]

FRESH_SECONDS = 1.0
"""Probes are cheap but not free; a monitor that asks more often gets the last answer."""
PROBE_SECONDS = 2.0
BIND_AFTER = 20
"""From so many turns on, "nothing binds" is worth a warning."""


class Health:
    """Asks engine and journal, at most once a second each."""

    def __init__(
        self,
        *,
        url: Callable[[], str | None],
        engine_healthy: Callable[[], Awaitable[bool]],
        fates: Callable[[], Awaitable[Fates]],
        trainer: Callable[[], Awaitable[Endpoint | None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url
        self._engine_healthy = engine_healthy
        self._read_fates = fates
        self._read_trainer = trainer
        self._clock = clock
        self._engine: tuple[float, EngineState] | None = None
        self._fates: tuple[float, Fates | None] | None = None
        self._lock = asyncio.Lock()

    async def engine(self) -> EngineState:
        """`unknown`: no host has published an engine yet. `waiting`: it does not answer."""
        if self._url() is None:
            return "unknown"
        async with self._lock:
            now = self._clock()
            if self._engine is None or now - self._engine[0] > FRESH_SECONDS:
                self._engine = (now, await self._probe())
            return self._engine[1]

    async def fates(self) -> Fates | None:
        """The journal's counts, or None where it cannot be read."""
        async with self._lock:
            now = self._clock()
            if self._fates is None or now - self._fates[0] > FRESH_SECONDS:
                self._fates = (now, await self._count())
            return self._fates[1]

    async def mismatch(self) -> Mapping[str, Any] | None:
        """What the trainer says of its last batch, if it has said anything."""
        try:
            endpoint = await self._read_trainer()
        except OpenClawRLError:
            return None
        return None if endpoint is None else endpoint.info

    async def _probe(self) -> EngineState:
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                return "ok" if await self._engine_healthy() else "waiting"
        except (OpenClawRLError, OSError, TimeoutError):
            return "waiting"

    async def _count(self) -> Fates | None:
        try:
            return await self._read_fates()
        except OpenClawRLError:
            return None


def fates_body(fates: Fates | None) -> dict[str, Any] | None:
    """Counts for `/healthz`."""
    return None if fates is None else asdict(fates)


def fates_gauges(fates: Fates | None) -> dict[str, dict[Labels, float]]:
    """Counts for `/metrics`: turns by state, dropped ones by reason."""
    if fates is None:
        return {}
    states = ("waiting", "judging", "ready", "leased", "trained", "side")
    series: dict[Labels, float] = {(("state", name),): getattr(fates, name) for name in states}
    dropped: dict[Labels, float] = {
        (("reason", reason),): count for reason, count in fates.dropped.items()
    }
    return {"journal_turns": series, "journal_dropped": dropped}


def mismatch_gauges(about: Mapping[str, Any] | None) -> dict[str, dict[Labels, float]]:
    """How far engine and trainer were apart on the tokens of the last batch, for `/metrics`."""
    known = about or {}
    return {
        f"mismatch_{name}": {(): float(known[name])}
        for name in ("mean", "max", "truncated", "rollout")
        if known.get(name) is not None
    }


def warnings(fates: Fates | None, engine: EngineState, journal_ok: bool) -> list[str]:
    """What a person should look at."""
    found = []
    if not journal_ok:
        found.append("the journal cannot be written: replies are served but not recorded")
    if engine == "unknown":
        found.append("no engine has been published yet: requests wait for one")
    elif engine == "waiting":
        found.append("the engine does not answer: requests wait for it")
    if fates is not None and fates.seen >= BIND_AFTER and fates.main == 0:
        found.append("no turn was bound as main: nothing will be trained (see docs/dialects.md)")
    elif fates is not None and fates.main >= BIND_AFTER and fates.unbound == fates.main:
        found.append("no turn is bound to a conversation: nothing will be judged or trained")
    return found
