"""The kinds of engines there are, by the names that settings use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

from openclaw_rl.engine.client import EngineClient
from openclaw_rl.engine.sglang import SGLangEngine
from openclaw_rl.engine.vllm import VLLMEngine

_KINDS: Mapping[str, Callable[..., EngineClient]] = {"sglang": SGLangEngine, "vllm": VLLMEngine}


def open_engine(
    kind: str | None,
    url: str | Callable[[], str | None],
    http: aiohttp.ClientSession,
    **options: Any,
) -> EngineClient:
    """The client of an engine of this kind (None and "embedded": SGLang's dialect)."""
    return _KINDS[kind if kind in _KINDS else "sglang"](url, http, **options)
