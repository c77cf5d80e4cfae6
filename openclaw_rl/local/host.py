"""The local host: a trainer, and what serves its weights, in one process.

Guarantees: requests are served from before the first training step until after the last, whatever
the trainer does; what is served at a start is the newest checkpoint; addresses and the served
version are in the journal; SIGTERM and SIGINT end it cleanly (a step under way is given up, its
turns are given back). A dead embedded engine ends the process, so that a supervisor can start it
again.

Threads: the event loop (HTTP) is the main one; the embedded engine and the trainer have one each,
with their own number of intra-op threads, so that neither waits for the other's cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from argparse import Namespace
from pathlib import Path
from typing import Protocol

import torch

from openclaw_rl.engine.chat import ChatTokenizer
from openclaw_rl.errors import ConfigError, EngineError, OpenClawRLError
from openclaw_rl.guards import Probes
from openclaw_rl.journal import Journal
from openclaw_rl.journal.lock import trainer_lock
from openclaw_rl.local.cache import round_up
from openclaw_rl.local.checkpoint import Checkpoints, fingerprint_of
from openclaw_rl.local.device import device_of
from openclaw_rl.local.engine import BASE_VERSION, EngineCore
from openclaw_rl.local.external import ExternalEngine
from openclaw_rl.local.model import LoadedModel, LoraSpec
from openclaw_rl.local.server import EngineServer, serve_engine
from openclaw_rl.local.trainer import Trainer

log = logging.getLogger("openclaw_rl.host")

GIVE_WAY_SECONDS = 0.5  # at most so long between two micro-batches, or training would starve
WATCH_SECONDS = 0.5
STEP_SECONDS = 30.0  # time that the trainer has to give up what it is doing at a stop
HALF_OF_CORES = max(1, (os.cpu_count() or 2) // 2)
_CPU_KV_BYTES = 1 << 30
_KV_SHARE = 0.35
"""Of a card's memory that the weights leave free; the rest is for training steps. On 16 GB it gives
a 4B model the 16,000 tokens of docs/memory.md."""


class Serving(Protocol):
    """What serves the weights. The trainer's thread calls `publish` and `give_way`, the event loop
    the rest; `url` is None until requests are served."""

    url: str | None

    async def start(self, version: int) -> None:
        """Serve the checkpoint of this version, and publish the address."""

    def publish(self, version: int, weights: dict[str, torch.Tensor]) -> None:
        """Serve a newer one, saved already."""

    def give_way(self) -> None:
        """Let requests under way pass, where they are on the trainer's device."""

    async def watch(self) -> None:
        """Called twice a second. Raises EngineError where serving has ended."""

    async def close(self) -> None: ...


def run_host(args: Namespace) -> None:
    """Serve and train until SIGTERM or SIGINT. `args`: see `config.hook_args`. Raises `ConfigError`
    or `JournalError` before anything is served, `EngineError` where the engine died."""
    asyncio.run(Host(args).run())


class Host:
    """One run of the host. `started` is set once requests are served; `stop` ends the run."""

    def __init__(self, args: Namespace) -> None:
        self.stop, self.started = threading.Event(), threading.Event()
        self.args = args = Namespace(**vars(args) | {"stop_event": self.stop})
        device = device_of(args.device)
        self._alone = trainer_lock(args.journal_path)
        lora = LoraSpec(rank=args.lora_rank, alpha=args.lora_alpha)
        fingerprint = fingerprint_of(args.hf_checkpoint, lora.rank, lora.alpha)
        checkpoints = Checkpoints(Path(args.save).expanduser(), fingerprint, args.keep_checkpoints)
        checkpoints.check()
        probes = None
        if args.guards:
            probes = Probes.load(args.probes or "", ChatTokenizer.load(args.hf_checkpoint))
        self.journal = Journal.open(args.journal_path)
        self.journal.bind(fingerprint)
        began = time.monotonic()
        self.loaded = LoadedModel.load(
            args.hf_checkpoint, dtype=args.dtype, device=device, lora=lora
        )
        self.serving: Serving
        if args.engine_url:
            context = args.context_length or self.loaded.context_length
            self.serving = ExternalEngine(args, self.journal, context)
        else:
            self.serving = EmbeddedEngine(args, self.loaded, self.journal)
        self.trainer = Trainer(
            args,
            self.loaded.trainer_model(args.seed),
            self.journal,
            checkpoints,
            self.serving.publish,
            self.serving.give_way,
            probes,
        )
        log.info("[host] %s loaded in %.1f s (%s, %s)", type(self.loaded.model).__name__,
                 time.monotonic() - began, self.loaded.dtype, device)  # fmt: skip

    async def run(self) -> None:
        """Serve until `stop` or a signal; always leaves the engine and the trainer ended."""
        trainer = threading.Thread(target=self._train, name="trainer", daemon=True)
        try:
            serving = asyncio.create_task(self._serve(trainer))
            for number in (signal.SIGTERM, signal.SIGINT):
                with contextlib.suppress(RuntimeError, ValueError):  # not in the main thread: tests
                    asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
            with contextlib.suppress(asyncio.CancelledError):
                await serving
        finally:
            self.stop.set()
            await self.serving.close()
            if trainer.is_alive():
                await asyncio.to_thread(trainer.join, STEP_SECONDS)
            if trainer.is_alive():
                log.warning("[host] the trainer is in a step: the next start gives its turns back")
            else:
                self.journal.close()
                self._alone.close()
            log.info("[host] stopped")

    async def _serve(self, trainer: threading.Thread) -> None:
        self.trainer.resume()  # nothing is served yet that could wait for it
        # An engine may be slow to come up, or to load what it is told to.
        await self.serving.start(self.trainer.state.version)
        log.info("[host] engine at %s, version %s", self.serving.url, self.trainer.state.version)
        trainer.start()
        self.started.set()
        while not self.stop.is_set():
            await self.serving.watch()
            await asyncio.sleep(WATCH_SECONDS)

    def _train(self) -> None:
        torch.set_num_threads(self.args.train_threads or HALF_OF_CORES)  # of this thread only
        try:
            self.trainer.run()
        except Exception as error:
            if not self.stop.is_set():
                # Of others' errors the type, but not the message: it may quote a conversation.
                why = error if isinstance(error, OpenClawRLError) else type(error).__name__
                log.error("[train] training has stopped, serving goes on: %s", why)
                log.debug("[train] traceback", exc_info=error)
                self.journal.count("training_stopped")


class EmbeddedEngine:
    """The embedded engine, see `Serving`. A dead engine thread is an EngineError of `watch`."""

    def __init__(self, args: Namespace, loaded: LoadedModel, journal: Journal) -> None:
        self._args, self._loaded, self._journal = args, loaded, journal
        self._shares_gpu = loaded.device.type == "cuda"
        self.core = EngineCore(
            loaded,
            kv_tokens=args.kv_tokens or kv_tokens(loaded),
            max_running=args.max_streams,
            context_length=args.context_length,
            threads=args.engine_threads or HALF_OF_CORES,
        )
        wanted, holds = args.context_length or loaded.context_length, self.core.context_length
        if holds < wanted:
            short = (
                f"the KV cache holds {holds} tokens: give --kv-tokens {round_up(wanted)} or more"
            )
            if args.context_length:
                raise ConfigError(f"--context-length {wanted}: {short}")
            log.warning("[host] no prompt and reply of the model's %d tokens: %s", wanted, short)
        self._server: EngineServer | None = None
        self.url: str | None = None

    async def start(self, version: int) -> None:
        self.core.start()
        # The key of before, or clients that know it are refused until they look it up again.
        before = await asyncio.to_thread(self._journal.endpoint, "policy")
        key = None if before is None else before.info.get("key")
        self._server = await serve_engine(self.core, self._args.engine_port, key=key)
        self.url = self._server.url
        await asyncio.to_thread(self._announce, self._server, version)

    def publish(self, version: int, weights: dict[str, torch.Tensor]) -> None:
        if self._shares_gpu:
            torch.cuda.current_stream(self._loaded.device).synchronize()
        self.core.start()  # the weights of a resumed run come before anything is served
        self.core.publish(version, weights).result(timeout=300)
        if self._server is not None:
            self._announce(self._server, version)

    def give_way(self) -> None:
        until = time.monotonic() + GIVE_WAY_SECONDS
        while self._shares_gpu and any(self.core.load) and time.monotonic() < until:
            time.sleep(0.005)

    async def watch(self) -> None:
        if not self.core.alive:
            raise EngineError("the engine thread died; see the log above")

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
        policy = {**info, "weight_version": str(version)}
        base, now = {**info, "weight_version": BASE_VERSION}, time.time()
        self._journal.publish("policy", server.url, policy, now)
        for role in ("judge", "teacher"):
            self._journal.publish(role, server.base_url, base, now)


def kv_tokens(loaded: LoadedModel) -> int:
    """Tokens of all sequences together that fit the memory that is there."""
    memory = _CPU_KV_BYTES
    if loaded.device.type == "cuda":
        memory = int(_KV_SHARE * torch.cuda.mem_get_info(loaded.device)[0])
    return memory // loaded.kv_shape.bytes_per_token(loaded.dtype)
