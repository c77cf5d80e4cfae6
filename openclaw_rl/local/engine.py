"""The embedded engine: one thread that owns the model and serves many sequences at once.

Guarantees:
- every token carries the version whose weights made it; `publish` takes effect between two steps
  and ends no request. A sequence under way keeps its keys and values of the older version;
- a request ends exactly once: stop, length or abort (then with the tokens so far). A failing step
  aborts the requests in it and nothing else;
- memory is bounded (`kv_tokens`): when it runs out, idle prefixes go first, then the youngest
  sequence is computed again later (its tokens and log-probs stay).

Policy goes before base, then order of arrival. One step is one forward pass over the next token of
every sequence that generates, plus pieces of prompts; what a row is given does not depend on who
else is in the step (but for rounding).
"""

from __future__ import annotations

import itertools
import logging
import queue
import random
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openclaw_rl.errors import EngineRefused, EngineUnavailable
from openclaw_rl.local.cache import Row, Slot, SlotPool, StepPlan
from openclaw_rl.local.model import LoadedModel
from openclaw_rl.local.sampling import GenerateRequest, TokenScore, draw, score

log = logging.getLogger(__name__)

BASE_VERSION = "base"
"""The weight version that replies of the base model (no adapter) carry."""
_SWITCH_SECONDS = 5e-4
_LAST_FAILURE = 5  # in a row ends the engine; one bad request is tried no more than 3 times
_WORTH_WAITING = 64  # tokens of a common prompt


class Chunk(NamedTuple):
    """What one step gave one request: tokens of one weight version. `prompt` holds the prompt's
    scores, in the first chunk; `finish` is SGLang's finish_reason, in the last one."""

    version: str
    cached_tokens: int
    tokens: tuple[TokenScore, ...] = ()
    prompt: tuple[TokenScore, ...] = ()
    finish: dict[str, Any] | None = None


Deliver = Callable[[Chunk], object]
"""Called by the engine thread with each chunk of a request; must be quick and not block."""


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request under way. `tokens` is prompt + output; the first `computed` of them have keys and
    values in `slot`."""

    request: GenerateRequest
    deliver: Deliver
    policy: bool
    order: int  # of arrival
    tokens: list[int]
    counts: Tensor | None  # of output tokens, where penalties ask
    slot: Slot | None = None
    computed: int = 0
    cached_tokens: int | None = None  # of the first admission
    prompt_scores: list[TokenScore] = field(default_factory=list)
    started: bool = False  # the prompt's scores are sent

    @property
    def rank(self) -> tuple[bool, int]:
        return not self.policy, self.order

    @property
    def pending(self) -> int:
        """Tokens to compute before the next one can be drawn."""
        return len(self.tokens) - self.computed

    @property
    def samples(self) -> bool:
        """Whether it generates; otherwise its prompt is scored only."""
        return self.request.sampling_params.max_new_tokens > 0

    @property
    def reusable(self) -> int:
        """Tokens whose logits nobody wants, so that a prefix up to there can be reused."""
        last = len(self.tokens) - 1
        return last if self.started else min(last, self.request.score_from)

    def wanted(self, end: int) -> range:
        """Positions of the next step, which ends at `end`, whose logits are wanted: those at p
        score the prompt's token at p + 1; behind the last token the next one is drawn."""
        start = max(self.computed, self.reusable)
        return range(start, end if self.samples else min(end, len(self.tokens) - 1))


class EngineCore:
    """Submit from any thread; everything is answered through the request's `deliver`.

    `kv_tokens`: room for keys and values of all sequences. `max_running`: sequences in one step.
    `prefill_tokens`: prompt tokens a step while others generate (None: 256 on a CPU, 2048
    elsewhere). `context_length`: None is the model's own. `threads`: of the engine thread only.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        kv_tokens: int = 1 << 15,
        max_running: int = 32,
        prefill_tokens: int | None = None,
        context_length: int | None = None,
        threads: int | None = None,
        seed: int | None = None,
    ) -> None:
        self.model = model
        self.pool = SlotPool(model.kv_shape, kv_tokens, model.dtype, model.device)
        # One sequence must always fit, or nothing could end.
        self.context_length = min(context_length or model.context_length, self.pool.budget)
        self._max_running = max_running
        self._prefill = prefill_tokens or (256 if model.device.type == "cpu" else 2048)
        self._threads = threads
        self._random = random.Random(seed)
        self.version = "0"
        model.set_adapter({})
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._waiting: list[_Sequence] = []
        self._running: list[_Sequence] = []
        self._stopping = False
        self._failures = 0
        self._order = itertools.count()
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    # -- called from any thread ------------------------------------------------------------

    def start(self) -> EngineCore:
        """Starts the thread, once. Also lets threads of this process take turns at the interpreter
        every 0.5 ms instead of 5: each operation of a step waits its turn (measured)."""
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
        if self._thread.ident is None:
            self._thread.start()
        return self

    def stop(self, timeout: float = 30.0) -> None:
        """Aborts what is under way and ends the thread."""
        self._stopping = True
        self._commands.put(lambda: None)
        if self._thread.is_alive():
            self._thread.join(timeout)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    @property
    def load(self) -> tuple[int, int]:
        """Requests running and waiting, as of now."""
        return len(self._running), len(self._waiting) + self._commands.qsize()

    def submit(self, request: GenerateRequest, deliver: Deliver, *, policy: bool = True) -> None:
        """Queues a request; `policy` says whether the adapter is applied. Raises EngineRefused(400)
        where it can never be served."""
        params = request.sampling_params
        n, limit, vocab = len(request.input_ids), self.context_length, self.model.vocab_size
        if n > limit or (n == limit and params.max_new_tokens > 0):
            raise EngineRefused(
                400,
                f"The input ({n} tokens) is longer than the model's context length "
                f"({limit} tokens).",
            )
        if max(request.input_ids) >= vocab or request.top_logprobs_num > vocab:
            raise EngineRefused(400, f"input_ids or top_logprobs_num: the vocabulary has {vocab}")
        if params.stop and self.model.tokenizer is None:
            raise EngineRefused(400, "stop strings need a tokenizer, and this model has none")
        sequence = _Sequence(
            request=request,
            deliver=deliver,
            policy=policy,
            order=next(self._order),
            tokens=list(request.input_ids),
            counts=torch.zeros(vocab, device=self.model.device) if params.penalised else None,
        )
        self._post(lambda: self._waiting.append(sequence))

    def abort(self, rid: str) -> None:
        """Ends the request `rid` with finish_reason abort and the tokens so far."""
        self._commands.put(lambda: self._abort("aborted on request", self._all(rid)))

    def publish(self, version: int, adapter_state: Mapping[str, Tensor]) -> Future[None]:
        """Serves this adapter (a PEFT LoRA state dict, copied here) under this version from the
        next step on. The future is done when it is live."""
        adapter = self.model.adapter(adapter_state)
        live: Future[None] = Future()

        def swap() -> None:
            self.pool.drop(self.version)
            self.model.set_adapter(adapter)
            self.version = str(version)
            live.set_result(None)

        self._post(swap)
        return live

    def _post(self, command: Callable[[], object]) -> None:
        if not self.alive:
            raise EngineUnavailable("the engine is not running")
        self._commands.put(command)

    # -- engine thread ---------------------------------------------------------------------

    def _loop(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)  # of this thread only
        with torch.inference_mode():
            while not self._stopping:
                self._run_commands(wait=not (self._running or self._waiting))
                try:
                    self._admit()
                    self._step()
                    self._failures = 0
                except Exception as error:
                    self._fail(error)
            self._run_commands(wait=False)
            self._abort("the engine stops", self._all())

    def _run_commands(self, wait: bool) -> None:
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return
            command()
            wait = False

    def _all(self, rid: str | None = None) -> list[_Sequence]:
        """All sequences, or those of one request."""
        every = [*self._running, *self._waiting]
        return [sequence for sequence in every if rid in (None, sequence.request.rid)]

    def _abort(self, message: str, sequences: list[_Sequence], **more: int) -> None:
        for sequence in sequences:
            self._remove(sequence)
            self._send(sequence, finish={"type": "abort", "message": message, **more})

    def _fail(self, error: Exception) -> None:
        # Only the type and torch's own words: there is no conversation text in them.
        log.exception("engine step failed")
        self._failures += 1
        self._stopping |= self._failures >= _LAST_FAILURE
        reason = f"engine step failed: {type(error).__name__}"
        self._abort(reason, list(self._running), status_code=500)
        self.pool.drop(self.version)
        self.pool.drop(BASE_VERSION)

    def _tag(self, sequence: _Sequence) -> str:
        return self.version if sequence.policy else BASE_VERSION

    def _remove(self, sequence: _Sequence) -> None:
        (self._waiting if sequence in self._waiting else self._running).remove(sequence)
        if sequence.slot is not None:
            self.pool.release(sequence.slot)
            sequence.slot = None

    def _retract(self, sequence: _Sequence) -> None:
        """Back among those that wait, without keys and values; everything sampled stays."""
        if sequence.slot is not None:
            sequence.slot.length = 0  # so that nothing of it is kept
        self._remove(sequence)
        sequence.computed = 0
        if not sequence.started:
            sequence.prompt_scores.clear()
        self._waiting.append(sequence)

    def _admit(self) -> None:
        """Moves waiting sequences into slots: policy first, then by arrival."""
        for sequence in sorted(self._waiting, key=lambda s: s.rank):
            if len(self._running) >= self._max_running:
                return
            if self._better_wait(sequence):
                continue
            got = self.pool.acquire(sequence.tokens, self._tag(sequence), sequence.reusable)
            if got is None:
                return  # whoever is first in line waits for room; nobody overtakes
            sequence.slot, sequence.computed = got
            if sequence.cached_tokens is None:
                sequence.cached_tokens = sequence.computed
            self._waiting.remove(sequence)
            self._running.append(sequence)

    def _better_wait(self, sequence: _Sequence) -> bool:
        """Whether a sequence now computing the same beginning will soon have more of it than any
        slot has (several votes on one prompt then cost one prompt)."""
        limit, tag = sequence.reusable, self._tag(sequence)
        return limit >= _WORTH_WAITING and any(
            other.pending > 1
            and other.slot is not None
            and other.slot.tag == tag
            and other.computed < limit
            and other.tokens[:limit] == sequence.tokens[:limit]
            for other in self._running
        )

    def _rows(self) -> list[tuple[_Sequence, int]]:
        """The sequences of the next step with the end of what is computed of each. Policy rows
        lead: the adapter is applied to the first rows of a step."""
        order = sorted(self._running, key=lambda s: s.rank)
        room = self._prefill * (1 if any(s.pending == 1 for s in order) else 2)
        rows = []
        for sequence in order:  # whoever is retracted for one of them comes behind it
            count = 1 if sequence.pending == 1 else min(sequence.pending, room)
            if count and self._make_room(sequence, sequence.computed + count):
                rows.append((sequence, sequence.computed + count))
                room -= count if sequence.pending > 1 else 0
        return rows

    def _make_room(self, sequence: _Sequence, length: int) -> bool:
        """Room for `length` tokens, retracting the youngest sequences if it must (False: this
        one was)."""
        while sequence.slot is not None:
            if self.pool.ensure(sequence.slot, length):
                return True
            self._retract(max(self._running, key=lambda s: s.rank))
        return False

    def _step(self) -> None:
        rows = self._rows()
        if not rows:
            return
        ids: list[int] = []
        positions: list[int] = []
        keep: list[int] = []  # of them, where logits are wanted
        plan: list[Row] = []
        for sequence, end in rows:
            slot, start = sequence.slot, sequence.computed
            assert slot is not None
            keep += [len(ids) - start + position for position in sequence.wanted(end)]
            ids += sequence.tokens[start:end]
            positions += range(start, end)
            slot.ids[start:end] = sequence.tokens[start:end]
            plan.append(Row(slot, start, end))
        self.model.switch.rows = sum(end - s.computed for s, end in rows if s.policy)
        inputs = torch.tensor([ids, positions], device=self.model.device)
        # Nothing kept (a piece of a prompt): one row, since an empty matrix is not everywhere fine.
        kept = torch.tensor(keep or [0], device=self.model.device)
        logits = self.model.forward(inputs[:1], inputs[1:], StepPlan(plan), kept)
        drawing: list[tuple[_Sequence, int]] = []  # with its row of the logits
        at = 0
        for (sequence, end), (slot, _, _) in zip(rows, plan, strict=True):
            places = sequence.wanted(end)
            sequence.computed = slot.length = end
            last = end == len(sequence.tokens)
            # The tokens behind these places; behind the last one there is none yet.
            given = sequence.tokens[places.start + 1 : places.stop + 1]
            sequence.prompt_scores += score(logits[at:], given, sequence.request.top_logprobs_num)
            at += len(places)
            if last and sequence.samples:
                drawing.append((sequence, at - 1))
            elif last:
                self._remove(sequence)
                self._send(sequence, finish={"type": "length", "length": 0})
        if drawing:
            self._draw(logits, drawing)

    def _draw(self, logits: Tensor, drawing: list[tuple[_Sequence, int]]) -> None:
        tokens = draw(
            logits[[row for _, row in drawing]],
            [sequence.request.sampling_params for sequence, _ in drawing],
            [self._random.random() for _ in drawing],
            [sequence.counts for sequence, _ in drawing],
            [sequence.request.top_logprobs_num for sequence, _ in drawing],
        )
        for (sequence, _), drawn in zip(drawing, tokens, strict=True):
            token = drawn.token
            sequence.tokens.append(token)
            if sequence.counts is not None:
                sequence.counts[token] += 1
            finish = self._finish(sequence, token)
            if finish is not None:
                self._remove(sequence)
            self._send(sequence, (drawn,), finish)

    def _finish(self, sequence: _Sequence, token: int) -> dict[str, Any] | None:
        """finish_reason after `token` was appended, or None."""
        params, tokens = sequence.request.sampling_params, sequence.tokens
        made = len(tokens) - len(sequence.request.input_ids)
        if token in params.stop_token_ids or (
            not params.ignore_eos and token in self.model.eos_ids
        ):
            return {"type": "stop", "matched": token}
        if params.stop:
            # A token is at least one byte, so as many tokens as the longest string has bytes, and
            # a few for a character cut in two.
            reach = min(made, max(len(stop.encode()) for stop in params.stop) + 4)
            text = self.model.tokenizer.decode(tokens[-reach:], skip_special_tokens=False)
            for stop in params.stop:
                if stop in text:
                    return {"type": "stop", "matched": stop}
        if made >= params.max_new_tokens or len(tokens) >= self.context_length:
            return {"type": "length", "length": made}
        return None

    def _send(
        self,
        sequence: _Sequence,
        tokens: tuple[TokenScore, ...] = (),
        finish: dict[str, Any] | None = None,
    ) -> None:
        prompt = () if sequence.started else tuple(sequence.prompt_scores)
        sequence.started = True
        chunk = Chunk(self._tag(sequence), sequence.cached_tokens or 0, tokens, prompt, finish)
        try:
            sequence.deliver(chunk)
        except RuntimeError:  # its event loop is closed
            log.warning("nobody waits for a request any more")
