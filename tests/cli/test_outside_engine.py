"""`--engine-url`: a misuse is one line before anything starts; what we start ends with us."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from openclaw_rl.cli import checks, main
from openclaw_rl.cli.supervisor import guarded
from openclaw_rl.config import hook_args, load_config
from openclaw_rl.errors import MISCONFIGURED, ConfigError
from tests.fakes.model import tiny_tokenizer
from tests.fakes.vllm import FakeVLLM

URL = "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"engine.kind": "vllm"}, "--engine is for an external engine"),
        ({"engine.command": "vllm serve x"}, "--engine-cmd is for"),
        ({"train.device": "cuda:1"}, "--train-device is for"),
        ({"engine.adapter_dir_at_engine": "/mnt"}, "--adapter-dir-at-engine is for"),
        ({"engine.url": f"{URL}/v1", "engine.kind": "vllm"}, "give the server itself"),
        ({"engine.url": f"{URL}/v1/completions"}, "--engine-url: give the server itself"),
        ({"judge.teacher_url": f"{URL}/v1"}, "--teacher-url: give the server itself"),
        ({"train.tis_clip": "-0.5"}, "--tis-clip -0.5: must be -1, or at least 0"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(flags: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checks.check_engine(load_config(flags, {}, None))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def up(tmp_path: Path) -> list[str]:
    """A command line that is refused at the last check, before anything starts."""
    model = tiny_tokenizer(tmp_path / "model")
    return ["up", "--model", str(model), "--data", str(tmp_path / "data"),
            "--custom-rm-path", "./none.py"]  # fmt: skip


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_what_listens_already_is_not_taken_for_the_engine_that_is_started(
    up: list[str], host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        url = f"http://{host}:{other.getsockname()[1]}"
        assert main([*up, "--engine-url", url, "--engine-cmd", "sleep 60"]) == MISCONFIGURED
    said = capsys.readouterr()
    assert f"--engine-cmd: something listens at {url} already: stop it" in said.err
    assert "omit --engine-cmd" in said.err
    assert said.err.count("\n") == 1
    assert said.out == "", "no process was started"


def test_a_connection_to_an_engine_that_was_stopped_is_not_in_the_way(
    up: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as engine:
        engine.bind(("127.0.0.1", 0))
        engine.listen()
        port = engine.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            engine.accept()[0].close()  # who closes first is left in TIME_WAIT
            assert client.recv(1) == b""
    with socket.socket() as probe, pytest.raises(OSError, match="in use"):
        probe.bind(("127.0.0.1", port))
    flags = ["--engine-url", f"http://127.0.0.1:{port}", "--engine-cmd", "sleep 60"]
    assert main([*up, *flags]) == MISCONFIGURED
    assert "no such file" in capsys.readouterr().err, "the check after it"


async def test_without_a_command_what_listens_is_the_engine() -> None:
    async with FakeVLLM() as fake:
        given = {"engine.url": fake.url}
        checks.check_engine_address(load_config(given, {}, None))
        with pytest.raises(ConfigError, match="something listens"):
            checks.check_engine_address(
                load_config({**given, "engine.command": "sleep 60"}, {}, None)
            )


CANNOT = [
    ({"train.opd_top_k": "8"}, "32 candidates of a token, but this vllm gives 20"),
    ({"gateway.temperature": "0.7"}, "--logprobs-mode processed_logprobs"),
    ({"engine.kind": "sglang"}, "is vllm"),
]


@pytest.mark.parametrize(("flags", "words"), CANNOT)
async def test_what_an_engine_that_answers_cannot_do_is_said_before_anything_starts(
    flags: dict[str, str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_tokenizer(tmp_path / "model")
    async with FakeVLLM() as fake:
        given = {"engine.url": fake.url, **flags}
        names = {"train.opd_top_k": "--opd-top-k", "gateway.temperature": "--temperature",
                 "engine.url": "--engine-url", "engine.kind": "--engine"}  # fmt: skip
        up = ["up", "--model", str(model), "--data", str(tmp_path / "data")]
        up += [word for key, value in given.items() for word in (names[key], value)]
        assert await asyncio.to_thread(main, up) == MISCONFIGURED
    said = capsys.readouterr()
    assert words in said.err
    assert said.err.count("\n") == 1
    assert said.out == "", "no process was started"


async def test_what_fits_passes_and_so_does_an_engine_that_is_not_there_yet() -> None:
    async with FakeVLLM(processed=True, max_logprobs=32) as fake:
        given = {"engine.url": fake.url}
        for flags in (
            {},
            {**given, "train.opd_top_k": "8", "gateway.temperature": "0.7"},
            {**given, "engine.kind": "vllm"},
        ):
            await asyncio.to_thread(checks.check_engine, load_config(flags, {}, None))
    await asyncio.to_thread(checks.check_engine, load_config(given, {}, None))


def test_importance_weights_are_on_beside_an_engine_outside_only() -> None:
    outside = {"engine.url": URL, "engine.kind": "vllm"}
    assert hook_args(load_config({}, {}, None)).use_tis is False
    assert hook_args(load_config(outside, {}, None)).tis_clip == 2.0
    assert hook_args(load_config({**outside, "train.tis_clip": "0"}, {}, None)).use_tis is False
    assert hook_args(load_config({"train.tis_clip": "3"}, {}, None)).tis_clip == 3.0


def test_the_trainer_may_have_a_device_of_its_own() -> None:
    flags = {"engine.url": f"{URL}/", "train.device": "cuda:1", "model.device": "cuda:0"}
    args = hook_args(load_config(flags, {}, None))
    assert (args.device, args.engine_url, args.engine_kind) == ("cuda:1", URL, "auto")
    assert hook_args(load_config({}, {}, None)).engine_kind == "embedded"


@pytest.mark.parametrize("name", ["engine.url", "judge.prm_url", "judge.judge_url",
                                  "judge.teacher_url"])  # fmt: skip
@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8000", "http://", "http://h:port", "http://h:99999", "ftp://h", "http://[::1"],
)
def test_an_address_must_be_one(name: str, url: str) -> None:
    with pytest.raises(ConfigError, match=r"give the server's address, like http://"):
        load_config({name: url}, {}, None)


@pytest.mark.parametrize("key", ["two\nlines", "clé", "with space"])
@pytest.mark.parametrize("name", ["ENGINE_API_KEY", "PRM_API_KEY", "JUDGE_API_KEY"])
def test_a_key_that_cannot_be_sent_is_said_and_not_shown(name: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: must be printable ASCII") as caught:
        load_config({}, {name: key}, None)
    assert key not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cuda:99", "--train-device: no device 'cuda:99'; there is auto, cpu"),
        ("gpu", "--train-device: no device 'gpu'"),
    ],
)
def test_a_device_that_is_not_there_is_said_before_anything_starts(name: str, words: str) -> None:
    pytest.importorskip("torch")
    flags = {"engine.url": URL, "train.device": name}
    with pytest.raises(ConfigError, match=words):
        checks.check_training(load_config(flags, {}, None))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("no-such-engine serve", "no such program: no-such-engine"),
        ("A=1 vllm serve", "no such program: A=1; before the program write env NAME=VALUE"),
        ('vllm serve "x', "--engine-cmd: no closing quotation"),
        (" ", "no such program"),
    ],
)
def test_an_engine_command_must_be_there(command: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        guarded("engine", command)


@pytest.mark.parametrize("how", ["told", "orphaned"])
async def test_what_a_guarded_program_started_ends_with_it(tmp_path: Path, how: str) -> None:
    """The program starts a child of its own and waits, as vLLM does; both must be gone."""
    pids = tmp_path / "pids"
    code = (
        "import os, subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}\\n'); time.sleep(600)"
    )
    command = f'{sys.executable} -c "{code}"'
    leash = await asyncio.create_subprocess_exec(
        *guarded("engine", command).command, stdin=asyncio.subprocess.PIPE
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
