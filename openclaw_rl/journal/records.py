"""What the journal tells beside turns and verdicts: plain, frozen, no I/O. Times are seconds since
the epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Address of an engine. `info["weight_version"]`, where given for the policy, is the version
    that is served now."""

    role: str
    url: str
    info: Mapping[str, Any]
    published: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """How many turns ended where. Turns that were purged since are still counted.

    `by_source`, for each way in which sessions were recognised: `bound` (main turns that belong to
    a conversation), `side`, and `unbound` (main turns without any name of which nothing followed
    yet).
    """

    seen: int = 0
    main: int = 0
    side: int = 0
    waiting: int = 0
    judging: int = 0
    ready: int = 0
    leased: int = 0
    trained: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    by_source: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def unbound(self) -> int:
        """Main turns that nothing ties to a conversation."""
        return sum(count["unbound"] for count in self.by_source.values())

    def states(self) -> dict[str, int]:
        """Main turns by state."""
        names = ("waiting", "judging", "ready", "leased", "trained")
        return {name: getattr(self, name) for name in names} | {
            "dropped": sum(self.dropped.values())
        }

    def balanced(self) -> bool:
        """Whether `seen == main + side` and `main` is the sum of its outcomes: it always is."""
        return self.seen == self.main + self.side and self.main == sum(self.states().values())
