"""The judge alone: reads what happened next, writes rewards and hints."""

from __future__ import annotations

import argparse
import asyncio

from openclaw_rl.cli import checks
from openclaw_rl.config import Config, hook_args


def run(config: Config, _: argparse.Namespace) -> int:
    """Judge until stopped. Raises `ConfigError`."""
    from openclaw_rl.judge.worker import run_judge

    checks.check_loops(config, ["judge"])
    asyncio.run(run_judge(hook_args(config)))
    return 0
