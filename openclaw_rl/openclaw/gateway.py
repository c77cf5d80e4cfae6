"""Asks the running gateway: what it serves, how it is, and how it takes a request like the
plugin's. An address that does not answer is None."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from openclaw_rl.openclaw.connect import Served, get


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, headers (any case) and JSON body (None where it is none)."""

    status: int
    headers: Message
    body: Any


@dataclass(frozen=True, slots=True)
class GatewayClient:
    """Talks to one gateway. `url` is its base address, without `/v1`."""

    url: str
    api_key: str

    def served(self) -> Served | None:
        """What it says it serves, or None where none answers as ours does."""
        answer = self._ask("/v1/models")
        data = get(answer.body, "data") if answer and answer.status == 200 else None
        entry = data[0] if isinstance(data, list) and data else {}
        match [get(entry, key) for key in ("id", "max_model_len", "max_completion_tokens")]:
            case [str(name), int(window), int(longest)]:
                return Served(f"{self.url}/v1", name, window, longest, self.api_key)
        return None

    def health(self) -> Answer | None:
        """`GET /healthz`."""
        return self._ask("/healthz")

    def probe(self, model: str) -> Answer | None:
        """A request as the plugin sends it, as a side turn of one token: never trained."""
        headers = {"x-session-id": "openclaw-rl-doctor", "x-turn-type": "side"}
        message = {"role": "user", "content": "ping"}
        body = {"model": model, "max_tokens": 1, "messages": [message]}
        # A small model on a busy CPU takes its time for the first token.
        return self._ask("/v1/chat/completions", body, headers, seconds=60.0)

    def _ask(
        self, path: str, body: Any = None, headers: Mapping[str, str] | None = None,
        seconds: float = 5.0,
    ) -> Answer | None:  # fmt: skip
        """The answer to a GET, or to a POST where there is a body."""
        own = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        data = None if body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **own, **(headers or {})}
        direct = build_opener(ProxyHandler({}))
        try:
            try:
                response = direct.open(Request(self.url + path, data, sent), timeout=seconds)
            except HTTPError as error:
                response = error
            with response:
                raw = response.read()
        except (OSError, HTTPException, ValueError):
            return None
        with contextlib.suppress(ValueError):
            return Answer(response.status, response.headers, json.loads(raw))
        return Answer(response.status, response.headers, None)
