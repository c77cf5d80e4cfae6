"""The durable store that the four loops share. See README.md of this package."""

from openclaw_rl.journal.records import (
    Endpoint,
    Fates,
    Lease,
    Lineage,
    Output,
    ReadyTurn,
    State,
    Turn,
    TurnRecord,
    Verdict,
)

__all__ = [
    "Endpoint",
    "Fates",
    "Lease",
    "Lineage",
    "Output",
    "ReadyTurn",
    "State",
    "Turn",
    "TurnRecord",
    "Verdict",
]
