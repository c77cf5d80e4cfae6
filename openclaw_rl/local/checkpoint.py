"""Checkpoints: an ordinary PEFT adapter folder, the optimiser, and `state.json`.

Guarantees: a checkpoint is either there whole or not there (written beside, synced, renamed);
the newest one that can be read is found; only the last few are kept; one of another base model or
another shape of adapter is refused. `state.json` names the weight version and the rollout that made
it (after a crash that decides what was trained), and the fingerprint of what it belongs to.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openclaw_rl.errors import ConfigError

if TYPE_CHECKING:  # the checks of a start, which look for torch, come this way
    import torch

log = logging.getLogger("openclaw_rl.train")

_NAME = re.compile(r"version_(\d+)")
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
OPTIMIZER, STATE, RUN = "optimizer.pt", "state.json", "run"

Fingerprint = Mapping[str, str | int | float]
"""`base` (`engine.model_fingerprint`), `lora_rank`, `lora_alpha`, `target_modules`."""


@dataclass(frozen=True, slots=True)
class TrainState:
    """`version` is the weight version saved, `rollout_id` the last rollout trained into it,
    `dropped` the turns of that rollout that were left out, by reason."""

    version: int = 0
    rollout_id: int = -1
    dropped: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run in the folder `root`; the last `keep` of them are kept."""

    root: Path
    fingerprint: Fingerprint
    keep: int

    def check(self) -> None:
        """Raise `ConfigError` where the newest one belongs to another model. Loads no weights."""
        for folder in folders(self.root):
            if (found := _read_state(folder)) is not None:
                self._check(folder, found[1])
                return

    def save(self, state: TrainState, model: Any, optimizer: torch.optim.Optimizer) -> Path:
        """Write a checkpoint, make it durable, drop the oldest; returns its folder."""
        import torch

        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        final = self.root / name_of(state.version)
        for left in self.root.glob(".writing_*"):  # by a crash or a full disk
            shutil.rmtree(left, ignore_errors=True)
        partial = self.root / f".writing_{state.version:08d}_{os.getpid()}"
        # Learnt from private conversations; the root may have been there before, open to everybody.
        partial.mkdir(mode=0o700)
        # No look-up of the base model for resized embeddings: only the adapter is trained.
        model.save_pretrained(str(partial), save_embedding_layers=False)
        torch.save(optimizer.state_dict(), partial / OPTIMIZER)
        self._write_state(partial / STATE, state)
        for path in [*partial.iterdir(), partial]:
            _sync(path)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _sync(self.root)
        for old in folders(self.root)[max(1, self.keep) :]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def load_newest(self, model: Any, optimizer: torch.optim.Optimizer) -> TrainState | None:
        """Load the newest checkpoint that can be read; None where there is none.

        Raises `ConfigError` where a readable one belongs to another model: silently starting afresh
        would throw away what was learnt.
        """
        for folder in folders(self.root):
            state = self.load(folder, model, optimizer)
            if state is not None:
                return state
            log.warning("[train] checkpoint %s cannot be read; an older one is used", folder.name)
        return None

    def load(self, folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> TrainState | None:
        """Load a checkpoint's weights and Adam's moments; None where it cannot be read. Raises
        `ConfigError` where it belongs to another model."""
        import torch
        from peft import get_peft_model_state_dict, set_peft_model_state_dict
        from safetensors.torch import load_file

        found = _read_state(folder)
        if found is None:
            return None
        state, fingerprint = found
        self._check(folder, fingerprint)
        try:
            weights = load_file(str(folder / ADAPTER))
            moments = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)
        except Exception:  # a torn file fails in as many ways as there are formats inside it
            return None
        own = {name: tuple(t.shape) for name, t in get_peft_model_state_dict(model).items()}
        if own != {name: tuple(t.shape) for name, t in weights.items()}:
            raise ConfigError(
                f"{folder} holds an adapter of other layers than the model's: "
                "set the same --model, or another --save folder"
            )
        set_peft_model_state_dict(model, weights)
        # The moments only: learning rate, betas and weight decay are the settings' of this start.
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": moments["state"], "param_groups": groups})
        if fingerprint != self.fingerprint:  # it was saved before checkpoints had one
            self._write_state(folder / STATE, state)
        return state

    def _check(self, folder: Path, fingerprint: Fingerprint) -> None:
        wrong = [
            f"{name} {value} there, {self.fingerprint[name]} now"
            for name, value in fingerprint.items()
            if self.fingerprint.get(name, value) != value
        ]
        if wrong:
            raise ConfigError(
                f"{folder} belongs to another model ({'; '.join(wrong)}): set what it was trained "
                "with, or another --data (and --save, where it is set)"
            )

    def _write_state(self, path: Path, state: TrainState) -> None:
        body = {**asdict(state), "fingerprint": dict(self.fingerprint)}
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(body, indent=1), encoding="utf-8")
        partial.replace(path)


def _read_state(folder: Path) -> tuple[TrainState, Fingerprint] | None:
    """A checkpoint's state and fingerprint, None where they cannot be read. One without a
    fingerprint is known by what its adapter says of itself."""
    try:
        body = json.loads((folder / STATE).read_text(encoding="utf-8"))
        dropped = {str(k): [str(t) for t in v] for k, v in body["dropped"].items()}
        state = TrainState(int(body["version"]), int(body["rollout_id"]), dropped)
        if "fingerprint" in body:
            return state, body["fingerprint"]
        lora = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        return state, {"lora_rank": lora["r"], "lora_alpha": lora["lora_alpha"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
