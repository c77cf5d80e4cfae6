"""Arguments of the trainer: slime's names, our defaults, and refusals instead of silence."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from openclaw_rl.engine.survey import Needs
from openclaw_rl.errors import ConfigError
from openclaw_rl.hooks import load_hook
from openclaw_rl.judge.teacher import teacher_list

DEFAULTS: dict[str, Any] = {
    "host_name": "local",
    "seed": 0,
    "rollout_function_path": "openclaw_rl.rollout.generate_rollout",
    "custom_loss_function_path": "openclaw_rl.losses.combined_loss",
    "custom_advantage_function_path": None,
    "custom_convert_samples_to_train_data_path": None,
    "num_rollout": None,  # stop after so many batches in all; None: never
    "num_steps_per_rollout": 1,
    "rollout_temperature": 1.0,
    "use_kl_loss": False,
    "lr": 1e-4,
    "adam_beta1": 0.9,
    "adam_beta2": 0.98,
    "adam_eps": 1e-8,
    "weight_decay": 0.0,
    "clip_grad": 1.0,
    # A healthy step of the published runs has a norm of 3 to 8, the one that broke a policy 2243.
    "max_grad_norm_skip": 100.0,
    # |train - rollout| log-prob per token: 0.02 healthy, 0.2 to 0.4 late in a second epoch, 233
    # in the broken one. Turns of older versions raise it honestly, so the limit is generous.
    "max_logprob_diff": 1.0,
    "keep_checkpoints": 4,
    "train_threads": None,  # None: leave torch's own
    "gradient_checkpointing": "auto",
}


def complete(args: Namespace, *, on_gpu: bool) -> Namespace:
    """A copy of `args` in which everything the trainer reads is there. Raises `ConfigError`.

    `max_tokens_per_gpu` (tokens of a micro-batch, padding included) defaults to 512 on a CPU and
    4096 on a GPU; `loss_chunk_tokens` (rows of logits at a time) to 512.
    """
    full = Namespace(**vars(args))
    for name, value in DEFAULTS.items():
        if getattr(full, name, None) is None:
            setattr(full, name, value)
    if not getattr(full, "max_tokens_per_gpu", None):
        full.max_tokens_per_gpu = 4096 if on_gpu else 512
    if not getattr(full, "loss_chunk_tokens", None):
        full.loss_chunk_tokens = 512
    choice = full.gradient_checkpointing
    full.gradient_checkpointing = choice in (True, "on") or (choice == "auto" and on_gpu)
    if not getattr(full, "save", None):
        raise ConfigError("save is not set: the trainer needs a folder for its checkpoints")
    loss_type = getattr(full, "loss_type", None)
    if loss_type not in (None, "custom_loss"):
        raise ConfigError(f"the embedded host has loss_type custom_loss only, not {loss_type!r}")
    full.any_temperature = True  # each turn is learnt at its own
    full.segment_steps = full.num_steps_per_rollout
    if full.num_steps_per_rollout < 1:
        raise ConfigError("num_steps_per_rollout must be at least 1")
    for name in ("lr", "clip_grad", "max_grad_norm_skip", "max_logprob_diff"):
        value = getattr(full, name)
        if not value >= 0 or (name == "lr" and math.isinf(value)):
            raise ConfigError(f"{name} must be a number of at least 0, not {value!r}")
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
