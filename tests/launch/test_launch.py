"""What a script starts: the script as a real process, with a trainer that says what it sees."""

import json
import os
import select
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.kit import SCRIPTS

pytestmark = pytest.mark.slow

TRAINER = """
import json, os, sys, time
names = ("PYTHONPATH", "PRM_API_KEY", "CUDA_DEVICE_MAX_CONNECTIONS", "RAY_ADDRESS",
         "RAY_JOB_CONFIG_JSON_ENV_VAR")
seen = {"argv": sys.argv[1:], "env": {n: os.environ.get(n) for n in names}, "pid": os.getpid()}
print(json.dumps(seen), flush=True)
if "--wait" in sys.argv:
    time.sleep(600)
sys.exit(7 if "--fail" in sys.argv else 0)
"""


class Launch:
    """One run of a script."""

    def __init__(self, place, *flags, **environ):
        trainer = place.folder / "train me.py"
        trainer.write_text(TRAINER)
        self.process = subprocess.Popen(
            ["bash", SCRIPTS["rl"], *flags],
            env={
                **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
                **{k: v for k, v in place.environ.items() if k in ("MODEL_PATH", "DATA_PATH")},
                "PYTHON": sys.executable,
                "TRAIN_SCRIPT": str(trainer),
                "PRM_API_KEY": "k-secret",
                **environ,
            },
            cwd=place.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines = []

    def trainer(self):
        """What the trainer saw, as soon as it says so."""
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError(f"no trainer: {self.lines} {self.process.stderr.read()}")

    def end(self):
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, "".join(self.lines) + out, err


def test_the_launcher_becomes_the_train_script_with_a_ray_of_its_own(place):
    launch = Launch(place, "--mark", "a b")
    seen = launch.trainer()
    status, out, err = launch.end()
    assert (status, err) == (0, "")
    assert seen["argv"][-2:] == ["--mark", "a b"]
    assert seen["env"]["RAY_ADDRESS"] == "local"
    assert seen["env"]["PRM_API_KEY"] == "k-secret"
    assert seen["env"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert seen["pid"] == launch.process.pid  # so signals and kill -9 reach it, case 36
    ours = [line for line in out.splitlines() if line.startswith("[openclaw-rl]")]
    assert ours[0].endswith("GPU 0-3    trainer")
    assert "k-secret" not in "".join(ours)
    for name in ("engines.yaml", "hooks.yaml", "runtime_env.json"):
        assert stat.S_IMODE((place.data / "slime" / name).stat().st_mode) == 0o600


def test_the_status_is_the_trainings(place):
    assert Launch(place, "--fail").end()[0] == 7


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_case_36_a_signal_ends_what_was_started_and_nothing_else(place, number):
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    launch = Launch(place, "--wait")
    watch = os.pidfd_open(launch.trainer()["pid"])
    launch.process.send_signal(number)
    launch.end()
    assert select.select([watch], [], [], 30)[0], "the trainer lives on"
    os.close(watch)
    assert other.poll() is None
    other.communicate(b"\n")


def test_a_ray_that_is_there_gets_a_job(place):
    tools = place.folder / "tools"
    tools.mkdir()
    ray = tools / "ray"
    ray.write_text('#!/bin/sh\nfor word in "$@"; do echo "word:$word"; done\n')
    ray.chmod(0o755)
    address = "http://127.0.0.1:1"
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    status, out, err = Launch(place, RAY_ADDRESS=address, PATH=path).end()
    assert (status, err) == (0, "")
    words = [line.removeprefix("word:") for line in out.splitlines() if line.startswith("word:")]
    private = place.data / "slime" / "runtime_env.json"
    assert words[:4] == ["job", "submit", "--address", address]
    assert words[4:7] == ["--runtime-env", str(private), "--"]
    assert "k-secret" not in out
    assert json.loads(private.read_text())["env_vars"]["PRM_API_KEY"] == "k-secret"


def test_a_driver_for_the_ray_of_a_cluster(place):
    launch = Launch(place, RAY_ADDRESS="auto", NUM_NODES="2")
    seen = launch.trainer()
    assert launch.end()[0] == 0
    assert seen["env"]["RAY_ADDRESS"] == "auto"
    config = json.loads(seen["env"]["RAY_JOB_CONFIG_JSON_ENV_VAR"])
    assert config["runtime_env"]["env_vars"]["PRM_API_KEY"] == "k-secret"
    assert config["runtime_env"]["env_vars"]["PYTHONPATH"] == seen["env"]["PYTHONPATH"]


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"NUM_NODES": "2"}, "NUM_NODES=2 needs a Ray over all machines"),
        ({"RAY_ADDRESS": "http://h:1", "PATH": "/usr/bin:/bin"}, "no ray command"),
        ({"DATA_PATH": "/dev/null/data"}, "DATA_PATH: cannot write /dev/null/data"),
    ],
)
def test_what_cannot_start_is_one_line(place, environ, words):
    status, out, err = Launch(place, **environ).end()
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert words in err


def test_fewer_gpus_than_asked_for_is_one_line(place):
    tools = place.folder / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: one'\n")
    (tools / "nvidia-smi").chmod(0o755)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    done = place.run("rl", PATH=path)
    assert done.returncode == 2
    assert "NUM_GPUS=8, but nvidia-smi lists 1" in done.stderr
    assert not Path(place.data).exists()
