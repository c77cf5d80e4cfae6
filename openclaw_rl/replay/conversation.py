"""A past conversation, wherever it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openclaw_rl.errors import OpenClawRLError
from openclaw_rl.types import Message


class ReplayError(OpenClawRLError):
    """A file that cannot be read as conversations; the message begins with `file:line`."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """`messages` as clients send them. Replies before `begin` are history only (what a compaction
    kept of it). `left_out` counts replies of the source that are not in it, by reason."""

    where: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    session_id: str | None = None
    begin: int = 0
    left_out: Mapping[str, int] | None = None
