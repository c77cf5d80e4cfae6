"""Serve an earlier version again, and train on from there (hosts of our own, not slime).

The trainer does it between two batches, under a new version number.
"""

from __future__ import annotations

import argparse
import time

from openclaw_rl.cli.status import version_line
from openclaw_rl.config import Config
from openclaw_rl.errors import ConfigError
from openclaw_rl.journal import Journal
from openclaw_rl.local.checkpoint import folders, name_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that are no settings."""
    parser.add_argument("version", nargs="?", type=int, help="the version to go back to")
    parser.add_argument(
        "--list", action="store_true", help="show the versions, and what the probes measured"
    )


def run(config: Config, options: argparse.Namespace) -> int:
    """Ask the trainer for it, or list the versions. Raises `ConfigError`, `JournalError`."""
    root = config.checkpoint_dir
    kept = [folder.name for folder in folders(root)]
    with Journal.open(config.journal_path, create=False) as journal:
        if options.list:
            for one in journal.versions():
                there = one.state == "served" and name_of(one.version) in kept
                print(version_line(one) + (" · can be served again" if there else ""))
            return 0
        if options.version is None:
            raise ConfigError("rollback: give the VERSION to go back to (--list shows them)")
        if not kept:
            raise ConfigError(
                f"rollback: no checkpoint in {root}; it is for hosts of our own: on slime start "
                "the run again from one of its own (--load, --ckpt-step)"
            )
        if name_of(options.version) not in kept:
            numbers = ", ".join(str(int(name.rpartition("_")[2])) for name in kept)
            raise ConfigError(
                f"rollback: no checkpoint of version {options.version} in {root}; there are "
                f"{numbers}"
            )
        journal.ask("rollback", str(options.version), time.time())
    print(
        f"version {options.version} is served again as soon as the trainer is between two batches; "
        "training goes on from there (openclaw-rl pause stops it)"
    )
    return 0
