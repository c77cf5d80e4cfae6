"""The journal's housekeeping, done by the process that is always there (`serve`).

Turns whose next state never came are given up, and finished sessions are forgotten by age and
size, as the settings say. Runs in a thread with a connection of its own; a failure is logged and
tried again at the next round.
"""

from __future__ import annotations

import asyncio
import logging
import time

from openclaw_rl.config import Config
from openclaw_rl.errors import OpenClawRLError
from openclaw_rl.journal import Journal

log = logging.getLogger("openclaw_rl.upkeep")

EVERY_SECONDS = 300.0


async def keep_up(config: Config, every: float = EVERY_SECONDS) -> None:
    """Tidy the journal now and then every `every` seconds, until cancelled."""
    while True:
        try:
            done = await asyncio.to_thread(tidy, config, time.time())
        except (OpenClawRLError, OSError) as error:
            log.warning("the journal could not be tidied: %s", error)
        else:
            if done:
                log.info("journal: %s", ", ".join(f"{n} {what}" for what, n in done.items()))
        await asyncio.sleep(every)


def tidy(config: Config, now: float) -> dict[str, int]:
    """One round of housekeeping at time `now`; how many turns, by what happened to them."""
    data = config.data
    with Journal.open(config.journal_path) as journal:
        return journal.run_retention(
            now,
            next_state_ttl=data.next_state_hours * 3600,
            max_age=data.retention_days * 86400 or None,
            max_bytes=int(data.retention_gb * 2**30) or None,
        )
