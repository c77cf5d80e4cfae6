"""`--engine-url`: a misuse is one line before anything starts; what we start ends with us."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from openclaw_rl import preflight
from openclaw_rl.config import load_config
from openclaw_rl.errors import ConfigError
from openclaw_rl.hook_args import hook_args
from openclaw_rl.supervisor import leashed

URL = "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"engine.kind": "vllm"}, "--engine belongs to an engine outside"),
        ({"engine.command": "vllm serve x"}, "--engine-cmd belongs"),
        ({"train.device": "cuda:1"}, "--train-device belongs"),
        ({"engine.url": URL}, "--engine vllm|sglang"),
        ({"engine.url": f"{URL}/v1", "engine.kind": "vllm"}, "give the server itself"),
        (
            {"engine.url": URL, "engine.kind": "vllm", "train.opd_top_k": "8"},
            "32 candidates of a token, but --engine vllm gives 20",
        ),
        (
            {"engine.url": URL, "engine.kind": "vllm", "gateway.temperature": "0.7"},
            "--temperature 0.7",
        ),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(flags: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        preflight.check_engine(load_config(flags, {}, None))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_fits_passes() -> None:
    for flags in (
        {},
        {"engine.url": URL, "engine.kind": "vllm", "train.opd_top_k": "4"},
        {"engine.url": URL, "engine.kind": "sglang", "gateway.temperature": "0.7"},
    ):
        preflight.check_engine(load_config(flags, {}, None))


def test_importance_weights_are_on_beside_an_engine_outside_only() -> None:
    outside = {"engine.url": URL, "engine.kind": "vllm"}
    assert hook_args(load_config({}, {}, None)).use_tis is False
    assert hook_args(load_config(outside, {}, None)).tis_clip == 2.0
    assert hook_args(load_config({**outside, "train.tis_clip": "0"}, {}, None)).use_tis is False
    assert hook_args(load_config({"train.tis_clip": "3"}, {}, None)).tis_clip == 3.0


def test_an_engine_command_must_be_there() -> None:
    with pytest.raises(ConfigError, match="no program no-such-engine"):
        leashed("engine", "no-such-engine serve")


@pytest.mark.parametrize("how", ["told", "orphaned"])
async def test_what_a_leashed_program_started_ends_with_it(tmp_path: Path, how: str) -> None:
    """The program starts a child of its own and waits, as vLLM does; both must be gone."""
    pids = tmp_path / "pids"
    code = (
        "import os, subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}\\n'); time.sleep(600)"
    )
    command = f'{sys.executable} -c "{code}"'
    leash = await asyncio.create_subprocess_exec(
        *leashed("engine", command).command, stdin=asyncio.subprocess.PIPE
    )
    await _until(lambda: pids.exists() and pids.read_text().endswith("\n"))
    if how == "told":
        leash.send_signal(signal.SIGTERM)
    else:
        assert leash.stdin is not None
        leash.stdin.close()
    await asyncio.wait_for(leash.wait(), 60)
    for pid in map(int, pids.read_text().split()):
        await _until(lambda pid=pid: not _lives(pid))


async def _until(predicate: Callable[[], bool]) -> None:
    """For what other processes do, which nobody tells us."""
    for _ in range(600):
        if predicate():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it never happened")


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False
