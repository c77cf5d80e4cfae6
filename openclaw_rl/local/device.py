"""The device that the model is on, by the name that the settings give it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openclaw_rl.errors import ConfigError

if TYPE_CHECKING:
    import torch


def device_of(name: str, flag: str = "--device") -> torch.device:
    """`auto` is the GPU where there is one. Raises `ConfigError` for a device that is not there."""
    import torch  # checks before a start that finds no torch come first

    count = torch.cuda.device_count()
    there = ["cpu", *(["cuda"] if count else []), *(f"cuda:{n}" for n in range(count))]
    if name == "auto":
        return torch.device("cuda" if count else "cpu")
    if name not in there:
        raise ConfigError(f"{flag}: no device {name!r}; there is auto, {', '.join(there)}")
    return torch.device(name)
