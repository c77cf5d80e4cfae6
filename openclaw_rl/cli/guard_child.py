"""`python -m openclaw_rl.cli.guard_child PROGRAM ARGUMENTS`: the child process guard.

Runs a program that knows nothing of us. It ends the program, and all that it started, when it is
told to (SIGTERM; SIGINT: at once) or when standard input closes, which is when the supervisor is
gone. Where the guard itself is killed, the kernel kills the program (Linux), not what that started.
It never ends with status 2: what that means is the program's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

_TERM_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1


def guard(command: Sequence[str]) -> int:
    """Run `command` to its end; 0 where it ended with 0, else 1."""
    guard_pid = os.getpid()
    prctl: Callable[[int, int], int] | None = None
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl

    def die_with_guard() -> None:
        if prctl:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != guard_pid:  # it was killed before
                os._exit(1)

    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_guard
    )

    def end(number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)

    def finish() -> None:
        end(signal.SIGTERM)
        try:
            child.wait(_TERM_SECONDS)
        except subprocess.TimeoutExpired:
            end(signal.SIGKILL)

    def watch() -> None:
        while os.read(0, 4096):
            pass
        finish()

    def start(job: Callable[[], None]) -> None:
        threading.Thread(target=job, daemon=True).start()

    signal.signal(signal.SIGTERM, lambda *_: start(finish))
    signal.signal(signal.SIGINT, lambda *_: end(signal.SIGKILL))
    start(watch)
    code = child.wait()
    end(signal.SIGKILL)
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(guard(sys.argv[1:]))
