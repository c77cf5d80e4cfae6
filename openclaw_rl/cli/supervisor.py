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
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from openclaw_rl.errors import MISCONFIGURED, ConfigError

STOP_SECONDS = 15.0
"""Time a child gets to end streams and save before it is killed."""

REST_SECONDS = 5.0
"""Time for the rest of the output of a child that has ended: what it started may live on, and hold
the pipe open for ever."""

_FIRST_PAUSE, _LONGEST_PAUSE, _STABLE_SECONDS = 0.5, 30.0, 60.0


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
    # vLLM loads adapters while it serves only where this is set; others do not look at it.
    return Loop(
        name,
        [
            *("env", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"),
            *(sys.executable, "-m", "openclaw_rl.cli.guard_child", *words),
        ],
        kill=signal.SIGINT,  # the guard itself must live to end what it holds
    )


async def supervise(
    loops: Sequence[Loop],
    emit: Callable[[str], None],
    background: Callable[[], Awaitable[None]] | None = None,
    stop: asyncio.Event | None = None,
) -> int:
    """Run `loops` until `stop`, SIGINT or SIGTERM; return the exit status.

    A loop may ask those before it in the list: each is ended when all after it have ended. A second
    signal ends all of them at once. `emit` receives each line of output, prefixed by the loop's
    name. `background` runs beside them and is cancelled at the end.
    """
    stop = stop or asyncio.Event()
    at_once = asyncio.Event()
    event_loop = asyncio.get_running_loop()

    def interrupted() -> None:
        if stop.is_set():
            at_once.set()
        else:
            emit("[up] stopping: replies under way are finished first (once more: at once)")
            stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        # Outside the main thread it is refused: there the owner of `stop` hears the signals.
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            event_loop.add_signal_handler(number, interrupted)
    status = 0

    async def keep(loop: Loop, may_end: asyncio.Event) -> None:
        nonlocal status
        pause = _FIRST_PAUSE
        while not stop.is_set():
            started = time.monotonic()
            code = await _run_once(loop, may_end, at_once, emit)
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

    kept = []
    for loop in loops:
        may_end = asyncio.Event()
        kept.append((asyncio.ensure_future(keep(loop, may_end)), may_end))

    async def end_in_order() -> None:
        await stop.wait()
        for task, may_end in reversed(kept):
            may_end.set()
            await asyncio.wait({task})

    beside = asyncio.ensure_future(background()) if background else None
    await asyncio.gather(*(task for task, _ in kept), end_in_order())
    if beside:
        beside.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await beside
    return status


async def _run_once(
    loop: Loop, stop: asyncio.Event, at_once: asyncio.Event, emit: Callable[[str], None]
) -> int:
    # A pipe of our own: with asyncio's, `wait()` lasts (Python 3.11) until everybody closed it.
    output, theirs = os.pipe()
    try:
        child = await asyncio.create_subprocess_exec(
            *loop.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=theirs,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the supervisor alone, which ends them
        )
    except OSError as error:
        os.close(output)
        raise ConfigError(f"cannot start {loop.command[0]}: {error.strerror}") from error
    finally:
        os.close(theirs)
    assert child.stdin is not None
    if loop.config:  # a few kilobytes, which the pipe holds
        child.stdin.write(loop.config.encode() + b"\n")
    reading = asyncio.ensure_future(_relay(loop.name, output, emit))
    ended = asyncio.ensure_future(child.wait())
    stopping = asyncio.ensure_future(stop.wait())
    killing = asyncio.ensure_future(at_once.wait())
    first = asyncio.FIRST_COMPLETED
    await asyncio.wait({ended, stopping, killing}, return_when=first)
    if not ended.done() and not killing.done():
        child.terminate()
        await asyncio.wait({ended, killing}, timeout=STOP_SECONDS, return_when=first)
        if not ended.done() and not killing.done():
            emit(f"[up] {loop.name} did not stop within {STOP_SECONDS:g} s; killed")
    if not ended.done():
        child.send_signal(loop.kill)
    code = await ended
    stopping.cancel()
    killing.cancel()
    try:
        await asyncio.wait_for(reading, REST_SECONDS)
    except TimeoutError:
        emit(f"[up] {loop.name} has ended, but a process that it started is still running")
    return code


async def _relay(name: str, output: int, emit: Callable[[str], None]) -> None:
    """Emit each line that comes out of the pipe `output`, and close it at its end."""
    stream = asyncio.StreamReader()
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(output, "rb", 0)
    )
    with contextlib.closing(pipe):
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # a line longer than the buffer: its rest follows
                continue
            if not line:
                return
            emit(f"[{name}] {line.decode('utf-8', 'replace').rstrip()}")
