"""Who starts and ends what: the script as a real process, beside a stand-in for `ray`."""

import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.launch.kit import SCRIPTS

FAKE = Path(__file__).with_name("fake_ray.py")
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


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for item in sockets:
        item.bind(("127.0.0.1", 0))
    ports = [item.getsockname()[1] for item in sockets]
    for item in sockets:
        item.close()
    return ports


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


class Launch:
    """One run of a script; `seen` is what the trainer printed."""

    def __init__(self, place, *flags, **environ):
        self.folder = place.folder
        tools = place.folder / "tools"
        tools.mkdir(exist_ok=True)
        ray = tools / "ray"
        ray.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
        ray.chmod(0o755)
        trainer = place.folder / "train me.py"
        trainer.write_text(TRAINER)
        # A Python of its own, so that no real ray lies beside it.
        python = tools / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        port, dashboard = free_ports(2)
        self.environ = {
            **{name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ},
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "PYTHON": str(python),
            "FAKE_RAY_FOLDER": str(place.folder),
            "RAY_COMMAND": str(ray),  # not a real one beside this Python
            "TRAIN_SCRIPT": str(trainer),
            "RAY_PORT": str(port),
            "RAY_DASHBOARD_PORT": str(dashboard),
            "PRM_API_KEY": "k-secret",
            **{k: v for k, v in place.environ.items() if k in ("MODEL_PATH", "DATA_PATH")},
            **environ,
        }
        self.process = subprocess.Popen(
            ["bash", SCRIPTS["rl"], *flags],
            env=self.environ,
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

    def calls(self):
        log = self.folder / "calls.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def test_our_own_ray_runs_the_job_and_ends_with_it(place):
    launch = Launch(place, "--mark", "a b")
    seen = launch.trainer()
    status, out, err = launch.end()
    assert (status, err) == (0, "")
    assert seen["argv"][-2:] == ["--mark", "a b"]
    assert seen["env"]["PRM_API_KEY"] == "k-secret"
    assert seen["env"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    start, submit = launch.calls()
    assert start["words"][:2] == ["start", "--head"]
    assert not alive(start["pid"])
    ours = [line for line in out.splitlines() if line.startswith("[openclaw-rl]")]
    assert "k-secret" not in json.dumps(submit["words"]) + "".join(ours)
    for name in ("engines.yaml", "hooks.yaml", "runtime_env.json", "ray.log"):
        assert stat.S_IMODE((place.data / "slime" / name).stat().st_mode) == 0o600
    assert ours[0].endswith("GPU 0-3    trainer")


def test_the_status_is_the_trainings(place):
    launch = Launch(place, "--fail")
    assert launch.end()[0] == 7


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_case_36_a_signal_ends_what_was_started_and_nothing_else(place, number):
    with closing(socket.socket()) as bystander:
        bystander.bind(("127.0.0.1", 0))
        other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        launch = Launch(place, "--wait")
        seen = launch.trainer()
        start = launch.calls()[0]
        assert alive(start["pid"])
        launch.process.send_signal(number)
        status, _, err = launch.end()
        assert status == 128 + number
        assert err == ""
        assert not alive(start["pid"])
        assert other.poll() is None
        other.communicate(b"\n")
        assert not alive(seen["pid"])


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to end the children")
def test_case_36_nothing_outlives_a_launcher_that_is_killed(place):
    launch = Launch(place, "--wait")
    seen = launch.trainer()
    pids = [launch.calls()[0]["pid"], seen["pid"]]
    watched = [os.pidfd_open(pid) for pid in pids]
    launch.process.kill()
    launch.end()
    for watch in watched:
        assert select.select([watch], [], [], 30)[0], "a child lives on"
        os.close(watch)


def test_a_ray_that_is_there_gets_a_job_and_stays(place):
    address = "http://127.0.0.1:1"
    launch = Launch(place, "--wait", RAY_ADDRESS=address)
    seen = launch.trainer()
    launch.process.terminate()
    assert launch.end()[0] == 128 + signal.SIGTERM
    submit, stop = (call["words"] for call in launch.calls())
    assert submit[:4] == ["job", "submit", "--address", address]
    job = submit[submit.index("--submission-id") + 1]
    assert stop == ["job", "stop", "--address", address, job]
    assert not alive(seen["pid"])


def test_plain_python_for_a_ray_on_this_machine(place):
    launch = Launch(place, RAY_ADDRESS="auto")
    seen = launch.trainer()
    assert launch.end()[0] == 0
    assert launch.calls() == []
    assert seen["env"]["RAY_ADDRESS"] == "auto"
    config = json.loads(seen["env"]["RAY_JOB_CONFIG_JSON_ENV_VAR"])
    assert config["runtime_env"]["env_vars"]["PRM_API_KEY"] == "k-secret"
    assert config["runtime_env"]["env_vars"]["PYTHONPATH"] == seen["env"]["PYTHONPATH"]


def test_plain_python_is_ended_by_a_signal(place):
    launch = Launch(place, "--wait", RAY_ADDRESS="auto")
    seen = launch.trainer()
    launch.process.terminate()
    assert launch.end()[0] == 128 + signal.SIGTERM
    assert not alive(seen["pid"])


def test_a_taken_port_is_one_line_and_nothing_starts(place):
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        launch = Launch(place, RAY_DASHBOARD_PORT=str(taken.getsockname()[1]))
        status, out, err = launch.end()
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert "RAY_DASHBOARD_PORT" in err
    assert "RAY_ADDRESS" in err
    assert launch.calls() == []
    assert not place.data.exists()


def test_a_folder_that_cannot_be_written_is_one_line(place):
    launch = Launch(place, DATA_PATH=str(place.model / "config.json"))
    status, out, err = launch.end()
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert launch.calls() == []


def test_a_head_that_does_not_come_up_is_one_line(place):
    launch = Launch(place, FAKE_RAY_BROKEN="1")
    status, _, err = launch.end()
    assert status == 2
    assert err.count("\n") == 1
    assert "ended with status 3 (no space left on device)" in err
    assert "no space left" in (place.data / "slime" / "ray.log").read_text()


def test_several_machines_are_told_how_to_join(place):
    launch = Launch(place, "--wait", NUM_NODES="2", MASTER_ADDR="127.0.0.2")
    launch.trainer()
    launch.process.terminate()
    _, out, _ = launch.end()
    port = launch.environ["RAY_PORT"]
    assert f"ray start --address 127.0.0.2:{port} --num-gpus 8" in out


REMOTE = """
import os, ray, sys, time
ray.init()
key = ray.get(ray.remote(lambda: os.environ.get("PRM_API_KEY")).remote())
print("remote:", key == "k-secret", sys.argv[-1], flush=True)
time.sleep(600 if "--wait" in sys.argv else 0)
"""
"""A trainer that needs its environment in a Ray worker."""


class RealRay:
    """A machine with a real Ray, on ports of its own."""

    def __init__(self, place):
        pytest.importorskip("ray", reason="ray is not installed")
        if not os.environ.get("REAL_RAY"):
            pytest.skip("a Ray of its own takes minutes on two cores: REAL_RAY=1 runs it")
        self.place = place
        self.port, self.dashboard, self.agent = free_ports(3)
        self.args = f"--dashboard-agent-listen-port {self.agent} --num-cpus 2"
        self.args += " --object-store-memory 100000000"
        trainer = place.folder / "train me.py"
        trainer.write_text(REMOTE)
        self.environ = {
            "TRAIN_SCRIPT": str(trainer),
            "RAY_PORT": str(self.port),
            "RAY_DASHBOARD_PORT": str(self.dashboard),
            "RAY_START_ARGS": self.args,
            "PRM_API_KEY": "k-secret",
        }

    def processes(self):
        """Processes of this Ray, by its port on their command line."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and alive(int(entry.name)):
                words = (entry / "cmdline").read_bytes().decode(errors="replace")
                if str(self.port) in words and "ray" in words:
                    found.append(int(entry.name))
        return found


@pytest.mark.slow
def test_real_ray_runs_a_job_of_the_script(place):
    real = RealRay(place)
    done = place.run("rl", "--mark", "a b", **real.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "remote: True a b" in done.stdout
    assert real.processes() == []


@pytest.mark.slow
def test_case_36_a_signal_ends_a_real_ray_of_our_own(place):
    real = RealRay(place)
    process = subprocess.Popen(
        ["bash", SCRIPTS["rl"], "--wait"],
        env={**os.environ, "PYTHON": sys.executable, **place.environ, **real.environ},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert any("remote: True --wait" in line for line in process.stdout)
    assert real.processes()
    process.terminate()
    process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    assert real.processes() == []


@pytest.mark.slow
def test_case_36_a_real_ray_that_was_there_is_used_and_left_alone(place):
    real = RealRay(place)
    ray = Path(sys.executable).with_name("ray")
    where = [f"--port={real.port}", f"--dashboard-port={real.dashboard}"]
    head = subprocess.Popen(
        [ray, "start", "--head", "--block", "--node-ip-address=127.0.0.1", *where,
         "--num-gpus=8", *real.args.split()],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert any("Ray runtime started" in line for line in head.stdout)
        for address in (f"127.0.0.1:{real.port}", f"http://127.0.0.1:{real.dashboard}"):
            done = place.run("rl", "--mark", "a b", **real.environ, RAY_ADDRESS=address)
            assert done.returncode == 0, done.stdout + done.stderr
            assert "remote: True a b" in done.stdout
            assert head.poll() is None
    finally:
        head.terminate()
        head.wait(120)
