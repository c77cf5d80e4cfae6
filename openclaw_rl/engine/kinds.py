"""The kinds of engines there are, by the names that settings use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

from openclaw_rl.engine.client import EngineClient
from openclaw_rl.engine.dialect import Dialect
from openclaw_rl.engine.sglang import SGLang
from openclaw_rl.engine.vllm import VLLM

KINDS: Mapping[str, type[SGLang] | type[VLLM]] = {"sglang": SGLang, "vllm": VLLM}

_CONNECT_SECONDS = 5.0


def dialect_of(kind: str | None, known: Mapping[str, Any] | None = None) -> Dialect:
    """How an engine of this kind is spoken to (None and "embedded": as SGLang is). `known`: what
    was found out of its abilities, by name."""
    dialect = KINDS.get(kind or "", SGLang)
    return dialect(dialect.abilities.told(known or {}))


def open_engine(
    kind: str | None,
    url: str | Callable[[], str | None],
    http: aiohttp.ClientSession,
    **options: Any,
) -> EngineClient:
    """The client of an engine of this kind."""
    return EngineClient(dialect_of(kind), url, http, **options)


def connections(api_key: str | None = None, **options: Any) -> aiohttp.ClientSession:
    """A pool for engines. No limit: a queue in it would hide what waits. `api_key` goes with each
    request, so the pool is for the engine's own address only."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=15.0),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
        **options,
    )
