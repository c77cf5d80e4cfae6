"""The judge: takes turns that have a next state, asks the reward, writes verdicts.

Guarantees: every claimed turn ends in a verdict, a counted drop, or back in the queue, and only
while this worker's claim holds it. Claims are renewed by a thread, so a reward that blocks the
event loop keeps them; a worker that lost one (the machine slept) abandons that turn's task, and it
never claims a turn that it is still judging. A reward that raises, takes too long or is no number
drops its turn with that reason. An endpoint that is away costs time, never a score: the turn waits
with a growing pause, and new turns are taken only as often as the endpoint may be back. A worker
that stops gives its turns back; one that dies leaves claims that expire. Several may run on one
journal. Logs hold ids and numbers only.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from cachetools import LRUCache

from openclaw_rl.errors import ConfigError, EngineError, EngineUnavailable, JournalError
from openclaw_rl.hooks import load_hook
from openclaw_rl.journal import Journal
from openclaw_rl.judge.models import Models
from openclaw_rl.judge.practice import Practice
from openclaw_rl.judge.reward import (
    TEACHER_KEYS,
    BadReward,
    RewardFn,
    call_reward,
    read_reward,
    turn_sample,
    where_of,
)
from openclaw_rl.types import Turn, Verdict

log = logging.getLogger(__name__)

CLAIM_SECONDS, RENEW_SECONDS = 60.0, 5.0
"""A claim outlives its worker by at most the first; a living worker renews it this often."""
POLL_SECONDS = 0.2
SWEEP_SECONDS = 2.0
"""Claims that expire and pauses that end change nothing in the journal: look without a change."""
STOP_SECONDS = 5.0
"""What is under way may end before a stopping worker gives it back."""
ABSTENTIONS = 3
"""A turn of which all judges abstain so often is dropped as `no_verdict`."""
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 600.0
"""Seconds before a turn is tried again; doubled each time."""
REST_SECONDS = 5.0
"""Between looks while an endpoint is away."""


async def run_judge(args: Any) -> None:
    """Judge the turns of `args.journal_path` by `args.custom_rm_path` until SIGTERM or SIGINT.

    Raises `HookError` where the reward cannot be loaded, `JournalError` where the journal cannot
    be opened.
    """
    path = args.custom_rm_path
    reward_fn = load_hook(path, default_name="custom_rm", flag="--custom-rm-path")
    journal = await asyncio.to_thread(Journal.open, args.journal_path)
    models = args.judge_models = Models(args, journal)
    name = f"judge-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    worker = JudgeWorker(journal, reward_fn, args, name=name)
    rule = load_hook(
        args.standing_rule_path, default_name="standing_rule", flag="--standing-rule-path"
    )
    practice = asyncio.create_task(Practice(journal, models, args, rule).run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread
            loop.add_signal_handler(number, worker.stop)
    log.info("judge %s: reward %s", name, path)
    try:
        await worker.run()
    finally:
        practice.cancel()
        await models.close()
        await asyncio.to_thread(journal.close)


class JudgeWorker:
    """See the module. `args` are complete, with `judge_models`; `name` must be unique among the
    workers of a journal."""

    def __init__(
        self,
        journal: Journal,
        reward_fn: RewardFn,
        args: Any,
        *,
        name: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._journal, self._reward_fn, self._args = journal, reward_fn, args
        self._models: Models = args.judge_models
        self._name, self._clock = name, clock
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """By turn id."""
        self._claims: dict[str, str] = {}
        """The claims that are to be renewed, by turn id; read by the renewing thread too."""
        self._abstained: LRUCache[str, int] = LRUCache(4096)
        """How often all judges abstained, by turn id: an outage in between is no abstention."""
        self._serial = itertools.count(1)
        self._stopping, self._woken = False, asyncio.Event()
        self._rest_until = 0.0
        """Until then an endpoint that was found away is given time to come back."""

    def stop(self) -> None:
        """Take no more turns; `run` returns soon."""
        self._stopping = True
        self._woken.set()

    async def run(self) -> None:
        """Judge until `stop`."""
        ended, loop = threading.Event(), asyncio.get_running_loop()
        threading.Thread(target=self._renew, args=(ended, loop), daemon=True).start()
        swept = 0.0
        try:
            while not self._stopping:
                now = self._clock()
                changed = await asyncio.to_thread(self._journal.changed)
                # A clock that was set back must not put the next look off.
                if changed or not 0 <= now - swept < SWEEP_SECONDS:
                    swept = now
                    try:
                        while await self._take():
                            await self._wait(None)  # more may be waiting than there was room for
                    except JournalError as error:
                        log.warning("%s", error)
                await self._wait(POLL_SECONDS)
        finally:
            await self._give_back()
            ended.set()

    async def run_until_idle(self) -> None:
        """Judge what can be judged now, then return."""
        while await self._take() or self._tasks:
            await self._wait(None)

    # --- claims --------------------------------------------------------------------------------

    async def _take(self) -> bool:
        """Start what there is room for; whether all room was used, so that more may wait."""
        now, room = self._clock(), self._args.judge_concurrency - len(self._tasks)
        # No rest is longer: one that seems so began before the clock was set back.
        resting = now < self._rest_until <= now + REST_SECONDS
        if self._stopping or resting:
            return False
        if room <= 0:
            return True
        if self._rest_until:
            room = 1  # one turn finds out whether the endpoint is back
        # A name for each claim, so that only what is under way is renewed: a turn that could not
        # be written back comes free by itself.
        claim = f"{self._name}/{next(self._serial)}"
        turns = await asyncio.to_thread(
            self._journal.claim, claim, room, now, CLAIM_SECONDS, but_not=[*self._tasks]
        )
        for turn in turns:
            task = asyncio.create_task(self._judge(turn), name=turn.turn_id)
            self._claims[turn.turn_id], self._tasks[turn.turn_id] = claim, task
            task.add_done_callback(self._ended)
        return bool(turns) and len(turns) == room

    def _renew(self, ended: threading.Event, loop: asyncio.AbstractEventLoop) -> None:
        """A thread with a connection of its own: neither a reward that blocks the event loop nor
        the journal's other work holds it up."""
        journal = None
        while not ended.wait(RENEW_SECONDS):
            try:
                journal = journal or Journal.open(self._args.journal_path, create=False)
                until, claims = self._clock() + CLAIM_SECONDS, dict(self._claims)
                held = {
                    turn_id
                    for claim in set(claims.values())
                    for turn_id in journal.extend_claims(claim, until)
                }
            except JournalError as error:
                log.warning("claims could not be renewed: %s", error)
                continue
            for turn_id in claims.keys() - held:
                with suppress(RuntimeError):  # the loop has been closed meanwhile
                    loop.call_soon_threadsafe(self._abandon, turn_id, claims[turn_id])
        if journal is not None:
            journal.close()

    def _abandon(self, turn_id: str, claim: str) -> None:
        if self._claims.get(turn_id) == claim:
            log.warning("turn %s: abandoned, its claim ran out", turn_id)
            self._tasks[turn_id].cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task.get_name())
        self._claims.pop(task.get_name(), None)
        self._woken.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("judging a turn failed: %s", where_of(error))

    async def _wait(self, seconds: float | None) -> None:
        """Until a turn ends, a stop, or so long."""
        self._woken.clear()
        if not self._stopping and (self._tasks or seconds is not None):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), seconds)

    async def _give_back(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=STOP_SECONDS)
        unfinished, claims = [*self._tasks.values()], {*self._claims.values()}
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
        for claim in claims:
            await asyncio.to_thread(self._journal.release_claims, claim)
        await self._carry_counters()

    # --- one turn ------------------------------------------------------------------------------

    async def _judge(self, turn: Turn) -> None:
        started = time.monotonic()
        try:
            verdict = await self._verdict(turn)
        except EngineUnavailable:
            await self._postpone(turn, "judge_unavailable", rest=True)
        except EngineError:
            await self._postpone(turn, "judge_refused")
        except BadReward as error:
            await self._drop(turn, error.reason, str(error))
        except ConfigError as error:
            log.error("%s", error)
            await self._postpone(turn, "judge_misconfigured", rest=True)
        except TimeoutError:
            await self._drop(turn, "reward_timeout", "the reward took too long")
        except Exception as error:
            await self._drop(turn, "reward_failed", f"the reward failed: {where_of(error)}")
        else:
            self._rest_until = 0.0
            often = self._abstained.get(turn.turn_id, 0) + 1
            if verdict is not None:
                await self._write(turn, verdict, time.monotonic() - started)
            elif often < ABSTENTIONS:
                self._abstained[turn.turn_id] = often
                await self._postpone(turn, "no_verdict")
            elif await self._drop(turn, "no_verdict", "all judges abstained too often"):
                self._models.count("postponed:no_verdict")  # each abstention counts as one
        await self._carry_counters()

    async def _verdict(self, turn: Turn) -> Verdict | None:
        """Of the reward, and the teacher where only a hint came; None where all judges abstained.
        Raises what the reward raises."""
        sample = turn_sample(turn, await self._models.response_text(turn))
        result = await call_reward(self._reward_fn, self._args, sample)
        verdict = read_reward(result, len(turn.output_ids), self._args.reward_key)
        given: Mapping[str, Any] = result if isinstance(result, Mapping) else {}
        if verdict.hint and self._args.w_opd and not TEACHER_KEYS & given.keys():
            values = await self._models.teach(sample, [verdict.hint])
            if values is not None:
                verdict = replace(
                    verdict, teacher_log_probs=values.log_probs, teacher_topk=values.topk
                )
        elif self._args.opd_top_k and verdict.teacher_log_probs and verdict.teacher_topk is None:
            # Over the top K nothing is learnt of the sampled tokens alone: no signal.
            self._models.count("teacher_topk_none")
            verdict = replace(verdict, teacher_log_probs=None)
        told = verdict.score or verdict.has_teacher
        return None if given.get("abstained") and not told else verdict

    async def _under_claim(
        self, turn: Turn, write: Callable[..., Any], *values: Any, **more: Any
    ) -> Any:
        """What ends the work on a turn: from here on its claim is not renewed. The journal writes
        nothing where the claim was lost."""
        claim = self._claims.pop(turn.turn_id)
        return await asyncio.to_thread(write, turn.turn_id, claim, *values, **more)

    async def _write(self, turn: Turn, verdict: Verdict, seconds: float) -> None:
        state = await self._under_claim(
            turn,
            self._journal.write_verdict,
            verdict,
            # A turn whose only signal has no weight would take a place in a batch for nothing.
            use_score=self._args.w_rl != 0,
        )
        log.info(
            "verdict turn=%s session=%s score=%s votes=%s hint_chars=%d teacher=%s state=%s ms=%d",
            *(turn.turn_id, turn.session_id, verdict.score, list(verdict.votes)),
            *(len(verdict.hint or ""), verdict.has_teacher, state or "claim_lost", seconds * 1000),
        )

    async def _postpone(self, turn: Turn, reason: str, *, rest: bool = False) -> None:
        """Back into the queue; dropped at the last attempt. `rest`: other turns wait, too."""
        if rest:
            self._rest_until = self._clock() + REST_SECONDS
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** max(0, turn.attempts - 1))
        retry_at = self._clock() + pause
        state = await self._under_claim(turn, self._journal.postpone, reason, retry_at)
        log.info("turn %s: postponed (%s), now %s", turn.turn_id, reason, state)

    async def _drop(self, turn: Turn, reason: str, why: str) -> bool:
        log.warning("turn %s: %s", turn.turn_id, why)
        return bool(await self._under_claim(turn, self._journal.drop_claimed, reason))

    async def _carry_counters(self) -> None:
        counted, self._models.counters = self._models.counters, Counter()
        for name, n in counted.items():
            await asyncio.to_thread(self._journal.count, name, n)
