"""Ray for one launch: our own, or one that is there already.

Guarantees: only what was started here is ended, by its process id or job id, however the launch
ends; a Ray of our own listens for jobs on the loopback only; keys travel in a file of mode 0600 or
in the environment, never on a command line.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from openclaw_rl.cli.checks import check_port
from openclaw_rl.config import SlimeConfig
from openclaw_rl.errors import ConfigError, OpenClawRLError

START_SECONDS = 180.0
"""Time Ray's head gets until it takes jobs (a first start compiles and can be slow)."""

STOP_SECONDS = 30.0
"""Time a process gets after SIGTERM before it is killed."""


_STARTED, _NODE_SECONDS = "Ray runtime started", 45.0
_PR_SET_PDEATHSIG = 1


class RayError(OpenClawRLError):
    """Ray did not start."""


@dataclass(frozen=True, slots=True)
class Way:
    """How the train command reaches Ray."""

    start: list[str] | None
    """Starts a head of our own; None where a Ray is there already."""
    command: list[str]
    """Runs the training and ends with it."""
    environ: dict[str, str]
    """What `command` needs in its environment. May hold secrets."""
    stop: list[str] | None
    """Ends the job in a Ray that stays; None where ending `command` or our Ray does."""
    dashboard: str | None
    """Address of our own head's job server."""


def way(slime: SlimeConfig, train: Sequence[str], runtime_env: Path, content: str, job: str) -> Way:
    """The way to the Ray that `slime.ray_address` names. `runtime_env` is the file with `content`,
    the job's environment; `job` names the job. Raises `ConfigError`."""
    address = slime.ray_address
    if address and not address.startswith(("http://", "https://")):
        # What Ray's own job server does for a driver that it starts.
        environ = {
            "RAY_ADDRESS": address,
            "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": json.loads(content)}),
            **json.loads(content)["env_vars"],
        }
        return Way(None, list(train), environ, None, None)
    ray = slime.ray_command or _ray()
    start = None
    if not address:
        address = f"http://127.0.0.1:{slime.ray_dashboard_port}"
        start = [
            *(ray, "start", "--head", "--block", "--disable-usage-stats"),
            *("--node-ip-address", slime.master_addr or "127.0.0.1"),
            *("--port", str(slime.ray_port)),
            *("--num-gpus", str(slime.num_gpus)),
            *("--dashboard-host", "127.0.0.1"),
            *("--dashboard-port", str(slime.ray_dashboard_port)),
            *shlex.split(slime.ray_start_args),
        ]
    submit = [
        *(ray, "job", "submit", "--address", address, "--submission-id", job),
        *("--runtime-env", str(runtime_env), "--"),
    ]
    stop = None if start else [ray, "job", "stop", "--address", address, job]
    return Way(start, [*submit, *train], {}, stop, address if start else None)


def _ray() -> str:
    """The `ray` of this Python, else the one on PATH."""
    beside = Path(sys.executable).parent / "ray"
    return str(beside) if beside.is_file() else "ray"


def check_machine(slime: SlimeConfig, found: Way) -> None:
    """What is to be started must be there; so must this machine's GPUs and the ports, where Ray is
    our own. Raises `ConfigError`."""
    if shutil.which(found.command[0]) is None:
        raise ConfigError(f"there is no {found.command[0]} command: pip install 'ray[default]'")
    if found.start is None:
        return
    address = slime.master_addr or "127.0.0.1"
    for host, port, name in (
        (address, slime.ray_port, "RAY_PORT"),
        ("127.0.0.1", slime.ray_dashboard_port, "RAY_DASHBOARD_PORT"),
    ):
        try:
            check_port(host, port, name)
        except ConfigError as error:
            raise ConfigError(
                f"{error}, or set RAY_ADDRESS to use the Ray that is there"
            ) from error
    if slime.train_script or shutil.which("nvidia-smi") is None:
        return
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    if listed.returncode == 0 and count < slime.num_gpus:
        raise ConfigError(
            f"NUM_GPUS={slime.num_gpus}, but nvidia-smi lists {count} on this machine"
        )


def run(
    found: Way, environ: Mapping[str, str], log: Path, emit: Callable[[str], None], join: str | None
) -> int:
    """Start what is to be started, wait for the training, end it all; return its status.

    `log` takes the output of our own Ray; `join` is what other machines run to take part. SIGINT,
    SIGTERM and SIGHUP end the run (130, 143, 129). Raises `RayError` where Ray does not come up.
    """
    with _ended_by_signals() as ended, contextlib.ExitStack() as stack:
        try:
            if found.start is not None and found.dashboard is not None:
                output = stack.enter_context(open(log, "wb"))  # a new one for each run
                os.chmod(log, 0o600)
                head = _start(stack, found.start, environ, output=output)
                _await_head(head, found.dashboard, log)
                emit(f"Ray's head runs (log: {log})")
                if join:
                    emit(f"on every other machine: {join}")
            if found.stop is not None:
                stack.callback(_stop_job, found.stop, environ, ended)
            return _start(stack, found.command, {**environ, **found.environ}).wait()
        except _Ended:
            return 128 + ended[0]


class _Ended(BaseException):
    """A signal asked for the end; beyond `except Exception` of anybody."""


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[list[int]]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into `_Ended`; more do not cut the ending short."""
    ended: list[int] = []

    def end(number: int, _: FrameType | None) -> None:
        if not ended:
            ended.append(number)
            raise _Ended

    before = {
        number: signal.signal(number, end)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN  # nohup means to go on
    }
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(
    stack: contextlib.ExitStack,
    command: Sequence[str],
    environ: Mapping[str, str],
    output: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """A process in a session of its own (a Ctrl-C reaches it through us), ended with `stack`."""
    process = subprocess.Popen(
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )
    stack.callback(_end, process)
    return process


def _end_with_parent() -> None:
    """In the child: ask Linux for a SIGTERM when the launcher is gone, even by `kill -9`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its own session: nobody else is in it
        process.wait()


def _stop_job(command: Sequence[str], environ: Mapping[str, str], ended: Sequence[int]) -> None:
    if ended:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, env=dict(environ), timeout=2 * STOP_SECONDS, check=False)


def _await_head(head: subprocess.Popen[bytes], dashboard: str, log: Path) -> None:
    """Return when the head takes jobs.

    Its job server answers before its node is up, so its own word is awaited too; where a version
    of Ray words it otherwise, the time that Ray gives its node (30 s) and some more.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    answered = None
    began = time.monotonic()
    while time.monotonic() < began + START_SECONDS:
        words = log.read_text(encoding="utf-8", errors="replace")
        if head.poll() is not None:
            last = (words.strip().splitlines() or ["no output"])[-1]
            raise RayError(f"Ray's head ended with status {head.returncode} ({last}): see {log}")
        if answered is None:
            with contextlib.suppress(OSError), opener.open(dashboard + "/api/version", timeout=5):
                answered = time.monotonic()
        elif _STARTED in words or time.monotonic() > answered + _NODE_SECONDS:
            return
        time.sleep(0.2)
    raise RayError(f"Ray's head took no jobs within {START_SECONDS:.0f} s: see {log}")
