"""The gateway alone: the HTTP service that agents talk to.

It is the process that is always there, so it also keeps the journal's retention: turns whose next
state never came are given up, and finished sessions are forgotten by age and size.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import time

from openclaw_rl.cli import checks
from openclaw_rl.config import Config
from openclaw_rl.errors import OpenClawRLError
from openclaw_rl.journal import Journal

log = logging.getLogger("openclaw_rl.cli")

RETENTION_SECONDS = 300.0


def run(config: Config, options: argparse.Namespace) -> int:
    """Serve until stopped. Raises `ConfigError`."""
    from openclaw_rl.gateway.app import run as run_gateway

    checks.check_loops(config, ["serve"])
    # An engine with our adapters is announced by the trainer once the first is loaded.
    if options.supervised or config.engine.kind != "auto":
        engine = config.engine.model_copy(update={"url": ""})
        config = config.model_copy(update={"engine": engine})

    async def serve() -> None:
        retention = asyncio.create_task(keep_retention(config))
        try:
            await run_gateway(config)
        finally:
            retention.cancel()

    asyncio.run(serve())
    return 0


async def keep_retention(config: Config, every: float = RETENTION_SECONDS) -> None:
    """Apply retention every `every` seconds until cancelled, in a thread with a connection of its
    own; a failure is logged and tried again at the next round."""
    while True:
        try:
            done = await asyncio.to_thread(retain, config, time.time())
        except (OpenClawRLError, OSError) as error:
            log.warning("the journal's retention failed: %s", error)
        else:
            if done:
                log.info("journal: %s", ", ".join(f"{n} {what}" for what, n in done.items()))
        await asyncio.sleep(every)


def retain(config: Config, now: float) -> dict[str, int]:
    """Apply retention at time `now`; how many turns, by what happened to them."""
    data = config.data
    with Journal.open(config.journal_path) as journal:
        return journal.run_retention(
            now,
            next_state_ttl=data.next_state_hours * 3600,
            max_age=data.retention_days * 86400 or None,
            max_bytes=int(data.retention_gb * 2**30) or None,
        )
