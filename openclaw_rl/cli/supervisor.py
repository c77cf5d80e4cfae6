"""`openclaw-rl up`: every loop on one machine, each in a process of its own.

Guarantees: a process that dies is started again (with a growing pause), a process that says it is
misconfigured ends the whole, and nothing outlives the supervisor, not even after `kill -9`: each
child holds the read end of a pipe and stops when it closes. They are ended one after the other,
the last of the list first: none while another that asks it still finishes its work. Only own
children are ever ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from openclaw_rl.errors import MISCONFIGURED, ConfigError

STOP_SECONDS = 15.0
"""Time a child gets to end streams and save before it is killed."""

_FIRST_PAUSE, _LONGEST_PAUSE, _STABLE_SECONDS = 0.5, 30.0, 60.0

_PIPE_BYTES = 1 << 20
"""More than a pipe holds: one read takes all that was written."""


@dataclass(frozen=True)
class Loop:
    """One child: `name` prefixes its output, `command` starts it, `config` is the line that it gets
    on standard input (the whole configuration as JSON), `kill` ends it at once. It is there to
    stay, or (`once`) has done its work when it ends with status 0."""

    name: str
    command: Sequence[str]
    config: str = field(default="", repr=False)
    kill: signal.Signals = signal.SIGKILL
    once: bool = False


def stop_with_parent() -> None:
    """Called by a child: end this process (as by SIGTERM) once the supervisor is gone."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(sys.stdin.fileno(), 4096):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="stop-with-parent", daemon=True).start()


def guarded(name: str, command: str) -> Loop:
    """A child that is not ours, by its command line, below the child process guard. Raises
    `ConfigError`."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--engine-cmd: {str(error).lower()}") from error
    if not words or shutil.which(words[0]) is None:
        program = words[0] if words else ""
        fix = "; before the program write env NAME=VALUE" if "=" in program else ""
        raise ConfigError(f"--engine-cmd: no such program: {program}{fix}")
    guard = ["env", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True",  # or vLLM takes no adapter at run time
             sys.executable, "-m", "openclaw_rl.cli.guard_child"]  # fmt: skip
    # SIGKILL would end the guard, which must live to end what it holds.
    return Loop(name, [*guard, *words], kill=signal.SIGINT)


async def supervise(
    loops: Sequence[Loop], emit: Callable[[str], None], stop: asyncio.Event | None = None
) -> int:
    """Run `loops` until `stop`, SIGINT or SIGTERM; return the exit status.

    A loop may ask those before it in the list: each is ended when all after it have ended. A second
    signal ends all of them at once. `emit` receives each line of output, prefixed by the loop's
    name.
    """
    stop, at_once = stop or asyncio.Event(), asyncio.Event()
    status = 0

    def interrupted() -> None:
        if stop.is_set():
            at_once.set()
        else:
            emit("[up] stopping: replies under way are finished first (once more: at once)")
            stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupted)

    async def may_end(place: int) -> None:
        await stop.wait()
        for later in kept[place + 1 :]:
            await asyncio.wait({later})

    async def keep(place: int, loop: Loop) -> None:
        nonlocal status
        pause = _FIRST_PAUSE
        while not stop.is_set():
            started = time.monotonic()
            code = await _run_once(loop, may_end(place), at_once.wait(), emit)
            if stop.is_set() or (loop.once and code == 0):
                return
            if code == MISCONFIGURED:
                status = MISCONFIGURED
                stop.set()
                return
            if time.monotonic() - started > _STABLE_SECONDS:
                pause = _FIRST_PAUSE
            emit(f"[up] {loop.name} ended with status {code}; starting it again in {pause:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    kept = [asyncio.ensure_future(keep(place, loop)) for place, loop in enumerate(loops)]
    await asyncio.gather(*kept)
    return status


async def _run_once(
    loop: Loop,
    may_end: Coroutine[Any, Any, Any],
    at_once: Coroutine[Any, Any, Any],
    emit: Callable[[str], None],
) -> int:
    """Run the child to its end, which comes by itself, or is asked for once `may_end` returns and
    enforced once `at_once` does; its status."""
    told, killed = asyncio.ensure_future(may_end), asyncio.ensure_future(at_once)
    with _relayed(loop.name, emit) as output:
        try:
            child = await asyncio.create_subprocess_exec(
                *loop.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the supervisor alone, which ends them
            )
        except OSError as error:
            raise ConfigError(f"cannot start {loop.command[0]}: {error.strerror}") from error
        assert child.stdin is not None
        if loop.config:  # a few kilobytes, which the pipe holds
            child.stdin.write(loop.config.encode() + b"\n")
        ended = asyncio.ensure_future(child.wait())
        first = asyncio.FIRST_COMPLETED
        await asyncio.wait({ended, told, killed}, return_when=first)
        if not ended.done() and not killed.done():
            child.terminate()
            await asyncio.wait({ended, killed}, timeout=STOP_SECONDS, return_when=first)
            if not ended.done() and not killed.done():
                emit(f"[up] {loop.name} did not stop within {STOP_SECONDS:g} s; killed")
        if not ended.done():
            child.send_signal(loop.kill)
        told.cancel()
        killed.cancel()
        return await ended


@contextlib.contextmanager
def _relayed(name: str, emit: Callable[[str], None]) -> Iterator[int]:
    """A descriptor whose lines are emitted: all that was written to it before the end, and nothing
    more, because what a child started may live on and hold the pipe open for ever."""
    event_loop = asyncio.get_running_loop()
    source, sink = os.pipe()
    os.set_blocking(source, False)
    rest = b""

    def read() -> None:
        nonlocal rest
        with contextlib.suppress(BlockingIOError):
            *lines, rest = (rest + os.read(source, _PIPE_BYTES)).split(b"\n")
            for line in lines:
                emit(f"[{name}] {line.decode('utf-8', 'replace').rstrip()}")

    event_loop.add_reader(source, read)
    try:
        yield sink
        read()
        if rest:
            emit(f"[{name}] {rest.decode('utf-8', 'replace')}")
    finally:
        event_loop.remove_reader(source)
        os.close(source)
        os.close(sink)
