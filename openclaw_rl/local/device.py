"""The device that the model is on, by the name that the settings give it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from openclaw_rl.errors import ConfigError

if TYPE_CHECKING:
    import torch


def device_of(name: str, flag: str = "--device") -> torch.device:
    """`auto` is the GPU where there is one. Raises `ConfigError` for a device that is not there."""
    import torch  # checks before a start that finds no torch come first

    count = torch.cuda.device_count()
    if name == "auto":
        return torch.device("cuda" if count else "cpu")
    found = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    if found is None:
        raise ConfigError(f"{flag} must be auto, cpu, cuda or cuda:N, not {name!r}")
    if name != "cpu" and int(found[1] or 0) >= count:
        raise ConfigError(f"{flag} {name}: torch sees {count} CUDA devices (the first is 0)")
    return torch.device(name)
