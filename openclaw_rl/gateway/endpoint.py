"""Where the policy's engine is, followed wherever a host moves it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

from openclaw_rl.config import Config
from openclaw_rl.engine.client import EngineClient
from openclaw_rl.engine.kinds import engine_api
from openclaw_rl.engine.types import Adapter
from openclaw_rl.errors import OpenClawRLError
from openclaw_rl.journal.store import Endpoint, Journal
from openclaw_rl.journal.writer import AsyncJournal

log = logging.getLogger("openclaw_rl.gateway")

POLL_SECONDS = 0.5
"""How soon a newly published engine is found."""


class EngineEndpoint:
    """The address is fixed by the settings, or as the journal says by now. What the journal says of
    an engine elsewhere than at a fixed address does not count for that one."""

    def __init__(self, config: Config, journal: AsyncJournal) -> None:
        self._fixed = config.engine.url.rstrip("/") or None
        self._journal = journal
        self._endpoint: Endpoint | None = None
        self.api = engine_api(None)
        """How to speak to it, as the host found that one can."""

    def url(self) -> str | None:
        """The address, or None before any host has published one."""
        if self._fixed is not None:
            return self._fixed
        return self._endpoint.url if self._endpoint is not None else None

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
        return Adapter(str(self._told["adapter"]), self.weight_version() or "")

    def key(self) -> str | None:
        """The key of an engine that made one itself (the embedded engine)."""
        key = self._told.get("key")
        return key if isinstance(key, str) else None

    async def look(self) -> None:
        """Read the journal. An unreadable journal leaves the last address."""
        with contextlib.suppress(OpenClawRLError):
            self._endpoint = await self._journal.read(Journal.endpoint, "policy")
            self.api = engine_api(self._told.get("engine"), self._told.get("abilities", {}))

    async def follow(self, engine: EngineClient, url: str, about: Mapping[str, Any]) -> None:
        """Look again and again, until cancelled. Where weights are adapters, say which ones
        requests use: the host unloads an old one when none does."""
        said, failed = None, ""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                await self.look()
                adapter = self.adapter()
                using = (adapter.name, sorted(engine.in_use)) if adapter else None
                if using and using != said:
                    info = {**about, "adapter": using[0], "in_use": using[1]}
                    await self._journal.write(Journal.publish, "gateway", url, info, time.time())
                    said = using
                failed = ""
            except Exception as error:  # ended by it, no new engine or version would ever be found
                if failed != (failed := type(error).__name__):  # once, not at every look
                    log.error("looking for the engine failed (%s); it is tried again", failed)

    @property
    def _told(self) -> Mapping[str, Any]:
        endpoint = self._endpoint
        if endpoint is None or self._fixed not in (None, endpoint.url.rstrip("/")):
            return {}
        return endpoint.info
