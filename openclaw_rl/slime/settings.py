"""The settings of a launch on slime: the common ones (`openclaw_rl/settings.py`) and how a cluster
is divided."""

from __future__ import annotations

from dataclasses import dataclass, field

from openclaw_rl.setting import setting
from openclaw_rl.settings import Config


@dataclass(frozen=True)
class SlimeConfig:
    """The cluster, who gets which GPUs, and where slime is."""

    num_gpus: int = setting(8, "GPUs of one machine", flag="--num-gpus", env="NUM_GPUS", low=1)
    num_nodes: int = setting(1, "machines", flag="--num-nodes", env="NUM_NODES", low=1)
    master_addr: str = setting(
        "",
        "address of this machine that the others reach (NUM_NODES above 1)",
        flag="--master-addr",
        env="MASTER_ADDR",
    )
    actor_gpus: int = setting(
        0,
        "GPUs that train, in all (0: half; where ROLLOUT_GPUS is given, the rest)",
        flag="--actor-gpus",
        env="ACTOR_GPUS",
        low=0,
    )
    rollout_gpus: int = setting(
        0,
        "GPUs that serve: policy, PRM, judge and teacher together (0: those that do not train)",
        flag="--rollout-gpus",
        env="ROLLOUT_GPUS",
        low=0,
    )
    rollout_gpus_per_engine: int = setting(
        1,
        "GPUs of one engine of the policy",
        flag="--rollout-gpus-per-engine",
        env="ROLLOUT_GPUS_PER_ENGINE",
        low=1,
    )
    prm_gpus: int = setting(
        0,
        "the PRM's share of ROLLOUT_GPUS (0: computed; the policy keeps half)",
        flag="--prm-gpus",
        env="PRM_GPUS",
        low=0,
    )
    prm_gpus_per_engine: int = setting(
        0,
        "GPUs of one engine of it (0: as the policy)",
        flag="--prm-gpus-per-engine",
        env="PRM_GPUS_PER_ENGINE",
        low=0,
    )
    judge_gpus: int = setting(
        0,
        "the judge's share, unless it shares the PRM's engine",
        flag="--judge-gpus",
        env="JUDGE_GPUS",
        low=0,
    )
    judge_gpus_per_engine: int = setting(
        0,
        "GPUs of one engine of it (0: as the policy)",
        flag="--judge-gpus-per-engine",
        env="JUDGE_GPUS_PER_ENGINE",
        low=0,
    )
    teacher: str = setting(
        "base",
        "who teaches: base (the policy's initial weights, frozen), policy (the current ones), or "
        "the folder of a model with the same tokenizer",
        flag="--teacher",
        env="TEACHER",
    )
    teacher_gpus: int = setting(
        0,
        "the teacher's share, unless it shares an engine",
        flag="--teacher-gpus",
        env="TEACHER_GPUS",
        low=0,
    )
    teacher_gpus_per_engine: int = setting(
        0,
        "GPUs of one engine of it (0: as the policy)",
        flag="--teacher-gpus-per-engine",
        env="TEACHER_GPUS_PER_ENGINE",
        low=0,
    )
    slime_dir: str = setting("", "slime's folder", flag="--slime-dir", env="SLIME_DIR")
    megatron_dir: str = setting(
        "", "Megatron-LM's folder", flag="--megatron-dir", env="MEGATRON_DIR"
    )
    train_script: str = setting(
        "",
        "what is submitted (default: train_async.py of slime)",
        flag="--train-script",
        env="TRAIN_SCRIPT",
    )
    model_args_file: str = setting(
        "",
        "script that sets MODEL_ARGS, instead of those computed from config.json",
        flag="--model-args-file",
        env="MODEL_ARGS_FILE",
    )
    use_lora: str = setting(
        "0",
        "1: train a LoRA adapter, where the slime at hand has the flags for it",
        flag="--use-lora",
        env="USE_LORA",
        choices=("0", "1"),
    )
    ray_address: str = setting(
        "",
        "a Ray that is there already: http://HOST:8265 (a job is submitted), or auto or HOST:6379 "
        "(plain python); empty: a Ray of our own, ended with the run",
        flag="--ray-address",
        env="RAY_ADDRESS",
    )
    ray_port: int = setting(
        6379, "port of our own Ray", flag="--ray-port", env="RAY_PORT", low=1, high=65535
    )
    ray_dashboard_port: int = setting(
        8265,
        "port of its dashboard (loopback)",
        flag="--ray-dashboard-port",
        env="RAY_DASHBOARD_PORT",
        low=1,
        high=65535,
    )
    ray_start_args: str = setting(
        "", "more flags for its ray start", flag="--ray-start-args", env="RAY_START_ARGS"
    )
    ray_command: str = setting(
        "",
        "the ray command (default: the one beside this Python, else the one on PATH)",
        flag="--ray-command",
        env="RAY_COMMAND",
    )
    dry_run: str = setting(
        "0",
        "1: print the command and the files, start nothing",
        flag="--dry-run",
        env="DRY_RUN",
        choices=("0", "1"),
    )


@dataclass(frozen=True)
class LaunchConfig(Config):
    """The whole configuration of a launch."""

    slime: SlimeConfig = field(default_factory=SlimeConfig)


USED = (
    *("model.path", "data.path", "data.replay", "rollout.", "gateway.", "judge.", "slime."),
    *("train.method", "train.w_rl", "train.w_opd", "train.opd_"),
    *("train.lora_rank", "train.lora_alpha"),
)
"""Settings that a launch reads (names, and beginnings of names). The rest are slime's own flags."""

NOT_USED = (
    *("rollout.batch_size", "rollout.function_path", "judge.custom_rm_path", "judge.reward_key"),
    *("gateway.temperature", "gateway.context_length", "gateway.max_tokens"),
)
"""Of these, what the flags for slime say: --rollout-batch-size, --rollout-function-path,
--custom-rm-path, --reward-key, --rollout-temperature, --sglang-context-length,
--rollout-max-response-len."""


def is_used(key: str) -> bool:
    """Whether a launch reads the setting `key` (`section.name`)."""
    return key.startswith(USED) and key not in NOT_USED
