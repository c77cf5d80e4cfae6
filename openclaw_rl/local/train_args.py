"""What the trainer reads of `hook_args`, and what it asks of the engine."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from openclaw_rl.engine.survey import Needs
from openclaw_rl.errors import ConfigError
from openclaw_rl.hooks import load_hook
from openclaw_rl.judge.teacher import teacher_list


def complete(args: Namespace, *, on_gpu: bool) -> Namespace:
    """A copy of `args` (see `hook_args`) in which what depends on the device is settled: tokens of
    a micro-batch and whether activations are recomputed. Raises `ConfigError`."""
    full = Namespace(**vars(args))
    full.max_tokens_per_gpu = full.max_tokens_per_gpu or (4096 if on_gpu else 512)
    choice = full.gradient_checkpointing
    full.gradient_checkpointing = choice in (True, "on") or (choice == "auto" and on_gpu)
    if full.loss_type != "custom_loss":
        raise ConfigError(f"this host has loss_type custom_loss only, not {full.loss_type!r}")
    full.any_temperature = True  # each turn is learnt at its own
    full.segment_steps = full.num_steps_per_rollout
    return full


def needs_of(args: Namespace) -> Needs:
    """What these settings ask of the engine that samples."""
    distils = (getattr(args, "w_opd", None) or 0.0) != 0
    top_k = (getattr(args, "opd_top_k", None) or 0) if distils else 0
    temperature = getattr(args, "rollout_temperature", None)
    return Needs(1.0 if temperature is None else float(temperature), teacher_list(int(top_k)))


def hook(args: Namespace, name: str, default_name: str) -> Callable[..., Any] | None:
    """The function that `args.<name>` names, None where it names none. Raises `HookError`."""
    path = getattr(args, name, None)
    if not path:
        return None
    return load_hook(path, default_name=default_name, flag="--" + name.replace("_", "-"))
