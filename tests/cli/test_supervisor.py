"""The supervisor, with real processes: restart, misconfiguration, nothing left behind."""

import asyncio
import contextlib
import dataclasses
import os
import shlex
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest

from openclaw_rl.cli.supervisor import Loop, guarded, supervise
from openclaw_rl.errors import MISCONFIGURED

pytestmark = pytest.mark.slow


def loop(name: str, code: str) -> Loop:
    return Loop(name, [sys.executable, "-u", "-c", textwrap.dedent(code)])


async def test_a_dead_process_is_started_again_and_the_others_go_on(tmp_path):
    lines: list[str] = []
    mark = tmp_path / "mark"
    flaky = f"""
        import os, pathlib, time
        mark = pathlib.Path({str(mark)!r})
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), 9)
        print("second life")
        time.sleep(60)
    """
    steady = "import time; print('steady'); time.sleep(60)"

    def emit(line: str) -> None:
        lines.append(line)
        if "second life" in line:
            os.kill(os.getpid(), signal.SIGTERM)

    loops = [loop("flaky", flaky), loop("steady", steady)]
    status = await asyncio.wait_for(supervise(loops, emit), 30)
    assert status == 0
    assert "[flaky] second life" in lines
    assert any(line.startswith("[up] flaky ended with status -9") for line in lines)
    assert lines.count("[steady] steady") == 1


async def test_work_to_be_done_once_is_tried_again_until_it_is_done(tmp_path):
    lines: list[str] = []
    stop = asyncio.Event()
    mark = tmp_path / "mark"
    work = f"""
        import pathlib, sys
        mark = pathlib.Path({str(mark)!r})
        if not mark.exists():
            mark.touch()
            sys.exit(1)
        print("done")
    """
    once = dataclasses.replace(loop("once", work), once=True)
    ends = loop("ends", "import time; time.sleep(1.5); print('ended')")

    def emit(line: str) -> None:
        lines.append(line)
        if lines.count("[ends] ended") == 2:
            stop.set()

    assert await asyncio.wait_for(supervise([ends, once], emit, stop=stop), 30) == 0
    assert lines.count("[once] done") == 1
    assert len([line for line in lines if line.startswith("[up] once ended with status")]) == 1


async def test_a_misconfigured_process_ends_the_whole():
    lines: list[str] = []
    wrong = f"import sys; print('openclaw-rl: no model'); sys.exit({MISCONFIGURED})"
    status = await asyncio.wait_for(
        supervise([loop("a", wrong), loop("b", "import time; time.sleep(60)")], lines.append), 30
    )
    assert status == MISCONFIGURED
    assert lines.count("[a] openclaw-rl: no model") == 1


async def test_all_that_a_process_said_before_its_end_is_shown():
    lines: list[str] = []
    stop = asyncio.Event()
    code = "import sys; print('x' * 60_000); sys.stdout.write('last words')"

    def emit(line: str) -> None:
        lines.append(line)
        if line.startswith("[up] a ended"):
            stop.set()

    assert await asyncio.wait_for(supervise([loop("a", code)], emit, stop), 30) == 0
    assert lines[:2] == [f"[a] {'x' * 60_000}", "[a] last words"]


ENDS = """
    import signal, sys, time
    def end(*_):
        print("ending")
        {work}
        print("ended")
        sys.exit()
    signal.signal(signal.SIGTERM, end)
    print("ready")
    time.sleep(60)
"""


async def interrupted(lines: list[str], again_at: str, first: str, second: str) -> int:
    """The exit status of a supervisor that is interrupted once both loops are ready, and again
    at the line `again_at`."""

    def emit(line: str) -> None:
        lines.append(line)
        ready = "ready" in line and sum("ready" in seen for seen in lines) == 2
        if ready or line == again_at:
            os.kill(os.getpid(), signal.SIGINT)

    loops = [loop("engine", ENDS.format(work=first)), loop("serve", ENDS.format(work=second))]
    return await asyncio.wait_for(supervise(loops, emit), 10)


async def test_case_36_who_is_asked_ends_after_who_asks():
    lines: list[str] = []
    assert await interrupted(lines, "", "pass", "time.sleep(0.5)") == 0
    assert [line for line in lines if "end" in line] == [
        "[serve] ending", "[serve] ended", "[engine] ending", "[engine] ended",
    ]  # fmt: skip


async def test_case_36_a_second_interrupt_ends_all_at_once():
    lines: list[str] = []
    assert await interrupted(lines, "[serve] ending", "pass", "time.sleep(60)") == 0
    assert [line for line in lines if "end" in line] == ["[serve] ending"]


async def test_case_36_a_second_interrupt_ends_what_is_guarded_with_all_that_it_started():
    stubborn = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('pid', os.getpid(), flush=True); time.sleep(60)"
    )
    held: list[int] = []
    gone = asyncio.Event()

    def emit(line: str) -> None:
        if line.startswith("[engine] pid"):
            held.append(os.pidfd_open(int(line.split()[-1])))
            asyncio.get_running_loop().add_reader(held[0], gone.set)
            for _ in range(2):
                asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGINT)

    engine = guarded("engine", shlex.join([sys.executable, "-c", stubborn]))
    try:
        assert await asyncio.wait_for(supervise([engine], emit), 8) == 0
        await asyncio.wait_for(gone.wait(), 5)
    finally:
        asyncio.get_running_loop().remove_reader(held[0])
        os.close(held[0])


@contextlib.contextmanager
def end_of(pid: int) -> Iterator[asyncio.Event]:
    """An event that is set once that process has ended."""
    descriptor, gone = os.pidfd_open(pid), asyncio.Event()
    asyncio.get_running_loop().add_reader(descriptor, gone.set)
    try:
        yield gone
    finally:
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)


def killing_the_first(
    lines: list[str], first: Callable[[int], None], second: Callable[[], None]
) -> Callable[[str], None]:
    """An `emit` for a guarded program that says `pids PID GUARD`: the first guard is killed after
    `first(PID)`; when it has been started again, `second()`."""
    begun: list[int] = []

    def emit(line: str) -> None:
        lines.append(line)
        if not line.startswith("[engine] pids"):
            return
        pid, guard = map(int, line.split()[2:])
        if begun:
            second()
            return
        begun.append(pid)
        first(pid)
        os.kill(guard, signal.SIGKILL)

    return emit


async def test_a_guard_that_is_killed_takes_what_it_holds_along_and_is_started_again():
    lines: list[str] = []
    stop = asyncio.Event()
    ends: list[asyncio.Event] = []
    engine = guarded("engine", "sh -c 'echo pids $$ $PPID; exec sleep 60'")
    with contextlib.ExitStack() as opened:
        emit = killing_the_first(
            lines, lambda pid: ends.append(opened.enter_context(end_of(pid))), stop.set
        )
        assert await asyncio.wait_for(supervise([engine], emit, stop=stop), 30) == 0
        await asyncio.wait_for(ends[0].wait(), 5)
    assert [line for line in lines if line.startswith("[up]")] == [
        "[up] engine ended with status -9; starting it again in 0.5 s"
    ]


async def test_what_lives_on_with_our_pipe_holds_nothing_up():
    """What the guarded program itself started: it is not ended with a guard that is killed."""
    lines: list[str] = []
    stop = asyncio.Event()
    left: list[int] = []

    emit = killing_the_first(lines, lambda pid: left.append(os.pidfd_open(pid)), stop.set)
    engine = guarded("engine", "sh -c 'sleep 60 & echo pids $! $PPID; wait'")
    try:
        assert await asyncio.wait_for(supervise([engine], emit, stop=stop), 30) == 0
    finally:
        signal.pidfd_send_signal(left[0], signal.SIGKILL)
        os.close(left[0])
    assert [line for line in lines if line.startswith("[up]")] == [
        "[up] engine ended with status -9; starting it again in 0.5 s",
    ]


SUPERVISOR = """
import asyncio, sys
from openclaw_rl.cli.supervisor import Loop, supervise
child = '''
import os, signal, time
from openclaw_rl.cli.supervisor import stop_with_parent
stop_with_parent()
print("child", os.getpid(), flush=True)
time.sleep(60)
'''
asyncio.run(supervise([Loop("c", [sys.executable, "-c", child])], lambda s: print(s, flush=True)))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_case_36_nothing_outlives_the_supervisor(number):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SUPERVISOR, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), 30)
    child = os.pidfd_open(int(line.split()[-1]))
    gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(child, gone.set)  # readable once that process ended
    try:
        process.send_signal(number)
        await asyncio.wait_for(gone.wait(), 30)
        await asyncio.wait_for(process.wait(), 30)
    finally:
        asyncio.get_running_loop().remove_reader(child)
        os.close(child)
