"""Every flag that the scripts print, through slime's own parser and checks.

Needs SLIME_DIR and MEGATRON_DIR, and what slime's `utils/arguments.py` imports: torch, sglang
(`--no-deps`) and sglang-router, triton. No GPU.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from openclaw_rl.slime.launch import write
from tests.launch.kit import ROOT, command, file_of, model_folder
from tests.launch.models import CONFIGS

TOPK = {"CUSTOM_LOSS_FUNCTION_PATH": "openclaw_rl.losses.topk_opd_loss"}
CASES = [
    ("rl", "qwen3-8B", {}),
    ("opd", "qwen3-8B", {"OPD_TOP_K": "4", "TEACHER": "policy", **TOPK}),
    ("combined", "qwen3-8B", {"NUM_NODES": "2", "RAY_ADDRESS": "auto"}),
    ("combined", "qwen3-32B", {"NUM_NODES": "2", "RAY_ADDRESS": "auto"}),
    ("combined", "qwen3-0.6B", {"WANDB_API_KEY": "k", "PRM_URL": "http://prm/v1"}),
    ("rl", "qwen2.5-1.5B", {}),
    ("rl", "qwen2.5-7B", {}),
    ("rl", "llama3.1-8B-Instruct", {}),
    ("rl", "qwen3.5-4B", {}),
]

BY_PATCH = {"--use-gated-attention"}
"""What only slime's patch of Megatron (docker/patch/latest/megatron.patch) adds."""


def real_environment():
    for name in ("SLIME_DIR", "MEGATRON_DIR"):
        if not os.environ.get(name):
            pytest.skip(f"{name} is not set")
    for package in ("torch", "sglang", "sglang_router", "triton"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed here; slime's parser imports it")
    return {"SLIME_DIR": os.environ["SLIME_DIR"], "MEGATRON_DIR": os.environ["MEGATRON_DIR"]}


@pytest.mark.slow
def test_slimes_parser_takes_every_flag_of_every_script(place, capsys):
    real = real_environment()
    asked = []
    for number, (method, name, environ) in enumerate(CASES):
        model = model_folder(place.folder / f"{number} {name}", CONFIGS[name], {"a": 0})
        data = place.folder / f"data {number}"
        given = {"MODEL_PATH": str(model), "DATA_PATH": str(data), **real, **environ}
        done = place.run(method, DRY_RUN="1", **given)
        assert done.returncode == 0, done.stderr
        asked.append(command(done.stdout)[2:])
        home = data / "slime"
        files = ("engines.yaml", "hooks.yaml")
        write({home / file: file_of(done.stdout, file) for file in files})
    path = os.pathsep.join([str(ROOT), real["SLIME_DIR"], real["MEGATRON_DIR"]])
    child = subprocess.run(
        [sys.executable, Path(__file__).with_name("real_parser.py")],
        env={**os.environ, "PYTHONPATH": path, "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    found = [json.loads(line) for line in child.stdout.splitlines()]
    assert len(found) == len(CASES), child.stderr[-3000:]
    with capsys.disabled():
        print(
            f"\nslime's parser: {sum(item['flags'] for item in found)} flags of {len(found)} runs"
        )
    for case, item, words in zip(CASES, found, asked, strict=True):
        assert set(item["unknown"]) <= BY_PATCH, case
        assert item["overridden"] == [], f"{case}: a setting of ours has the name of slime's"
        assert all(item["told"].values()), (case, item["told"])
        assert item["engine_gpus"] == 0, case
        assert item["updated"] == ["policy"], case
        assert item["not_callable"] == [], case
        assert item["loads_weights"], f"{case}: slime cannot load this model's weights itself"
        assert item["starts_from"] == words[words.index("--ref-load") + 1], case
        assert item["batch"] == 16, case
