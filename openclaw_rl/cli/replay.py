"""Learn from past conversations: JSONL of messages, or OpenClaw's own sessions."""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path

from openclaw_rl.cli import checks
from openclaw_rl.config import Config
from openclaw_rl.replay.files import find
from openclaw_rl.replay.run import new_files, replay
from openclaw_rl.replay.turns import Reader


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that are no settings."""
    parser.add_argument(
        "path", nargs="*", type=Path, metavar="PATH",
        help="files or folders (OpenClaw's state folder is one); default: those in --data",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="only count, write nothing")


def run(config: Config, options: argparse.Namespace) -> int:
    """Replay once. Raises `ConfigError`, `ReplayError`."""
    checks.check_model(config)
    checks.check_reply_format(config)
    if not options.dry_run:
        checks.check_data(config)
    folder = Path(config.data.path).expanduser()
    if options.path:
        paths = [file for path in options.path for file in find(path.expanduser())]
    else:
        paths = new_files(folder, config.journal_path) if options.supervised else find(folder)
    if not paths:
        print(f"no new conversations in {folder}")
        return 0
    gateway = config.gateway
    reader = Reader.open(config.model.path, gateway.reply_format, gateway.context_length or None)
    done = replay(paths, reader, config.journal_path, time.time(), dry_run=options.dry_run,
                  emit=partial(print, flush=True))  # fmt: skip
    print(f"{done.files} files, {done.conversations} conversations: "
          f"{done.describe(options.dry_run)}")  # fmt: skip
    return 0
