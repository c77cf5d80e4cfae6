"""A machine without torch is told so by the checks of a start, which must load without it."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
sys.modules["torch"] = None
import openclaw_rl.cli.checks
"""


def test_the_checks_load_without_torch():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
