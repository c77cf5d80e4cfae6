"""What the tests of the launcher share: folders with spaces in their names, the scripts, plans."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from openclaw_rl.config import load_config
from openclaw_rl.slime.plan import Plan, make_plan
from tests.launch.models import CONFIGS

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    "rl": ROOT / "run_qwen3_7b_openclaw_rl.sh",
    "opd": ROOT / "run_qwen3_7b_openclaw_opd.sh",
    "combined": ROOT / "run_qwen3_7b_openclaw_combine.sh",
}
FLAGS = ["--custom-rm-path", "openclaw_rl.rewards.combined.custom_rm"]


def model_folder(folder: Path, config: dict[str, Any], vocab: dict[str, int]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if vocab:
        Tokenizer(WordLevel(vocab, unk_token="a")).save(str(folder / "tokenizer.json"))
    return folder


class Place:
    """A machine to launch on: models, slime and Megatron in folders with spaces."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "with a space"
        self.model = model_folder(self.folder / "Qwen3 8B", CONFIGS["qwen3-8B"], {"a": 0, "b": 1})
        self.prm = model_folder(self.folder / "the prm", CONFIGS["qwen3-4B"], {"a": 0, "b": 1})
        self.data = self.folder / "my data"
        self.slime = self.folder / "slime"
        (self.slime / "slime").mkdir(parents=True)
        (self.slime / "train_async.py").write_text("")
        (self.folder / "Megatron-LM" / "megatron").mkdir(parents=True)
        self.environ = {
            "MODEL_PATH": str(self.model),
            "DATA_PATH": str(self.data),
            "SLIME_DIR": str(self.slime),
            "MEGATRON_DIR": str(self.folder / "Megatron-LM"),
        }

    def plan(self, *flags: str, settings: Mapping[str, str] | None = None, **environ: str) -> Plan:
        """The plan of `flags` under these settings and variables; an empty variable is taken
        out."""
        given = {name: value for name, value in {**self.environ, **environ}.items() if value}
        config = load_config(settings or {}, given)
        return make_plan(config, flags or FLAGS, given, python="python3")

    def run(self, method: str, *flags: str, cwd: Path | None = None, **environ: str):
        """Run a script under these variables and no other setting of the caller's."""
        clean = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        return subprocess.run(
            ["bash", SCRIPTS[method], *flags],
            env={**clean, "PYTHON": sys.executable, **self.environ, **environ},
            cwd=cwd or self.folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


def command(output: str) -> list[str]:
    """The command that a dry run printed, as a shell would split it."""
    return shlex.split(output.replace("\\\n", " ").splitlines()[-1])


def file_of(output: str, name: str) -> str:
    """A file that a dry run printed."""
    start = output.index(f"/slime/{name}\n") + len(f"/slime/{name}\n")
    return output[start : output.index("\n\n", start)]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)
