"""Our hooks inside slime's own code (`make test-slime SLIME_DIR=...`); skipped without it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from tests.losses.slime_dir import SLIME_DIR, needs_slime
from tests.slime import real

CASES = [(seed, per_token) for seed in range(3) for per_token in (False, True)]
missing = [name for name in ("ray", "sglang") if not importlib.util.find_spec(name)]
pytestmark = [
    pytest.mark.slow,
    needs_slime,
    pytest.mark.skipif(bool(missing), reason=f"slime's rollout needs {', '.join(missing)}"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    # A process of its own: with slime loaded, every loss in the process takes slime's log-probs.
    folder: Path = tmp_path_factory.mktemp("slime")
    mp.spawn(real.check, args=(str(folder), CASES), nprocs=1)
    return torch.load(folder / "results.pt", weights_only=False)


@pytest.fixture(params=range(len(CASES)), ids=[f"{seed}-{'per_token' if per else 'per_rollout'}"
                                               for seed, per in CASES])  # fmt: skip
def result(request, results) -> dict:
    return results["cases"][request.param]


@pytest.mark.parametrize("loss", real.LOSSES)
def test_merged_turns_have_the_gradient_of_separate_ones(result, loss):
    merged, separate = result["gradients"][loss]
    scale = float(separate.abs().max())
    assert scale > 1e-3
    assert float((merged - separate).abs().max()) <= 1e-6 * max(1.0, scale)


def test_the_split_gives_each_rank_whole_rollouts_and_all_of_them(result):
    ids = [rollout for rank in result["ranks"] for rollout in rank["rollout_ids"]]
    assert sorted(ids) == list(range(result["turns"]))
    for rank in result["ranks"]:
        assert rank["rollout_ids"]
        for mask, length in zip(rank["loss_masks"], rank["response_lengths"], strict=True):
            assert len(mask) == length


def test_every_sampled_token_is_trained_once(result):
    assert result["trained"] == result["distinct"]


def test_signals_arrive_with_the_advantages(result):
    assert sum(map(sum, result["values"])) == result["taught"]
    for rank, weights in zip(result["ranks"], result["weights"], strict=True):
        for advantage, weight, mask in zip(
            rank["advantages"], weights, rank["loss_masks"], strict=True
        ):
            assert len(advantage) == len(weight) == len(mask)
            assert bool(((weight > 0) == (mask > 0)).all())


def test_slime_logs_the_batch(result):
    assert len(result["logged"]) == real.DP
    for values in result["logged"]:
        assert all(torch.isfinite(torch.tensor(float(value))) for value in values.values())
    assert "rollout/values" in result["logged"][0]


def test_slimes_own_evaluation_runs_beside_live_turns(results):
    found = results["evaluation"]
    assert found["rewards"] == [0.5] * 4
    assert all(found["lengths"])


def test_slimes_plugin_contracts_hold_for_our_paths():
    """Its four files, in a process of their own, pointed at our hooks by `contract_paths`."""
    root = Path(__file__).parent.parent.parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.slime.contract_paths",
               "-p", "no:cacheprovider", "tests/plugin_contracts"]  # fmt: skip
    done = subprocess.run(
        command, cwd=SLIME_DIR, env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 36
