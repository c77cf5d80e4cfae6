"""The training loop: rollout, step, checkpoint, publish, mark trained; and how it starts again.

Guarantees: no turn trains twice and none is lost, wherever the process dies. The order is

    lease -> optimiser step -> gate -> checkpoint (one rename) -> engine.publish -> mark_trained

and the checkpoint is the point of no return: at a start, an unfinished lease whose rollout is in
the newest checkpoint is marked trained, every other one is given back. A batch that must not be
learnt (limits of `learner.py` and `guards`, nothing unmasked) is dropped with its reason, counted
and reported. Of a version that the gate refuses nothing remains but its record in the journal:
weights and optimiser are those of the newest checkpoint again.

Between two batches, and while it waits for one, it does what the journal's requests ask: serve an
earlier version again, as a new one (rollback): versions only grow. A pause is the rollout's, which
leases nothing then.

Owns the trainer's model; runs in one thread. Knows the engine only as a function that takes
`(version, adapter state dict)`.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from openclaw_rl.errors import ConfigError, HookError, JournalError
from openclaw_rl.guards import Figures, Guard, Probes, batch_refusal, best_of
from openclaw_rl.hooks import Sample, load_hook
from openclaw_rl.journal import Journal, Version
from openclaw_rl.local.checkpoint import Checkpoints, TrainState
from openclaw_rl.local.learner import Learner, StepReport
from openclaw_rl.local.prober import LocalProber
from openclaw_rl.rollout.train_data import convert, flatten, turn_ids

log = logging.getLogger("openclaw_rl.train")

ATTEMPTS = 3  # of one batch that fails for another reason than a hook (out of memory, ...)
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds between failures, doubled each time
REFUSALS = 3  # versions refused in a row, after which training pauses itself
SCALES = (1.0, 0.5)
"""Candidates of one step: all of the way from the served weights to the new ones, then half of it
(WARP, 2406.16768, serves such means)."""


class _Stopped(Exception):
    """`stop` was set in the middle of a step, which is given up."""


class _Asked(Exception):
    """Somebody asked for a rollback while a batch was waited for."""


class Trainer:
    """`args`: see `config.hook_args`, and `stop_event`, which ends the loop; `model` is a PEFT
    model of its own modules; `give_way` is called between pieces of work. `probes` None: every
    version is served."""

    def __init__(
        self,
        args: Namespace,
        model: Any,
        journal: Journal,
        checkpoints: Checkpoints,
        publish: Callable[[int, dict[str, torch.Tensor]], None],
        give_way: Callable[[], None] = lambda: None,
        probes: Probes | None = None,
    ) -> None:
        args = Namespace(**vars(args) | {"while_waiting": self._look})
        self.args, self.model, self.journal = args, model, journal
        self.checkpoints, self.publish, self.give_way = checkpoints, publish, give_way
        self.stop: threading.Event = args.stop_event
        self.learner = Learner(args, model, self._pause)
        self.probes, self.guard = probes, None
        if probes is not None:
            prober = LocalProber(self.learner.forward, probes.ends, self._pause)
            self.guard = Guard(args, journal, probes, prober)
        self.rollout = load_hook(
            args.rollout_function_path,
            default_name="generate_rollout",
            flag="--rollout-function-path",
        )
        self.convert = convert
        if path := args.custom_convert_samples_to_train_data_path:
            flag = "--custom-convert-samples-to-train-data-path"
            self.convert = load_hook(path, default_name="convert", flag=flag)
        self.state = TrainState()
        self.failed = 0  # how often in a row a batch could not be learnt
        self.refused = 0  # how many versions in a row

    def resume(self) -> TrainState:
        """Load the newest checkpoint, settle unfinished leases by it, publish its weights."""
        state = self.checkpoints.load_newest(self.model, self.learner.optimizer)
        self.state = state or TrainState()
        self.settle_leases()
        if state is None:
            # The adapter's random start is part of the run: every later one grows from it.
            self._save(self.state)
        else:
            log.info("[train] resumed version %d", state.version)
            self.publish(state.version, self._weights())
        known = {one.version for one in self.journal.versions() if one.state == "served"}
        if self.state.version not in known:  # a stop came between its checkpoint and its record
            self._record()
        return self.state

    def settle_leases(self) -> None:
        """The newest checkpoint decides what became of leases that a crash left unfinished."""
        for rollout_id in self.journal.leases(self.args.host_name):
            if rollout_id <= self.state.rollout_id:
                self._finish(rollout_id)
                log.info("[train] rollout %d was saved before the stop: it is trained", rollout_id)
            else:
                n = self._give_back(rollout_id)
                log.info("[train] rollout %d was not trained: %d turns given back", rollout_id, n)

    def run(self) -> None:
        """Train until `stop` is set or `args.num_rollout` batches are done, over all starts.

        A failing hook ends training (the batch is given back; serving is not this thread's
        business). Any other failure of a batch is tried again, then the batch is dropped.
        """
        pause = FIRST_PAUSE
        while not self.stop.is_set():
            rollout_id = self.state.rollout_id + 1
            if self.args.num_rollout and rollout_id >= self.args.num_rollout:
                log.info("[train] %s rollouts are done; serving goes on", rollout_id)
                return
            try:
                self.settle_leases()  # what a failed attempt left open
                self._heed()
                output = self.rollout(self.args, rollout_id, None, evaluation=False)
                # Older rollout functions of slime return the samples themselves.
                samples = flatten(getattr(output, "samples", output) or [])
                if samples and not self.stop.is_set():
                    self.train(samples, rollout_id)
                pause = FIRST_PAUSE
            except _Asked:
                pass
            except (HookError, ConfigError):
                self._give_back(rollout_id)
                raise
            except Exception as error:
                if self.stop.is_set():
                    break
                # The traceback, but not the message: it may quote a conversation.
                log.error("[train] rollout %d failed (%s); again in %.0f s",
                          rollout_id, type(error).__name__, pause)  # fmt: skip
                log.debug("[train] traceback", exc_info=error)
                with contextlib.suppress(JournalError):  # perhaps the very thing that failed
                    self.journal.count("train_failures")
                # Weights and optimiser as last saved: a failed batch leaves nothing behind.
                self.learner.optimizer.zero_grad(set_to_none=True)
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                self.checkpoints.load_newest(self.model, self.learner.optimizer)
                self.stop.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        self._give_back(self.state.rollout_id + 1)

    def train(self, samples: Sequence[Sample], rollout_id: int) -> list[StepReport]:
        """Learn one batch and carry it through to `mark_trained` (or to dropping it)."""
        began = time.monotonic()
        data = self.convert(self.args, list(samples))
        if not data["tokens"]:
            raise HookError("the conversion of a rollout gave no samples")
        if why := self._unfit(samples):
            self.state = self._left(rollout_id, {"batch_refused": turn_ids(samples)})
            self._finish(rollout_id)
            self.journal.count(f"batch_refused_{why}")
            log.warning("[train] rollout %d is not learnt: its replies are beyond the limit (%s)",
                        rollout_id, why)  # fmt: skip
            return []
        served = [p.detach().clone() for p in self.learner.parameters]
        refused, figures = "", dict[str, float]()
        try:
            reports = self.learner.learn(data)
            changed = not all(map(torch.equal, served, self.learner.parameters))
            if changed and self.guard is not None:
                refused, figures = self._examine(self.guard, served)
        except (HookError, ConfigError, _Stopped):
            raise
        except Exception:
            self.failed += 1
            if self.failed >= ATTEMPTS and not self.stop.is_set():
                self.state = self._left(rollout_id, {"train_failed": turn_ids(samples)})
                self._finish(rollout_id)
                self.failed = 0
                log.error("[train] rollout %d: its turns are dropped (train_failed)", rollout_id)
            raise
        self.failed = 0
        dropped = _left_out(samples, reports)
        learnt = sorted(set(turn_ids(samples)).difference(*dropped.values()))
        if refused:
            self.checkpoints.load_newest(self.model, self.learner.optimizer)
            self.state = self._left(rollout_id, dropped | {"version_refused": learnt})
            self._refuse(rollout_id, refused, figures)
        elif changed:
            state = TrainState(self.state.version + 1, rollout_id, dropped, figures=figures)
            self._serve(state)
            self.refused = 0
        else:
            if learnt:
                self.journal.count("version_unchanged")
                dropped |= {"version_unchanged": learnt}
            self.state = self._left(rollout_id, dropped)
        self._finish(rollout_id)
        for report in reports:
            self._say(report, rollout_id, time.monotonic() - began)
        release_memory()
        return reports

    # -- the gate --------------------------------------------------------------------------

    def _unfit(self, samples: Sequence[Sample]) -> str:
        """Why the batch must not be learnt, see `guards.batch_refusal`."""
        if self.probes is None:
            return ""
        replies, sessions = [], []
        for sample in samples:
            response = sample.tokens[len(sample.tokens) - sample.response_length :]
            for turn in sample.metadata.get("turns", ()):
                replies.append(self.probes.decode(response[turn["start"] : turn["end"]]))
                sessions.append(sample.session_id or "")
        return batch_refusal(replies, sessions, self.args)

    def _examine(
        self, guard: Guard, served: Sequence[torch.Tensor]
    ) -> tuple[str, dict[str, float]]:
        """Probe the new weights, then milder ones; leaves the first that may be served in place.
        Where none may, why not and what was measured are told of the new ones."""
        found: list[tuple[str, dict[str, float]]] = []
        learnt = [p.detach().clone() for p in self.learner.parameters]
        for scale in SCALES:
            with torch.no_grad():
                for p, old, new in zip(self.learner.parameters, served, learnt, strict=True):
                    p.copy_(torch.lerp(old, new, scale))
            refused, figures = guard.examine()
            found.append((refused, {**figures, "scale": scale}))
            if not refused:
                return found[-1]
        return found[0]

    def _refuse(self, rollout_id: int, why: str, figures: Figures) -> None:
        """Write down that the step of this rollout led to a version that is not served."""
        version, now = self.state.version + 1, time.time()
        self.journal.count("version_refused")
        self.journal.record_version(
            Version(
                version=version, state="refused", reason=why, rollout=rollout_id, created=now,
                figures=figures,
            )
        )  # fmt: skip
        log.warning("[train] version %d is refused: %s; version %d stays served",
                    version, why, self.state.version)  # fmt: skip
        self.refused += 1
        if self.refused >= REFUSALS:
            self.refused = 0
            self.journal.ask("pause", f"{REFUSALS} versions in a row were refused: {why}", now)
            self.journal.count("training_paused")
            log.error("[train] training pauses itself after %d refused versions in a row; serving "
                      "goes on (openclaw-rl resume ends the pause)", REFUSALS)  # fmt: skip

    def _serve(self, state: TrainState) -> None:
        """Save the weights as this version: from here on it is the newest one."""
        self._save(state)
        self.state = state
        self.publish(state.version, self._weights())
        self._record()

    def _save(self, state: TrainState) -> None:
        best = best_of(self.journal.versions(1000))
        self.checkpoints.save(
            state, self.model, self.learner.optimizer, best.version if best else None
        )

    def _record(self) -> None:
        state = self.state
        self.journal.record_version(
            Version(
                version=state.version, state="served", rollout=state.rollout_id,
                reason="" if state.restored is None else "rollback", restored=state.restored,
                created=time.time(), figures=state.figures,
            )
        )  # fmt: skip

    # -- requests --------------------------------------------------------------------------

    def _look(self) -> None:
        """Called while a batch is waited for."""
        if "rollback" in self.journal.asked():
            raise _Asked

    def _heed(self) -> None:
        """Do what is asked of the trainer."""
        if (wanted := self.journal.asked().get("rollback")) is not None:
            self._roll_back(wanted)
            self.journal.answered("rollback", wanted)

    def _roll_back(self, wanted: str) -> None:
        """Weights and optimiser of an earlier version, as a new version."""
        state, version = self.state, int(wanted) if wanted.isdecimal() else -1
        if version == state.restored:  # saved already: something went wrong before the answer
            self.publish(state.version, self._weights())
            return
        found = self.checkpoints.load(version, self.model, self.learner.optimizer)
        if found is None:
            self.journal.count("rollback_unknown")
            log.error("[train] no rollback: there is no checkpoint of version %s", wanted)
            return
        self._serve(
            TrainState(state.version + 1, state.rollout_id, restored=version, figures=found.figures)
        )
        log.info("[train] version %d is served again, as version %d", version, self.state.version)

    def _left(self, rollout_id: int, dropped: dict[str, list[str]]) -> TrainState:
        """The weights stay; this rollout's turns are dropped."""
        return replace(self.state, rollout_id=rollout_id, dropped=dropped)

    def _pause(self) -> None:
        if self.stop.is_set():
            raise _Stopped
        self.give_way()

    def _finish(self, rollout_id: int) -> None:
        host = self.args.host_name
        if rollout_id == self.state.rollout_id:
            for reason, ids in self.state.dropped.items():
                self.journal.drop_leased(rollout_id, host, ids, reason)
        self.journal.mark_trained(rollout_id, host, str(self.state.version))

    def _give_back(self, rollout_id: int) -> int:
        return self.journal.give_back(rollout_id, self.args.host_name)

    def _weights(self) -> dict[str, torch.Tensor]:
        from peft import get_peft_model_state_dict

        state = get_peft_model_state_dict(self.model)
        return {name: tensor.detach().clone() for name, tensor in state.items()}

    def _say(self, report: StepReport, rollout_id: int, seconds: float) -> None:
        """A line of log, and for `status` and `/metrics` how far engine and trainer were apart on
        the step's tokens; `truncated`: which share of them had its importance weight cut."""
        log.info(
            "[train] rollout %d · version %d · %d turns · reward %+.2f · %.0f tokens a turn · "
            "loss %.4f · grad %.3f · logprob diff %.4f (max %.2f) · %.1f s%s",
            rollout_id, self.state.version, report.turns, report.reward,
            report.trained_tokens / max(1, report.turns), report.loss, report.grad_norm,
            report.logprob_diff, report.logprob_diff_max, seconds,
            "" if report.skipped is None else f" · SKIPPED ({report.skipped})",
        )  # fmt: skip
        log.debug("[train] metrics %s", {k: round(v, 5) for k, v in report.metrics.items()})
        if report.skipped is not None:
            self.journal.count(f"step_skipped_{report.skipped}")
        info = {
            "rollout": rollout_id,
            "mean": report.logprob_diff,
            "max": report.logprob_diff_max,
            "tokens": report.compared_tokens,
            "truncated": report.metrics.get("tis_clipfrac"),
            "skipped": report.skipped,
        }
        self.journal.publish("trainer", "", info, time.time())


def release_memory() -> None:
    """Give what the C library holds of freed memory back to the system: between the long-lived
    tensors of several threads, blocks of many sizes leave gaps that grow with every step."""
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _left_out(samples: Sequence[Sample], reports: Sequence[StepReport]) -> dict[str, list[str]]:
    """Turns that no step learnt, by reason: `step_skipped`, or `masked` (no unmasked token)."""
    ids = set(turn_ids(samples))
    tried = {turn for report in reports for turn in report.turn_ids}
    taken = [report for report in reports if report.skipped is None]
    learnt = {turn for report in taken for turn in report.turn_ids}
    if "" in tried:  # the conversion hook named no turns: the steps say nothing of single ones
        tried, learnt = ids, ids if taken else set()
    found = {"masked": sorted(ids - tried), "step_skipped": sorted(tried - learnt)}
    return {reason: turns for reason, turns in found.items() if turns}
