"""Asks the running gateway: what it serves, how it is, and how it takes a request like the
plugin's. Every answer is plain values; an address that does not answer is `None`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from openclaw_rl.openclaw.change import Served
from openclaw_rl.openclaw.json5 import get

_SECONDS = 5.0
_PROBE_SECONDS = 60.0
"""A small model on a busy CPU takes its time for the first token."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Status, lower-case headers and JSON body (None where it is none)."""

    status: int
    headers: Mapping[str, str]
    body: Any


@dataclass(frozen=True, slots=True)
class Asker:
    """Talks to one gateway. `url` is its base address, without `/v1`."""

    url: str
    api_key: str

    def served(self) -> Served | None:
        """What it says it serves, or None where none answers as ours does."""
        reply = asyncio.run(self._ask("GET", "/v1/models"))
        if reply is None or reply.status != 200:
            return None
        data = get(reply.body, ("data",))
        entry = data[0] if isinstance(data, list) and data else {}
        keys = ("id", "max_model_len", "max_completion_tokens")
        name, window, longest = (get(entry, (key,)) for key in keys)
        if isinstance(name, str) and isinstance(window, int) and isinstance(longest, int):
            return Served(f"{self.url}/v1", name, window, longest, self.api_key)
        return None

    def health(self) -> Reply | None:
        """`GET /healthz`."""
        return asyncio.run(self._ask("GET", "/healthz"))

    def probe(self, model: str) -> Reply | None:
        """A request as the plugin sends it, as a side turn of one token: never trained."""
        headers = {"x-session-id": "openclaw-rl-doctor", "x-turn-type": "side"}
        message = {"role": "user", "content": "ping"}
        body = {"model": model, "max_tokens": 1, "messages": [message]}
        return asyncio.run(
            self._ask("POST", "/v1/chat/completions", _PROBE_SECONDS, headers=headers, json=body)
        )

    async def _ask(
        self, method: str, path: str, seconds: float = _SECONDS, **options: Any
    ) -> Reply | None:
        headers = {**options.pop("headers", {})}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        timeout = aiohttp.ClientTimeout(total=seconds)
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, ValueError):
            async with (
                aiohttp.ClientSession(timeout=timeout) as http,
                http.request(method, self.url + path, headers=headers, **options) as response,
            ):
                body = None
                with contextlib.suppress(aiohttp.ClientError, ValueError):
                    body = await response.json()
                names = {name.lower(): value for name, value in response.headers.items()}
                return Reply(response.status, names, body)
        return None
