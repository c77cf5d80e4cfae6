"""The embedded host: engine server and trainer over one copy of the weights, in one process.

Guarantees: requests are served from before the first training step until after the last, whatever
the trainer does; what is served at a start is the newest checkpoint; addresses and the served
version are in the journal; SIGTERM and SIGINT end it cleanly (a step under way is given up, its
turns are given back). A dead engine ends the process, so that a supervisor can start it again.

Threads: the event loop (HTTP) is the main one; the engine and the trainer have one each, with
their own number of intra-op threads, so that neither waits for the other's cores.
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
from typing import Any

import torch

from openclaw_rl.errors import ConfigError, EngineError, OpenClawRLError
from openclaw_rl.journal import Journal
from openclaw_rl.local.engine import EngineCore, EngineLimits
from openclaw_rl.local.model import LoadedModel, LoraSpec
from openclaw_rl.local.server import serve_engine
from openclaw_rl.local.train_args import complete
from openclaw_rl.local.trainer import Trainer
from openclaw_rl.rollout.lock import hold_leases

log = logging.getLogger("openclaw_rl.host")

GIVE_WAY_SECONDS = 0.5  # at most so long between two micro-batches, or training would starve
STEP_SECONDS = 30.0  # time that the trainer has to give up what it is doing at a stop


def run_host(args: Namespace) -> None:
    """Serve and train until SIGTERM or SIGINT. Raises `ConfigError` before anything is served,
    `EngineError` where the engine died.

    Reads `hf_checkpoint`, `dtype`, `device`, `lora_rank`, `lora_alpha`, `seed`, `journal_path`,
    `engine_host`, `engine_port`, `engine_max_streams`, `engine_kv_tokens`, `engine_threads`,
    `context_length`, `train_threads`, and what `train_args.complete` names.
    """
    asyncio.run(Host(args).run())


class Host:
    """One run of the host. `started` is set once requests are served; `stop` ends the run."""

    def __init__(self, args: Namespace) -> None:
        device = _device(getattr(args, "device", None))
        self.args = complete(args, on_gpu=device.type == "cuda")
        self._alone = hold_leases(Path(args.journal_path), str(self.args.host_name))
        self.stop = threading.Event()
        self.args.stop_event = self.stop  # the rollout function waits on it
        self.started = threading.Event()
        self.url: str | None = None
        half = max(1, (os.cpu_count() or 2) // 2)
        self.train_threads = getattr(args, "train_threads", None) or half
        spec = LoraSpec(
            rank=int(getattr(args, "lora_rank", None) or 16),
            alpha=float(getattr(args, "lora_alpha", None) or 32.0),
        )
        began = time.monotonic()
        self.loaded = LoadedModel.load(
            args.hf_checkpoint,
            dtype=getattr(args, "dtype", None) or "auto",
            device=device,
            lora=spec,
        )
        self.core = EngineCore(
            self.loaded,
            limits=self._limits(),
            threads=getattr(args, "engine_threads", None) or half,
        )
        self.journal = Journal.open(args.journal_path)
        self.trainer = Trainer(
            self.args,
            self.loaded.trainer_model(self.args.seed),
            self.journal,
            self._publish,
            give_way=self._give_way if device.type == "cuda" else lambda: None,
            stop=self.stop,
        )
        log.info(
            "[host] %s loaded in %.1f s (%s, %s)",
            type(self.loaded.model).__name__,
            time.monotonic() - began,
            str(self.loaded.dtype).removeprefix("torch."),
            device,
        )

    async def run(self) -> None:
        """Serve until `stop`; always leaves the engine and the trainer ended."""
        loop = asyncio.get_running_loop()
        stopping = asyncio.Event()

        def request_stop() -> None:
            self.stop.set()
            stopping.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            # Refused outside the main thread (tests).
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                loop.add_signal_handler(number, request_stop)
        self.core.start()
        trainer = threading.Thread(target=self._train, name="trainer", daemon=True)
        server = None
        try:
            await asyncio.to_thread(self.trainer.resume)
            server = await serve_engine(
                self.core,
                getattr(self.args, "engine_host", None) or "127.0.0.1",
                int(getattr(self.args, "engine_port", None) or 0),
            )
            self.url = server.url
            await asyncio.to_thread(self._announce, self.trainer.state.version)
            log.info("[host] engine at %s, version %s", server.url, self.core.version)
            trainer.start()
            self.started.set()
            while not self.stop.is_set():
                if not self.core.alive:
                    raise EngineError("the engine thread died; see the log above")
                try:
                    await asyncio.wait_for(stopping.wait(), 0.5)
                except TimeoutError:
                    continue
        finally:
            self.stop.set()
            if server is not None:
                await server.close()
            await asyncio.to_thread(self.core.stop)
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

    # -- trainer thread ----------------------------------------------------------------------------

    def _train(self) -> None:
        torch.set_num_threads(self.train_threads)  # of this thread only
        try:
            self.trainer.run()
        except OpenClawRLError as error:
            log.error("[train] training has stopped, serving goes on: %s", error)
            self.journal.count("training_stopped")
        except Exception as error:
            if not self.stop.is_set():
                log.exception("[train] training has stopped, serving goes on: %s", type(error))
                self.journal.count("training_stopped")

    def _publish(self, version: int, weights: dict[str, torch.Tensor]) -> None:
        if self.loaded.device.type == "cuda":
            torch.cuda.current_stream(self.loaded.device).synchronize()
        self.core.publish(version, weights).result(timeout=300)
        if self.url is not None:
            self._announce(version)

    def _announce(self, version: int) -> None:
        now = time.time()
        assert self.url is not None
        info: dict[str, Any] = {
            "engine": "embedded",
            "pid": os.getpid(),
            "model_path": self.loaded.path,
            "context_length": self.core.context_length,
        }
        self.journal.publish("policy", self.url, {**info, "weight_version": str(version)}, now)
        for role in ("judge", "teacher"):
            base = {**info, "weight_version": "base"}
            self.journal.publish(role, f"{self.url}/base", base, now)

    def _give_way(self) -> None:
        """On a GPU both threads share one device: let requests under way have it for a moment."""
        until = time.monotonic() + GIVE_WAY_SECONDS
        while any(self.core.load) and time.monotonic() < until and not self.stop.is_set():
            time.sleep(0.005)

    # -- parts -------------------------------------------------------------------------------------

    def _limits(self) -> EngineLimits:
        default = EngineLimits()
        tokens = getattr(self.args, "engine_kv_tokens", None)
        a_token = self.loaded.kv_shape.bytes_per_token(self.loaded.dtype)
        return EngineLimits(
            kv_bytes=int(tokens) * a_token if tokens else default.kv_bytes,
            max_running=int(getattr(self.args, "engine_max_streams", None) or default.max_running),
            context_length=getattr(self.args, "context_length", None),
        )


def _device(name: str | None) -> torch.device:
    if name and name != "auto":
        device = torch.device(name)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"--device {name}: torch sees no CUDA device")
        return device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
