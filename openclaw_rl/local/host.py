"""The local host: a trainer, and what serves its weights, in one process.

The weights are served by the embedded engine, over the trainer's own copy of the base
(`embedded.py`), or as adapters by an external engine (`external.py`).

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

from openclaw_rl.engine import model_fingerprint
from openclaw_rl.errors import OpenClawRLError
from openclaw_rl.journal import Journal
from openclaw_rl.journal.lock import trainer_lock
from openclaw_rl.local.checkpoint import Checkpoints, Fingerprint
from openclaw_rl.local.device import device_of
from openclaw_rl.local.embedded import Embedded
from openclaw_rl.local.external import ExternalEngine
from openclaw_rl.local.model import LoadedModel, LoraSpec
from openclaw_rl.local.trainer import Trainer

log = logging.getLogger("openclaw_rl.host")

GIVE_WAY_SECONDS = 0.5  # at most so long between two micro-batches, or training would starve
WATCH_SECONDS = 0.5
STEP_SECONDS = 30.0  # time that the trainer has to give up what it is doing at a stop


class Serving(Protocol):
    """What serves the weights. `publish` is called by the trainer's thread, the rest by the event
    loop; `url` is None until requests are served."""

    @property
    def url(self) -> str | None: ...

    async def start(self, version: int) -> None:
        """Serve the checkpoint of this version, and publish the address."""

    def publish(self, version: int, weights: dict[str, torch.Tensor]) -> None:
        """Serve a newer one, saved already."""

    async def watch(self) -> None:
        """Called twice a second. Raises EngineError where serving has ended."""

    def busy(self) -> bool:
        """Whether training should wait for requests under way."""

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
        fingerprint: Fingerprint = {
            "base": model_fingerprint(args.hf_checkpoint),
            "lora_rank": lora.rank,
            "lora_alpha": lora.alpha,
            "target_modules": str(lora.target_modules),
        }
        checkpoints = Checkpoints(Path(args.save).expanduser(), fingerprint, args.keep_checkpoints)
        checkpoints.check()
        self.journal = Journal.open(args.journal_path)
        self.journal.bind(fingerprint)
        began = time.monotonic()
        self.loaded = LoadedModel.load(
            args.hf_checkpoint, dtype=args.dtype, device=device, lora=lora
        )
        half = max(1, (os.cpu_count() or 2) // 2)
        self.train_threads = args.train_threads or half
        self.serving: Serving
        if args.engine_url:
            context = args.context_length or self.loaded.context_length
            self.serving = ExternalEngine(args, self.journal, context)
        else:
            self.serving = Embedded(args, self.loaded, half, self.journal)
        self.trainer = Trainer(
            args,
            self.loaded.trainer_model(args.seed),
            self.journal,
            checkpoints,
            self.serving.publish,
            self._give_way,
        )
        log.info("[host] %s loaded in %.1f s (%s, %s)", type(self.loaded.model).__name__,
                 time.monotonic() - began, self.loaded.dtype, device)  # fmt: skip

    async def run(self) -> None:
        """Serve until `stop` or a signal; always leaves the engine and the trainer ended."""
        trainer = threading.Thread(target=self._train, name="trainer", daemon=True)
        try:
            serving = asyncio.create_task(self._serve(trainer))
            for number in (signal.SIGTERM, signal.SIGINT):
                # Refused outside the main thread (tests).
                with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                    asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
            with contextlib.suppress(asyncio.CancelledError):
                await serving
        finally:
            self.stop.set()
            await self.serving.close()
            if trainer.is_alive():
                await asyncio.to_thread(trainer.join, STEP_SECONDS)
            if trainer.is_alive():
                log.warning(
                    "[host] the trainer is in a step; its turns come back at the next start"
                )
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

    # -- trainer thread ----------------------------------------------------------------------------

    def _train(self) -> None:
        torch.set_num_threads(self.train_threads)  # of this thread only
        try:
            self.trainer.run()
        except Exception as error:
            if not self.stop.is_set():
                # Of others' errors the type, but not the message: it may quote a conversation.
                why = error if isinstance(error, OpenClawRLError) else type(error).__name__
                log.error("[train] training has stopped, serving goes on: %s", why)
                log.debug("[train] traceback", exc_info=error)
                self.journal.count("training_stopped")

    def _give_way(self) -> None:
        """On a GPU both threads share one device: let requests under way have it for a moment."""
        until = time.monotonic() + GIVE_WAY_SECONDS
        while self.serving.busy() and time.monotonic() < until and not self.stop.is_set():
            time.sleep(0.005)
