"""Serving by the embedded engine, from the trainer's own copy of the weights."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from argparse import Namespace

import torch

from openclaw_rl.errors import ConfigError, EngineError
from openclaw_rl.journal import Journal
from openclaw_rl.local.cache import round_up
from openclaw_rl.local.engine import BASE_VERSION, EngineCore
from openclaw_rl.local.model import LoadedModel
from openclaw_rl.local.server import EngineServer, serve_engine

log = logging.getLogger("openclaw_rl.host")

_CPU_KV_BYTES = 1 << 30
_KV_SHARE = 0.35
"""Of a card's memory that the weights leave free; the rest is for training steps. On 16 GB it gives
a 4B model the 16,000 tokens of docs/memory.md."""


class Embedded:
    """See `host.Serving`. A dead engine thread is an EngineError of `watch`."""

    def __init__(
        self, args: Namespace, loaded: LoadedModel, threads: int, journal: Journal
    ) -> None:
        self._port: int = args.engine_port
        self._loaded, self._journal = loaded, journal
        self.core = EngineCore(
            loaded,
            kv_tokens=args.engine_kv_tokens or kv_tokens(loaded),
            max_running=args.engine_max_streams,
            context_length=args.context_length,
            threads=args.engine_threads or threads,
        )
        wanted, holds = args.context_length, self.core.context_length
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

    @property
    def url(self) -> str | None:
        return None if self._server is None else self._server.url

    async def start(self, version: int) -> None:
        self.core.start()
        # The key of before, or clients that know it are refused until they look it up again.
        before = await asyncio.to_thread(self._journal.endpoint, "policy")
        key = None if before is None else before.info.get("key")
        self._server = await serve_engine(self.core, self._port, key=key)
        await asyncio.to_thread(self._announce, self._server, version)

    def publish(self, version: int, weights: dict[str, torch.Tensor]) -> None:
        if self._loaded.device.type == "cuda":
            torch.cuda.current_stream(self._loaded.device).synchronize()
        self.core.start()  # the weights of a resumed run come before anything is served
        self.core.publish(version, weights).result(timeout=300)
        if self._server is not None:
            self._announce(self._server, version)

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

    def _announce(self, server: EngineServer, version: int) -> None:
        info = {
            "engine": "embedded",
            "key": server.key,
            "pid": os.getpid(),
            "model_path": self._loaded.path,
            "context_length": self.core.context_length,
        }
        for role, url, served in (
            ("policy", server.url, str(version)),
            ("judge", server.base_url, BASE_VERSION),
            ("teacher", server.base_url, BASE_VERSION),
        ):
            self._journal.publish(role, url, {**info, "weight_version": served}, time.time())


def kv_tokens(loaded: LoadedModel) -> int:
    """Tokens of all sequences together that fit the memory that is there."""
    memory = _CPU_KV_BYTES
    if loaded.device.type == "cuda":
        memory = int(_KV_SHARE * torch.cuda.mem_get_info(loaded.device)[0])
    return memory // loaded.kv_shape.bytes_per_token(loaded.dtype)
