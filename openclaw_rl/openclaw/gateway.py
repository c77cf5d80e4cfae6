"""Asks the running gateway: what it serves, how it is, and how it takes a request like the
plugin's. Every answer is plain values; an address that does not answer is `None`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from openclaw_rl.openclaw.connect import Served, get

_SECONDS = 5.0
_PROBE_SECONDS = 60.0
"""A small model on a busy CPU takes its time for the first token."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, lower-case headers and JSON body (None where it is none)."""

    status: int
    headers: Mapping[str, str]
    body: Any


@dataclass(frozen=True, slots=True)
class GatewayClient:
    """Talks to one gateway. `url` is its base address, without `/v1`."""

    url: str
    api_key: str

    def served(self) -> Served | None:
        """What it says it serves, or None where none answers as ours does."""
        answer = asyncio.run(self._ask("GET", "/v1/models"))
        if answer is None or answer.status != 200:
            return None
        data = get(answer.body, ("data",))
        entry = data[0] if isinstance(data, list) and data else {}
        keys = ("id", "max_model_len", "max_completion_tokens")
        match [get(entry, (key,)) for key in keys]:
            case [str(name), int(window), int(longest)]:
                return Served(f"{self.url}/v1", name, window, longest, self.api_key)
        return None

    def health(self) -> Answer | None:
        """`GET /healthz`."""
        return asyncio.run(self._ask("GET", "/healthz"))

    def probe(self, model: str) -> Answer | None:
        """A request as the plugin sends it, as a side turn of one token: never trained."""
        headers = {"x-session-id": "openclaw-rl-doctor", "x-turn-type": "side"}
        message = {"role": "user", "content": "ping"}
        body = {"model": model, "max_tokens": 1, "messages": [message]}
        ask = self._ask("POST", "/v1/chat/completions", _PROBE_SECONDS, headers, json=body)
        return asyncio.run(ask)

    async def _ask(
        self,
        method: str,
        path: str,
        seconds: float = _SECONDS,
        headers: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Answer | None:
        headers = dict(headers or {})
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
                return Answer(response.status, names, body)
        return None
