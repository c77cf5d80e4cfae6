"""`generate_rollout`: a batch from the journal, with the signature of slime's rollout functions.

Guarantees: it returns when a batch is full (or `args.stop_event` is set) and has leased exactly
the turns whose samples it returns; the host that trained them calls `Journal.mark_trained`. An
unfinished lease of the same rollout and host is taken up again instead of a new one. Works from
`args` alone; while it waits it says at a steady pace what it waits for.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from openclaw_rl.errors import ConfigError, HookError
from openclaw_rl.hooks import Sample
from openclaw_rl.journal import Journal, Outcomes
from openclaw_rl.rollout.batch import Choice, Rules, age, choose
from openclaw_rl.rollout.samples import build_samples, distinct_tokens
from openclaw_rl.types import Turn

log = logging.getLogger("openclaw_rl.rollout")

_STATES = ("seen", "side", "waiting", "judging", "ready", "leased", "trained")


@dataclass(frozen=True, slots=True)
class RolloutFnTrainOutput:
    """What slime's class of this name holds. `samples`: one list a group, here of one sample;
    empty only where `args.stop_event` was set."""

    samples: list[list[Sample]]
    metrics: dict[str, float] = field(default_factory=dict)


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """Wait for a full batch and return its samples. `data_source` is not used.

    args: `journal_path`, `rollout_batch_size` (turns); optional `session_share` (0.25),
    `max_staleness` (8 versions; None: no limit), `rollout_temperature` (that of the trainer's
    log-probs) unless `any_temperature` (it takes each turn's own; so without either),
    `max_sample_tokens` (None: no limit; see `build_samples`), `host_name` ("default"),
    `rollout_poll_seconds` (0.5), `rollout_progress_seconds` (10), `stop_event` (a
    `threading.Event`), `while_waiting` (called at each poll; what it raises ends the wait),
    `segment_steps` (the optimiser steps of a rollout: 1; no segment holds signals of two, and
    `metadata["step"]` says whose it is).
    """
    if evaluation:
        raise HookError("generate_rollout trains from live turns; it has no evaluation set")
    path = getattr(args, "journal_path", None)
    if not path:
        raise ConfigError("generate_rollout needs args.journal_path, the file of the journal")
    rules = Rules(
        batch_size=int(args.rollout_batch_size),
        session_share=_given(args, "session_share", 0.25),
        max_staleness=getattr(args, "max_staleness", 8),
        temperature=None
        if getattr(args, "any_temperature", False)
        else getattr(args, "rollout_temperature", None),
    )
    with Journal.open(path) as journal:
        return _Wait(
            journal=journal,
            rules=rules,
            rollout_id=rollout_id,
            host=str(_given(args, "host_name", "default")),
            poll_seconds=_given(args, "rollout_poll_seconds", 0.5),
            progress_seconds=_given(args, "rollout_progress_seconds", 10.0),
            stop=_given(args, "stop_event", None) or threading.Event(),
            while_waiting=_given(args, "while_waiting", lambda: None),
            steps=_given(args, "segment_steps", 1),
            max_tokens=getattr(args, "max_sample_tokens", None),
        ).run()


def _given(args: Any, name: str, default: Any) -> Any:
    value = getattr(args, name, None)
    return default if value is None else value


@dataclass
class _Wait:
    """One wait for one batch."""

    journal: Journal
    rules: Rules
    rollout_id: int
    host: str
    poll_seconds: float
    progress_seconds: float
    stop: threading.Event
    while_waiting: Callable[[], None] = lambda: None
    steps: int = 1
    max_tokens: int | None = None
    clock: Callable[[], float] = time.time
    dropped: Counter[str] = field(default_factory=Counter)
    choice: Choice = field(default_factory=lambda: Choice((), {}, {}))

    def run(self) -> RolloutFnTrainOutput:
        began = time.monotonic()
        next_line = began
        output = self._resume()
        while output is None and not self.stop.is_set():
            self.while_waiting()
            if self.journal.changed():
                output = self._try()
                if output is not None:
                    break
            if time.monotonic() >= next_line:
                log.info("%s", self._progress(self.journal.outcomes()))
                next_line = time.monotonic() + self.progress_seconds
            self.stop.wait(min(self.poll_seconds, max(0.0, next_line - time.monotonic())))
        if output is None:
            return RolloutFnTrainOutput([], {})
        output.metrics["rollout/wait_seconds"] = time.monotonic() - began
        return output

    def _resume(self) -> RolloutFnTrainOutput | None:
        for lease in self.journal.leases(self.host):
            if lease.rollout_id == self.rollout_id:
                log.info(
                    "[rollout] %d: taking up its unfinished lease of %d turns",
                    self.rollout_id,
                    len(lease.turn_ids),
                )
                return self._build(lease.turn_ids)
        return None

    def _try(self) -> RolloutFnTrainOutput | None:
        ready = self.journal.ready()
        self.choice = choose(ready, self.rules, self._version(_newest(ready)))
        if self.choice.drop:
            self._drop(self.choice)
        take = self.choice.take
        if len(take) < self.rules.batch_size:
            return None
        if not self.journal.lease(self.rollout_id, self.host, take, self.clock()):
            return None  # another host was faster
        return self._build(take)

    def _drop(self, choice: Choice) -> None:
        now = self.clock()
        with self.journal.batch():
            for turn_id, reason in choice.drop.items():
                if self.journal.drop(turn_id, reason, now):
                    self.dropped[reason] += 1

    def _version(self, newest: str | None) -> str | None:
        """The version that is served: what the host published, else that of the newest turn."""
        policy = self.journal.endpoint("policy")
        if policy is not None and policy.info.get("weight_version") is not None:
            return str(policy.info["weight_version"])
        return newest

    def _build(self, turn_ids: tuple[str, ...]) -> RolloutFnTrainOutput | None:
        lineage = self.journal.lineage(turn_ids)
        leased = [turn for turn in lineage if turn.turn_id in turn_ids]
        samples: list[Sample] = []
        per_step = max(1, math.ceil(len(leased) / self.steps))
        for step, begin in enumerate(range(0, len(leased), per_step)):
            own, misfits = build_samples(
                lineage,
                {turn.turn_id for turn in leased[begin : begin + per_step]},
                self.journal.tokens,
                first_index=self.rollout_id * self.rules.batch_size + len(samples),
                max_tokens=self.max_tokens,
            )
            for sample in own:
                sample.metadata["step"] = step
            samples += own
            self._drop_misfits(misfits)
        if not samples:
            # Every turn of the lease was purged or did not line up: there is nothing to step on.
            log.warning("[rollout] %d: nothing of the batch can be trained", self.rollout_id)
            self.journal.count("empty_batches")
            return None
        return RolloutFnTrainOutput(
            [[sample] for sample in samples],
            self._metrics(samples, leased, distinct_tokens(lineage)),
        )

    def _drop_misfits(self, misfits: dict[str, str]) -> None:
        now = self.clock()
        for turn_id, reason in misfits.items():
            n = self.journal.drop_leased(self.rollout_id, self.host, [turn_id], reason, now)
            self.dropped[reason] += n

    def _metrics(
        self, samples: list[Sample], leased: list[Turn], distinct: int
    ) -> dict[str, float]:
        turns = [turn for sample in samples for turn in sample.metadata["turns"]]
        used = {turn["turn_id"] for turn in turns}
        kept = [turn for turn in leased if turn.turn_id in used]
        sessions = Counter(turn.session_id for turn in kept)
        total = sum(len(sample.tokens) for sample in samples)
        hints = sum(turn.verdict is not None and turn.verdict.hint is not None for turn in kept)
        n = len(turns)
        metrics: dict[str, float] = {
            "rollout/turns": n,
            "rollout/samples": len(samples),
            "rollout/sessions": len(sessions),
            "rollout/largest_session_share": max(sessions.values()) / n,
            "rollout/reward_mean": sum(turn["reward"] for turn in turns) / n,
            "rollout/hint_share": hints / n,
            "rollout/teacher_share": sum(turn["has_teacher"] for turn in turns) / n,
            "rollout/off_policy_share": sum(turn.off_policy for turn in kept) / n,
            "rollout/truncated_share": sum(turn.truncated for turn in kept) / n,
            "rollout/age_seconds_mean": self.clock() - sum(turn.created for turn in kept) / n,
            "rollout/tokens_trained": sum(sum(sample.loss_mask or ()) for sample in samples),
            "rollout/tokens_total": total,
            "rollout/tokens_per_distinct": total / max(distinct, 1),
        }
        version = self._version(_newest(kept))
        ages = [old for turn in kept if (old := age(turn, version)) is not None]
        if ages:
            metrics["rollout/age_versions_mean"] = sum(ages) / len(ages)
            metrics["rollout/age_versions_max"] = max(ages)
        metrics |= {f"rollout/dropped_{reason}": n for reason, n in self.dropped.items()}
        metrics |= {f"rollout/held_{reason}": n for reason, n in self.choice.held.items()}
        outcomes = self.journal.outcomes()
        metrics |= {f"rollout/outcomes/{state}": getattr(outcomes, state) for state in _STATES}
        metrics["rollout/outcomes/dropped"] = sum(outcomes.dropped.values())
        return metrics

    def _progress(self, outcomes: Outcomes) -> str:
        return (
            f"[rollout] {self.rollout_id}: {len(self.choice.take)} of {self.rules.batch_size} "
            f"turns ready; {outcomes.waiting} wait for a next state, {outcomes.judging} are judged"
        )


def _newest(turns: list[Turn]) -> str | None:
    """The newest version that sampled one of `turns`, oldest first."""
    return next((turn.max_version for turn in reversed(turns) if not turn.off_policy), None)
