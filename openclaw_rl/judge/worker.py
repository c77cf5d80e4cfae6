"""`JudgeWorker`: takes turns that have a next state and writes verdicts.

Guarantees: every claimed turn ends in a verdict, a counted drop, or back in the queue. A reward
that raises, takes too long or is no number drops its turn with that reason, and the worker goes
on. An endpoint that is away costs time, never a score: the turn waits with a growing pause, and
the worker asks for new turns only as often as the endpoint may be back. A worker that stops gives
its turns back; one that dies leaves claims that expire. No conversation text is logged.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from openclaw_rl.errors import ConfigError, EngineError, EngineUnavailable, JournalError
from openclaw_rl.journal.store import Journal
from openclaw_rl.judge.outcome import BadReward, Outcome, read_outcome
from openclaw_rl.judge.resources import Resources
from openclaw_rl.judge.samples import sample_of
from openclaw_rl.types import State, Turn, Verdict

log = logging.getLogger(__name__)

RewardFn = Callable[..., Any]

CLAIM_SECONDS = 60.0
"""A claim outlives its worker by at most this; a living worker renews it."""
POLL_SECONDS = 0.2
SWEEP_SECONDS = 2.0
"""Claims that expire and pauses that end change nothing in the journal: look without a change."""
STOP_SECONDS = 5.0
"""What is under way may end before a stopping worker gives it back."""
ABSTENTIONS = 3
"""Times that all judges of a turn may abstain before it is dropped as `no_verdict`."""
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 600.0
"""Seconds before a turn is tried again; doubled each time."""
LONGEST_REST = 30.0
"""Seconds between looks while an endpoint is away."""


class JudgeWorker:
    """See the module. `name` must be unique among the workers of a journal."""

    def __init__(
        self,
        journal: Journal,
        reward_fn: RewardFn,
        args: Any,
        resources: Resources,
        *,
        name: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._journal, self._reward_fn, self._args = journal, reward_fn, args
        self._resources, self._name, self._clock = resources, name, clock
        self._concurrency = max(1, int(getattr(args, "judge_concurrency", None) or 8))
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._done = asyncio.Event()
        self._serial = itertools.count(1)
        self._abstained: Counter[str] = Counter()
        self._away = 0
        """How often in a row an endpoint was found away."""
        self._rest_until = 0.0

    def stop(self) -> None:
        """Take no more turns; `run` returns soon."""
        self._stopping.set()

    async def run(self) -> None:
        """Judge until `stop`. Ends early only for a `ConfigError` of the reward."""
        renewal = asyncio.create_task(self._renew())
        swept = 0.0
        try:
            while not self._stopping.is_set():
                now = self._clock()
                changed = await asyncio.to_thread(self._journal.changed)
                # A clock that was set back must not put the next look off.
                due = changed or not 0 <= now - swept < SWEEP_SECONDS
                if due and not self._rests(now):
                    swept = now
                    await self._take_all()
                await self._wait(POLL_SECONDS)
        finally:
            renewal.cancel()
            await self._give_back()

    async def run_until_idle(self) -> None:
        """Judge what can be judged now, then return (tests, replays)."""
        while True:
            taken = await self._take()
            if not self._tasks and not taken:
                return
            await self._wait(None)

    async def _take_all(self) -> None:
        try:
            while await self._take():
                await self._wait(None)  # more may be waiting than there was room for
        except JournalError as error:
            log.warning("%s", error)

    # --- taking turns --------------------------------------------------------------------------

    async def _take(self) -> bool:
        """Start what there is room for; whether all room was used, so that more may wait."""
        room = self._concurrency - len(self._tasks)
        if room <= 0 or self._stopping.is_set():
            return room <= 0 and not self._stopping.is_set()
        now = self._clock()
        if self._rests(now):
            return False
        if self._away:
            room = 1  # one turn finds out whether the endpoint is back
        # A name for each claim, so that only what is under way is renewed: a turn that could not
        # be written back comes free by itself.
        claim = f"{self._name}/{next(self._serial)}"
        turns = await asyncio.to_thread(self._journal.claim, claim, room, now, CLAIM_SECONDS)
        for turn in turns:
            task = asyncio.create_task(self._judge(turn, claim), name=claim)
            self._tasks.add(task)
            task.add_done_callback(self._ended)
        return bool(turns) and len(turns) == room

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._done.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("judging a turn failed: %s", where_of(error))

    async def _wait(self, seconds: float | None) -> None:
        """Until a turn ends, a stop, or so long."""
        self._done.clear()
        if self._stopping.is_set() or (seconds is None and not self._tasks):
            return
        waits = [asyncio.ensure_future(self._stopping.wait())]
        if self._tasks:
            waits.append(asyncio.ensure_future(self._done.wait()))
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(CLAIM_SECONDS / 3)
            until = self._clock() + CLAIM_SECONDS
            for claim in {task.get_name() for task in self._tasks}:
                with suppress(JournalError):
                    await asyncio.to_thread(self._journal.extend_claims, claim, until)

    async def _give_back(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_SECONDS)
        unfinished = set(self._tasks)
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.wait(unfinished)
        for claim in {task.get_name() for task in unfinished}:
            await asyncio.to_thread(self._journal.release_claims, claim)
        await self._carry_counters()

    # --- one turn ------------------------------------------------------------------------------

    async def _judge(self, turn: Turn, claim: str) -> None:
        started = time.monotonic()
        try:
            outcome = await self._outcome(turn)
        except EngineUnavailable:
            await self._postpone(turn, claim, "judge_unavailable")
            self._rest()
        except EngineError:
            await self._postpone(turn, claim, "judge_refused")
        except BadReward as error:
            log.warning("turn %s: %s", turn.turn_id, error)
            await self._drop(turn, claim, error.reason)
        except ConfigError as error:
            # Nothing can be judged like this, but the turns must not suffer for it.
            log.error("%s", error)
            await self._postpone(turn, claim, "judge_misconfigured")
            self._rest()
        except TimeoutError:
            log.warning("turn %s: the reward took too long", turn.turn_id)
            await self._drop(turn, claim, "reward_timeout")
        except Exception as error:
            log.warning("turn %s: the reward failed: %s", turn.turn_id, where_of(error))
            await self._drop(turn, claim, "reward_failed")
        else:
            self._away, self._rest_until = 0, 0.0
            await self._settle(turn, claim, outcome, time.monotonic() - started)
        await self._carry_counters()

    async def _outcome(self, turn: Turn) -> Outcome:
        """Reward, and teacher where only a hint came. Raises what the reward function raises."""
        response = await self._resources.response_text(turn.output_ids, turn.reply)
        sample = sample_of(turn, response)
        async with asyncio.timeout(self._resources.timeout):
            result = await self._call(sample)
        key = getattr(self._args, "reward_key", None)
        outcome = read_outcome(result, len(turn.output_ids), key)
        if outcome.hint is not None and not outcome.asked_teacher and not self._no_distillation():
            lesson = await self._resources.teach(sample, [outcome.hint])
            if lesson is not None:
                outcome = replace(
                    outcome, teacher_log_probs=lesson.log_probs, teacher_topk=lesson.topk
                )
        elif self._resources.top_k and outcome.teacher_topk is None and outcome.teacher_log_probs:
            # Over the top K nothing is learnt of the sampled tokens alone: no signal.
            self._resources.count("teacher_topk_none")
            outcome = replace(outcome, teacher_log_probs=None)
        return outcome

    async def _call(self, sample: Any) -> Any:
        """The reward's result. A hook may raise anything: it must not end the judge."""
        try:
            return await self._result(sample)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # ours: a timeout or a stop
            raise BadReward("reward_failed", "the reward was cancelled") from None
        except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
            kind = type(error).__name__
            raise BadReward("reward_failed", f"the reward raised {kind}") from None

    async def _result(self, sample: Any) -> Any:
        if inspect.iscoroutinefunction(self._reward_fn):
            return await self._reward_fn(self._args, sample)
        # A plain function may compute for long: not on the event loop.
        result = await in_thread(self._reward_fn, self._args, sample)
        return await result if inspect.isawaitable(result) else result

    def _no_distillation(self) -> bool:
        return getattr(self._args, "w_opd", None) == 0

    async def _settle(self, turn: Turn, claim: str, outcome: Outcome, seconds: float) -> None:
        taught = outcome.teacher_log_probs is not None or outcome.teacher_topk is not None
        if outcome.abstained and not outcome.score and not taught:
            self._abstained[turn.turn_id] += 1
            if self._abstained[turn.turn_id] < ABSTENTIONS:
                await self._postpone(turn, claim, "no_verdict")
            else:
                await self._drop(turn, claim, "no_verdict")
            return
        self._abstained.pop(turn.turn_id, None)
        now = self._clock()
        verdict = Verdict(
            score=outcome.score,
            hint=outcome.hint,
            teacher_log_probs=outcome.teacher_log_probs,
            teacher_topk=outcome.teacher_topk,
            votes=outcome.votes,
            created=now,
        )
        # A turn whose only signal has no weight would take a place in a batch for nothing.
        use_score = getattr(self._args, "w_rl", None) != 0
        state = await asyncio.to_thread(
            self._journal.write_verdict, turn.turn_id, claim, verdict, now, use_score=use_score
        )
        log.info(
            "verdict turn=%s session=%s score=%s votes=%s hint_chars=%d teacher=%d state=%s ms=%d",
            turn.turn_id,
            turn.session_id,
            "none" if outcome.score is None else f"{outcome.score:g}",
            ",".join("-" if v is None else f"{v:g}" for v in outcome.votes) or "none",
            len(outcome.hint or ""),
            len(turn.output_ids) if taught else 0,
            "claim_lost" if state is None else state.value,
            seconds * 1000,
        )

    async def _postpone(self, turn: Turn, claim: str, reason: str) -> None:
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** max(0, turn.attempts - 1))
        retry_at = self._clock() + pause
        state = await asyncio.to_thread(
            self._journal.postpone, turn.turn_id, claim, reason, retry_at
        )
        if state is State.DROPPED:
            log.warning("turn %s: given up (%s)", turn.turn_id, reason)
            self._abstained.pop(turn.turn_id, None)
        else:
            log.info("turn %s: waits %.0f s (%s)", turn.turn_id, pause, reason)

    async def _drop(self, turn: Turn, claim: str, reason: str) -> None:
        self._abstained.pop(turn.turn_id, None)
        await asyncio.to_thread(
            self._journal.drop_claimed, turn.turn_id, claim, reason, self._clock()
        )

    def _rests(self, now: float) -> bool:
        """Whether an endpoint is given time to come back. No rest is longer than the longest:
        one that seems to be began before the clock was set back."""
        return now < self._rest_until <= now + LONGEST_REST

    def _rest(self) -> None:
        now = self._clock()
        if not self._rests(now):  # else: another turn of the same outage
            self._away += 1
            self._rest_until = now + min(LONGEST_REST, 2.0 ** min(self._away - 1, 10))

    async def _carry_counters(self) -> None:
        counted, self._resources.counters = self._resources.counters, Counter()
        for name, n in counted.items():
            await asyncio.to_thread(self._journal.count, name, n)


async def in_thread(function: Callable[..., Any], *values: Any) -> Any:
    """Run in a daemon thread of its own: a function that never returns must neither use up the
    pool that the journal needs nor keep the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result: Any = None
        failure: BaseException | None = None
        try:
            result = function(*values)
        except StopIteration:
            failure = RuntimeError("StopIteration")  # a future does not take one
        except BaseException as error:  # the thread ends here in any case
            failure = error
        with suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return await future


def where_of(error: BaseException) -> str:
    """Type and place of an error. Its message may hold conversation text and is left out."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"
