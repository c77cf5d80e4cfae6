"""`Sample`: what hooks see of one piece of training data.

The field names are slime's (`slime.utils.types.Sample`), so that a reward or conversion hook
written against one works with the other. Under slime the adapter fills slime's own class; the
embedded host uses this one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


@dataclass
class Sample:
    """One sample: `tokens` is prompt + response; the per-token lists cover the response only.

    Invariant (checked by `validate`): `loss_mask`, `rollout_log_probs` and, where present,
    `teacher_log_probs` all have `response_length` entries.
    """

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    index: int | None = None
    group_index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    loss_mask: list[int] | None = None
    reward: float | dict[str, Any] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    """The engine's; NaN on tokens that it did not sample (replayed conversations)."""
    teacher_log_probs: list[float] | None = None
    remove_sample: bool = False
    session_id: str | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None

    def validate(self) -> None:
        """Raise `ValueError` unless every per-token list has `response_length` entries."""
        for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs"):
            values = getattr(self, name)
            if values is not None and len(values) != self.response_length:
                raise ValueError(
                    f"{name} has {len(values)} entries for a response of {self.response_length}"
                )
        if self.response_length > len(self.tokens):
            raise ValueError("the response is longer than the tokens")
