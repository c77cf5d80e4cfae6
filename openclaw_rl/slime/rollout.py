"""`generate_rollout`: slime's rollout function, over `rollout.wait_for_batch`.

Guarantees: every step gets exactly as many distinct `rollout_id`s as slime counts and at least
`dp_size` samples; what merging leaves open is filled with masked two-token samples that weigh
nothing. A lease becomes trained only when the served weights are known to hold it and, where the
run saves checkpoints, a checkpoint does; a run that starts again settles what was left open by
the checkpoint it loaded. So no turn is learnt twice or lost by the weights that live on.

How it is known: slime counts `weight_version` up by one with each weight update, and an update
comes after every trained rollout at the earliest (`train.py`) or one rollout later
(`train_async.py`). The first call of a run sees the loaded weights as version `v0`; version `v`
then holds the first `v - v0` rollouts of the run for certain.
"""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from openclaw_rl.engine import model_fingerprint
from openclaw_rl.errors import ConfigError, HookError
from openclaw_rl.journal import Journal
from openclaw_rl.journal.lock import trainer_lock
from openclaw_rl.rollout import wait_for_batch
from openclaw_rl.rollout.train_data import flatten
from openclaw_rl.slime.probes import PublishedVersions, base_of
from openclaw_rl.slime.samples import Shape, fill, is_filler, slimes_output
from openclaw_rl.slime.services import Services, addresses, model_info

log = logging.getLogger("openclaw_rl.slime")

HOST = "slime"


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Wait for a batch of live turns; `RolloutFnTrainOutput` with `rollout_batch_size *
    n_samples_per_prompt` turns in groups of slime's `Sample`. `data_source` is not used.

    With `evaluation`: slime's own, for the prompts of `--eval-prompt-data`. Raises
    `ConfigError` for settings that do not fit. For what is read from `args` see `wait_for_batch`.
    """
    if evaluation:
        return _evaluate(args, rollout_id, data_source)
    run = Run.of(args)
    run.begin(rollout_id)
    batch = wait_for_batch(run.view(args), rollout_id)
    samples = fill(flatten(batch.samples), rollout_id, run.shape)
    metrics = batch.metrics | {"rollout/fillers": sum(map(is_filler, samples))}
    return slimes_output(samples, metrics, getattr(args, "reward_key", None))


def _evaluate(args: Any, rollout_id: int, data_source: Any) -> Any:
    """slime's own evaluation; its training half wants a global data set, which we have none of."""
    if args is None or not getattr(args, "eval_datasets", None):
        raise ConfigError("evaluation needs --eval-prompt-data or --eval-config")
    try:
        from slime.rollout.sglang_rollout import generate_rollout as slimes_rollout
    except ModuleNotFoundError as error:
        raise HookError(f"evaluation runs inside slime only: {error}") from error
    view = Namespace(**vars(args) | {"rollout_global_dataset": True})
    return slimes_rollout(view, rollout_id, data_source, evaluation=True)


class Run:
    """One run of slime: what its rollouts have in common. Hung on `args`, which is the only thing
    that all calls share; a copy of `args` that is sent to another process has none."""

    def __init__(self, args: Any) -> None:
        check(args)
        self.args, self.shape = args, Shape.of(args)
        path = Path(args.journal_path)
        self.services = Services(args)
        self.lock = trainer_lock(path)
        self.journal = Journal.open(path)
        self.journal.bind({"base": model_fingerprint(Path(args.hf_checkpoint))})
        self.versions = PublishedVersions(args, self.journal)
        self.start: tuple[int, str | None] | None = None
        """The first rollout of the run and the version that was served then."""

    def __reduce__(self) -> Any:
        return type(None), ()

    @classmethod
    def of(cls, args: Any) -> Run:
        """The run of `args`, begun at the first call."""
        if args is None:
            raise ConfigError("generate_rollout needs slime's args")
        run: Run | None = getattr(args, "openclaw_rl_run", None)
        if run is None:
            run = args.openclaw_rl_run = cls(args)
        return run

    def begin(self, rollout_id: int) -> None:
        """Publish where the engines are, see to gateway and judge, settle leases, probe a version
        that is newly served."""
        places = self._publish()
        self.services.ensure()
        policy, info = places["policy"]
        version = None if info.get("weight_version") is None else str(info["weight_version"])
        if version is None:
            log.warning("[slime] the policy's router names no weight version: turns stay leased")
        if self.start is None:
            self.start = (rollout_id, version)
            through = rollout_id - 1  # what the loaded checkpoint holds
            for leased in self.journal.leases(HOST):
                if leased > through:
                    n = self.journal.give_back(leased, HOST)
                    log.info("[slime] rollout %d is not in the loaded weights: %d turns given back",
                             leased, n)  # fmt: skip
        else:
            through = trained_through(self.start, version, saved_rollout(self.args))
        for leased in self.journal.leases(HOST):
            if leased <= through:
                self.journal.mark_trained(leased, HOST, version or "")
        learnt = trained_through(self.start, version, None)
        self.versions.probe(version, learnt, policy, base_of(places))

    def view(self, args: Any) -> Namespace:
        """`args` as the rollout package reads them."""
        return Namespace(
            **vars(args)
            | {
                "rollout_batch_size": self.shape.turns,
                "segment_steps": self.shape.steps,
                "host_name": HOST,
                "while_waiting": self.services.ensure,
            }
        )

    def close(self) -> None:
        """End own children, free the leases. slime does not call it: it ends the process."""
        self.services.close()
        self.journal.close()
        self.lock.close()

    def _publish(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """Publish where the engines are; each one's address and what it says of itself, by role."""
        places: dict[str, tuple[str, dict[str, Any]]] = {}
        context = getattr(self.args, "sglang_context_length", None)
        for role, url in addresses(self.args).items():
            info = model_info(url)
            known: dict[str, Any] = {
                key: info[key] for key in ("model_path", "weight_version") if key in info
            }
            if context:
                known["context_length"] = int(context)
            self.journal.publish(role, url, {"engine": "sglang", **known}, time.time())
            places[role] = url, known
        return places


def check(args: Any) -> None:
    """Refuse settings under which slime would train something else than the turns."""
    if not getattr(args, "journal_path", None):
        raise ConfigError("journal_path is not set: name the journal's file in the custom config")
    for name in ("custom_convert_samples_to_train_data_path", "custom_advantage_function_path"):
        if not getattr(args, name, None):
            hook = "convert_samples_to_train_data" if "convert" in name else "compute_advantages"
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} openclaw_rl.slime.{hook} is needed beside the rollout")
    if getattr(args, "loss_type", None) != "custom_loss":
        raise ConfigError("--loss-type custom_loss is needed: slime's own ignores turns' weights")
    for name, fine in (
        ("rollout_top_p", (None, 1, 1.0)),
        ("kl_coef", (None, 0, 0.0)),
        ("use_rollout_routing_replay", (None, False)),
        ("use_critic", (None, False)),
        ("log_reward_category", (None,)),
    ):
        if getattr(args, name, None) not in fine:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} does not go with turns that agents sampled: leave it out")


def trained_through(start: tuple[int, str | None], version: str | None, saved: int | None) -> int:
    """The last rollout that is in the served weights for certain, and in a checkpoint if `saved`
    (the newest one's rollout) is given; before the first one where nothing is known."""
    first, first_version = start
    if not (version and first_version and version.isdecimal() and first_version.isdecimal()):
        return first - 1
    served = first - 1 + max(0, int(version) - int(first_version))
    return served if saved is None else min(served, saved)


def saved_rollout(args: Any) -> int | None:
    """The rollout of the newest checkpoint, as Megatron notes it; None where the run saves none."""
    if not (getattr(args, "save", None) and getattr(args, "save_interval", None)):
        return None
    try:
        return int((Path(args.save) / "latest_checkpointed_iteration.txt").read_text().strip())
    except (OSError, ValueError):
        return -1
