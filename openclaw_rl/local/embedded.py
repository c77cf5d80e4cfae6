"""Serving by the embedded engine, from the trainer's own copy of the weights."""

from __future__ import annotations

import asyncio
import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from openclaw_rl.errors import EngineError
from openclaw_rl.local.engine import EngineCore, EngineLimits
from openclaw_rl.local.model import LoadedModel
from openclaw_rl.local.server import EngineServer, serve_engine

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
            limits=_limits(args, loaded),
            threads=getattr(args, "engine_threads", None) or threads,
        )
        self._server: EngineServer | None = None
        self.url: str | None = None

    async def start(self, version: int) -> None:
        self._start_core()
        self._server = await serve_engine(
            self.core,
            getattr(self._args, "engine_host", None) or "127.0.0.1",
            int(getattr(self._args, "engine_port", None) or 0),
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
        info: dict[str, Any] = {
            "engine": "embedded",
            "pid": os.getpid(),
            "model_path": self._loaded.path,
            "context_length": self.core.context_length,
        }
        assert self.url is not None
        self._announce_role("policy", self.url, {**info, "weight_version": str(version)})
        for role in ("judge", "teacher"):
            self._announce_role(role, f"{self.url}/base", {**info, "weight_version": "base"})


def _limits(args: Namespace, loaded: LoadedModel) -> EngineLimits:
    default = EngineLimits()
    tokens = getattr(args, "engine_kv_tokens", None)
    a_token = loaded.kv_shape.bytes_per_token(loaded.dtype)
    return EngineLimits(
        kv_bytes=int(tokens) * a_token if tokens else default.kv_bytes,
        max_running=int(getattr(args, "engine_max_streams", None) or default.max_running),
        context_length=getattr(args, "context_length", None),
    )
