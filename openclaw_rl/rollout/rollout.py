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
from openclaw_rl.journal import Fates, Journal, Output
from openclaw_rl.rollout.batch import Choice, Rules, choose
from openclaw_rl.rollout.samples import Built, build_samples

log = logging.getLogger("openclaw_rl.rollout")

_FATES = ("seen", "side", "waiting", "judging", "ready", "leased", "trained")


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
    `max_staleness` (8 versions; None: no limit), `rollout_temperature` (None: any),
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
        temperature=getattr(args, "rollout_temperature", None),
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
    choice: Choice = field(default_factory=lambda: Choice((), {}, {}, 0))

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
                fates = self.journal.fates()
                log.info("%s", progress(self.rollout_id, self.rules, self.choice, fates))
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
        newest = next((turn.max_version for turn in reversed(ready) if not turn.off_policy), None)
        self.choice = choose(ready, self.rules, self._version(newest))
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
        outputs = self.journal.outputs(turn_ids)
        built = Built()
        per_step = max(1, math.ceil(len(outputs) / self.steps))
        for step, begin in enumerate(range(0, len(outputs), per_step)):
            own = outputs[begin : begin + per_step]
            part = build_samples(
                own,
                self.journal.lineage([output.turn_id for output in own]),
                self.journal.tokens,
                first_index=self.rollout_id * self.rules.batch_size + len(built.samples),
                max_tokens=self.max_tokens,
            )
            for sample in part.samples:
                sample.metadata["step"] = step
            built += part
        self._drop_misfits(built)
        if not built.samples:
            # Every turn of the lease was purged or did not line up: there is nothing to step on.
            log.warning("[rollout] %d: nothing of the batch can be trained", self.rollout_id)
            self.journal.count("empty_batches")
            return None
        return RolloutFnTrainOutput(
            [[sample] for sample in built.samples], self._metrics(built, outputs)
        )

    def _drop_misfits(self, built: Built) -> None:
        now = self.clock()
        for turn_id, reason in built.misfits.items():
            n = self.journal.drop_leased(self.rollout_id, self.host, [turn_id], reason, now)
            self.dropped[reason] += n

    def _metrics(self, built: Built, outputs: list[Output]) -> dict[str, float]:
        turns = [turn for sample in built.samples for turn in sample.metadata["turns"]]
        used = {turn["turn_id"] for turn in turns}
        kept = [output for output in outputs if output.turn_id in used]
        sessions = Counter(output.session_id for output in kept)
        trained = sum(sum(sample.loss_mask or ()) for sample in built.samples)
        hints = sum(o.verdict is not None and o.verdict.hint is not None for o in kept)
        n = len(turns)
        metrics: dict[str, float] = {
            "rollout/turns": n,
            "rollout/samples": len(built.samples),
            "rollout/sessions": len(sessions),
            "rollout/largest_session_share": max(sessions.values()) / n,
            "rollout/reward_mean": sum(turn["reward"] for turn in turns) / n,
            "rollout/hint_share": hints / n,
            "rollout/teacher_share": sum(turn["has_teacher"] for turn in turns) / n,
            "rollout/off_policy_share": sum(o.off_policy for o in kept) / n,
            "rollout/truncated_share": sum(output.truncated for output in kept) / n,
            "rollout/age_seconds_mean": self.clock() - sum(o.created for o in kept) / n,
            "rollout/tokens_trained": trained,
            "rollout/tokens_total": built.total,
            "rollout/tokens_per_distinct": built.total / max(built.distinct, 1),
        }
        newest = next((o.output_versions[-1] for o in reversed(kept) if not o.off_policy), None)
        metrics |= _ages(turns, self._version(newest))
        metrics |= {f"rollout/dropped_{reason}": n for reason, n in self.dropped.items()}
        metrics |= {f"rollout/held_{reason}": n for reason, n in self.choice.held.items()}
        fates = self.journal.fates()
        metrics |= {f"rollout/fates/{state}": getattr(fates, state) for state in _FATES}
        metrics["rollout/fates/dropped"] = sum(fates.dropped.values())
        return metrics


def _ages(turns: list[dict[str, Any]], version: str | None) -> dict[str, float]:
    if version is None or not version.isdecimal():
        return {}
    oldest = [min(int(v) for v in turn["versions"]) for turn in turns
              if turn["versions"] and all(v.isdecimal() for v in turn["versions"])]  # fmt: skip
    ages = [max(0, int(version) - value) for value in oldest]
    if not ages:
        return {}
    return {
        "rollout/age_versions_mean": sum(ages) / len(ages),
        "rollout/age_versions_max": max(ages),
    }


def progress(rollout_id: int, rules: Rules, choice: Choice, fates: Fates) -> str:
    """One line: how far the batch is, and why the other turns are not in it."""
    line = (
        f"[rollout] {rollout_id}: {len(choice.take)} of {rules.batch_size} turns ready; "
        f"{fates.waiting} wait for a next state, {fates.judging} are judged"
    )
    if held := choice.held.get("session_share", 0):
        sessions = "1 session has" if choice.sessions == 1 else f"{choice.sessions} sessions have"
        line += (
            f"; {held} held back: a session gives at most {rules.session_cap} turns of a batch, "
            f"and {sessions} any (more sessions fill it, or a larger session_share)"
        )
    return line
