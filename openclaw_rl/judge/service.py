"""The judge's process: `openclaw-rl judge`, and the judge of `openclaw-rl up`.

Guarantees: one log line for each verdict (ids and numbers only); SIGTERM and SIGINT end it in good
order; it can be started, killed and started again at any time, also several at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import uuid
from contextlib import suppress
from typing import Any

from openclaw_rl.hooks import load_hook
from openclaw_rl.journal.store import Journal
from openclaw_rl.judge.counts import format_counts, judge_counts
from openclaw_rl.judge.resources import Resources
from openclaw_rl.judge.worker import JudgeWorker

log = logging.getLogger(__name__)

COUNTS_SECONDS = 60.0


async def run_judge(args: Any, *, stop: asyncio.Event | None = None) -> None:
    """Judge the turns of `args.journal_path` by `args.custom_rm_path` until told to stop.

    Raises `HookError` where the reward cannot be loaded, `JournalError` where the journal cannot
    be opened.
    """
    path = getattr(args, "custom_rm_path", None) or "openclaw_rl.rewards.combined.custom_rm"
    reward_fn = load_hook(path, default_name="custom_rm", flag="--custom-rm-path")
    journal = await asyncio.to_thread(Journal.open, args.journal_path)
    resources = args.judge_resources = Resources(args, journal)
    name = f"judge-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    worker = JudgeWorker(journal, reward_fn, args, resources, name=name)
    loop = asyncio.get_running_loop()
    handled = []
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread
            loop.add_signal_handler(number, worker.stop)
            handled.append(number)
    watching = [asyncio.create_task(_log_counts(journal))]
    if stop is not None:
        watching.append(asyncio.create_task(_stop_when(stop, worker)))
    log.info("judge %s: reward %s", name, path)
    try:
        await worker.run()
    finally:
        for task in watching:
            task.cancel()
        for number in handled:
            loop.remove_signal_handler(number)
        await resources.close()
        log.info("judge %s stops: %s", name, format_counts(judge_counts(journal)))
        journal.close()


async def _stop_when(stop: asyncio.Event, worker: JudgeWorker) -> None:
    await stop.wait()
    worker.stop()


async def _log_counts(journal: Journal) -> None:
    last = None
    while True:
        await asyncio.sleep(COUNTS_SECONDS)
        counts = await asyncio.to_thread(judge_counts, journal)
        if counts != last:
            log.info("%s", format_counts(counts))
        last = counts
