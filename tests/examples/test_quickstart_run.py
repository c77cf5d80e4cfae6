"""The quickstart's command line: what reaches the system, and one line for each mistake."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples.quickstart.options import parse, without_settings
from examples.quickstart.report import table
from examples.quickstart.run import Plan, ended
from examples.quickstart.talk import Exam
from examples.quickstart.user import Verdict
from openclaw_rl.config import load_config, settings
from tests.fakes.model import tiny_model

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "examples" / "quickstart" / "recipe.toml"


def start(folder: Path, **environ: str) -> subprocess.Popen[str]:
    """`make quickstart`'s command as a process group of its own, as a terminal starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", "examples.quickstart.run", "--folder", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_no_setting_of_the_callers_environment_reaches_the_system():
    environ = {one.env: "abc" for one in settings() if one.env} | {"PATH": "/bin"}
    kept = without_settings(environ)
    assert kept == {"PATH": "/bin"}
    assert load_config({}, kept, str(RECIPE)).train == load_config({}, {}, str(RECIPE)).train
    assert without_settings(environ, keep=("ENGINE_API_KEY",))["ENGINE_API_KEY"] == "abc"


def test_the_environment_gives_defaults_and_a_flag_wins():
    options = parse(["--updates", "3"], {"METHOD": "rl", "UPDATES": "9", "SEED": "2", "EVERY": ""})
    assert (options.method, options.updates, options.seed, options.every) == ("rl", 3, 2, 3)


def test_several_users_talk_for_longer():
    one, several = parse([], {}), parse(["--users", "8"], {})
    assert (one.users, one.updates, one.every) == (1, 12, 3)
    assert (several.updates, several.every) == (36, 6)


@pytest.mark.parametrize(
    ("name", "value"), [("METHOD", "foo"), ("UPDATES", "abc"), ("EVERY", "0"), ("SEED", "-1")]
)
def test_a_bad_value_is_one_line(name, value, capsys):
    with pytest.raises(SystemExit) as end:
        parse([], {name: value})
    said = capsys.readouterr().err
    assert end.value.code == 2
    assert said.count("\n") == 1
    assert name.lower() in said
    assert value in said


def test_the_shares_of_a_row_add_up():
    share = 1 / len(Verdict)
    exam = Exam(0, share, 12.0, {kind.value: share for kind in Verdict}, "Snow is ice.")
    text = table([exam])
    assert "after" not in text  # there is one exam so far
    row = text.splitlines()[2]
    assert sum(int(word[:-1]) for word in row.split() if word.endswith("%")) == pytest.approx(
        100, abs=3
    )


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("[train] openclaw-rl: --lr: no\n[serve] stopping\n", "[train] openclaw-rl: --lr: no"),
        ("[train] a line\r its rest\n\nKeyError: 'x'\n", "KeyError: 'x'"),
        ("[train] a line\r its rest\n", "status -9"),
    ],
)
def test_an_early_end_is_told_with_its_reason(tmp_path, log, reason):
    plan = Plan("rl", 1, 1, 0, 1, 1, tmp_path, 1)
    plan.log.write_text(log, newline="")
    assert f"ended: {reason} (log: {plan.log})" in str(ended(plan, -9))


@pytest.mark.slow
def test_a_model_that_is_not_there_is_named(tmp_path):
    process = start(tmp_path, MODEL_PATH=str(tmp_path / "nowhere"))
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert said.count("\n") == 1
    assert f"no such folder: {tmp_path / 'nowhere'}" in said


@pytest.mark.slow
def test_ctrl_c_ends_everything_without_a_traceback(tmp_path):
    model = tiny_model(tmp_path / "model")
    process = start(tmp_path / "runs", MODEL_PATH=str(model), OPENCLAW_RL_API_KEY="secret")
    assert process.stdout is not None
    said = ""
    while "is served at" not in said:  # the caller's key is not asked for
        line = process.stdout.readline()
        assert line, "it ended early"
        said += line
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert f"the run is kept in {tmp_path / 'runs'}" in errors
    left = [
        path
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if str(tmp_path).encode() in _read(path)
    ]
    assert not left


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it ended meanwhile
        return b""
