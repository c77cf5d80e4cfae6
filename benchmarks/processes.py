"""Processes of a benchmark: their start and end, and what CPU time they use."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class Meter:
    """CPU seconds of named processes, all their threads, from Linux' scheduler."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids

    def read(self) -> dict[str, float]:
        return {name: self._seconds(pid) for name, pid in self._pids.items()}

    async def around(self, work: Awaitable[T]) -> tuple[T, str]:
        """What `work` gives, and what it cost each process."""
        before = self.read()
        result = await work
        spent = {name: value - before[name] for name, value in self.read().items()}
        return result, ", ".join(f"{name} {s:.1f} s" for name, s in spent.items())

    @staticmethod
    def _seconds(pid: int) -> float:
        total = 0
        for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # it ended just now
                total += int(thread.read_text().split()[0])
        return total / 1e9


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def process(*command: str) -> AsyncIterator[int]:
    """A child of ours (its process id); ended with the block. Ready with its first line."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )
    assert child.stdout is not None
    try:
        if not await child.stdout.readline():
            raise SystemExit(f"{command} did not start")
        yield child.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        await child.wait()
