"""Opens what the gateway is made of, in order, and closes it again: tokenizer, journal, engine
client, tracker. A restart picks every conversation up where the journal has it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from openclaw_rl.config import Config
from openclaw_rl.engine.api import EngineAPI
from openclaw_rl.engine.chat import ChatTokenizer
from openclaw_rl.engine.client import EngineClient, engine_api
from openclaw_rl.engine.transport import connections
from openclaw_rl.engine.types import Adapter, OnWait
from openclaw_rl.errors import OpenClawRLError
from openclaw_rl.gateway.core import MAX_TURNS, Gateway
from openclaw_rl.gateway.health import Health
from openclaw_rl.gateway.known import KnownTurns
from openclaw_rl.gateway.limits import Bodies, Inflight
from openclaw_rl.gateway.metrics import Metrics
from openclaw_rl.gateway.prompts import Prompts
from openclaw_rl.journal.lock import gateway_lock
from openclaw_rl.journal.records import Endpoint
from openclaw_rl.journal.store import Journal
from openclaw_rl.journal.writer import AsyncJournal
from openclaw_rl.session.tracker import Tracker
from openclaw_rl.types import Turn
from openclaw_rl.wire.formats import ReplyFormat, choose_format

log = logging.getLogger("openclaw_rl.gateway")

POLL_SECONDS = 0.5
"""How soon a newly published engine is found."""

BODY_SECONDS = 60.0
"""How long a request's body may take to arrive."""

MAX_BODIES = 512
"""Requests that may be sending their bodies; `max_inflight` counts those that have sent it."""

KNOWN_PROMPT_BYTES = 128 * 2**20
"""Memory for token ids and replies of recent turns; older ones are read from the journal."""

INLINE_CHARS = 10_000
"""Longer requests are rendered in a thread, so that other streams go on."""


class PolicyAddress:
    """Where the policy's engine is: fixed by the settings, or as the journal says by now. What the
    journal says of an engine elsewhere than at a fixed address does not count for that one.

    Calling it gives the address, or None before any host has published one.
    """

    def __init__(self, fixed: str, journal: AsyncJournal) -> None:
        self._fixed = fixed.rstrip("/") or None
        self._journal = journal
        self._endpoint: Endpoint | None = None
        self._api = engine_api(None)

    def __call__(self) -> str | None:
        if self._fixed is not None:
            return self._fixed
        return self._endpoint.url if self._endpoint is not None else None

    @property
    def weight_version(self) -> str | None:
        """The version that the host says is served."""
        version = self._endpoint.info.get("weight_version") if self._endpoint else None
        return None if version is None else str(version)

    def context_length(self) -> int | None:
        """Tokens that the engine takes, where the host tells."""
        length = self._told.get("context_length")
        return length if isinstance(length, int) else None

    def adapter(self) -> Adapter | None:
        """The weights to ask for, where the host serves them as adapters."""
        if "adapter" not in self._told:
            return None
        return Adapter(str(self._told["adapter"]), self.weight_version or "")

    def key(self) -> str | None:
        """The key of an engine that made one itself (the embedded engine)."""
        key = self._told.get("key")
        return key if isinstance(key, str) else None

    def api(self) -> EngineAPI:
        """How that engine is spoken to, with what the host found that it can do."""
        return self._api

    async def look(self) -> None:
        """Read the journal. An unreadable journal leaves the last address."""
        with contextlib.suppress(OpenClawRLError):
            self._endpoint = await self._journal.endpoint("policy")
            self._api = engine_api(self._told.get("engine"), self._told.get("abilities", {}))

    @property
    def _told(self) -> Mapping[str, Any]:
        endpoint = self._endpoint
        if endpoint is None or self._fixed not in (None, endpoint.url.rstrip("/")):
            return {}
        return endpoint.info


@dataclass(slots=True)
class Parts:
    """Everything that the routes use."""

    config: Config
    gateway: Gateway
    tokenizer: ChatTokenizer
    reply_format: ReplyFormat
    known: KnownTurns
    metrics: Metrics
    inflight: Inflight
    bodies: Bodies
    health: Health
    address: PolicyAddress
    started: float
    waiting_now: int = 0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[OnWait]:
        """A callback for the engine client to say that a request waits; counted once each."""
        waits = False

        def on_wait(_: str) -> None:
            nonlocal waits
            if not waits:
                waits = True
                self.waiting_now += 1
                self.metrics.count("engine_waits")

        try:
            yield on_wait
        finally:
            self.waiting_now -= waits


@contextlib.asynccontextmanager
async def open_parts(config: Config) -> AsyncIterator[Parts]:
    """Open everything; on leaving, finish what is being written, then close."""
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(gateway_lock(config.journal_path))
        executor = stack.enter_context(ThreadPoolExecutor(2, thread_name_prefix="gateway"))
        tokenizer, reply_format, by = await asyncio.to_thread(_load_model, config)
        journal = await asyncio.to_thread(AsyncJournal.open, config.journal_path)
        stack.push_async_callback(journal.close)
        about = {"model": config.served_name, "reply_format": f"{reply_format.name} (by {by})"}
        await journal.write(partial(_publish_gateway, config.gateway.url, about))
        tracker = Tracker(max_turns=MAX_TURNS, unnamed=config.gateway.unnamed)
        nodes = await journal.heads(MAX_TURNS)
        tracker.restore(nodes)
        address = PolicyAddress(config.engine.url, journal)
        await address.look()
        http = await stack.enter_async_context(
            connections(config.engine.api_key, read_bufsize=2**20)
        )
        engine = EngineClient(
            address.api,
            address,
            http,
            adapter=address.adapter,
            key=address.key,
            wait_seconds=config.gateway.engine_wait_seconds,
            join_deltas=True,
        )
        stack.push_async_callback(engine.close)
        following = asyncio.ensure_future(
            _follow(address, engine, journal, config.gateway.url, about)
        )
        stack.callback(following.cancel)
        metrics, known = Metrics(), KnownTurns(KNOWN_PROMPT_BYTES)

        async def load(turn_ids: list[str]) -> list[Turn]:
            rows = await journal.read(lambda reader: [reader.turn(one) for one in turn_ids])
            return [row for row in rows if row is not None]

        prompts = Prompts(tokenizer, reply_format, known, load, executor, metrics, INLINE_CHARS)
        gateway = Gateway(
            config,
            tokenizer=tokenizer,
            reply_format=reply_format,
            engine=engine,
            journal=journal,
            tracker=tracker,
            prompts=prompts,
            known=known,
            metrics=metrics,
            engine_context=address.context_length,
        )
        gateway.restore(nodes)
        stack.push_async_callback(gateway.settle)
        log.info("journal %s: %d turns restored", config.journal_path, len(nodes))
        yield Parts(
            config=config,
            gateway=gateway,
            tokenizer=tokenizer,
            reply_format=reply_format,
            known=known,
            metrics=metrics,
            inflight=Inflight(config.gateway.max_inflight),
            bodies=Bodies(MAX_BODIES, BODY_SECONDS),
            health=Health(
                url=address,
                engine_healthy=engine.health,
                fates=journal.outcomes,
                trainer=partial(journal.endpoint, "trainer"),
            ),
            address=address,
            started=time.monotonic(),
        )


def _load_model(config: Config) -> tuple[ChatTokenizer, ReplyFormat, str]:
    """Tokenizer and reply format of the served model, which belong together: the one must show the
    marks that the other reads. And what gave the format away."""
    tokenizer = ChatTokenizer.load(config.model.path)
    chosen, by = choose_format(
        config.gateway.reply_format,
        tokenizer.template,
        tokenizer.added_tokens.keys(),
        config.served_name,
    )
    log.info("reply format %s (by %s)", chosen.name, by)
    return tokenizer.showing(chosen.marks, chosen.inner), chosen, by


async def _follow(
    address: PolicyAddress,
    engine: EngineClient,
    journal: AsyncJournal,
    url: str,
    about: dict[str, str],
) -> None:
    """Look for the engine again and again, until cancelled. Where weights are adapters, say which
    ones requests use: the host unloads an old one when none does."""
    said: tuple[str, list[str]] | None = None
    failed = ""
    while True:
        await asyncio.sleep(POLL_SECONDS)
        try:
            await address.look()
            adapter = address.adapter()
            if adapter is not None and said != (using := (adapter.name, sorted(engine.in_use))):
                info = {**about, "adapter": using[0], "in_use": using[1]}
                with contextlib.suppress(OpenClawRLError):
                    await journal.write(partial(_publish_gateway, url, info))
                    said = using
            failed = ""
        except Exception as error:  # ended by it, no new engine or version would ever be found
            kind = type(error).__name__
            if kind != failed:  # once, not at every look
                log.error("looking for the engine failed (%s); it is tried again", kind)
            failed = kind


def _publish_gateway(url: str, info: dict[str, Any], journal: Journal) -> None:
    journal.publish("gateway", url, info, time.time())
