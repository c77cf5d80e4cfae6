"""Everything on one machine: gateway, judge, and engine with trainer."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping
from typing import Any

from openclaw_rl.cli import checks
from openclaw_rl.cli.status import mean_reward, read_status
from openclaw_rl.cli.supervisor import Loop, guarded, supervise
from openclaw_rl.config import Config
from openclaw_rl.errors import ConfigError, JournalError

LOOPS = ("train", "judge", "serve")
"""In the order in which they are started: each asks those before it."""

_REPORT_SECONDS = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that are no settings."""
    parser.add_argument(
        "loops", nargs="*", metavar="LOOP", help="serve, judge, train: only these (default: all)"
    )


def run(config: Config, options: argparse.Namespace) -> int:
    """Run until stopped; the exit status. Raises `ConfigError`."""
    for name in options.loops:
        if name not in LOOPS:
            raise ConfigError(f"up: {name!r} is not one of {', '.join(LOOPS)}")
    wanted = [name for name in LOOPS if name in options.loops or not options.loops]
    if "train" in wanted:
        checks.check_engine_address(config)  # before what is there is asked what it is
    checks.check_loops(config, wanted)
    past = len(checks.check_conversations(config)) if "serve" in wanted else 0
    tree = config.model_dump_json()
    loops = [
        Loop(
            name,
            [sys.executable, "-m", "openclaw_rl.cli", name, "--supervised", "--config", "-"],
            tree,
            once=name == "replay",
        )
        for name in (*wanted, *(["replay"] if past else []))
    ]
    if "train" in wanted and config.engine.command:
        loops.insert(0, guarded("engine", config.engine.command))
    checks.check_journal(config, wanted)  # last, because it ties the journal to the model

    def emit(line: str) -> None:
        print(line, flush=True)

    async def report() -> None:
        last = ""
        while True:
            await asyncio.sleep(_REPORT_SECONDS)
            with contextlib.suppress(JournalError):  # before the first loop has made it
                line = _progress(await asyncio.to_thread(read_status, config))
                if line != last:
                    emit(f"[up] {line}")
                    last = line

    # The bars and hints of libraries are no lines of ours.
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")
    if past:
        emit(f"[up] files of past conversations in the data folder, to learn from: {past}")
    emit(
        f"[up] model {config.served_name} at http://{config.gateway.host}:{config.gateway.port}/v1"
        f" · method {config.train.method} · data {config.data.path}"
    )

    async def all_loops() -> int:
        reporting = asyncio.create_task(report())
        try:
            return await supervise(loops, emit)
        finally:
            reporting.cancel()

    return asyncio.run(all_loops())


def _progress(status: Mapping[str, Any]) -> str:
    return (
        f"turns {status['main']} · judged {status['judged']} · "
        f"ready {status['ready']}/{status['batch_size']} · trained {status['trained']} · "
        f"dropped {sum(status['dropped'].values())} · version {status['version'] or 0} · "
        f"reward {mean_reward(status)}" + (" · paused" if status["paused"] is not None else "")
    )
