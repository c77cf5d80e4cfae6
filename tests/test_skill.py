"""The skill for coding agents: each command in it is one that there is."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from openclaw_rl.cli.commands import build_parser
from openclaw_rl.config import settings
from tests.launch.kit import SCRIPTS, Place

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "plugins" / "skills" / "openclaw-rl-training"
TEXT = (FOLDER / "SKILL.md").read_text(encoding="utf-8")
LINES = [
    line for block in re.findall(r"```sh\n(.*?)```", TEXT, re.S) for line in block.splitlines()
]
OTHERS = ("nvidia-smi", "python3", "free", ".venv/bin/pip", ".venv/bin/openclaw-rl")
VALUES = {"MODEL": "MODEL_PATH", "DATA": "DATA_PATH", "SLIME": "SLIME_DIR",
          "MEGATRON": "MEGATRON_DIR"}  # fmt: skip


def ours(line: str) -> bool:
    return line.startswith("openclaw-rl ")


def script_of(line: str) -> Path | None:
    words = shlex.split(line)
    return ROOT / words[words.index("bash") + 1] if "bash" in words else None


def test_the_front_matter_is_what_the_skills_cli_wants():
    head = TEXT.split("---\n")[1]
    fields = dict(line.split(": ", 1) for line in head.splitlines())
    assert fields["name"] == FOLDER.name
    assert re.fullmatch(r"[a-z0-9-]{1,64}", fields["name"])
    assert 50 < len(fields["description"]) <= 1024


def test_every_line_of_code_is_of_a_known_kind():
    unknown = [
        line for line in LINES
        if not ours(line) and script_of(line) is None and line.split()[0] not in OTHERS
    ]  # fmt: skip
    assert unknown == []
    assert len([line for line in LINES if ours(line)]) > 10


@pytest.mark.parametrize("line", [line for line in LINES if ours(line)])
def test_our_command_line_takes_it(line, capsys):
    try:
        build_parser().parse_args(shlex.split(line)[1:])
    except SystemExit:
        pytest.fail(capsys.readouterr().err)


def test_every_flag_that_the_text_names_is_one_of_ours():
    parser = build_parser()
    choices = next(action.choices for action in parser._actions if action.dest == "command")
    known = {flag for sub in choices.values() for action in sub._actions
             for flag in action.option_strings}  # fmt: skip
    known |= {"--version", "--query-gpu", "--format"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", TEXT)) - known == set()


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in LINES if script_of(line) is not None])
def test_the_scripts_dry_run_takes_it(line, tmp_path):
    place = Place(tmp_path)
    words = shlex.split(line)
    at = words.index("bash")
    given = dict(word.split("=", 1) for word in words[:at])
    assert given["DRY_RUN"] == "1"
    for name, value in given.items():
        if value in VALUES:
            given[name] = place.environ[VALUES[value]]
    (method,) = [name for name, path in SCRIPTS.items() if path == script_of(line)]
    done = place.run(method, *words[at + 2 :], **given)
    assert done.returncode == 0, done.stderr
    assert "ray" in done.stdout


def test_the_variables_that_the_text_names_are_read():
    named = set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", TEXT))
    read = {setting.env for setting in settings()}
    script = (ROOT / "scripts" / "slime_common.sh").read_text()
    assert [name for name in sorted(named) if name not in read and name not in script] == []


def test_the_skills_cli_finds_it(tmp_path):
    """With the CLI at hand (`npm install -g skills`); it needs no network for a local path."""
    program = shutil.which("skills")
    if program is None:
        pytest.skip("the skills CLI is not installed (npm install -g skills)")
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "DISABLE_TELEMETRY": "1", "CI": "1"}
    clone = tmp_path / "clone"
    shutil.copytree(ROOT / "plugins", clone / "plugins")
    done = subprocess.run(
        [program, "add", str(clone), "-a", "claude-code", "--copy", "-y"],
        cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    installed = tmp_path / ".claude" / "skills" / FOLDER.name / "SKILL.md"
    assert installed.read_text() == TEXT
