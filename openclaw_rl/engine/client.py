"""The client of an engine, whatever its kind.

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
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

import aiohttp

from openclaw_rl.engine.api import (
    NO_REASON,
    RETRIED_STATUS,
    EngineAPI,
    Lost,
    Reader,
    models_of,
    reason_of,
)
from openclaw_rl.engine.sglang import SGLang
from openclaw_rl.engine.transport import Exchange, Transport
from openclaw_rl.engine.types import Abilities, Adapter, Delta, Finish, OnWait, Scores, join
from openclaw_rl.engine.vllm import VLLM
from openclaw_rl.errors import ContextOverflow, EngineError, EngineRefused, EngineUnavailable

log = logging.getLogger(__name__)

KINDS: Mapping[str, type[SGLang] | type[VLLM]] = {"sglang": SGLang, "vllm": VLLM}
"""By the names that settings use."""

_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""Seconds between tries; doubled each time."""
_FAULTS = 3
"""Tries of a request to which the engine answers with an error of its own (500)."""
_LOAD_SECONDS = 300.0
"""For an adapter to be read, perhaps over a network, by an engine under load."""


def engine_api(kind: str | None, known: Mapping[str, Any] = MappingProxyType({})) -> EngineAPI:
    """How an engine of this kind is spoken to (None and "embedded": as SGLang is). `known`: what
    was found out of its abilities, by name."""
    api = KINDS.get(kind or "", SGLang)
    found = {one.name: known[one.name] for one in fields(Abilities) if one.name in known}
    return api(replace(api.abilities, **found))


def open_engine(
    kind: str | None,
    url: str | Callable[[], str | None],
    http: aiohttp.ClientSession,
    **options: Any,
) -> EngineClient:
    """The client of an engine of this kind."""
    return EngineClient(engine_api(kind), url, http, **options)


@dataclass(slots=True, eq=False)
class _Call:
    """One `generate` under way. `engine_rid` names its present request at the engine."""

    rid: str
    engine_rid: str
    tries: int = 0
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    exchange: Exchange | None = None
    adapter: Adapter | None = None


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

    def pause(self, lost: Lost) -> float:
        """Seconds to wait before the next try (0 for the first). Raises EngineUnavailable."""
        now = asyncio.get_running_loop().time()
        self._faults += lost.faulty
        if self._faults >= _FAULTS:
            raise EngineUnavailable(f"{lost}; gave up after {_FAULTS} tries")
        if self._since is None:
            self._since = now
        left = self._since + self._seconds - now
        if left <= 0:
            raise EngineUnavailable(f"{lost}; gave up after {self._seconds:g} s")
        pause, self._pause = self._pause, min(_LONGEST_PAUSE, self._pause * 2 or _FIRST_PAUSE)
        return min(pause, left)


class EngineClient:
    """An `Engine`: see there for its methods. `api` says how the engine is spoken to. One instance
    serves any number of streams of one event loop.

    `api`, `url`, `adapter` and `key` may be functions, asked before every try: `url` gives None for
    "not there yet", `adapter` the weights to ask for (None: the model as the engine has it), `key`
    the engine's key, where it published one (None: what `http` sends).
    `http` pools the connections (`transport.connections`).
    `silence_seconds`: after so long without a byte the engine is asked for a sign of life.
    Tokens that came in one piece are one delta, so that a reader that is behind catches up.
    """

    def __init__(
        self,
        api: EngineAPI | Callable[[], EngineAPI],
        url: str | Callable[[], str | None],
        http: aiohttp.ClientSession,
        *,
        adapter: Callable[[], Adapter | None] = lambda: None,
        key: Callable[[], str | None] = lambda: None,
        wait_seconds: float = 300.0,
        silence_seconds: float = 30.0,
    ) -> None:
        self._api_of = api
        self._adapter = adapter
        self._transport = Transport(url, http, silence_seconds, key)
        self._wait_seconds = wait_seconds
        self._calls: dict[str, _Call] = {}
        self._aborts: set[asyncio.Task[bool]] = set()

    @property
    def _api(self) -> EngineAPI:
        return self._api_of() if callable(self._api_of) else self._api_of

    @property
    def abilities(self) -> Abilities:
        """What the engine can do."""
        return self._api.abilities

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
        interval: int | None = 1,
        on_wait: OnWait | None = None,
    ) -> AsyncGenerator[Delta, None]:
        budget = sampling.get("max_new_tokens")
        if not isinstance(budget, int) or budget < 1:
            raise EngineRefused(400, "max_new_tokens must be a whole number of at least 1")
        if rid in self._calls:
            raise EngineError("a request with this rid is under way already")
        call = self._calls[rid] = _Call(rid, rid)
        patience = _Patience(self._wait_seconds)
        got: list[int] = []
        version = ""
        try:
            while not call.aborted.is_set() and len(got) < budget:
                lost = Lost("the engine aborted the request")
                attempt = self._attempt(
                    call,
                    [*ids, *got],
                    _rest_of(sampling, budget, len(got)),
                    routing_key,
                    top_logprobs,
                    interval,
                )
                try:
                    async with aclosing(attempt) as deltas:
                        async for delta in deltas:
                            got += delta.ids
                            if delta.ids:
                                patience.progress()
                            version = delta.version or version
                            finish = delta.finish
                            if finish is None or finish.type == "abort":
                                finish = Finish("abort") if call.aborted.is_set() else None
                            if delta.ids or finish is not None:
                                yield replace(delta, finish=finish)
                            if finish is not None:
                                return
                except Lost as error:
                    lost = error
                except ContextOverflow:
                    if not got:
                        raise
                    budget = len(got)  # the reply has grown to the end of the context
                    continue
                if not call.aborted.is_set():
                    if got and any(sampling.get(name) for name in _GRAMMARS):
                        raise EngineUnavailable(f"{lost}; a reply under a grammar is not resumed")
                    await self._wait(call, patience.pause(lost), lost, on_wait)
            yield Delta([], [], version, Finish("length" if len(got) >= budget else "abort"))
        finally:
            del self._calls[rid]

    async def score(self, ids: Sequence[int], start: int, top: int = 0) -> Scores:
        if start < 1 or start > len(ids):
            raise ValueError(f"start is {start}, but must be between 1 and {len(ids)}")
        if start == len(ids):
            return Scores([], [] if top else None)
        patience = _Patience(self._wait_seconds)
        while True:
            api, lost = self._api, Lost("the engine aborted the request")
            body = api.scoring(ids, start, top, self._adapter())
            try:
                async with self._transport.exchange(api.path, body, len(ids)) as exchange:
                    answer = await exchange.read()
                if (scores := api.scores(answer, ids, start, top)) is not None:
                    return scores
            except Lost as error:
                lost = error
            await asyncio.sleep(patience.pause(lost))

    async def abort(self, rid: str) -> None:
        call = self._calls.get(rid)
        if call is None:
            await self._abort_at_engine(rid)
            return
        call.aborted.set()
        if not await self._abort_at_engine(call.engine_rid) and call.exchange is not None:
            call.exchange.close()  # nobody there to end the stream for us

    async def health(self) -> bool:
        """True if `/health` answers 200 within five seconds."""
        answer = await self._transport.ask("GET", "/health")
        return answer is not None and answer[0] == 200

    async def model_info(self) -> dict[str, Any]:
        return self._api.info(await self._transport.fetch(*self._api.info_paths))

    async def models(self) -> list[dict[str, Any]]:
        """The engine's own list of models and adapters (entries with a `parent`)."""
        return models_of(await self._transport.fetch("/v1/models"))

    async def adapters(self) -> frozenset[str]:
        return frozenset(str(one["id"]) for one in await self.models() if one.get("parent"))

    async def load_adapter(self, name: str, path: str) -> None:
        await self._order(self._api.load_path, {"lora_name": name, "lora_path": path})

    async def unload_adapter(self, name: str) -> None:
        """Let the engine forget an adapter. Raises EngineUnavailable or EngineRefused."""
        await self._order(self._api.unload_path, {"lora_name": name})

    async def close(self) -> None:
        """Waits for aborts under way. The HTTP session belongs to the caller."""
        if self._aborts:
            await asyncio.wait(self._aborts)

    async def _attempt(
        self,
        call: _Call,
        ids: list[int],
        sampling: dict[str, Any],
        routing_key: str | None,
        top: int,
        interval: int | None,
    ) -> AsyncGenerator[Delta, None]:
        """One request up to its finish; Lost if there was none. Aborted at the engine where its
        reader leaves it before."""
        api = self._api
        call.adapter = self._adapter()
        call.engine_rid = f"{call.rid}-{call.tries}" if call.tries else call.rid
        call.tries += 1
        top = min(top, api.abilities.top_logprobs)  # fewer, rather than a refusal
        body, reader = api.generation(ids, sampling, call.engine_rid, call.adapter, top, interval)
        try:
            async with self._transport.exchange(api.path, body, len(ids), routing_key) as exchange:
                call.exchange = exchange
                while payloads := await exchange.receive():
                    for delta in _read(reader, payloads):
                        exchange.finished = exchange.finished or delta.finish is not None
                        yield delta
                        if delta.finish is not None:
                            return
        except EngineUnavailable as error:
            raise Lost(str(error), faulty=True) from None
        except (GeneratorExit, asyncio.CancelledError):
            if call.exchange is None or not call.exchange.finished:
                self._spawn_abort(call.engine_rid)
            raise
        finally:
            call.exchange = None
        raise Lost("the engine ended the stream without a finish reason")

    async def _wait(self, call: _Call, seconds: float, lost: Lost, on_wait: OnWait | None) -> None:
        """Before the next try; an abort of ours ends it."""
        what = str(lost).partition(":")[0]  # the engine's own words may quote the request
        log.info("%s; going on in %.2f s", what, seconds)
        if on_wait is not None:
            on_wait(str(lost))
        if seconds:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await call.aborted.wait()

    async def _abort_at_engine(self, engine_rid: str) -> bool:
        """Whether the engine took it. One without an id to abort by sees the connection close."""
        if not self.abilities.abort_by_id:
            return False
        answer = await self._transport.ask("POST", "/abort_request", {"rid": engine_rid})
        return answer is not None and answer[0] < 400

    def _spawn_abort(self, engine_rid: str) -> None:
        """Not awaited by a reader that is being cancelled."""
        task = asyncio.ensure_future(self._abort_at_engine(engine_rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _order(self, path: str, body: dict[str, Any]) -> None:
        answer = await self._transport.ask("POST", path, body, _LOAD_SECONDS)
        if answer is None:
            raise EngineUnavailable(f"no answer to {path}")
        status, reason = answer[0], reason_of(answer[1])
        if status == 404 and reason in ("Not Found", NO_REASON):  # the path, not what was asked
            raise EngineRefused(501, f"the engine has no {path}: was it started with adapters on?")
        if status in RETRIED_STATUS:
            raise EngineUnavailable(f"{path}: {reason} ({status})")
        if status >= 400:
            raise EngineRefused(status, f"{path}: {reason}")


def _rest_of(sampling: Mapping[str, Any], budget: int, got: int) -> dict[str, Any]:
    """Sampling parameters for the rest of a reply that has `got` tokens."""
    params = {**sampling, "max_new_tokens": budget - got}
    if params.get("min_new_tokens"):
        params["min_new_tokens"] = max(0, params["min_new_tokens"] - got)
    return params


def _read(reader: Reader, payloads: Sequence[bytes]) -> list[Delta]:
    """What these events bring, up to the finish; joined where that loses nothing."""
    deltas: list[Delta] = []
    for payload in payloads:
        delta = reader.read(payload)
        if deltas and (joined := join(deltas[-1], delta)) is not None:
            deltas[-1] = joined
        else:
            deltas.append(delta)
        if delta.finish is not None:
            break
    return deltas
