"""Serving by the embedded engine, from the trainer's own copy of the weights."""

from __future__ import annotations

import asyncio
import logging
import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from openclaw_rl.errors import ConfigError, EngineError
from openclaw_rl.local.cache import round_up
from openclaw_rl.local.engine import EngineCore, EngineLimits
from openclaw_rl.local.model import LoadedModel
from openclaw_rl.local.server import EngineServer, serve_engine

log = logging.getLogger("openclaw_rl.host")

Announce = Callable[[str, str, dict[str, Any]], None]
"""Says in the journal where a role is served: role, address, what is known of it."""


class Embedded:
    """See `host.Serving`. A dead engine thread is an EngineError of `watch`."""

    def __init__(
        self, args: Namespace, loaded: LoadedModel, threads: int, announce: Announce
    ) -> None:
        self._args, self._loaded, self._announce_role = args, loaded, announce
        self.core = EngineCore(
            loaded,
            limits=limits(args, loaded),
            threads=getattr(args, "engine_threads", None) or threads,
        )
        wanted, holds = getattr(args, "context_length", None), self.core.context_length
        if wanted and holds < wanted:
            raise ConfigError(
                f"--context-length {wanted}: the KV cache holds {holds} tokens: "
                f"give --kv-tokens {round_up(wanted)} or more"
            )
        if not wanted and holds < loaded.context_length:
            log.warning(
                "[host] prompt and reply can have %d tokens together, not the model's %d: the KV "
                "cache holds no more (--kv-tokens)",
                holds,
                loaded.context_length,
            )
        self._server: EngineServer | None = None
        self.url: str | None = None

    async def start(self, version: int) -> None:
        self._start_core()
        self._server = await serve_engine(
            self.core, int(getattr(self._args, "engine_port", None) or 0)
        )
        self.url = self._server.url
        await asyncio.to_thread(self._announce, version)

    def publish(self, version: int, weights: dict[str, torch.Tensor]) -> None:
        if self._loaded.device.type == "cuda":
            torch.cuda.current_stream(self._loaded.device).synchronize()
        if self.url is None:
            self._start_core()  # the weights of a resumed run, before anything is served
        self.core.publish(version, weights).result(timeout=300)
        if self.url is not None:
            self._announce(version)

    async def watch(self) -> None:
        if not self.core.alive:
            raise EngineError("the engine thread died; see the log above")

    def busy(self) -> bool:
        """Whether requests are under way, which a trainer on the same GPU lets pass."""
        return self._loaded.device.type == "cuda" and any(self.core.load)

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
        await asyncio.to_thread(self.core.stop)

    def _start_core(self) -> None:
        if not self.core.alive:
            self.core.start()

    def _announce(self, version: int) -> None:
        assert self._server is not None
        info: dict[str, Any] = {
            "engine": "embedded",
            "key": self._server.key,
            "pid": os.getpid(),
            "model_path": self._loaded.path,
            "context_length": self.core.context_length,
        }
        self._announce_role("policy", self._server.url, {**info, "weight_version": str(version)})
        for role in ("judge", "teacher"):
            self._announce_role(role, self._server.base_url, {**info, "weight_version": "base"})


_KV_SHARE = 0.35
"""Of a card's memory that the weights leave free; the rest is for training steps. On 16 GB it gives
a 4B model the 16,000 tokens of docs/memory.md."""


def limits(args: Namespace, loaded: LoadedModel) -> EngineLimits:
    """What the settings leave to us is chosen from the memory that is there."""
    default = EngineLimits()
    tokens = getattr(args, "engine_kv_tokens", None)
    kv_bytes = default.kv_bytes
    if tokens:
        kv_bytes = int(tokens) * loaded.kv_shape.bytes_per_token(loaded.dtype)
    elif loaded.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(loaded.device)
        kv_bytes = int(_KV_SHARE * free)
    return EngineLimits(
        kv_bytes=kv_bytes,
        max_running=int(getattr(args, "engine_max_streams", None) or default.max_running),
        context_length=getattr(args, "context_length", None),
    )
