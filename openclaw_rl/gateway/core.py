"""The gateway without HTTP: places a request, renders it, lets the engine reply, records the turn.

Guarantees: the client sees the end of a reply only after its turn is in the journal (or after the
journal failed, which is counted as `unrecorded` and never disturbs the client: such a turn is not
recorded later either); a turn whose client went away is aborted at the engine and not recorded;
what is recorded is exactly what was served.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from typing import Any

from openclaw_rl.config import Config
from openclaw_rl.engine.chat import ChatTokenizer
from openclaw_rl.engine.client import EngineClient
from openclaw_rl.engine.transport import connections
from openclaw_rl.errors import ConfigError, EngineError, OpenClawRLError
from openclaw_rl.gateway.access import Caller, Grace, Limit
from openclaw_rl.gateway.endpoint import EngineEndpoint
from openclaw_rl.gateway.prompts import Prompts
from openclaw_rl.gateway.replies import ClientGone, OpenTurn, Shown
from openclaw_rl.gateway.status import EngineState, Metrics
from openclaw_rl.journal.lock import gateway_lock
from openclaw_rl.journal.outcomes import Outcomes
from openclaw_rl.journal.store import Journal
from openclaw_rl.journal.writer import AsyncJournal
from openclaw_rl.session.identity import RequestView
from openclaw_rl.session.tracker import Tracker
from openclaw_rl.types import Message, Turn
from openclaw_rl.wire.dialect import ChatRequest, ReplyInfo, WireError, prompt_too_long
from openclaw_rl.wire.formats import ReplyFormat, choose_format
from openclaw_rl.wire.reply import opens_reasoning

log = logging.getLogger("openclaw_rl.gateway")

MAX_TURNS = 20_000
"""Turns that the session tracker keeps in memory."""
MAX_BODIES = 512
"""Requests that may be sending their bodies; `max_inflight` counts those that have sent it."""
JOURNAL_SECONDS = 5.0
"""How long the end of a reply waits for its journal commit before it is served without."""
STREAMS_PER_TOKEN = 10
"""A stream gets its tokens one by one where few are under way, and one more together for each so
many: a new request's first token does not queue behind everybody's hundredth."""
_OPERATORS = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "logit_bias",
        "frequency_penalty", "presence_penalty", "repetition_penalty",
    }
)  # fmt: skip
"""Sampling parameters that a client does not decide under `client_sampling = ignore`."""

Show = Callable[[Shown], Awaitable[None]]
"""Takes what the client may see now. Raises `ClientGone` when nobody listens any more."""


@asynccontextmanager
async def open_gateway(config: Config) -> AsyncIterator[Gateway]:
    """Open journal, tokenizer and connections; a restart picks every conversation up where the
    journal has it. On leaving, finish what is being written, then close."""
    async with AsyncExitStack() as stack:
        stack.enter_context(gateway_lock(config.journal_path))
        executor = stack.enter_context(ThreadPoolExecutor(2, thread_name_prefix="gateway"))
        tokenizer, reply_format, by = await asyncio.to_thread(_load_model, config)
        journal = await asyncio.to_thread(AsyncJournal.open, config.journal_path)
        stack.push_async_callback(journal.close)
        about = {"model": config.served_name, "reply_format": f"{reply_format.name} (by {by})"}
        await journal.write(Journal.publish, "gateway", config.gateway.url, about, time.time())
        endpoint = EngineEndpoint(config, journal)
        await endpoint.look()
        http = await stack.enter_async_context(
            connections(config.engine.api_key, read_bufsize=2**20)
        )
        engine = EngineClient(
            lambda: endpoint.api,
            endpoint.url,
            http,
            adapter=endpoint.adapter,
            key=endpoint.key,
            wait_seconds=config.gateway.engine_wait_seconds,
        )
        stack.push_async_callback(engine.close)
        following = asyncio.ensure_future(endpoint.follow(engine, config.gateway.url, about))
        stack.callback(following.cancel)
        gateway = Gateway(config, tokenizer, reply_format, engine, endpoint, journal, executor)
        await gateway.restore()
        stack.push_async_callback(gateway.settle)
        yield gateway


class Gateway:
    """Joins session, journal and engine. Lives on one event loop."""

    def __init__(
        self,
        config: Config,
        tokenizer: ChatTokenizer,
        reply_format: ReplyFormat,
        engine: EngineClient,
        endpoint: EngineEndpoint,
        journal: AsyncJournal,
        executor: ThreadPoolExecutor,
    ) -> None:
        context = config.gateway.context_length or tokenizer.context_length
        if not context:
            raise ConfigError("the model does not state its context length: set --context-length")
        self.config = config
        self.reply_format = reply_format
        self.endpoint = endpoint
        self.metrics = Metrics()
        self.prompts = Prompts(tokenizer, reply_format, journal, executor, self.metrics)
        self.started = time.monotonic()
        self.waiting: set[str] = set()
        """Turns under way that the engine has kept waiting."""
        self.inflight, self.bodies = Limit(config.gateway.max_inflight), Limit(MAX_BODIES)
        self.grace = Grace()
        self.journal_error: str | None = None
        """Why the journal failed last, until it works again."""
        self.failed_writes = 0
        self._context = context
        self._tokenizer = tokenizer
        self._engine = engine
        self._journal = journal
        self._tracker = Tracker(max_turns=MAX_TURNS, unnamed=config.gateway.unnamed)
        self._tasks: set[asyncio.Future[Any]] = set()

    @property
    def context_length(self) -> int:
        """Tokens that prompt and reply may have together: the model's, or what its engine holds."""
        return min(self._context, self.endpoint.context_length() or self._context)

    async def begin(
        self, request: ChatRequest, caller: Caller, headers: Mapping[str, str], size: int
    ) -> OpenTurn:
        """Place and render a valid request; what it tells about the turn before is journaled.

        `headers` have lower-case names, `size` is the length of the body. Raises `WireError` for
        a prompt that does not fit the context.
        """
        started, now = time.perf_counter(), time.time()
        placement = self._tracker.place(_view(request, caller, headers), now)
        parent_id, next_state = placement.turn.parent_id, placement.next_state
        if parent_id is not None and next_state is not None:

            def write(journal: Journal) -> None:
                journal.set_next_state(parent_id, next_state)

            # Not awaited: the writer keeps the order, so it is in the journal before this turn is.
            self._spawn(self._journaled(self._journal.write(write)))
        prompt = await self.prompts.build(placement, request, size, self.context_length)
        if parent_id is not None:
            self.metrics.continued.labels("kept" if prompt.shares_tokens else "new").inc()
        turn = OpenTurn(
            request=request,
            placement=placement,
            prompt=prompt,
            sampling=self._sampling(request, len(prompt.ids)),
            info=ReplyInfo(uuid.uuid4().hex, self.config.served_name, int(now), request),
            tokenizer=self._tokenizer,
            parser=self.reply_format.parser(
                request.tools, in_reasoning=opens_reasoning(prompt.text)
            ),
            top_k=self.config.train.opd_top_k if placement.turn.kind == "main" else 0,
            started=started,
        )
        self.metrics.prepare.observe(time.perf_counter() - started)
        self.metrics.identity.labels(placement.turn.source).inc()
        return turn

    async def count(
        self, request: ChatRequest, caller: Caller, headers: Mapping[str, str], size: int
    ) -> int:
        """How many tokens the prompt of this request would have. Nothing is recorded, and
        no later request is placed otherwise because of it."""
        placement = self._tracker.look(_view(request, caller, headers), time.time())
        return len((await self.prompts.build(placement, request, size)).ids)

    async def generate(self, turn: OpenTurn, show: Show) -> None:
        """Let the engine reply, showing what comes, then record the turn.

        Raises the engine's errors; cancellation and `ClientGone` abort at the engine. In all
        these cases nothing is recorded.
        """
        turn_id, alone = turn.info.turn_id, not turn.request.stream  # nobody reads along

        def on_wait(_: str) -> None:
            if turn_id not in self.waiting:
                self.waiting.add(turn_id)
                self.metrics.engine_waits.inc()

        deltas = self._engine.generate(
            turn.prompt.ids,
            turn.sampling,
            rid=turn_id,
            routing_key=turn.placement.turn.session_id,
            top_logprobs=turn.asked_candidates,
            interval=None if alone else max(1, self.inflight.now // STREAMS_PER_TOKEN),
            on_wait=on_wait,
        )
        highest = self._tokenizer.vocab_size or math.inf
        try:
            async with self.grace.reply(), aclosing(deltas):
                async for delta in deltas:
                    if max(delta.ids, default=0) >= highest:
                        raise EngineError("the engine gave a token that the model lacks")
                    if turn.first_token_seconds is None:
                        turn.first_token_seconds = time.perf_counter() - turn.started
                        self.metrics.first_token.observe(turn.first_token_seconds)
                    await show(turn.take(delta))
        except (asyncio.CancelledError, ClientGone):  # the engine client aborts what it leaves
            self._spawn(self._journal.write(Journal.count, "disconnected"))
            self._unfinished(turn, "disconnected")
            raise
        except Exception as error:
            self._unfinished(turn, type(error).__name__)
            raise
        finally:
            self.waiting.discard(turn_id)
        # The reply is whole: it is recorded even if the client leaves in this very moment.
        await asyncio.shield(self._spawn(self._record(turn)))

    async def feedback(
        self,
        message: Message,
        caller: Caller,
        turn_id: str | None = None,
        session_id: str | None = None,
    ) -> str:
        """`message` becomes the next state of that turn, or of the newest main turn of that
        session; returns the turn's id.

        Raises `WireError` 404 where the caller has no such turn, 409 where it has its next state.
        """

        def find(journal: Journal) -> Turn | None:
            if turn_id is not None:
                turn = journal.turn(turn_id)
                return turn if turn and caller.reach in (None, turn.owner) else None
            ids = reversed(journal.turn_ids(session_id=session_id, owner=caller.reach))
            turns = (turn for one in ids if (turn := journal.turn(one)))
            return next((t for t in turns if t.kind == "main" and not t.off_policy), None)

        turn = await self._journal.read(find)
        if turn is None:
            raise WireError(404, "no such turn", code="turn_not_found")
        if not await self._journal.write(Journal.set_next_state, turn.turn_id, [message]):
            raise WireError(
                409,
                "this turn already has its next state, or is not judged at all",
                code="turn_not_waiting",
            )
        return turn.turn_id

    async def end_session(self, session_id: str, caller: Caller) -> None:
        """Nothing follows in this session of the caller's: none of its turns waits any more."""
        self._tracker.end_session(session_id, caller.reach)
        await self._journal.write(Journal.end_session, session_id, owner=caller.reach)

    async def engine_state(self) -> EngineState:
        """`unknown`: no host has published an engine yet, `waiting`: it does not answer."""
        if self.endpoint.url() is None:
            return "unknown"
        return "ok" if await self._engine.health() else "waiting"

    async def counts(self) -> Outcomes | None:
        """The journal's counts, or None where it cannot be read."""
        with suppress(OpenClawRLError):
            return await self._journal.read(Journal.outcomes)
        return None

    async def trainer(self) -> Mapping[str, Any]:
        """What the trainer says of its last batch, if it has said anything."""
        with suppress(OpenClawRLError):
            if endpoint := await self._journal.read(Journal.endpoint, "trainer"):
                return endpoint.info
        return {}

    async def restore(self) -> None:
        """After a restart: take the trajectories up where the journal has them."""
        heads = await self._journal.read(Journal.heads, MAX_TURNS)
        self._tracker.restore(heads)
        log.info("journal %s: %d turns restored", self.config.journal_path, len(heads))

    async def settle(self) -> None:
        """Wait for what still runs in the background (aborts, commits)."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    # -- the engine ------------------------------------------------------------------------------

    def _sampling(self, request: ChatRequest, prompt_tokens: int) -> dict[str, Any]:
        """The parameters of the engine's request: the client's, where `client_sampling` lets it
        choose, and at most the tokens that the context has left. Raises `WireError` without any."""
        asked, config = request.sampling, self.config.gateway
        if config.client_sampling == "ignore":
            for name in sorted(asked.keys() & _OPERATORS):
                self.metrics.ignored_sampling.labels(name).inc()
            asked = {name: value for name, value in asked.items() if name not in _OPERATORS}
        left = self.context_length - prompt_tokens
        if left < 1:
            raise prompt_too_long(prompt_tokens, self.context_length)
        return {
            "temperature": config.temperature,
            **asked,
            "max_new_tokens": min(request.max_tokens or config.max_tokens, left),
            # Engines know them too; a model whose own configuration is wrong ends its turns too.
            "stop_token_ids": sorted({*asked.get("stop_token_ids", ()), *self._tokenizer.eos_ids}),
        }

    # -- the journal -----------------------------------------------------------------------------

    async def _record(self, open_turn: OpenTurn) -> None:
        placement = open_turn.placement
        head = self._tracker.commit(placement, open_turn.info.turn_id, open_turn.reply)
        turn = open_turn.complete(head)

        def write(journal: Journal) -> None:
            journal.supersede(placement.superseded)
            journal.record_turn(turn)

        started = time.perf_counter()
        recorded = await self._journaled(self._journal.write_within(JOURNAL_SECONDS, write))
        self.metrics.commit.observe(time.perf_counter() - started)
        if recorded:
            self.prompts.remember(turn)
        else:
            self._tracker.forget(turn.turn_id)  # nothing hangs on what the journal lacks
            self._spawn(self._journal.write(Journal.count, "unrecorded"))
        self._log(open_turn, turn, recorded)

    async def _journaled(self, write: Awaitable[Any]) -> bool:
        """Whether the journal took it. A failing journal must not fail the client."""
        try:
            in_time = await write is not False
            self.journal_error = None if in_time else f"no commit within {JOURNAL_SECONDS:g} s"
        except (OpenClawRLError, OSError) as error:
            self.journal_error = f"{type(error).__name__}: {error}"
        if self.journal_error is not None:
            self.failed_writes += 1
            self.metrics.journal_failed.inc()
            log.error("journal failed: %s", self.journal_error)
        return self.journal_error is None

    # -- what is said of it ----------------------------------------------------------------------

    def _unfinished(self, turn: OpenTurn, reason: str) -> None:
        self.metrics.unfinished.labels(reason).inc()
        log.info(
            f"turn {turn.info.turn_id} session {turn.placement.turn.session_id} unfinished: "
            f"{reason} after {len(turn.output_ids)} tokens, "
            f"{time.perf_counter() - turn.started:.3f} s"
        )

    def _log(self, open_turn: OpenTurn, turn: Turn, recorded: bool) -> None:
        self.metrics.turns.labels(turn.kind).inc()
        self.metrics.prompt_tokens.inc(turn.prompt_len)
        self.metrics.cached_tokens.inc(open_turn.cached_tokens)
        self.metrics.completion_tokens.inc(turn.output_len)
        tokens = "continued" if turn.shares_tokens else "new"
        log.info(
            f"turn {turn.turn_id} session {turn.session_id} by {turn.source} {turn.kind} "
            f"({turn.kind_reason}) parent {turn.parent_id or '-'}: prompt "
            f"{turn.prompt_len} ({open_turn.cached_tokens} cached, {tokens}) reply "
            f"{turn.output_len} {turn.finish_reason}, first token "
            f"{open_turn.first_token_seconds or 0.0:.3f} s, "
            f"total {time.perf_counter() - open_turn.started:.3f} s"
            f"{'' if len(turn.output_logprobs) == turn.output_len else ', log-probs missing'}"
            f"{'' if recorded else ', NOT RECORDED'}"
        )

    def _spawn(self, work: Awaitable[Any]) -> asyncio.Future[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("background work failed: %s", type(error).__name__)


def _view(request: ChatRequest, caller: Caller, headers: Mapping[str, str]) -> RequestView:
    return RequestView(
        messages=request.messages,
        headers=headers,
        owner=caller.owner,
        hints=request.hints,
        key_session=caller.key_session,
        has_tools=bool(request.tools),
    )


def _load_model(config: Config) -> tuple[ChatTokenizer, ReplyFormat, str]:
    """Tokenizer and reply format of the served model, which belong together: the one must show the
    marks that the other reads. And what gave the format away."""
    tokenizer = ChatTokenizer.load(config.model.path)
    chosen, by = choose_format(
        config.gateway.reply_format, tokenizer.template, tokenizer.added_tokens.keys()
    )
    log.info("reply format %s (by %s)", chosen.name, by)
    return tokenizer.showing(chosen.marks, chosen.inner), chosen, by
