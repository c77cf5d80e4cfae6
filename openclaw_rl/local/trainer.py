"""The training loop: rollout, step, checkpoint, publish, mark trained; and how it starts again.

Guarantees: no turn trains twice and none is lost, wherever the process dies. The order is

    lease -> optimiser step -> checkpoint (one rename) -> engine.publish -> mark_trained

and the checkpoint is the point of no return: at a start, an unfinished lease whose rollout is in
the newest checkpoint is marked trained, every other one is given back. A batch that must not be
learnt (limits of `learner.py`, nothing unmasked) is dropped with its reason, counted and said.

Owns the trainer's model; runs in one thread. Knows the engine only as a function that takes
`(version, adapter state dict)`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from openclaw_rl.errors import ConfigError, HookError, JournalError
from openclaw_rl.hooks import Sample
from openclaw_rl.local import checkpoint
from openclaw_rl.local import data as d
from openclaw_rl.local.checkpoint import TrainState
from openclaw_rl.local.learner import Learner, StepReport
from openclaw_rl.local.train_args import hook
from openclaw_rl.rollout.train_data import convert, flatten, turn_ids

log = logging.getLogger("openclaw_rl.train")

ATTEMPTS = 3  # of one batch that fails for another reason than a hook (out of memory, ...)
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds between failures, doubled each time


class _LearnFailed(Exception):
    """Learning a batch raised what is neither a hook's fault nor a stop (out of memory, ...)."""


class _Stopped(Exception):
    """`stop` was set in the middle of a step, which is given up."""


Publish = Callable[[int, dict[str, torch.Tensor]], None]
RolloutFunction = Callable[..., Any]


class TrainJournal(Protocol):
    """What the trainer needs of the journal."""

    def leases(self, host: str) -> Sequence[Any]: ...
    def give_back(self, rollout_id: int, host: str, now: float) -> int: ...
    def mark_trained(self, rollout_id: int, host: str, version: str, now: float) -> int: ...
    def drop_leased(
        self, rollout_id: int, host: str, turn_ids: Sequence[str], reason: str, now: float
    ) -> int: ...
    def count(self, name: str, n: int = 1) -> None: ...
    def publish(self, role: str, url: str, info: Mapping[str, Any], now: float) -> None: ...


class Trainer:
    """`args` as `train_args.complete` returns them; `model` is a PEFT model of its own modules."""

    def __init__(
        self,
        args: Namespace,
        model: Any,
        journal: TrainJournal,
        publish: Publish,
        *,
        give_way: Callable[[], None] = lambda: None,
        stop: threading.Event | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.args, self.model, self.journal, self.publish = args, model, journal, publish
        self.stop = stop or threading.Event()
        self.clock = clock
        self.root = Path(args.save).expanduser()
        self.learner = Learner(args, model, self._pause)
        self.give_way = give_way
        rollout = hook(args, "rollout_function_path", "generate_rollout")
        if rollout is None:
            raise HookError("--rollout-function-path: no rollout function is named")
        self.rollout: RolloutFunction = rollout
        self.convert = hook(args, "custom_convert_samples_to_train_data_path", "convert") or convert
        self.state = TrainState()
        self.failed = (-1, 0)  # rollout, and how often learning it has failed

    # -- starting ----------------------------------------------------------------------------------

    def resume(self) -> TrainState:
        """Load the newest checkpoint, settle unfinished leases by it, publish its weights."""
        state, folder, bad = checkpoint.load_newest(self.root, self.model, self.learner.optimizer)
        for path in bad:
            log.warning("[train] checkpoint %s cannot be read; an older one is used", path.name)
        self.state = state
        self.settle_leases()
        if folder is None:
            # The adapter's random start is part of the run: every later one grows from it.
            self._save(state)
        else:
            log.info("[train] resumed version %d from %s", state.version, folder.name)
            self.publish(state.version, self._weights())
        return state

    def settle_leases(self) -> None:
        """The newest checkpoint decides what became of leases that a crash left unfinished."""
        host, now = self.args.host_name, self.clock()
        for lease in self.journal.leases(host):
            if lease.rollout_id <= self.state.rollout_id:
                self._finish(lease.rollout_id)
                log.info("[train] rollout %d was saved before the stop: marked trained",
                         lease.rollout_id)  # fmt: skip
            else:
                n = self.journal.give_back(lease.rollout_id, host, now)
                log.info("[train] rollout %d was not trained: %d turns given back",
                         lease.rollout_id, n)  # fmt: skip

    # -- the loop ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Train until `stop` is set or `args.num_rollout` batches are done.

        A failing hook ends training (the batch is given back; serving is not this thread's
        business). Any other failure of a batch is tried again, then the batch is dropped.
        """
        failures = 0  # in a row
        while not self.stop.is_set() and not self.finished():
            rollout_id = self.state.rollout_id + 1
            try:
                if failures:
                    self.settle_leases()  # whatever the failed attempt left open
                self.one_rollout(rollout_id)
                failures = 0
            except (HookError, ConfigError):
                self.journal.give_back(rollout_id, self.args.host_name, self.clock())
                raise
            except Exception as error:
                if self.stop.is_set():
                    break
                failures += 1
                pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(failures - 1, 10))
                # The traceback, but not the message: it may quote a conversation.
                kind = type(error.__cause__ or error).__name__
                log.error(
                    "[train] rollout %d failed (%s); again in %.0f s", rollout_id, kind, pause
                )
                log.debug("[train] traceback", exc_info=error)
                with contextlib.suppress(JournalError):  # perhaps the very thing that failed
                    self.journal.count("train_failures")
                self._release_memory()
                self.stop.wait(pause)
        if self.stop.is_set():
            self.journal.give_back(self.state.rollout_id + 1, self.args.host_name, self.clock())
        elif self.finished():
            log.info("[train] %s rollouts are done; serving goes on", self.args.num_rollout)

    def finished(self) -> bool:
        """Whether `args.num_rollout` rollouts are done, over all starts."""
        limit = self.args.num_rollout
        return bool(limit) and self.state.rollout_id + 1 >= limit

    def one_rollout(self, rollout_id: int) -> list[StepReport]:
        """Wait for a batch and train on it; no reports where the rollout gave none."""
        began = time.monotonic()
        output = self.rollout(self.args, rollout_id, None, evaluation=False)
        samples = flatten(_samples_of(output))
        if self.stop.is_set() or not samples:
            return []
        waited = time.monotonic() - began
        try:
            return self.train(samples, rollout_id, waited)
        except (HookError, ConfigError):
            raise
        except _Stopped:
            return []
        except Exception as error:
            if self.state.rollout_id >= rollout_id:
                raise  # saved: learnt, whatever failed after it; `settle_leases` marks it
            self._restore()
            if isinstance(error, _LearnFailed):
                self._another_attempt(rollout_id, samples)
            raise

    def _another_attempt(self, rollout_id: int, samples: Sequence[Sample]) -> None:
        """Count a failure to learn this batch; after `ATTEMPTS` of them its turns are dropped."""
        last, number = self.failed
        self.failed = (rollout_id, number + 1 if last == rollout_id else 1)
        if self.failed[1] >= ATTEMPTS:
            ids, host = turn_ids(samples), self.args.host_name
            n = self.journal.drop_leased(rollout_id, host, ids, "train_failed", self.clock())
            log.error("[train] rollout %d: %d turns dropped (train_failed)", rollout_id, n)
            self._advance(rollout_id)

    def train(
        self, samples: Sequence[Sample], rollout_id: int, waited: float = 0.0
    ) -> list[StepReport]:
        """Learn one batch and carry it through to `mark_trained` (or to dropping it)."""
        began = time.monotonic()
        data = d.to_tensors(self.convert(self.args, list(samples)), self.learner.forward.device)
        if not data["tokens"]:
            raise HookError("the conversion of a rollout gave no samples")
        try:
            reports = self.learner.learn(data)
        except (HookError, ConfigError, _Stopped):
            raise
        except Exception as error:
            raise _LearnFailed(type(error).__name__) from error
        dropped = _left_out(data, samples, reports)
        if any(report.skipped is None for report in reports):
            state = TrainState(self.state.version + 1, rollout_id, dropped)
            self._save(state)
            self.state = state
            self.publish(state.version, self._weights())
        else:
            self._advance(rollout_id, dropped)
        for report in reports:
            if report.skipped is not None:
                self.journal.count(f"step_skipped_{report.skipped}")
        self._finish(rollout_id)
        self._tell(rollout_id, samples, reports, waited, time.monotonic() - began)
        return reports

    # -- parts -------------------------------------------------------------------------------------

    def _pause(self) -> None:
        if self.stop.is_set():
            raise _Stopped
        self.give_way()

    def _save(self, state: TrainState) -> None:
        optimizer, keep = self.learner.optimizer, self.args.keep_checkpoints
        checkpoint.save(self.root, state, self.model, optimizer, keep)

    def _restore(self) -> None:
        """Weights and optimiser as last saved: a failed batch leaves nothing behind."""
        self._release_memory()
        checkpoint.load_newest(self.root, self.model, self.learner.optimizer)

    def _advance(self, rollout_id: int, dropped: Mapping[str, list[str]] | None = None) -> None:
        """Go past a rollout that left no checkpoint."""
        self.state = TrainState(self.state.version, rollout_id, dict(dropped or {}))

    def _finish(self, rollout_id: int) -> None:
        host, now = self.args.host_name, self.clock()
        if rollout_id == self.state.rollout_id:
            for reason, ids in self.state.dropped.items():
                self.journal.drop_leased(rollout_id, host, ids, reason, now)
        self.journal.mark_trained(rollout_id, host, str(self.state.version), now)

    def _weights(self) -> dict[str, torch.Tensor]:
        from peft import get_peft_model_state_dict

        state = get_peft_model_state_dict(self.model)
        return {name: tensor.detach().clone() for name, tensor in state.items()}

    def _release_memory(self) -> None:
        self.learner.optimizer.zero_grad(set_to_none=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _tell(
        self,
        rollout_id: int,
        samples: Sequence[Sample],
        reports: Sequence[StepReport],
        waited: float,
        took: float,
    ) -> None:
        rewards = [
            float(t["reward"] or 0.0) for s in samples for t in s.metadata.get("turns") or ()
        ] or [float(s.reward) for s in samples if isinstance(s.reward, int | float)]
        tokens = sum(r.trained_tokens for r in reports)
        turns = sum(r.turns for r in reports)
        for report in reports:
            outcome = "" if report.skipped is None else f" · SKIPPED ({report.skipped})"
            log.info(
                "[train] rollout %d · version %d · %d turns in %d samples · reward %+.2f · "
                "%.0f tokens a turn · loss %.4f · grad %.3f · logprob diff %.4f (max %.2f) · "
                "rollout %.1f s, train %.1f s%s",
                rollout_id, self.state.version, turns, len(samples),
                sum(rewards) / max(1, len(rewards)), tokens / max(1, turns), report.loss,
                report.grad_norm, report.logprob_diff, report.logprob_diff_max, waited, took,
                outcome,
            )  # fmt: skip
            self._tell_mismatch(rollout_id, report)
            log.debug("[train] metrics %s", {k: round(v, 5) for k, v in report.metrics.items()})

    def _tell_mismatch(self, rollout_id: int, report: StepReport) -> None:
        """For `status` and `/metrics`: how far engine and trainer were apart on the tokens of this
        step; `truncated`: which share of them had its importance weight cut (mean over turns)."""
        cut = report.metrics.get("tis_clipfrac")
        about = {
            "rollout": rollout_id,
            "mean": round(report.logprob_diff, 6),
            "max": round(report.logprob_diff_max, 6),
            "tokens": report.compared_tokens,
            "truncated": None if cut is None else round(cut, 6),
            "skipped": report.skipped,
        }
        self.journal.publish("trainer", "", about, self.clock())


def _samples_of(output: Any) -> Sequence[Any]:
    """Rollout functions return `RolloutFnTrainOutput`, or (older ones) the samples themselves."""
    if output is None:
        return []
    return getattr(output, "samples", output) or []


def _left_out(
    data: d.RolloutData, samples: Sequence[Sample], reports: Sequence[StepReport]
) -> dict[str, list[str]]:
    """Turns that no step learnt, by reason: `step_skipped`, or `masked` (no unmasked token)."""
    named = {turn["turn_id"] for turns in data["turns"] for turn in turns or ()}
    tried = {turn for report in reports for turn in report.turn_ids}
    taken = [report for report in reports if report.skipped is None]
    skipped = tried - {turn for report in taken for turn in report.turn_ids}
    if not taken:  # nor was anything that a conversion hook left without turns
        skipped |= set(turn_ids(samples)) - named
    found = {"masked": sorted(named - tried), "step_skipped": sorted(skipped)}
    return {reason: ids for reason, ids in found.items() if ids}
