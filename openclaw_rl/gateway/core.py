"""The gateway without HTTP: places a request, renders it, lets the engine reply, records the turn.

Guarantees: the client sees the end of a reply only after its turn is in the journal (or after the
journal failed, which is counted and never disturbs the client); a turn whose client went away is
aborted at the engine and not recorded; what is recorded is exactly what was served.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing
from typing import Any, Protocol

from openclaw_rl.config import Config
from openclaw_rl.engine.chat import ChatTokenizer
from openclaw_rl.engine.types import Delta, Engine, OnWait
from openclaw_rl.errors import ConfigError, EngineError, OpenClawRLError
from openclaw_rl.gateway.auth import Caller
from openclaw_rl.gateway.feedback import Feedback
from openclaw_rl.gateway.known import KnownTurn, KnownTurns, compact
from openclaw_rl.gateway.metrics import Metrics
from openclaw_rl.gateway.prompts import Prompts
from openclaw_rl.gateway.recent import Endings, NewestTurns, RecentIds
from openclaw_rl.gateway.stops import StopCut
from openclaw_rl.gateway.turn import OpenTurn, fit_max_tokens, stop_strings, view_of
from openclaw_rl.journal.store import Journal
from openclaw_rl.journal.writer import AsyncJournal
from openclaw_rl.session.tracker import Tracker
from openclaw_rl.session.types import NextState, Placement
from openclaw_rl.types import Turn
from openclaw_rl.wire.errors import WireError, prompt_too_long
from openclaw_rl.wire.formats import ReplyFormat
from openclaw_rl.wire.reply import END_THINK, ReplyEvent
from openclaw_rl.wire.request import ChatRequest

log = logging.getLogger("openclaw_rl.gateway")

MAX_TURNS = 20_000
"""Turns that the session tracker keeps in memory."""

JOURNAL_SECONDS = 5.0
"""How long the end of a reply waits for its journal commit before it is served without."""


class Sink(Protocol):
    """Where a reply goes while it is made."""

    async def show(self, events: list[ReplyEvent], delta: Delta) -> None:
        """Take what the client may see now. Raises `ClientGone` when nobody listens any more."""


class ClientGone(Exception):
    """The client closed its connection."""


class Gateway:
    """Joins session, journal and engine. Lives on one event loop."""

    def __init__(
        self,
        config: Config,
        *,
        tokenizer: ChatTokenizer,
        reply_format: ReplyFormat,
        engine: Engine,
        journal: AsyncJournal,
        tracker: Tracker,
        prompts: Prompts,
        known: KnownTurns,
        metrics: Metrics,
        engine_context: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._format = reply_format
        self._engine = engine
        self._journal = journal
        self._tracker = tracker
        self._prompts = prompts
        self._known = known
        self._metrics = metrics
        self._clock = clock
        end = tokenizer.encode(END_THINK)
        self._end_of_reasoning = end[0] if len(end) == 1 else None
        context = config.gateway.context_length or tokenizer.context_length
        if not context:
            raise ConfigError("the model does not tell its context length: set --context-length")
        self._context, self._engine_context = context, engine_context
        self._unrecorded = RecentIds(MAX_TURNS)
        self._continued = RecentIds(MAX_TURNS)
        self._newest = NewestTurns(MAX_TURNS)
        self._endings = Endings(MAX_TURNS)
        self._tasks: set[asyncio.Task[Any]] = set()
        self.journal_error: str | None = None
        """Why the journal failed last, until it works again."""

    @property
    def context_length(self) -> int:
        """Tokens that prompt and reply may have together: the model's, or what its engine holds."""
        return min(self._context, self._engine_context() or self._context)

    async def begin(
        self, request: ChatRequest, caller: Caller, headers: Mapping[str, str], size: int
    ) -> OpenTurn:
        """Place and render a valid request; what it tells about the turn before is journaled.

        `headers` have lower-case names, `size` is the length of the body. Raises `WireError` for
        a prompt that does not fit the context.
        """
        started = time.perf_counter()
        now = self._clock()
        view = view_of(request, caller, headers)
        placement = self._without_lost_parent(self._tracker.place(view, now))
        if placement.kind == "main" and placement.next_state is not None:
            # Not awaited: the writer keeps the order, so it is in the journal before this turn is.
            self._continued.add(placement.next_state.turn_id)
            self._spawn(self._journal_next_state(placement, placement.next_state, now))
        prompt = await self._prompts.build(request, placement, size, self.context_length)
        if placement.parent_id is not None:
            tokens = "kept" if prompt.shares_tokens else "new"
            self._metrics.count("continued_turns", tokens=tokens)
        room = fit_max_tokens(
            request.max_tokens,
            self._config.gateway.max_tokens,
            len(prompt.ids),
            self.context_length,
        )
        if room < 1:
            raise prompt_too_long(len(prompt.ids), self.context_length)
        sampling = {"temperature": self._config.gateway.temperature, **request.sampling}
        sampling["max_new_tokens"] = room
        # Engines know them too; a model whose own configuration is wrong ends its turns as well.
        ends = {*sampling.get("stop_token_ids", ()), *self._tokenizer.eos_ids}
        sampling["stop_token_ids"] = sorted(ends)
        turn = OpenTurn(
            turn_id=uuid.uuid4().hex,
            owner=caller.owner,
            request=request,
            placement=placement,
            prompt=prompt,
            sampling=sampling,
            text=self._tokenizer.stream(),
            stops=StopCut(stop_strings(sampling)),
            parser=self._format.parser(
                request.tools,
                in_reasoning=prompt.in_reasoning,
            ),
            end_of_reasoning=self._end_of_reasoning,
            top_k=self._config.train.opd_top_k,
            created=now,
            started=started,
        )
        turn.prepare_seconds = time.perf_counter() - started
        self._metrics.observe("prepare", turn.prepare_seconds)
        self._metrics.count("identity", source=placement.source)
        return turn

    async def count(
        self, request: ChatRequest, caller: Caller, headers: Mapping[str, str], size: int
    ) -> int:
        """How many tokens the prompt of this request would have. Nothing is recorded, and
        no later request is placed otherwise because of it."""
        view = view_of(request, caller, headers)
        placement = self._without_lost_parent(self._tracker.look(view, self._clock()))
        return len((await self._prompts.build(request, placement, size)).ids)

    async def run(self, turn: OpenTurn, sink: Sink, on_wait: OnWait | None = None) -> None:
        """Let the engine reply into `sink`, then record the turn.

        Raises the engine's errors; cancellation and `ClientGone` abort at the engine. In all
        these cases nothing is recorded.
        """
        try:
            await self._generate(turn, sink, on_wait)
        except (asyncio.CancelledError, ClientGone):  # the engine client aborts what it leaves
            self._unfinished(turn, "disconnected")
            raise
        except Exception as error:
            self._unfinished(turn, type(error).__name__)
            raise
        # The reply is whole: it is recorded even if the client leaves in this very moment.
        await asyncio.shield(self._spawn(self._record(turn)))

    async def feedback(self, feedback: Feedback, caller: Caller) -> str:
        """Explicit feedback becomes the next state of the turn it names; returns the turn's id.

        Raises `WireError` 404 where the caller has no such turn, 409 where it has its next state.
        """
        turn_id = feedback.turn_id
        if feedback.session_id is not None:
            turn_id = self._newest.of(feedback.session_id, caller)
        turn = None if turn_id is None else await self._journal.turn(turn_id)
        if turn is None or not caller.may_name(turn.owner):
            raise WireError(404, "there is no such turn", code="turn_not_found")
        self._continued.add(turn.turn_id)
        write = self._journal.set_next_state(turn.turn_id, [feedback.message], self._clock())
        if not await write:
            raise WireError(
                409,
                "this turn has its next state already, or is none that is judged",
                code="turn_not_waiting",
            )
        self._metrics.count("feedback")
        return turn.turn_id

    async def end_session(self, session_id: str, caller: Caller) -> None:
        """Nothing follows in this session of the caller's: none of its turns waits any more."""
        owner = None if caller.anybody else caller.owner
        self._endings.note(session_id, owner, time.perf_counter())
        await self._journal.end_session(session_id, self._clock(), owner=owner)
        self._tracker.forget_session(session_id, owner)
        self._metrics.count("ended_sessions")

    def restore(self, nodes: Iterable[Turn]) -> None:
        """After a restart: which turn of each session is the newest."""
        for node in nodes:
            if node.kind == "main":
                self._newest.note(node.owner, node.session_id, node.turn_id)

    async def settle(self) -> None:
        """Wait for what still runs in the background (aborts, commits)."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    # -- parts ---------------------------------------------------------------------------------

    async def _generate(self, turn: OpenTurn, sink: Sink, on_wait: OnWait | None) -> None:
        deltas = self._engine.generate(
            turn.prompt.ids,
            dict(turn.sampling),
            rid=turn.turn_id,
            routing_key=turn.placement.session_id,
            top_logprobs=turn.asked_candidates,
            on_wait=on_wait,
        )
        async with aclosing(deltas):
            async for delta in deltas:
                if max(delta.ids, default=0) >= (self._tokenizer.vocab_size or math.inf):
                    raise EngineError("the engine gave a token that the model lacks: another one?")
                if turn.first_token_seconds is None:
                    turn.first_token_seconds = time.perf_counter() - turn.started
                    self._metrics.observe("first_token", turn.first_token_seconds)
                await sink.show(turn.take(delta), delta)

    async def _record(self, turn: OpenTurn) -> None:
        reply = turn.parser.message()
        placement, prompt = turn.placement, turn.prompt
        now = self._clock()
        late = any(one in self._continued for one in self._tracker.overtaken_by(placement))
        over = self._endings.since(placement.session_id, turn.owner, turn.started)
        head = self._tracker.commit(placement, turn.turn_id, reply, now, retried=late)
        record = dataclasses.replace(
            head,
            shares_tokens=prompt.shares_tokens,
            prompt_ids=prompt.ids,
            output_ids=turn.output_ids,
            output_logprobs=turn.logprobs,
            output_versions=turn.versions,
            finish_reason=turn.finish_reason,
            truncated=turn.finish_reason == "length",
            messages=prompt.messages,
            reply=reply,
            tools=turn.request.tools,
            template_kwargs=turn.request.template_kwargs,
            sampling=turn.sampling,
            rendered_len=prompt.rendered_len,
            rendered_sha=prompt.rendered_sha,
            created=turn.created,
            topk=turn.topk(),
            drop_reason=head.drop_reason or ("session_ended" if over else None),
        )
        started = time.perf_counter()
        recorded = await self._journaled(self._journal.write(self._writing(record, placement, now)))
        self._metrics.observe("commit", time.perf_counter() - started)
        if recorded:
            self._remember(turn, record)
        else:
            self._unrecorded.add(turn.turn_id)
        self._log(turn, recorded)

    def _writing(self, record: Turn, placement: Placement, now: float) -> Callable[[Journal], None]:
        retried_id = placement.retried_id
        if retried_id in self._continued:  # meanwhile, so this request was no retry of it
            retried_id = None

        def write(journal: Journal) -> None:
            if retried_id is not None:
                journal.drop(retried_id, "retried", now)
            journal.record_turn(record)

        return write

    async def _journal_next_state(
        self, placement: Placement, next_state: NextState, now: float
    ) -> None:
        def write(journal: Journal) -> None:
            journal.set_next_state(next_state.turn_id, next_state.messages, now)
            for turn_id in placement.superseded:
                journal.drop(turn_id, "retried", now)

        await self._journaled(self._journal.write(write))

    async def _journaled(self, write: Awaitable[Any]) -> bool:
        """Whether the journal took it. A journal that cannot is no reason to fail the client."""
        try:
            await asyncio.wait_for(write, JOURNAL_SECONDS)
        except (OpenClawRLError, OSError, TimeoutError) as error:
            self.journal_error = f"{type(error).__name__}: {error}"
            self._metrics.count("journal_failed")
            log.error("journal failed: %s", self.journal_error)
            return False
        self.journal_error = None
        return True

    def _remember(self, turn: OpenTurn, record: Turn) -> None:
        tokens = turn.prompt.ids + compact(turn.output_ids)
        known = KnownTurn(
            reply=record.reply,
            tokens=tokens,
            output_len=len(turn.output_ids),
            rendered_len=record.rendered_len,
            rendered_sha=record.rendered_sha,
        )
        self._known.put(turn.turn_id, known)
        if record.kind == "main":
            self._newest.note(record.owner, record.session_id, turn.turn_id)
        if record.parent_id is not None and record.shares_tokens:
            self._known.outgrow(record.parent_id)

    def _without_lost_parent(self, placement: Placement) -> Placement:
        """The tracker may know a turn that the journal failed to take: nothing hangs on it."""
        if placement.parent_id in self._unrecorded:
            return dataclasses.replace(placement, parent_id=None, matched=0, next_state=None)
        return placement

    def _unfinished(self, turn: OpenTurn, reason: str) -> None:
        self._metrics.count("unfinished_turns", reason=reason)
        if reason == "disconnected":
            self._spawn(self._journaled(self._journal.count("disconnected")))
        log.info(
            "turn %s session %s unfinished: %s after %d tokens, %.3f s",
            turn.turn_id,
            turn.placement.session_id,
            reason,
            len(turn.output_ids),
            time.perf_counter() - turn.started,
        )

    def _log(self, turn: OpenTurn, recorded: bool) -> None:
        kind = turn.placement.kind
        self._metrics.count("turns", kind=kind)
        self._metrics.count("prompt_tokens", len(turn.prompt.ids))
        self._metrics.count("cached_tokens", turn.cached_tokens)
        self._metrics.count("completion_tokens", len(turn.output_ids))
        log.info(
            "turn %s session %s by %s %s (%s) parent %s: prompt %d (%d cached, %s) reply %d %s, "
            "prepared %.1f ms, first token %.3f s, total %.3f s%s%s",
            turn.turn_id,
            turn.placement.session_id,
            turn.placement.source,
            kind,
            turn.placement.kind_reason,
            turn.placement.parent_id or "-",
            len(turn.prompt.ids),
            turn.cached_tokens,
            "continued" if turn.prompt.shares_tokens else "new",
            len(turn.output_ids),
            turn.finish_reason,
            turn.prepare_seconds * 1e3,
            turn.first_token_seconds or 0.0,
            time.perf_counter() - turn.started,
            "" if turn.lines_up() else ", log-probs missing",
            "" if recorded else ", NOT RECORDED",
        )

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("background work failed: %s", type(error).__name__)
