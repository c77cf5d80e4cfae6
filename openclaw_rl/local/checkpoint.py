"""Checkpoints: an ordinary PEFT adapter folder, the optimiser, and `state.json`.

Guarantees: a checkpoint is either there whole or not there (written beside, synced, renamed);
the newest one that can be read is found; only the last few are kept. `state.json` names the
weight version and the rollout that made it: after a crash that decides what was trained.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from openclaw_rl.errors import ConfigError

_NAME = re.compile(r"version_(\d+)")
ADAPTER, OPTIMIZER, STATE = "adapter_model.safetensors", "optimizer.pt", "state.json"
RUN = "run"


@dataclass(frozen=True, slots=True)
class TrainState:
    """`version` is the weight version saved, `rollout_id` the last rollout trained into it,
    `dropped` the turns of that rollout that were left out, by reason."""

    version: int = 0
    rollout_id: int = -1
    dropped: dict[str, list[str]] = field(default_factory=dict)


def save(
    root: Path, state: TrainState, model: Any, optimizer: torch.optim.Optimizer, keep: int
) -> Path:
    """Write a checkpoint, make it durable, drop the oldest beyond `keep`; returns its folder."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    final = root / name_of(state.version)
    temporary = root / f".writing_{state.version:08d}_{os.getpid()}"
    for left in root.glob(".writing_*"):
        shutil.rmtree(left, ignore_errors=True)
    # Learnt from private conversations; the root may have been there before, open to everybody.
    temporary.mkdir(mode=0o700)
    try:
        # No look-up of the base model for resized embeddings: only the adapter is trained.
        model.save_pretrained(str(temporary), save_embedding_layers=False)
        torch.save(optimizer.state_dict(), temporary / OPTIMIZER)
        body = {
            "format": 1,
            "version": state.version,
            "rollout_id": state.rollout_id,
            "dropped": state.dropped,
        }
        (temporary / STATE).write_text(json.dumps(body, indent=1), encoding="utf-8")
        for path in [*temporary.iterdir(), temporary]:
            _sync(path)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        _sync(root)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for old in folders(root)[max(1, keep) :]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def run_of(root: Path) -> str:
    """A name for the run whose checkpoints are in `root`, made up once and kept there: the same
    path may be another run's on another machine."""
    file = root / RUN
    try:
        return file.read_text(encoding="ascii")
    except FileNotFoundError:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.write_text(secrets.token_hex(4), encoding="ascii")
        return file.read_text(encoding="ascii")


def name_of(version: int) -> str:
    """The name of a version's folder."""
    return f"version_{version:08d}"


def folders(root: Path) -> list[Path]:
    """Checkpoint folders, newest first."""
    if not root.is_dir():
        return []
    found = [p for p in root.iterdir() if p.is_dir() and _NAME.fullmatch(p.name)]
    return sorted(found, key=lambda p: int(p.name.partition("_")[2]), reverse=True)


def read_state(folder: Path) -> TrainState | None:
    """The state of a checkpoint, None where it cannot be read."""
    try:
        body = json.loads((folder / STATE).read_text(encoding="utf-8"))
        dropped = {str(k): [str(t) for t in v] for k, v in body.get("dropped", {}).items()}
        return TrainState(int(body["version"]), int(body["rollout_id"]), dropped)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def load_newest(
    root: Path, model: Any, optimizer: torch.optim.Optimizer
) -> tuple[TrainState, Path | None, list[Path]]:
    """Load the newest readable checkpoint: `(state, its folder or None, unreadable ones)`.

    Raises `ConfigError` where a readable one belongs to another adapter shape: silently starting
    afresh would throw away what was learnt.
    """
    bad: list[Path] = []
    for folder in folders(root):
        state = read_state(folder)
        loaded = _read(folder) if state is not None else None
        if state is None or loaded is None:
            bad.append(folder)
            continue
        weights, moments = loaded
        _apply(folder, model, weights)
        # The moments only: learning rate, betas and weight decay are the settings' of this start.
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": moments["state"], "param_groups": groups})
        return state, folder, bad
    return TrainState(), None, bad


def _read(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
    from safetensors.torch import load_file

    try:
        weights = load_file(str(folder / ADAPTER))
        moments = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)
    except Exception:  # a torn file fails in as many ways as there are formats inside it
        return None
    return weights, moments


def _apply(folder: Path, model: Any, weights: dict[str, torch.Tensor]) -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    own = {name: tuple(t.shape) for name, t in get_peft_model_state_dict(model).items()}
    theirs = {name: tuple(t.shape) for name, t in weights.items()}
    if own != theirs:
        raise ConfigError(
            f"{folder} holds another adapter than the model's (rank, layers or base model differ): "
            "set the same --lora-rank and --model, or another --save folder"
        )
    set_peft_model_state_dict(model, weights)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
