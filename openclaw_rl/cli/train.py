"""The embedded host alone: the engine that samples and the trainer."""

from __future__ import annotations

import argparse

from openclaw_rl.cli import checks
from openclaw_rl.config import Config, hook_args


def run(config: Config, _: argparse.Namespace) -> int:
    """Serve the engine and train until stopped. Raises `ConfigError`."""
    checks.check_loops(config, ["train"])
    from openclaw_rl.local.host import run_host

    run_host(hook_args(config))
    return 0
