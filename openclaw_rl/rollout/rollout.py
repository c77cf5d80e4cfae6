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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from openclaw_rl.config import RolloutConfig
from openclaw_rl.errors import ConfigError, HookError
from openclaw_rl.hooks import Sample
from openclaw_rl.journal import Journal, Outcomes
from openclaw_rl.rollout.batch import Choice, Rules, age, choose
from openclaw_rl.rollout.samples import build_samples, distinct_tokens
from openclaw_rl.types import Turn

log = logging.getLogger("openclaw_rl.rollout")


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

    args: `journal_path`, `rollout_batch_size` (turns); optional `session_share`, `max_staleness`
    (versions; None: no limit), `rollout_temperature` (that of the trainer's log-probs) unless
    `any_temperature` (it takes each turn's own; so without either), `max_sample_tokens` (None: no
    limit; see `build_samples`), `host_name` ("default"), `rollout_poll_seconds` (0.5),
    `rollout_progress_seconds` (10), `stop_event` (a `threading.Event`), `while_waiting` (called at
    each poll; what it raises ends the wait), `segment_steps` (the optimiser steps of a rollout: 1;
    no segment holds signals of two, and `metadata["step"]` says whose it is).
    """
    if evaluation:
        raise HookError("generate_rollout trains from live turns; it has no evaluation set")
    path = getattr(args, "journal_path", None)
    if not path:
        raise ConfigError("generate_rollout needs args.journal_path, the file of the journal")
    with Journal.open(path) as journal:
        return _Wait(args, rollout_id, journal).run()


class _Wait:
    """One wait for one batch."""

    def __init__(self, args: Any, rollout_id: int, journal: Journal) -> None:
        def given(name: str, default: Any) -> Any:
            value = getattr(args, name, None)
            return default if value is None else value

        self.journal, self.rollout_id = journal, rollout_id
        defaults = RolloutConfig()
        self.rules = Rules(
            batch_size=int(args.rollout_batch_size),
            session_share=given("session_share", defaults.session_share),
            max_staleness=getattr(args, "max_staleness", defaults.max_staleness),
            temperature=None
            if given("any_temperature", False)
            else given("rollout_temperature", None),
        )
        self.host = str(given("host_name", "default"))
        self.steps = given("segment_steps", 1)
        self.max_tokens = given("max_sample_tokens", None)
        self.stop = given("stop_event", None) or threading.Event()
        self.while_waiting = given("while_waiting", lambda: None)
        self.poll_seconds = given("rollout_poll_seconds", 0.5)
        self.progress_seconds = given("rollout_progress_seconds", 10.0)
        self.dropped: Counter[str] = Counter()
        self.choice = Choice((), {}, {})

    def run(self) -> RolloutFnTrainOutput:
        began = next_line = time.monotonic()
        output = self._resume()
        while output is None and not self.stop.is_set():
            self.while_waiting()
            if self.journal.changed() and (output := self._try()) is not None:
                break
            if time.monotonic() >= next_line:
                log.info("%s", self._progress(self.journal.outcomes()))
                next_line = time.monotonic() + self.progress_seconds
            self.stop.wait(min(self.poll_seconds, max(0.0, next_line - time.monotonic())))
        if output is None:
            return RolloutFnTrainOutput([])
        output.metrics["rollout/wait_seconds"] = time.monotonic() - began
        return output

    def _resume(self) -> RolloutFnTrainOutput | None:
        leased = self.journal.leases(self.host).get(self.rollout_id)
        if leased is None:
            return None
        log.info("[rollout] %d: taking up its unfinished lease of %d turns",
                 self.rollout_id, len(leased))  # fmt: skip
        return self._build(leased)

    def _try(self) -> RolloutFnTrainOutput | None:
        ready = self.journal.ready()
        self.choice = choose(ready, self.rules, self._version(ready))
        now = time.time()
        for turn_id, reason in self.choice.drop.items():
            self.dropped[reason] += self.journal.drop(turn_id, reason, now)
        take = self.choice.take
        if len(take) < self.rules.batch_size:
            return None
        if not self.journal.lease(self.rollout_id, self.host, take, now):
            return None  # another host was faster
        return self._build(take)

    def _version(self, turns: Sequence[Turn]) -> str | None:
        """The version that is served: what the host published, else that of the newest turn."""
        policy = self.journal.endpoint("policy")
        if policy is not None and policy.info.get("weight_version") is not None:
            return str(policy.info["weight_version"])
        return next((turn.max_version for turn in reversed(turns) if not turn.off_policy), None)

    def _build(self, turn_ids: Iterable[str]) -> RolloutFnTrainOutput | None:
        wanted = set(turn_ids)
        lineage = self.journal.lineage(wanted)
        leased = [turn for turn in lineage if turn.turn_id in wanted]
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
            for turn_id, reason in misfits.items():
                self.dropped[reason] += self.journal.drop_leased(
                    self.rollout_id, self.host, [turn_id], reason, time.time()
                )
        if not samples:
            # Every turn of the lease was purged or did not line up: there is nothing to step on.
            log.warning("[rollout] %d: nothing of the batch can be trained", self.rollout_id)
            self.journal.count("empty_batches")
            return None
        metrics = self._metrics(samples, leased, distinct_tokens(lineage))
        return RolloutFnTrainOutput([[sample] for sample in samples], metrics)

    def _metrics(
        self, samples: Sequence[Sample], leased: Sequence[Turn], distinct: int
    ) -> dict[str, float]:
        about = [turn for sample in samples for turn in sample.metadata["turns"]]
        used = {turn["turn_id"] for turn in about}
        turns = [turn for turn in leased if turn.turn_id in used]
        sessions = Counter((turn.owner, turn.session_id) for turn in turns)
        version = self._version(turns)
        ages = [old for turn in turns if (old := age(turn, version)) is not None]
        total = sum(len(sample.tokens) for sample in samples)

        def mean(values: Iterable[float]) -> float:
            return math.fsum(values) / len(turns)

        metrics: dict[str, float] = {
            "turns": len(turns),
            "samples": len(samples),
            "sessions": len(sessions),
            "largest_session_share": max(sessions.values()) / len(turns),
            "reward_mean": mean(turn["reward"] for turn in about),
            "hint_share": mean(bool(turn.verdict and turn.verdict.hint) for turn in turns),
            "teacher_share": mean(turn["has_teacher"] for turn in about),
            "off_policy_share": mean(turn.off_policy for turn in turns),
            "truncated_share": mean(turn.truncated for turn in turns),
            "age_seconds_mean": time.time() - mean(turn.created for turn in turns),
            "tokens_trained": sum(sum(sample.loss_mask or ()) for sample in samples),
            "tokens_total": total,
            "tokens_per_distinct": total / max(distinct, 1),
        }
        if ages:
            metrics |= {"age_versions_mean": sum(ages) / len(ages), "age_versions_max": max(ages)}
        metrics |= {f"dropped_{reason}": n for reason, n in self.dropped.items()}
        metrics |= {f"held_{reason}": n for reason, n in self.choice.held.items()}
        metrics |= {f"outcomes/{state}": n for state, n in self.journal.outcomes().states().items()}
        return {f"rollout/{name}": value for name, value in metrics.items()}

    def _progress(self, outcomes: Outcomes) -> str:
        return (
            f"[rollout] {self.rollout_id}: {len(self.choice.take)} of {self.rules.batch_size} "
            f"turns ready; {outcomes.waiting} wait for a next state, {outcomes.judging} are judged"
        )
