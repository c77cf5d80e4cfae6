"""Checkpoints: an ordinary PEFT adapter folder, the optimiser, and `state.json`.

Guarantees: a checkpoint is either there whole or not there (written beside, synced, renamed);
the newest one that can be read is found; the last few are kept, and the best one; one of another
base model or another shape of adapter is refused. `state.json` names the weight version and the
rollout that made it (after a crash that decides what was trained), and the fingerprint of what it
belongs to.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openclaw_rl.engine import model_fingerprint
from openclaw_rl.errors import ConfigError

if TYPE_CHECKING:  # the checks of a start, which look for torch, come this way
    import torch

log = logging.getLogger("openclaw_rl.train")

_NAME = re.compile(r"version_(\d+)")
ADAPTER, OPTIMIZER, STATE = "adapter_model.safetensors", "optimizer.pt", "state.json"

Fingerprint = Mapping[str, str | int | float]
"""See `fingerprint_of`."""
TARGET_MODULES = "all-linear"
"""Where the adapter is, as PEFT names it."""


def fingerprint_of(model: str | Path, lora_rank: int, lora_alpha: float) -> Fingerprint:
    """What journal and checkpoints are tied to: the base in the folder `model`, and the shape of
    the adapter. Raises `ConfigError` where there is no model."""
    return {
        "base": model_fingerprint(model),
        "lora_rank": lora_rank,
        "lora_alpha": lora_alpha,
        "target_modules": TARGET_MODULES,
    }


@dataclass(frozen=True, slots=True)
class TrainState:
    """`version` is the weight version saved, `rollout_id` the last rollout trained into it,
    `dropped` the turns of that rollout that were left out, by reason; `restored` the version whose
    weights it has again, `figures` what its probes measured."""

    version: int = 0
    rollout_id: int = -1
    dropped: dict[str, list[str]] = field(default_factory=dict)
    restored: int | None = None
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run in the folder `root`; the last `keep` of them are kept."""

    root: Path
    fingerprint: Fingerprint
    keep: int

    def check(self) -> None:
        """Raise `ConfigError` where the newest one belongs to another model. Loads no weights."""
        next(self._readable(), None)

    def save(
        self,
        state: TrainState,
        model: Any,
        optimizer: torch.optim.Optimizer,
        best: int | None = None,
    ) -> Path:
        """Write a checkpoint, make it durable, drop the oldest but not the version `best`; returns
        its folder."""
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
        body = {**asdict(state), "fingerprint": dict(self.fingerprint)}
        (partial / STATE).write_text(json.dumps(body, indent=1), encoding="utf-8")
        for path in [*partial.iterdir(), partial]:
            _sync(path)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _sync(self.root)
        for old in folders(self.root)[max(1, self.keep) :]:
            if best is None or old.name != name_of(best):
                shutil.rmtree(old, ignore_errors=True)
        return final

    def load_newest(self, model: Any, optimizer: torch.optim.Optimizer) -> TrainState | None:
        """Load weights and Adam's moments of the newest checkpoint that can be read; None where
        there is none.

        Raises `ConfigError` where a readable one belongs to another model: silently starting afresh
        would throw away what was learnt.
        """
        return self._load(self._readable(), model, optimizer)

    def load(self, version: int, model: Any, optimizer: torch.optim.Optimizer) -> TrainState | None:
        """As `load_newest`, of one version; None where it was not kept, or cannot be read."""
        kept = ((folder, state) for folder, state in self._readable() if state.version == version)
        return self._load(kept, model, optimizer)

    def _load(
        self,
        found: Iterable[tuple[Path, TrainState]],
        model: Any,
        optimizer: torch.optim.Optimizer,
    ) -> TrainState | None:
        """Load the first one that can be read whole."""
        import torch
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        for folder, state in found:
            try:
                weights = load_file(str(folder / ADAPTER))
                moments = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)
            except Exception:  # a torn file fails in as many ways as there are formats inside it
                _unreadable(folder)
                continue
            set_peft_model_state_dict(model, weights)
            # The moments only: learning rate, betas and weight decay are this start's settings.
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": moments["state"], "param_groups": groups})
            return state
        return None

    def _readable(self) -> Iterator[tuple[Path, TrainState]]:
        """Checkpoints whose state can be read, newest first. Raises `ConfigError` for another
        model's."""
        for folder in folders(self.root):
            try:
                body = json.loads((folder / STATE).read_text(encoding="utf-8"))
                found = body.pop("fingerprint", {})
                state = TrainState(
                    body["version"], body["rollout_id"], body["dropped"],
                    body.get("restored"), body.get("figures", {}),
                )  # fmt: skip
            except (OSError, ValueError, LookupError, AttributeError):
                _unreadable(folder)
                continue
            wrong = [
                f"{name} {found.get(name, 'unknown')} there, {value} now"
                for name, value in self.fingerprint.items()
                if found.get(name) != value
            ]
            if wrong:
                raise ConfigError(
                    f"{folder} belongs to another model ({'; '.join(wrong)}): set what it was "
                    "trained with, or another --data (and --save, where it is set)"
                )
            yield folder, state


def name_of(version: int) -> str:
    """The name of a version's folder."""
    return f"version_{version:08d}"


def folders(root: Path) -> list[Path]:
    """Checkpoint folders, newest first."""
    if not root.is_dir():
        return []
    found = [p for p in root.iterdir() if p.is_dir() and _NAME.fullmatch(p.name)]
    return sorted(found, key=lambda p: int(p.name.partition("_")[2]), reverse=True)


def _unreadable(folder: Path) -> None:
    log.warning("[train] checkpoint %s cannot be read; an older one is used", folder.name)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
