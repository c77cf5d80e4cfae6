"""The whole system as a user starts it: `openclaw-rl up` in real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import aiohttp
from openai import AsyncOpenAI

from openclaw_rl.engine.client import EngineClient
from openclaw_rl.journal import Journal, Outcomes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class System:
    """`openclaw-rl up` on a model, its output line by line, and its children's process ids."""

    def __init__(self, folder: Path, model: Path, *flags: str) -> None:
        self.data = folder / "data"
        self.port, self.engine_port = free_port(), free_port()
        self.lines: list[str] = []
        self._changed = asyncio.Condition()
        self._command = [
            sys.executable,
            "-m",
            "openclaw_rl.cli",
            "up",
            "--model",
            str(model),
            "--data",
            str(self.data),
            "--port",
            str(self.port),
            "--engine-port",
            str(self.engine_port),
            "--custom-rm-path",
            "openclaw_rl.rewards.feedback.custom_rm",
            "--guards",  # what a random model says to the probes means nothing
            "off",
            *flags,
        ]

    def engine(self, role: str, http: aiohttp.ClientSession) -> EngineClient:
        """A client of what serves a role, with the key that is in the journal."""
        journal = self.journal()
        endpoint = journal.endpoint(role)
        journal.close()
        assert endpoint is not None
        return EngineClient("embedded", endpoint.url, http, key=lambda: endpoint.info["key"])

    async def __aenter__(self) -> System:
        self.process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._reading = asyncio.create_task(self._read())
        self.client = AsyncOpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="-", max_retries=0, timeout=120
        )
        try:
            await self.until_served()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """End it in good order; again: nothing."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        await self.process.wait()
        await self._reading
        await self.client.close()

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            async with self._changed:
                self.lines.append(line.decode().rstrip())
                self._changed.notify_all()
        async with self._changed:
            self._changed.notify_all()

    async def until(self, predicate: Callable[[], bool], seconds: float = 120) -> None:
        """Wait until `predicate` holds; it is asked after each line of output."""
        async with self._changed:
            try:
                await asyncio.wait_for(
                    self._changed.wait_for(lambda: predicate() or self._reading.done()), seconds
                )
            except TimeoutError:
                raise AssertionError("not reached; output:\n" + "\n".join(self.lines)) from None
        assert predicate(), "the system ended:\n" + "\n".join(self.lines)

    async def until_line(self, pattern: str, *, after: int = 0, seconds: float = 120) -> None:
        """Wait for a line, beyond the first `after` ones, that contains `pattern` (a regex)."""
        await self.until(lambda: any(re.search(pattern, x) for x in self.lines[after:]), seconds)

    async def until_served(self) -> None:
        """Wait until the policy answers."""
        async with asyncio.timeout(120):
            while self.process.returncode is None:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                    writer.close()
                    break
                async with self._changed:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), 0.3)
        assert self.process.returncode is None, "\n".join(self.lines)

    def child(self, name: str) -> int:
        """The process id of the loop `name` (serve, judge, train)."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for pid in children.read_text().split():
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if name.encode() in words and b"--supervised" in words:
                return int(pid)
        raise AssertionError(f"no process {name}")

    def journal(self) -> Journal:
        return Journal.open(self.data / "journal.db", create=False)

    def outcomes(self) -> Outcomes:
        journal = self.journal()
        try:
            return journal.outcomes()
        finally:
            journal.close()
