"""The durable store that the four loops share. See README.md of this package."""

from openclaw_rl.journal.lock import gateway_lock, trainer_lock
from openclaw_rl.journal.outcomes import Outcomes
from openclaw_rl.journal.store import Endpoint, Journal
from openclaw_rl.journal.versions import Version
from openclaw_rl.journal.writer import AsyncJournal

__all__ = [
    "AsyncJournal",
    "Endpoint",
    "Journal",
    "Outcomes",
    "Version",
    "gateway_lock",
    "trainer_lock",
]
