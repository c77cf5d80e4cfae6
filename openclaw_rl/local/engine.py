"""The embedded engine: one thread that owns the model and serves many sequences at once.

Guarantees:
- every token carries the version whose weights made it; `publish` takes effect between two
  steps, ends no request and forgets the old version's idle prefixes. A sequence under way keeps
  the keys and values it has, so its later tokens attend to states of the older version;
- a request ends exactly once: stop, length or abort (then with the tokens so far). A failing step
  aborts the requests in it and nothing else;
- memory is bounded (`kv_bytes`): when it runs out, idle prefixes go first, then the youngest
  sequence is computed again later (its tokens and log-probs stay);
- a long prompt is computed in pieces between the steps of the others.

Scheduling: policy before base, then order of arrival. One step is one forward pass over the next
token of every sequence that generates, plus pieces of prompts.
"""

from __future__ import annotations

import logging
import queue
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from openclaw_rl.errors import EngineError, EngineRefused, EngineUnavailable
from openclaw_rl.local.cache import SlotPool
from openclaw_rl.local.model import Adapter, LoadedModel
from openclaw_rl.local.request import BASE_VERSION, Chunk, Deliver, GenerateRequest
from openclaw_rl.local.sequence import Sequence
from openclaw_rl.local.step import StepRunner

log = logging.getLogger(__name__)

_SWITCH_SECONDS = 5e-4
_LAST_FAILURE = 5  # in a row ends the engine; one bad request is tried no more than 3 times

PauseMode = Literal["abort", "retract", "in_place"]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """`kv_bytes`: memory of all keys and values. `max_running`: sequences in one step.
    `prefill_tokens`: prompt tokens a step while others generate (None: 256 on a CPU, 2048
    elsewhere). `context_length`: None takes the model's own."""

    kv_bytes: int = 1 << 30
    max_running: int = 32
    prefill_tokens: int | None = None
    context_length: int | None = None


class EngineCore:
    """Submit from any thread; everything is answered through the request's `deliver`.

    `threads`: intra-op threads of the engine thread (None: torch's default), its own only.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        limits: EngineLimits | None = None,
        threads: int | None = None,
        version: int = 0,
        seed: int | None = None,
    ) -> None:
        self.model = model
        self.limits = limits or EngineLimits()
        self._threads = threads
        budget = self.limits.kv_bytes // model.kv_shape.bytes_per_token(model.dtype)
        self.pool = SlotPool(model.kv_shape, budget, model.dtype, model.device)
        # One sequence must always fit, or nothing could end.
        self.context_length = min(
            self.limits.context_length or model.context_length, self.pool.budget
        )
        on_cpu = model.device.type == "cpu"
        self._prefill = self.limits.prefill_tokens or (256 if on_cpu else 2048)
        self._random = random.Random(seed)
        self._runner = StepRunner(model)
        self._version = version
        model.set_adapter(None)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._paused = False
        self._stopping = False
        self._failures = 0
        self._orders = 0
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    # -- called from any thread ------------------------------------------------------------

    def start(self) -> EngineCore:
        """Starts the thread. Also lets threads of this process take turns at the interpreter
        every 0.5 ms instead of 5: each operation of a step waits its turn (measured, README)."""
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
        self._thread.start()
        return self

    def stop(self, timeout: float = 30.0) -> None:
        """Aborts what is under way and ends the thread."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    @property
    def version(self) -> str:
        return str(self._version)

    @property
    def load(self) -> tuple[int, int]:
        """Requests running and waiting, as of now."""
        return len(self._running), len(self._waiting) + self._commands.qsize()

    def submit(self, request: GenerateRequest, deliver: Deliver) -> None:
        """Queues a request. Raises EngineRefused(400) where it can never be served."""
        n, limit = len(request.ids), self.context_length
        if n > limit or (n == limit and request.sampling.max_new_tokens > 0):
            raise EngineRefused(
                400,
                f"The input ({n} tokens) is longer than the model's context length "
                f"({limit} tokens).",
            )
        if request.sampling.stop and self.model.tokenizer is None:
            raise EngineRefused(400, "stop strings need a tokenizer, and this model has none")
        if not self.alive:
            raise EngineUnavailable("the engine is not running")
        self._post(lambda: self._accept(request, deliver))

    def abort(self, rid: str | None) -> None:
        """Ends the request `rid` (None: all) with finish_reason abort and the tokens so far."""
        self._post(lambda: self._abort(rid))

    def pause(self, mode: PauseMode = "abort") -> Future[None]:
        """Stops stepping. abort: requests under way end. retract: they wait, to be computed
        again. in_place: they wait with what they have. Arrivals wait in all three."""
        return self._call(lambda: self._pause(mode))

    def resume(self) -> Future[None]:
        """Ends a pause."""

        def go() -> None:
            self._paused = False

        return self._call(go)

    def flush_cache(self) -> Future[None]:
        """Forgets all idle prefixes."""
        return self._call(self.pool.flush)

    def publish(
        self, version: int, adapter_state: Mapping[str, Tensor] | None, scale: float | None = None
    ) -> Future[None]:
        """Serves this adapter (a PEFT LoRA state dict, copied here; None: the bare base) under
        this version from the next step on. The future is done when it is live."""
        adapter = None
        if adapter_state is not None:
            adapter = self.model.adapter(adapter_state, scale)
        return self._call(lambda: self._publish(version, adapter))

    # -- engine thread ---------------------------------------------------------------------

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._wake.set()

    def _call(self, command: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()

        def run() -> None:
            try:
                command()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        if not self.alive:
            future.set_exception(EngineUnavailable("the engine is not running"))
        else:
            self._post(run)
        return future

    def _accept(self, request: GenerateRequest, deliver: Deliver) -> None:
        seed = request.sampling.seed
        self._orders += 1
        sequence = Sequence(
            request=request,
            deliver=deliver,
            order=self._orders,
            tokens=list(request.ids),
            prompt_len=len(request.ids),
            random=self._random if seed is None else random.Random(seed),
        )
        if request.sampling.penalised:
            sequence.counts = torch.zeros(self.model.vocab_size, device=self.model.device)
        self._waiting.append(sequence)

    def _abort(self, rid: str | None, message: str = "aborted on request") -> None:
        for sequence in [*self._running, *self._waiting]:
            if rid is None or sequence.request.rid == rid:
                self._end(sequence, {"type": "abort", "message": message})

    def _pause(self, mode: PauseMode) -> None:
        self._paused = True
        if mode == "abort":
            self._abort(None, "paused")
        elif mode == "retract":
            for sequence in list(self._running):
                self._retract(sequence)

    def _publish(self, version: int, adapter: Adapter | None) -> None:
        self.pool.drop(self._tag(True))
        self.model.set_adapter(adapter)
        self._version = version

    def _tag(self, policy: bool) -> str:
        return self.version if policy else BASE_VERSION

    def _end(self, sequence: Sequence, finish: dict[str, Any]) -> None:
        """Ends a sequence outside a step."""
        self._remove(sequence)
        chunk = Chunk(
            tokens=(),
            version=self._tag(sequence.request.policy),
            cached_tokens=sequence.cached_tokens or 0,
            finish=finish,
        )
        _deliver(sequence.deliver, [(sequence.request.rid, chunk)])

    def _remove(self, sequence: Sequence) -> None:
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence.slot is not None:
            self.pool.release(sequence.slot)
            sequence.slot = None

    def _retract(self, sequence: Sequence) -> None:
        """Back to the head of the queue, without keys and values."""
        slot = sequence.slot
        self._remove(sequence)
        if slot is not None and slot in self.pool.slots:
            self.pool.slots.remove(slot)
        sequence.restart()
        self._waiting.appendleft(sequence)

    def _loop(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)  # of this thread only
        with torch.inference_mode():
            while not self._stopping:
                idle = self._paused or not (self._running or self._waiting)
                if idle:
                    self._wake.wait()
                self._wake.clear()
                self._run_commands()
                if not self._paused and not self._stopping:
                    self._safe_step()
            self._run_commands()
            self._abort(None, "the engine stops")

    def _run_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _safe_step(self) -> None:
        try:
            self._admit()
            if self._running:
                self._step()
            self._failures = 0
        except Exception as error:
            # Only the type and torch's own words: there is no conversation text in them.
            log.exception("engine step failed")
            self._failures += 1
            reason = f"engine step failed: {type(error).__name__}"
            for sequence in list(self._running):
                self._end(sequence, {"type": "abort", "message": reason, "status_code": 500})
            self.pool.flush()
            if self._failures >= _LAST_FAILURE:
                self._stopping = True

    def _admit(self) -> None:
        """Moves waiting sequences into slots: policy first, then by arrival."""
        if not self._waiting:
            return
        for sequence in sorted(self._waiting, key=lambda s: (not s.request.policy, s.order)):
            if len(self._running) >= self.limits.max_running:
                return
            tag = self._tag(sequence.request.policy)
            limit = min(len(sequence.tokens) - 1, sequence.score_from)
            if sequence.prompt_sent:
                limit = len(sequence.tokens) - 1
            if self._better_wait(sequence, tag, limit):
                continue
            got = self.pool.acquire(sequence.tokens, tag, limit)
            if got is None:
                if not self._running:
                    raise EngineError("one sequence does not fit the cache")  # __init__ forbids it
                return  # whoever is first in line waits for room; nobody overtakes
            sequence.slot, sequence.computed = got
            if sequence.cached_tokens is None:
                sequence.cached_tokens = sequence.computed
            self._waiting.remove(sequence)
            self._running.append(sequence)

    def _better_wait(self, sequence: Sequence, tag: str, limit: int) -> bool:
        """Whether a sequence now computing the same beginning will soon have more of it than any
        slot has (several votes on one prompt then cost one prompt)."""
        ids = sequence.tokens[:limit]
        for other in self._running:
            slot = other.slot
            if slot is None or slot.tag != tag or other.pending <= 1 or limit < 64:
                continue
            if slot.length < limit and other.tokens[: len(ids)] == ids:
                return True
        return False

    def _step(self) -> None:
        rows: list[tuple[Sequence, int]] = []
        # Policy rows lead: the adapter is applied to the first rows of a step.
        order = sorted(self._running, key=lambda s: (not s.request.policy, s.order))
        generating = any(s.pending == 1 for s in order)
        room = self._prefill if generating else 2 * self._prefill
        for sequence in order:
            if sequence not in self._running:
                continue  # retracted for one before it
            count = min(sequence.pending, room) if sequence.pending > 1 else 1
            if count == 0 or not self._make_room(sequence, sequence.computed + count):
                continue
            if sequence.pending > 1:
                room -= count
            rows.append((sequence, count))
        rows = [(s, n) for s, n in rows if s in self._running]
        if not rows:
            return
        version = {True: self._tag(True), False: self._tag(False)}
        results = self._runner.run(rows, self.context_length)
        grouped: dict[Deliver, list[tuple[str, Chunk]]] = {}
        for sequence, tokens, finish in results:
            prompt = None
            if not sequence.prompt_sent:
                sequence.prompt_sent = True
                prompt = tuple(sequence.prompt_scores)
                sequence.prompt_scores.clear()
            chunk = Chunk(
                tokens=tokens,
                version=version[sequence.request.policy],
                cached_tokens=sequence.cached_tokens or 0,
                prompt=prompt,
                finish=finish,
            )
            grouped.setdefault(sequence.deliver, []).append((sequence.request.rid, chunk))
            if finish is not None:
                self._remove(sequence)
        for deliver, chunks in grouped.items():
            _deliver(deliver, chunks)

    def _make_room(self, sequence: Sequence, length: int) -> bool:
        """Room for `length` tokens, retracting the youngest sequences if it must (False: this
        one was)."""
        assert sequence.slot is not None
        while not self.pool.ensure(sequence.slot, length):
            if len(self._running) == 1:
                raise EngineError("one sequence does not fit the cache")
            youngest = max(self._running, key=lambda s: (not s.request.policy, s.order))
            self._retract(youngest)
            if youngest is sequence:
                return False
        return True


def _deliver(deliver: Deliver, chunks: list[tuple[str, Chunk]]) -> None:
    """A receiver that is gone (its event loop closed) must not end the others' step."""
    try:
        deliver(chunks)
    except RuntimeError:
        log.warning("a receiver of %d requests is gone", len(chunks))
