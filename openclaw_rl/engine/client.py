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
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import aiohttp
import orjson

from openclaw_rl.engine.kinds import GRAMMARS, EngineAPI, Generation, engine_api
from openclaw_rl.engine.transport import NO_REASON, RETRIED_STATUS, Lost, Transport, reason_of
from openclaw_rl.engine.types import Abilities, Adapter, Delta, Finish, OnWait, Scores, joined
from openclaw_rl.errors import ContextOverflow, EngineError, EngineRefused, EngineUnavailable

log = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""Seconds between tries; doubled each time."""
_FAULTS = 3
"""Tries of a request to which the engine answers with an error of its own (500)."""
_LOAD_SECONDS = 300.0
"""For an adapter to be read, perhaps over a network, by an engine under load."""


class _Patience:
    """How long to go on with `what` without progress. Pauses grow; progress makes it fresh again,
    and time counts from the first pause after it, which alone is logged."""

    def __init__(self, what: str, seconds: float, on_wait: OnWait | None = None) -> None:
        self._what, self._seconds, self._on_wait = what, seconds, on_wait
        self.progress()

    def progress(self) -> None:
        self._since: float | None = None
        self._pause = 0.0
        self._faults = 0

    async def wait(self, lost: Lost) -> None:
        """Until the next try (the first comes at once). Raises EngineUnavailable."""
        now = asyncio.get_running_loop().time()
        self._faults += lost.faulty
        if self._faults >= _FAULTS:
            raise EngineUnavailable(f"{lost}; gave up after {_FAULTS} tries")
        if self._since is None:
            self._since = now
            reason = str(lost).partition(":")[0]  # the engine's own words may quote the request
            log.info("%s: %s; trying again", self._what, reason)
        left = self._since + self._seconds - now
        if left <= 0:
            raise EngineUnavailable(f"{lost}; gave up after {self._seconds:g} s")
        seconds = min(self._pause, left)
        self._pause = min(_LONGEST_PAUSE, self._pause * 2 or _FIRST_PAUSE)
        if self._on_wait is not None:
            self._on_wait(str(lost))
        await asyncio.sleep(seconds)


class EngineClient:
    """An `Engine`: see there for `generate` and `score`. One instance serves any number of streams
    of one event loop.

    `kind` names the engine's kind (as for `engine_api`), or says how it is spoken to. That, `url`,
    `adapter` and `key` may be functions, asked before every try: `url` gives None for "not there
    yet", `adapter` the weights to ask for (None: the model as the engine has it), `key` the
    engine's key, where it published one (None: what `http` sends). `http` pools the connections
    (`transport.connections`). `silence_seconds`: after so long without a byte the engine is asked
    for a sign of life. Tokens that came in one piece are one delta, so that a reader that is behind
    catches up.
    """

    def __init__(
        self,
        kind: str | EngineAPI | Callable[[], EngineAPI] | None,
        url: str | Callable[[], str | None],
        http: aiohttp.ClientSession,
        *,
        adapter: Callable[[], Adapter | None] = lambda: None,
        key: Callable[[], str | None] = lambda: None,
        wait_seconds: float = 300.0,
        silence_seconds: float = 30.0,
    ) -> None:
        self._kind = engine_api(kind) if kind is None or isinstance(kind, str) else kind
        self._adapter = adapter
        self._transport = Transport(url, http, silence_seconds, key)
        self._wait_seconds = wait_seconds
        self._used = Counter[str]()
        """Streams under way by the adapter asked for, "" without one."""
        self._aborts: set[asyncio.Task[object]] = set()

    @property
    def _api(self) -> EngineAPI:
        return self._kind() if callable(self._kind) else self._kind

    @property
    def abilities(self) -> Abilities:
        """What the engine can do."""
        return self._api.abilities

    @property
    def in_use(self) -> frozenset[str]:
        """Names of the adapters that streams under way were asked from."""
        return frozenset(+self._used) - {""}

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
        patience = _Patience(f"request {rid}", self._wait_seconds, on_wait)
        got: list[int] = []
        tries = 0
        while len(got) < budget:
            api, adapter = self._api, self._adapter()
            name = adapter.name if adapter is not None else ""
            engine_rid = f"{rid}-{tries}" if tries else rid
            top = min(top_logprobs, api.abilities.top_logprobs)  # fewer, rather than a refusal
            rest = _rest_of(sampling, budget, len(got))
            asked = Generation([*ids, *got], rest, engine_rid, adapter, top, interval)
            body, read = api.generation(asked)
            sending = self._transport.exchange(api.path, body, len(ids) + len(got), routing_key)
            lost = Lost("the engine ended the stream without a finish reason")
            tries += 1
            self._used[name] += 1
            try:
                async with sending as exchange:
                    while not exchange.finished and (payloads := await exchange.receive()):
                        for delta in joined(map(read, payloads)):
                            finish = delta.finish
                            exchange.finished = exchange.finished or finish is not None
                            if finish is not None and finish.type == "abort":
                                lost = Lost("the engine aborted the request")
                                finish, delta = None, replace(delta, finish=None)
                            if delta.ids:
                                got += delta.ids
                                patience.progress()
                            if delta.ids or finish is not None:
                                yield delta
                            if finish is not None:
                                return
            except Lost as error:
                lost = error
            except ContextOverflow:
                if not got:
                    raise
                break  # the reply has grown to the end of the context
            except (GeneratorExit, asyncio.CancelledError):
                if not exchange.finished:
                    self._spawn_abort(engine_rid)
                raise
            finally:
                self._used[name] -= 1
            if len(got) < budget:
                if got and any(sampling.get(grammar) for grammar in GRAMMARS):
                    raise EngineUnavailable(f"{lost}; a reply under a grammar is not resumed")
                await patience.wait(lost)
        yield Delta([], [], "", Finish("length"))

    async def score(self, ids: Sequence[int], start: int, top: int = 0) -> Scores:
        if start < 1 or start > len(ids):
            raise ValueError(f"start is {start}, but must be between 1 and {len(ids)}")
        if start == len(ids):
            return Scores([], [] if top else None)
        patience = _Patience(f"scoring {len(ids) - start} tokens", self._wait_seconds)
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
            await patience.wait(lost)

    async def health(self) -> bool:
        """True if `/health` answers 200 within two seconds."""
        answer = await self._transport.ask("GET", "/health", seconds=2.0)
        return answer is not None and answer[0] == 200

    async def model_info(self) -> dict[str, Any]:
        """`model_path` and `context_length` of the engine's model. Raises as `models`, and
        EngineError where there is none."""
        for entry in await self.models():
            if not entry.get("parent"):
                return {
                    "model_path": entry.get("root") or entry["id"],
                    "context_length": entry.get("max_model_len"),
                }
        raise EngineError("the engine's list of models has no base model")

    async def models(self) -> list[dict[str, Any]]:
        """The engine's own list of models and adapters (entries with a `parent`). Raises
        EngineUnavailable, and EngineRefused where it has no such list, or refuses our key."""
        status, body = await self._transport.ask("GET", "/v1/models") or (503, b"")
        if status == 404:
            raise EngineRefused(404, "the engine does not know /v1/models")
        if status in (401, 403):
            raise EngineRefused(status, "the engine refuses our key (ENGINE_API_KEY)")
        try:
            answer = orjson.loads(body) if status < 400 else None
        except ValueError:
            answer = None
        if answer is None:
            raise EngineUnavailable(f"the engine does not answer /v1/models ({status})")
        data = answer.get("data") if isinstance(answer, dict) else None
        return [entry for entry in data or () if isinstance(entry, dict) and "id" in entry]

    async def adapters(self) -> frozenset[str]:
        """Names of the adapters that the engine holds. Raises EngineUnavailable."""
        return frozenset(str(one["id"]) for one in await self.models() if one.get("parent"))

    async def load_adapter(self, name: str, path: str) -> None:
        """Let the engine load a PEFT folder, at the path where it sees it, under a new name.
        Requests under way go on. Raises EngineUnavailable or EngineRefused."""
        await self._order(self._api.load_path, {"lora_name": name, "lora_path": path})

    async def unload_adapter(self, name: str) -> None:
        """Let the engine forget an adapter. Raises EngineUnavailable or EngineRefused."""
        await self._order(self._api.unload_path, {"lora_name": name})

    async def close(self) -> None:
        """Waits for aborts under way. The HTTP session belongs to the caller."""
        if self._aborts:
            await asyncio.wait(self._aborts)

    def _spawn_abort(self, engine_rid: str) -> None:
        """Not awaited by a reader that is being cancelled."""
        if (path := self._api.abort_path) is not None:
            asking = self._transport.ask("POST", path, {"rid": engine_rid})
            task: asyncio.Task[object] = asyncio.create_task(asking)
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
