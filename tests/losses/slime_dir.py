"""Where a real slime is, for tests that run beside it; elsewhere they are skipped."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

SLIME_DIR = os.environ.get("SLIME_DIR", "")


def _reason() -> str:
    if not SLIME_DIR:
        return "SLIME_DIR is not set: slime's own code is not here to run"
    if not Path(SLIME_DIR, "slime", "backends", "megatron_utils", "loss.py").is_file():
        return f"SLIME_DIR ({SLIME_DIR}) holds no slime"
    missing = [name for name in ("megatron", "httpx") if not importlib.util.find_spec(name)]
    return f"slime's loss needs {', '.join(missing)}, not installed here" if missing else ""


needs_slime = pytest.mark.skipif(bool(_reason()), reason=_reason() or "slime is here")
