"""The kinds of engines there are, by the names that settings use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

from openclaw_rl.engine.client import EngineClient
from openclaw_rl.engine.sglang import SGLang, SGLangEngine
from openclaw_rl.engine.types import Abilities
from openclaw_rl.engine.vllm import VLLM, VLLMEngine

_KINDS: Mapping[str, Callable[..., EngineClient]] = {"sglang": SGLangEngine, "vllm": VLLMEngine}

_CONNECT_SECONDS = 5.0


def open_engine(
    kind: str | None,
    url: str | Callable[[], str | None],
    http: aiohttp.ClientSession,
    **options: Any,
) -> EngineClient:
    """The client of an engine of this kind (None and "embedded": SGLang's dialect)."""
    return _KINDS.get(kind or "", SGLangEngine)(url, http, **options)


def abilities_of(kind: str) -> Abilities:
    """What engines of this kind can do."""
    return VLLM.abilities if kind == "vllm" else SGLang.abilities


def connections(api_key: str | None = None, **options: Any) -> aiohttp.ClientSession:
    """A pool for engines. No limit: a queue in it would hide what waits. `api_key` goes with each
    request, so the pool is for the engine's own address only."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=15.0),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
        **options,
    )
