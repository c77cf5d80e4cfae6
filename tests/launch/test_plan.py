"""What a launch comes to: files, command, and every misuse in one line."""

import os
import tomllib
from argparse import Namespace

import pytest
import yaml

from openclaw_rl.errors import ConfigError, HookError
from openclaw_rl.slime.launch import write
from openclaw_rl.slime.plan import option
from openclaw_rl.slime.services import services_config
from tests.launch.kit import model_folder
from tests.launch.models import CONFIGS


def engines(plan):
    content = next(text for path, text in plan.files.items() if path.name == "engines.yaml")
    return {model["name"]: model for model in yaml.safe_load(content)["sglang"]}


def hooks(plan):
    content = next(text for path, text in plan.files.items() if path.name == "hooks.yaml")
    return yaml.safe_load(content)


def settings_of(plan):
    """The configuration of gateway and judge."""
    content = next(text for path, text in plan.files.items() if path.suffix == ".toml")
    return tomllib.loads(content)


def test_a_plan_writes_and_starts_nothing(place):
    place.plan()
    assert not place.data.exists()


def test_flags_of_the_user_come_after_the_computed_ones(place):
    plan = place.plan("--rotary-base", "7", "--num-layers=3")
    assert option(plan.train, "--rotary-base") == "7"
    assert option(plan.train, "--num-layers") == "3"
    assert option(plan.train, "--hidden-size") == "4096"


def test_prm_judge_and_teacher_of_the_base_share_one_frozen_engine(place):
    plan = place.plan()
    assert {name: model["update_weights"] for name, model in engines(plan).items()} == {
        "policy": True,
        "prm": False,
    }
    assert [hooks(plan)[f"{role}_engine"] for role in ("prm", "judge", "teacher")] == ["prm"] * 3


def test_a_prm_of_its_own(place):
    plan = place.plan(PRM_MODEL_PATH=str(place.prm), PRM_GPUS="2", ROLLOUT_GPUS="4")
    found = engines(plan)
    assert found["prm"]["model_path"] == str(place.prm)
    assert found["judge"]["model_path"] == str(place.model)
    assert hooks(plan)["teacher_engine"] == "judge"
    assert settings_of(plan)["judge"]["prm_model_path"] == str(place.prm)


def test_models_served_elsewhere_need_no_share(place):
    urls = {"PRM_URL": "http://prm/v1", "JUDGE_URL": "http://judge/v1"}
    plan = place.plan(TEACHER="policy", **urls)
    assert list(engines(plan)) == ["policy"]
    assert settings_of(plan)["judge"]["prm_url"] == "http://prm/v1"
    assert settings_of(plan)["judge"]["judge_url"] == "http://judge/v1"
    assert hooks(plan)["teacher_engine"] == "policy"
    assert list(engines(place.plan(**urls))) == ["policy", "teacher"]


@pytest.mark.parametrize(
    ("reward", "method", "served"),
    [
        ("prm", "rl", ["policy", "prm"]),
        ("hindsight", "opd", ["policy", "judge"]),
        ("feedback", "rl", ["policy"]),
        ("feedback", "combined", ["policy", "teacher"]),
        ("exit_code", "rl", ["policy"]),
    ],
)
def test_only_those_whom_the_reward_asks_are_served(place, reward, method, served):
    path = f"openclaw_rl.rewards.{reward}.custom_rm"
    assert list(engines(place.plan("--custom-rm-path", path, METHOD=method))) == served


def test_a_reward_of_the_users_asks_whom_he_names(place, monkeypatch):
    monkeypatch.chdir(place.folder)
    (place.folder / "my_rm.py").write_text("async def custom_rm(args, sample, **kw): return 1.0\n")
    flags = ("--custom-rm-path", "./my_rm.py")
    assert list(engines(place.plan(*flags, METHOD="rl"))) == ["policy"]
    plan = place.plan(*flags, METHOD="rl", PRM_MODEL_PATH=str(place.prm))
    assert list(engines(plan)) == ["policy", "prm"]
    assert option(plan.train, "--custom-rm-path") == "my_rm.custom_rm"
    assert str(place.folder) in plan.variables["PYTHONPATH"].split(os.pathsep)


def test_a_loss_in_a_file_becomes_what_slime_can_load(place, monkeypatch):
    monkeypatch.chdir(place.folder)
    (place.folder / "my_loss.py").write_text("def custom_loss(*a): ...\n")
    plan = place.plan("--custom-loss-function-path", "./my_loss.py")
    assert option(plan.train, "--custom-loss-function-path") == "my_loss.custom_loss"
    assert str(place.folder) in plan.variables["PYTHONPATH"].split(os.pathsep)
    plan = place.plan("--custom-loss-function-path", "./my_loss.py:other")
    assert option(plan.train, "--custom-loss-function-path") == "my_loss.other"


def test_hooks_in_this_folder_are_found_by_the_job_too(place, monkeypatch):
    monkeypatch.chdir(place.folder)
    monkeypatch.syspath_prepend(str(place.folder))
    (place.folder / "mine_to_load.py").write_text("def loss(*a): ...\nasync def rm(*a): ...\n")
    for flags in (
        ("--custom-loss-function-path", "mine_to_load.loss"),
        ("--custom-rm-path", "mine_to_load.rm"),
    ):
        path = place.plan(*flags).variables["PYTHONPATH"]
        assert str(place.folder) in path.split(os.pathsep)


def test_keys_are_in_the_jobs_environment_and_nowhere_else(place):
    keys = {"OPENCLAW_RL_API_KEY": "k-gate", "PRM_API_KEY": "k-prm", "WANDB_API_KEY": "k-wandb"}
    plan = place.plan(**keys, HOST="0.0.0.0", WANDB_PROJECT="mine", NCCL_DEBUG="INFO", OTHER="x")
    assert (
        plan.runtime_env["env_vars"].items()
        >= {
            **keys,
            "WANDB_PROJECT": "mine",
            "NCCL_DEBUG": "INFO",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        }.items()
    )
    assert "OTHER" not in plan.variables
    shown = f"{plan} {plan.files} {plan.train} {plan.variables}"
    assert not [key for key in keys.values() if key in shown]


def test_services_understand_what_the_hooks_are_told(place):
    """The file goes to slime's args, from there to gateway and judge."""
    plan = place.plan(
        "--sglang-context-length", "16384",
        "--rollout-max-response-len", "1024",
        *("--custom-rm-path", "openclaw_rl.rewards.combined.custom_rm"),
        PRM_MODEL_PATH=str(place.prm), PRM_M="5", W_OPD="0.5", OPD_TOP_K="4", PORT="31999",
    )  # fmt: skip
    write(plan.files)
    args = Namespace(
        hf_checkpoint=str(place.model),
        rollout_temperature=0.7,
        rollout_max_response_len=1024,
        sglang_context_length=16384,
        custom_rm_path=option(plan.train, "--custom-rm-path"),
        **hooks(plan),
    )
    found = services_config(args, {"PRM_API_KEY": "k"})
    assert found.journal_path == place.data / "journal.db"
    assert (found.gateway.port, found.gateway.temperature) == (31999, 0.7)
    assert (found.gateway.context_length, found.gateway.max_tokens) == (16384, 1024)
    assert found.reward_path == "openclaw_rl.rewards.combined.custom_rm"
    assert (found.judge.prm_model_path, found.judge.prm_api_key) == (str(place.prm), "k")
    assert (found.judge.prm_m, found.train.w_opd, found.train.opd_top_k) == (5, 0.5, 4)


def test_the_jobs_guards_are_those_that_the_launch_was_given(place, monkeypatch):
    monkeypatch.chdir(place.folder)
    (place.folder / "mine.txt").write_text("What is new?\n")
    plan = place.plan(settings={"guards.max_kl": "2", "guards.probes": "./mine.txt"})
    told = hooks(plan)
    assert (told["guards"], told["max_kl"], told["probe_every"]) == (True, 2.0, 1)
    assert told["probes"] == str(place.folder / "mine.txt")
    with pytest.raises(ConfigError, match=r"--probes: no such file: \./other\.txt"):
        place.plan(settings={"guards.probes": "./other.txt"})


def test_a_teacher_must_speak_the_policys_tokens(place):
    same = model_folder(place.folder / "same", CONFIGS["qwen3-14B"], {"a": 0, "b": 1, "more": 2})
    assert engines(place.plan(TEACHER=str(same)))["teacher"]["model_path"] == str(same)
    other = model_folder(place.folder / "other", CONFIGS["qwen3-14B"], {"a": 0, "b": 2})
    with pytest.raises(ConfigError, match=r"another tokenizer .*1 of 2 tokens"):
        place.plan(TEACHER=str(other))


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"ACTOR_GPUS": "6", "ROLLOUT_GPUS": "4"}, "are 10 GPUs, but there are 8"),
        ({"PRM_GPUS": "4"}, "PRM_GPUS=4 leave 0 of ROLLOUT_GPUS=4"),
        ({"NUM_GPUS": "x"}, "NUM_GPUS: "),
        ({"MODEL_PATH": ""}, "MODEL_PATH is not set"),
        ({"MODEL_PATH": "models/Qwen3-8B"}, "MODEL_PATH is a relative path"),
        ({"MODEL_PATH": "/no/such folder"}, "MODEL_PATH: no such folder: /no/such folder"),
        ({"PRM_MODEL_PATH": "./prm"}, "PRM_MODEL_PATH is a relative path"),
        ({"JUDGE_MODEL_PATH": "/no/judge"}, "JUDGE_MODEL_PATH: no such folder"),
        ({"DATA_PATH": ""}, "DATA_PATH is not set"),
        ({"DATA_PATH": "data"}, "DATA_PATH is a relative path"),
        ({"SLIME_DIR": ""}, "SLIME_DIR is not set"),
        ({"SLIME_DIR": "slime"}, "SLIME_DIR is a relative path"),
        ({"MEGATRON_DIR": "/no/megatron"}, "MEGATRON_DIR: no such folder"),
        ({"TRAIN_SCRIPT": "/no/train.py"}, "TRAIN_SCRIPT: no such file"),
        ({"TEACHER": "teacher"}, "TEACHER is a relative path"),
    ],
)
def test_case_35_misuse_is_one_line(place, environ, words):
    with pytest.raises(ConfigError, match=words) as caught:
        place.plan(**environ)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("loss", "top_k", "words"),
    [("topk_opd_loss", "0", "needs OPD_TOP_K"), ("opd_loss", "4", "OPD_TOP_K=4 has no effect on")],
)
def test_the_loss_and_the_candidates_fit_together(place, loss, top_k, words):
    flags = ("--custom-loss-function-path", f"openclaw_rl.losses.{loss}")
    with pytest.raises(ConfigError, match=words):
        place.plan(*flags, METHOD="opd", OPD_TOP_K=top_k)
    place.plan(*flags, METHOD="opd", OPD_TOP_K="0" if top_k == "4" else "4")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--save", "checkpoints"), "CKPT_SAVE_DIR is a relative path"),
        (("--custom-rm-path", "./none.py"), "CUSTOM_RM_PATH: no such file"),
        (("--custom-rm-path", "no_such_module.fn"), "CUSTOM_RM_PATH"),
        (("--custom-loss-function-path", "./none.py"), "CUSTOM_LOSS_FUNCTION_PATH: no such file"),
        (("--custom-loss-function-path", "no_such_module.fn"), "CUSTOM_LOSS_FUNCTION_PATH"),
        (("--sglang-context-length", "65536"), "more than the policy's config.json allows"),
        (("--tensor-model-parallel-size", "3"), "ACTOR_GPUS=4 is not a multiple of 3"),
        (("--context-parallel-size", "8"), "ACTOR_GPUS=4 is not a multiple of 8"),
        (("--tensor-model-parallel-size", "x"), "'x' is not a whole number"),
    ],
)
def test_case_35_flags_that_do_not_fit_are_one_line(place, flags, words):
    with pytest.raises((ConfigError, HookError), match=words) as caught:
        place.plan(*flags)
    assert "\n" not in str(caught.value)


def test_case_37_the_gateway_is_reachable_from_elsewhere_only_with_a_key(place):
    with pytest.raises(ConfigError, match="OPENCLAW_RL_API_KEY"):
        place.plan(HOST="0.0.0.0")
    assert settings_of(place.plan())["gateway"]["host"] == "127.0.0.1"
    plan = place.plan(HOST="0.0.0.0", OPENCLAW_RL_API_KEY="k")
    assert settings_of(plan)["gateway"]["host"] == "0.0.0.0"


def test_case_35_a_model_without_a_tokenizer_is_one_line(place):
    (place.model / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"MODEL_PATH: .* has no tokenizer"):
        place.plan()


def test_model_arguments_can_be_the_users_own(place):
    odd = model_folder(place.folder / "odd", {"model_type": "odd"}, {"a": 0})
    with pytest.raises(ConfigError, match="MODEL_ARGS_FILE"):
        place.plan(MODEL_PATH=str(odd))
    plan = place.plan("--num-layers", "2", MODEL_PATH=str(odd), MODEL_ARGS_FILE="/some/args.sh")
    assert plan.train.count("--num-layers") == 1


def test_case_36_a_folder_that_pythonpath_would_cut_in_two(place):
    odd = place.folder / "slime: mine"
    (odd / "slime").mkdir(parents=True)
    (odd / "train_async.py").write_text("")
    with pytest.raises(ConfigError, match=r"slime: mine.*PYTHONPATH"):
        place.plan(SLIME_DIR=str(odd))
