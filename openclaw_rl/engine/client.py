"""The client of an engine, whatever its dialect.

Guarantees of `generate`: the tokens given out are one unbroken reply, each with the version that
made it, whatever happens to the engine meanwhile. When the engine aborts (a weight update), drops
the connection, dies or moves to another address, generation goes on from prompt + tokens so far
with `max_new_tokens` reduced. It waits at most `wait_seconds` without a new token while the engine
is away, then raises EngineUnavailable. A refusal (ContextOverflow, EngineRefused) is raised at
once. A stream that its reader closes or cancels is aborted at the engine. Where weights are
adapters (`adapter`), each try asks for the present one, and its tokens carry that one's version,
so nothing is paused or aborted for a new one; an engine that lacks it is waited for.

Not kept across a resume: penalties count only the tokens since, a stop string that straddles the
cut is not found, and a grammar (`json_schema`, `regex`, `ebnf`) cannot go on in mid-word, so such a
reply is not resumed once it has tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from openclaw_rl.engine.dialect import Dialect, adapters_of
from openclaw_rl.engine.refusals import NO_SUCH_PATH, RETRIED_STATUS, Lost
from openclaw_rl.engine.sse import EventLines
from openclaw_rl.engine.transport import Transport
from openclaw_rl.engine.types import Abilities, Adapter, Delta, Finish, OnWait, Scores, join
from openclaw_rl.errors import ContextOverflow, EngineError, EngineRefused, EngineUnavailable

log = logging.getLogger(__name__)

_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""Seconds between tries; doubled each time."""
_FAULTS = 3
"""Tries of a request to which the engine answers with an error of its own (500)."""
_LOAD_SECONDS = 300.0
"""For an adapter to be read, perhaps over a network, by an engine under load."""


@dataclass(slots=True, eq=False)
class _Call:
    """One `generate` under way. `engine_rid` names its present request at the engine."""

    engine_rid: str
    grammar: bool
    on_wait: OnWait | None
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    response: aiohttp.ClientResponse | None = None
    adapter: Adapter | None = None
    tries: int = 0


class _Patience:
    """How long to go on without progress. Pauses grow; progress makes it fresh again, and time
    counts from the first pause after it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.progress()

    def progress(self) -> None:
        self._since: float | None = None
        self._pause = 0.0
        self._faults = 0

    def pause(self, reason: str, faulty: bool, now: float) -> float:
        """Seconds to wait before the next try (0 for the first). Raises EngineUnavailable."""
        self._faults += faulty
        if self._faults >= _FAULTS:
            raise EngineUnavailable(f"{reason}; gave up after {_FAULTS} tries")
        if self._since is None:
            self._since = now
        left = self._since + self._seconds - now
        if left <= 0:
            raise EngineUnavailable(f"{reason}; gave up after {self._seconds:g} s")
        pause, self._pause = self._pause, min(_LONGEST_PAUSE, self._pause * 2 or _FIRST_PAUSE)
        return min(pause, left)


class EngineClient:
    """See the module; `dialect` says how the engine is spoken to (a function is asked before every
    try). One instance serves any number of streams of one event loop.

    `url` may be a function: it is asked before every try, and None means "not there yet".
    `http` pools the connections; its connector wants `limit=0`, or streams queue behind each other.
    `silence_seconds`: after so long without a byte the engine is asked for a sign of life (a paused
    engine is silent and alive). `adapter` gives the weights to ask for, asked before every try
    (None: the model as the engine has it), and `key` the engine's key, where it published one.
    `join_deltas`: tokens that came in one piece are one
    delta, so that a reader that is behind catches up.
    """

    def __init__(
        self,
        dialect: Dialect | Callable[[], Dialect],
        url: str | Callable[[], str | None],
        http: aiohttp.ClientSession,
        *,
        adapter: Callable[[], Adapter | None] = lambda: None,
        key: Callable[[], str | None] = lambda: None,
        wait_seconds: float = 300.0,
        silence_seconds: float = 30.0,
        join_deltas: bool = False,
    ) -> None:
        self._spoken = dialect
        self._adapter = adapter
        self._transport = Transport(url, http, silence_seconds, key)
        self._join_deltas = join_deltas
        self._wait_seconds = wait_seconds
        self._calls: dict[str, _Call] = {}
        self._tasks: set[asyncio.Task[bool]] = set()

    @property
    def _dialect(self) -> Dialect:
        return self._spoken() if callable(self._spoken) else self._spoken

    @property
    def abilities(self) -> Abilities:
        """What the engine can do."""
        return self._dialect.abilities

    @property
    def in_use(self) -> frozenset[str]:
        """Names of the adapters that streams under way were asked from."""
        return frozenset(call.adapter.name for call in self._calls.values() if call.adapter)

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Mapping[str, Any],
        *,
        rid: str,
        routing_key: str | None = None,
        top_logprobs: int = 0,
        stream: bool = True,
        on_wait: OnWait | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Streams the reply to `ids`. Use it under `contextlib.aclosing`. `stream` False: nobody
        reads along, so the engine may give its tokens in few large deltas, which costs less.

        `sampling` goes to the engine as `sampling_params`; `max_new_tokens` (at least 1) is
        required. `rid` must be unique and of a fixed length: engines abort by prefix.
        """
        budget = sampling.get("max_new_tokens")
        if not isinstance(budget, int) or budget < 1:
            raise EngineRefused(400, "max_new_tokens must be a whole number of at least 1")
        if rid in self._calls:
            raise EngineError("a request with this rid is under way already")
        grammar = any(sampling.get(name) for name in _GRAMMARS)
        call = self._calls[rid] = _Call(rid, grammar, on_wait)
        patience = _Patience(self._wait_seconds)
        got: list[int] = []
        version, at_work = "", True
        try:
            while True:
                if call.aborted.is_set() or len(got) >= budget:
                    at_work = False
                    kind = Finish("length" if len(got) >= budget else "abort")
                    yield Delta([], [], version, kind)
                    return
                call.engine_rid = rid if call.tries == 0 else f"{rid}-{call.tries}"
                lost, at_work = Lost("the engine aborted the request"), True
                attempt = self._attempt(
                    call,
                    [*ids, *got],
                    _left_of(sampling, budget, len(got)),
                    routing_key,
                    top_logprobs,
                    stream,
                )
                try:
                    async with aclosing(attempt) as deltas:
                        async for delta in deltas:
                            if delta.ids:
                                got += delta.ids
                                patience.progress()
                            version = delta.version or version
                            at_work = delta.finish is None
                            finish = delta.finish
                            if call.aborted.is_set():
                                finish = finish or Finish("abort")
                            elif finish is not None and finish.type == "abort":
                                finish = None  # not our doing: the tokens count, the end does not
                                if not delta.ids:
                                    continue
                            yield delta if finish is delta.finish else replace(delta, finish=finish)
                            if finish is not None:
                                return
                except Lost as error:
                    lost = error
                except ContextOverflow:
                    if not got:
                        raise
                    at_work = False  # the reply has grown to the end of the context
                    yield Delta([], [], version, Finish("length"))
                    return
                at_work = False
                await self._hold(call, patience, lost, len(got))
        except (EngineRefused, EngineUnavailable):
            at_work = False
            raise
        finally:
            del self._calls[rid]
            if at_work and call.tries:
                self._spawn_abort(call.engine_rid)

    async def score(self, ids: Sequence[int], start: int, *, rid: str = "") -> list[float]:
        """Natural-log probability of each of `ids[start:]`, given all ids before it; not scaled by
        any temperature. `start` is at least 1: nothing precedes the first id."""
        return (await self.score_top(ids, start, 0, rid=rid)).log_probs

    async def score_top(self, ids: Sequence[int], start: int, top: int, *, rid: str = "") -> Scores:
        """As `score`, with the `top` likeliest tokens in the place of each of `ids[start:]`."""
        if start < 1 or start > len(ids):
            raise ValueError(f"start is {start}, but must be between 1 and {len(ids)}")
        if start == len(ids):
            return Scores([], [] if top else None)
        patience = _Patience(self._wait_seconds)
        fresh = False
        while True:
            dialect = self._dialect
            body = dialect.scoring(ids, start, top, rid, self._adapter())
            try:
                async with self._transport.exchange(
                    dialect.path, body, len(ids), fresh=fresh
                ) as exchange:
                    pieces: list[bytes] = []
                    while piece := await exchange.read():
                        pieces.append(piece)
                    exchange.finished = True
                scores = dialect.scores(b"".join(pieces), ids, start, top)
            except Lost as lost:
                await asyncio.sleep(patience.pause(str(lost), lost.faulty, _now()))
                fresh = True
                continue
            if scores is not None:
                return scores
            await asyncio.sleep(patience.pause("the engine aborted the request", False, _now()))

    async def abort(self, rid: str) -> None:
        """Ends the request: its stream gives `Finish("abort")` next. Unknown rids are ignored."""
        call = self._calls.get(rid)
        if call is None:
            await self._abort_at_engine(rid)
            return
        call.aborted.set()
        if not await self._abort_at_engine(call.engine_rid) and call.response is not None:
            call.response.close()  # nobody there to end the stream for us

    async def health(self) -> bool:
        """True if `/health` answers 200 within five seconds."""
        return await self._transport.ask("/health") == 200

    async def model_info(self) -> dict[str, Any]:
        """What the engine says of its model: `model_path`, `context_length` where it tells."""
        return self._dialect.info(await self._transport.fetch(*self._dialect.info_paths))

    async def models(self) -> Any:
        """The engine's own list of models and adapters, as it answers."""
        return await self._transport.fetch("/v1/models")

    async def adapters(self) -> frozenset[str]:
        """Names of the adapters that the engine holds. Raises EngineUnavailable."""
        return adapters_of(await self.models())

    async def load_adapter(self, name: str, path: str) -> None:
        """Let the engine load a PEFT folder, at the path where it sees it, under a new name.
        Requests under way go on. Raises EngineUnavailable or EngineRefused."""
        body = {"lora_name": name, "lora_path": path}
        await self._order(self._dialect.load_path, body)

    async def unload_adapter(self, name: str) -> None:
        """Let the engine forget an adapter. Raises EngineUnavailable or EngineRefused."""
        await self._order(self._dialect.unload_path, {"lora_name": name})

    async def close(self) -> None:
        """Waits for aborts under way. The HTTP session belongs to the caller."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._transport.close()

    async def _attempt(
        self,
        call: _Call,
        ids: list[int],
        sampling: dict[str, Any],
        routing_key: str | None,
        top: int,
        stream: bool,
    ) -> AsyncGenerator[Delta, None]:
        """One request, one stream, up to its finish; Lost if there was none."""
        adapter, dialect = self._adapter(), self._dialect
        call.adapter = adapter
        top = min(top, dialect.abilities.top_logprobs)  # fewer, rather than a refusal
        body, reader = dialect.generation(ids, sampling, call.engine_rid, adapter, top, stream)
        lines = EventLines()
        call.tries += 1
        fresh = call.tries > 1
        try:
            async with self._transport.exchange(
                dialect.path, body, len(ids), routing_key, fresh=fresh
            ) as exchange:
                call.response = exchange.response
                if call.aborted.is_set() and not dialect.abilities.abort_by_id:
                    return  # it was called off before there was a connection to close
                while chunk := await exchange.read():
                    waiting: Delta | None = None
                    for payload in lines.feed(chunk):
                        if payload == b"[DONE]":
                            continue
                        delta = reader.read(payload)
                        if waiting is not None:
                            joined = join(waiting, delta) if self._join_deltas else None
                            if joined is None:
                                yield waiting
                            delta = joined or delta
                        waiting = delta
                        if delta.finish is not None:
                            break
                    if waiting is not None:
                        exchange.finished = waiting.finish is not None
                        yield waiting
                        if exchange.finished:
                            return
        except EngineUnavailable as error:
            raise Lost(str(error), faulty=True) from None
        finally:
            call.response = None
        raise Lost("the engine ended the stream without a finish reason")

    async def _hold(self, call: _Call, patience: _Patience, lost: Lost, got: int) -> None:
        """Waits before the next try; raises where there must be none."""
        if call.aborted.is_set():
            return
        if got and call.grammar:
            raise EngineUnavailable(f"{lost}; a reply under a grammar cannot be resumed")
        pause = patience.pause(str(lost), lost.faulty, _now())
        what = str(lost).partition(":")[0]  # the engine's own words may quote the request
        log.info("%s; going on in %.2f s with %d tokens so far", what, pause, got)
        if call.on_wait is not None:
            call.on_wait(str(lost))
        if pause:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await call.aborted.wait()

    async def _abort_at_engine(self, engine_rid: str) -> bool:
        """Whether the engine took it. One without an id to abort by sees the connection close."""
        if not self.abilities.abort_by_id:
            return False
        answer = await self._transport.tell("/abort_request", {"rid": engine_rid})
        return answer is not None and answer[0] < 400

    async def _order(self, path: str, body: dict[str, Any]) -> None:
        answer = await self._transport.tell(path, body, _LOAD_SECONDS)
        if answer is None:
            raise EngineUnavailable(f"no answer to {path}")
        status, reason = answer
        if status == 404 and reason in NO_SUCH_PATH:
            raise EngineRefused(501, f"the engine has no {path}: was it started with adapters on?")
        if status in RETRIED_STATUS:
            raise EngineUnavailable(f"{path}: {reason} ({status})")
        if status >= 400:
            raise EngineRefused(status, f"{path}: {reason}")

    def _spawn_abort(self, engine_rid: str) -> None:
        """Not awaited by a reader that is being cancelled."""
        task = asyncio.ensure_future(self._abort_at_engine(engine_rid))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _left_of(sampling: Mapping[str, Any], budget: int, got: int) -> dict[str, Any]:
    """Sampling parameters for the rest of a reply that has `got` tokens."""
    params = {**sampling, "max_new_tokens": budget - got}
    if params.get("min_new_tokens"):
        params["min_new_tokens"] = max(0, params["min_new_tokens"] - got)
    return params


def _now() -> float:
    return asyncio.get_running_loop().time()
