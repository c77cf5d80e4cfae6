"""What a gateway process loads before a tokenizer is asked for."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import importlib, pkgutil, sys
for name in ("openclaw_rl.engine", "openclaw_rl.wire"):
    for module in pkgutil.iter_modules(importlib.import_module(name).__path__, name + "."):
        importlib.import_module(module.name)
print(sorted({"torch", "transformers", "numpy"} & sys.modules.keys()))
"""


def test_engine_and_wire_load_neither_torch_nor_transformers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"
