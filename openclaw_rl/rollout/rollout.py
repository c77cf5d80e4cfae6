"""`wait_for_batch`: a batch from the journal, for the rollout hooks of both hosts, which are
`generate_rollout` here (local) and `openclaw_rl.slime.generate_rollout`.

Guarantees: it returns when a batch is full (or `args.stop_event` is set) and has leased exactly
the turns whose samples it returns; the host that trained them calls `Journal.mark_trained`. An
unfinished lease of the same rollout and host is taken up again instead of a new one. While
somebody has asked the journal for a pause it returns nothing. Works from `args` alone; while it
waits it says at a steady pace what it waits for.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from openclaw_rl.config import RolloutConfig
from openclaw_rl.errors import ConfigError, HookError
from openclaw_rl.hooks import Sample
from openclaw_rl.journal import Journal
from openclaw_rl.rollout.batch import Choice, Rules, age, choose
from openclaw_rl.rollout.samples import distinct_tokens, segment_samples
from openclaw_rl.types import Turn

log = logging.getLogger("openclaw_rl.rollout")


@dataclass(frozen=True, slots=True)
class RolloutFnTrainOutput:
    """What slime's class of this name holds. `samples`: one list a group, here of one sample;
    empty only where `args.stop_event` was set."""

    samples: list[list[Sample]]
    metrics: dict[str, float] = field(default_factory=dict)


_MAY_LACK: Mapping[str, Any] = {
    "journal_path": None,
    "session_share": RolloutConfig().session_share,
    "max_staleness": RolloutConfig().max_staleness,
    "rollout_temperature": None,
    "any_temperature": False,
    "max_sample_tokens": None,
    "segment_steps": 1,
    "host_name": "default",
    "rollout_poll_seconds": 0.5,
    "stop_event": None,
    "while_waiting": None,
}
"""What slime's args do not have."""

_PROGRESS_SECONDS = 10.0


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """`wait_for_batch` with the signature of slime's rollout functions; `data_source` is not used.
    Raises `HookError` for an `evaluation`: there are live turns only."""
    if evaluation:
        raise HookError("generate_rollout trains from live turns; it has no evaluation set")
    return wait_for_batch(args, rollout_id)


def wait_for_batch(args: Any, rollout_id: int) -> RolloutFnTrainOutput:
    """Wait for a full batch and return its samples, one a segment. Raises `ConfigError`.

    args: `journal_path`, `rollout_batch_size` (turns); optional `session_share`, `max_staleness`
    (versions; None: no limit), `rollout_temperature` (that of the trainer's log-probs) unless
    `any_temperature` (it takes each turn's own; so without either), `max_sample_tokens` (0: no
    limit; see `segment_samples`), `host_name`, `rollout_poll_seconds`, `stop_event` (a
    `threading.Event`), `while_waiting` (called at each poll; what it raises ends the wait),
    `segment_steps` (the optimiser steps of a rollout; no segment holds signals of two, and
    `metadata["step"]` says whose it is).
    """
    args = Namespace(**{**_MAY_LACK, **vars(args)})
    if not args.journal_path:
        raise ConfigError("the rollout needs args.journal_path, the file of the journal")
    with Journal.open(args.journal_path) as journal:
        return _Wait(args, rollout_id, journal).run()


class _Wait:
    """One wait for one batch."""

    def __init__(self, args: Namespace, rollout_id: int, journal: Journal) -> None:
        self.args, self.rollout_id, self.journal = args, rollout_id, journal
        self.lease = rollout_id, args.host_name
        self.rules = Rules(
            batch_size=args.rollout_batch_size,
            session_share=args.session_share,
            max_staleness=args.max_staleness,
            temperature=None if args.any_temperature else args.rollout_temperature,
        )
        self.dropped: Counter[str] = Counter()
        self.choice = Choice((), {}, {})
        self.paused: str | None = None
        """Why training is paused, if it is."""

    def run(self) -> RolloutFnTrainOutput:
        began = next_line = time.monotonic()
        batch = {"batch_size": self.rules.batch_size, "session_share": self.rules.session_share}
        self.journal.publish("rollout", "", batch, time.time())
        stop = self.args.stop_event or threading.Event()
        output = None
        while output is None and not stop.is_set():
            if self.args.while_waiting is not None:
                self.args.while_waiting()
            if self.journal.changed() and (output := self._try()) is not None:
                break
            if time.monotonic() >= next_line:
                next_line = time.monotonic() + _PROGRESS_SECONDS
                self._say()
            stop.wait(self.args.rollout_poll_seconds)
        if output is None:
            return RolloutFnTrainOutput([])
        output.metrics["rollout/wait_seconds"] = time.monotonic() - began
        return output

    def _say(self) -> None:
        if self.paused is not None:
            log.info("[rollout] %d: training is paused (%s) until `openclaw-rl resume`; serving "
                     "goes on", self.rollout_id, self.paused)  # fmt: skip
            return
        outcomes = self.journal.outcomes()
        log.info("[rollout] %d: %d of %d turns ready; %d wait for a next state, %d are judged",
                 self.rollout_id, len(self.choice.take), self.rules.batch_size,
                 outcomes.waiting, outcomes.judging)  # fmt: skip

    def _try(self) -> RolloutFnTrainOutput | None:
        self.paused = self.journal.asked().get("pause")
        if self.paused is not None:
            return None
        if leased := self.journal.leases(self.args.host_name).get(self.rollout_id):
            log.info("[rollout] %d: taking up its unfinished lease of %d turns",
                     self.rollout_id, len(leased))  # fmt: skip
            return self._build(leased)
        ready = self.journal.ready()
        self.choice = choose(ready, self.rules, self._version(ready))
        for turn_id, reason in self.choice.drop.items():
            self.dropped[reason] += self.journal.drop(turn_id, reason, time.time())
        take = self.choice.take
        if len(take) < self.rules.batch_size or not self.journal.lease(*self.lease, take):
            return None  # not full, or another host was faster
        return self._build(take)

    def _version(self, turns: Sequence[Turn]) -> str | None:
        """The version that is served: what the host published, else that of the newest turn."""
        policy = self.journal.endpoint("policy")
        if policy is not None and policy.info.get("weight_version") is not None:
            return str(policy.info["weight_version"])
        return next((turn.max_version for turn in reversed(turns) if not turn.off_policy), None)

    def _build(self, turn_ids: Sequence[str]) -> RolloutFnTrainOutput | None:
        lineage = self.journal.lineage(turn_ids)
        leased = [turn for turn in lineage if turn.turn_id in set(turn_ids)]
        samples: list[Sample] = []
        unfit: dict[str, str] = {}
        per_step = max(1, math.ceil(len(leased) / self.args.segment_steps))
        for step, begin in enumerate(range(0, len(leased), per_step)):
            own, misfits = segment_samples(
                lineage,
                {turn.turn_id for turn in leased[begin : begin + per_step]},
                self.journal.tokens,
                first_index=self.rollout_id * self.rules.batch_size + len(samples),
                max_tokens=self.args.max_sample_tokens,
            )
            for sample in own:
                sample.metadata["step"] = step
            samples += own
            unfit |= misfits
        for turn_id, reason in unfit.items():
            self.dropped[reason] += self.journal.drop_leased(*self.lease, [turn_id], reason)
        if not samples:
            # Every turn of the lease was purged or did not line up: there is nothing to step on.
            log.warning("[rollout] %d: nothing of the batch can be trained", self.rollout_id)
            self.journal.count("empty_batches")
            return None
        used = [turn for turn in leased if turn.turn_id not in unfit]
        metrics = self._metrics(samples, used, distinct_tokens(lineage))
        return RolloutFnTrainOutput([[sample] for sample in samples], metrics)

    def _metrics(
        self, samples: Sequence[Sample], turns: Sequence[Turn], distinct: int
    ) -> dict[str, float]:
        sessions = Counter((turn.owner, turn.session_id) for turn in turns)
        verdicts = [turn.verdict for turn in turns if turn.verdict is not None]
        version = self._version(turns)
        ages = [old for turn in turns if (old := age(turn, version)) is not None]
        metrics: dict[str, float] = {
            "turns": len(turns),
            "samples": len(samples),
            "largest_session_share": max(sessions.values()) / len(turns),
            "reward_mean": fmean(verdict.score or 0.0 for verdict in verdicts),
            "hint_share": fmean(bool(verdict.hint) for verdict in verdicts),
            "teacher_share": fmean(verdict.has_teacher for verdict in verdicts),
            "off_policy_share": fmean(turn.off_policy for turn in turns),
            "tokens_trained": sum(turn.output_len for turn in turns),
            "tokens_per_distinct": sum(len(s.tokens) for s in samples) / max(distinct, 1),
            **({"age_versions_max": max(ages)} if ages else {}),
            **{f"dropped_{reason}": n for reason, n in self.dropped.items()},
            **{f"held_{reason}": n for reason, n in self.choice.held.items()},
            **{f"outcomes/{state}": n for state, n in self.journal.outcomes().states().items()},
        }
        return {f"rollout/{name}": value for name, value in metrics.items()}
