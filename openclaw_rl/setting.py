"""How one setting is declared: what `settings.py` and a host's own settings are made of."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def setting(
    default: Any,
    help: str,
    *,
    flag: str | None = None,
    env: str | None = None,
    choices: tuple[str, ...] | None = None,
    low: float | None = None,
    high: float | None = None,
    secret: bool = False,
    address: bool = False,
) -> Any:
    """Declare a setting; `low` and `high` are inclusive bounds of a number, `address` is that of a
    server, and `secret` a key."""
    metadata = {
        "help": help,
        "flag": flag,
        "env": env,
        "choices": choices,
        "low": low,
        "high": high,
        "secret": secret,
        "address": address,
    }
    return field(default=default, metadata=metadata, repr=not secret)
