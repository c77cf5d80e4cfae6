"""Every setting, declared once: its default, its help, its flag, its environment variable.

A frozen tree of dataclasses; `config.py` fills it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from openclaw_rl.engine_config import EngineConfig
from openclaw_rl.setting import setting as _setting

METHODS: Mapping[str, tuple[str, str]] = {
    # method -> (loss hook, reward hook); both can be replaced by their own flag
    "combined": ("openclaw_rl.losses.combined_loss", "openclaw_rl.rewards.combined.custom_rm"),
    "rl": ("openclaw_rl.losses.grpo_loss", "openclaw_rl.rewards.prm.custom_rm"),
    "opd": ("openclaw_rl.losses.opd_loss", "openclaw_rl.rewards.hindsight.custom_rm"),
}


@dataclass(frozen=True)
class ModelConfig:
    """The policy's base model."""

    path: str = _setting(
        "", "folder of the base model (Hugging Face format)", flag="--model", env="MODEL_PATH"
    )
    served_name: str = _setting(
        "", "name clients use for it (default: the folder's name)", flag="--served-name"
    )
    dtype: str = _setting(
        "auto",
        "number format of the weights",
        flag="--dtype",
        choices=("auto", "float32", "bfloat16"),
    )
    device: str = _setting("auto", "auto, cpu, cuda or cuda:N", flag="--device")


@dataclass(frozen=True)
class DataConfig:
    """Where conversations are kept. Nothing in it leaves the machine."""

    path: str = _setting("runs/default", "folder of the journal", flag="--data", env="DATA_PATH")
    replay: bool = _setting(
        True,
        "learn at the start from past conversations that lie in that folder",
        flag="--replay",
        env="DATA_REPLAY",
    )
    retention_days: float = _setting(
        0.0,
        "forget finished sessions after so many days (0: never)",
        flag="--retention-days",
        low=0,
    )
    retention_gb: float = _setting(
        0.0, "keep at most so many GB, oldest go first (0: no limit)", flag="--retention-gb", low=0
    )
    next_state_hours: float = _setting(
        24.0,
        "give up waiting for a turn's next state after this",
        flag="--next-state-hours",
        low=0.001,
    )


@dataclass(frozen=True)
class GatewayConfig:
    """The HTTP service that agents talk to."""

    host: str = _setting(
        "127.0.0.1",
        "address to listen on; other than the loopback needs a key",
        flag="--host",
        env="HOST",
    )
    port: int = _setting(30000, "port of the gateway", flag="--port", env="PORT", low=0, high=65535)
    api_key: str = _setting(
        "",
        "key clients must send (environment or file only, never a flag)",
        env="OPENCLAW_RL_API_KEY",
        secret=True,
    )
    unnamed: str = _setting(
        "auto",
        "requests that name no session and no turn type: main, side, "
        "or auto (main for plain chat clients)",
        flag="--unnamed",
        choices=("auto", "main", "side"),
    )
    temperature: float = _setting(
        1.0,
        "sampling temperature where the client names none; only "
        "turns sampled at this temperature are trained",
        flag="--temperature",
        low=0,
        high=5,
    )
    max_tokens: int = _setting(
        8192, "longest reply where the client names none", flag="--max-tokens", low=1
    )
    context_length: int = _setting(
        0, "tokens of context (0: as the model's own configuration)", flag="--context-length", low=0
    )
    reply_format: str = _setting(
        "auto",
        "how the model writes tool calls and reasoning: auto (as its chat template says), hermes, "
        "qwen3-coder, deepseek, glm, kimi, llama3, gpt-oss; sglang (SGLang's own parser for what "
        "the template says) or sglang:NAME",
        flag="--reply-format",
    )
    keepalive_seconds: float = _setting(
        10.0,
        "a waiting stream gets an empty chunk this often",
        flag="--keepalive-seconds",
        low=0.05,
    )
    engine_wait_seconds: float = _setting(
        600.0, "how long a request waits for an absent engine", flag="--engine-wait-seconds", low=0
    )
    max_inflight: int = _setting(
        256, "requests under way at once; more get a 429", flag="--max-inflight", low=1
    )
    max_body_mb: float = _setting(32.0, "largest request body", flag="--max-body-mb", low=0.001)

    @property
    def url(self) -> str:
        """Where the gateway listens, as seen from this machine."""
        host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


@dataclass(frozen=True)
class JudgeConfig:
    """Who reads what happened next, and how it becomes a reward."""

    custom_rm_path: str = _setting(
        "",
        "reward hook: module.function or ./file.py (default: the method's own)",
        flag="--custom-rm-path",
        env="CUSTOM_RM_PATH",
    )
    prm_url: str = _setting(
        "",
        "OpenAI-compatible address of the PRM (default: the base model)",
        flag="--prm-url", env="PRM_URL", address=True,
    )  # fmt: skip
    prm_model: str = _setting(
        "", "model name at the PRM's address", flag="--prm-model", env="PRM_MODEL"
    )
    prm_api_key: str = _setting("", "key for it", env="PRM_API_KEY", secret=True)
    prm_model_path: str = _setting(
        "",
        "folder of the PRM's model: its tokenizer; on slime, also what serves it "
        "(default: the base model)",
        flag="--prm-model-path",
        env="PRM_MODEL_PATH",
    )
    judge_url: str = _setting(
        "",
        "OpenAI-compatible address of the judge that writes hints",
        flag="--judge-url", env="JUDGE_URL", address=True,
    )  # fmt: skip
    judge_model: str = _setting(
        "", "model name at the judge's address", flag="--judge-model", env="JUDGE_MODEL"
    )
    judge_api_key: str = _setting("", "key for it", env="JUDGE_API_KEY", secret=True)
    judge_model_path: str = _setting(
        "",
        "folder of the judge's model (default: the base model)",
        flag="--judge-model-path",
        env="JUDGE_MODEL_PATH",
    )
    teacher_url: str = _setting(
        "", "engine that scores the hinted reply (default: the base)", flag="--teacher-url",
        address=True,
    )  # fmt: skip
    teacher_api_key: str = _setting("", "key for it", env="TEACHER_API_KEY", secret=True)
    prm_m: int = _setting(3, "votes per turn", flag="--prm-m", env="PRM_M", low=1, high=64)
    temperature: float = _setting(
        0.6, "temperature of PRM and judge", flag="--judge-temperature", low=0, high=5
    )
    timeout_seconds: float = _setting(
        120.0, "time a reward may take", flag="--judge-timeout", low=0.01
    )
    concurrency: int = _setting(8, "turns judged at once", flag="--judge-concurrency", low=1)
    min_hint_chars: int = _setting(
        10, "a hint of this length or less is none", flag="--min-hint-chars", low=0
    )
    reward_key: str = _setting(
        "", "key of the score where the reward is a dict", flag="--reward-key"
    )


@dataclass(frozen=True)
class RolloutConfig:
    """When a batch is full and who is in it."""

    batch_size: int = _setting(16, "ready turns in a batch", flag="--rollout-batch-size", low=1)
    session_share: float = _setting(
        0.25,
        "largest part of a batch that one session may give",
        flag="--session-share",
        low=0.0001,
        high=1,
    )
    max_staleness: int = _setting(
        8, "drop turns older than so many weight versions", flag="--max-staleness", low=0
    )
    max_sample_tokens: int = _setting(
        0,
        "longest sample in tokens; a turn beyond is dropped (0: no limit)",
        flag="--max-sample-tokens",
        low=0,
    )
    function_path: str = _setting(
        "openclaw_rl.rollout.generate_rollout", "rollout hook", flag="--rollout-function-path"
    )


@dataclass(frozen=True)
class TrainConfig:
    """The background training of a LoRA adapter (embedded host)."""

    method: str = _setting(
        "combined",
        "rewards (rl), hints (opd), or both",
        flag="--method",
        env="METHOD",
        choices=("combined", "rl", "opd"),
    )
    custom_loss_function_path: str = _setting(
        "",
        "loss hook (default: the method's own)",
        flag="--custom-loss-function-path",
        env="CUSTOM_LOSS_FUNCTION_PATH",
    )
    custom_advantage_function_path: str = _setting(
        "", "advantage hook", flag="--custom-advantage-function-path"
    )
    custom_convert_samples_to_train_data_path: str = _setting(
        "", "conversion hook", flag="--custom-convert-samples-to-train-data-path"
    )
    w_rl: float = _setting(1.0, "weight of the reward", flag="--w-rl", env="W_RL", low=0)
    w_opd: float = _setting(
        1.0, "weight of the distillation term", flag="--w-opd", env="W_OPD", low=0
    )
    opd_clip: float = _setting(
        0.0, "bound on the distillation term of a token (0: none)", flag="--opd-clip", low=0
    )
    opd_top_k: int = _setting(
        0,
        "distil over so many candidates of each token (0: the sampled one; the published form "
        "takes 4)",
        flag="--opd-top-k",
        env="OPD_TOP_K",
        low=0,
        high=64,
    )
    opd_subset: str = _setting(
        "student",
        "whose candidates: the policy's own, the teacher's, or those of both",
        flag="--opd-subset",
        choices=("student", "teacher", "overlap"),
    )
    opd_tail: bool = _setting(
        False, "all other tokens together count as one more candidate", flag="--opd-tail"
    )
    opd_hints: int = _setting(
        1,
        "hints a turn of which one is chosen, by how far the teacher's candidates and the "
        "policy's overlap",
        flag="--opd-hints",
        low=1,
        high=3,
    )
    opd_hint_choice: str = _setting(
        "sequence",
        "one hint for the whole reply, or the best one for each token",
        flag="--opd-hint-choice",
        choices=("sequence", "token"),
    )
    opd_baseline: str = _setting(
        "current",
        "what the teacher is measured against: this forward, that before the step, the engine's",
        flag="--opd-baseline",
        choices=("current", "old", "rollout"),
    )
    tis_clip: float = _setting(
        -1.0,
        "upper bound of the weights that correct a token for the difference between engine and "
        "trainer (0: no such weights; -1: 2 beside an outside engine, else none)",
        flag="--tis-clip",
        low=-1,
    )
    eps_clip: float = _setting(0.2, "lower clip of the ratio", flag="--eps-clip", low=0)
    eps_clip_high: float = _setting(0.28, "upper clip of the ratio", flag="--eps-clip-high", low=0)
    kl_loss_coef: float = _setting(
        0.0, "weight of the KL to the base (0: not computed)", flag="--kl-loss-coef", low=0
    )
    entropy_coef: float = _setting(0.0, "weight of the entropy bonus", flag="--entropy-coef", low=0)
    lr: float = _setting(1e-4, "learning rate", flag="--lr", low=0)
    weight_decay: float = _setting(0.0, "Adam's weight decay", flag="--weight-decay", low=0)
    clip_grad: float = _setting(1.0, "largest gradient norm", flag="--clip-grad", low=0)
    max_grad_norm_skip: float = _setting(
        100.0, "no step beyond this gradient norm (0: no limit)", flag="--max-grad-norm-skip", low=0
    )
    max_logprob_diff: float = _setting(
        1.0,
        "no step where the log-probs of engine and trainer differ more, in the mean (0: no limit)",
        flag="--max-logprob-diff",
        low=0,
    )
    num_steps_per_rollout: int = _setting(
        1, "optimiser steps on a batch", flag="--num-steps-per-rollout", low=1
    )
    lora_rank: int = _setting(16, "rank of the adapter", flag="--lora-rank", low=1)
    lora_alpha: float = _setting(32.0, "scale of the adapter", flag="--lora-alpha", low=0)
    max_tokens_per_gpu: int = _setting(
        0,
        "tokens in a micro-batch (0: 512 on a CPU, 4096 on a GPU)",
        flag="--max-tokens-per-gpu",
        low=0,
    )
    loss_chunk_tokens: int = _setting(
        512, "tokens whose logits are held at a time", flag="--loss-chunk-tokens", low=2
    )
    gradient_checkpointing: str = _setting(
        "auto",
        "recompute activations (auto: on a GPU)",
        flag="--gradient-checkpointing",
        choices=("auto", "on", "off"),
    )
    save: str = _setting(
        "", "folder of the checkpoints (default: inside --data)", flag="--save", env="CKPT_SAVE_DIR"
    )
    keep_checkpoints: int = _setting(4, "checkpoints kept", flag="--keep-checkpoints", low=1)
    num_rollout: int = _setting(
        0,
        "stop training after so many batches in all (0: never); serving goes on",
        flag="--num-rollout",
        low=0,
    )
    device: str = _setting(
        "",
        "device of the trainer beside an outside engine (default: as --device)",
        flag="--train-device",
    )
    threads: int = _setting(
        0, "CPU threads of the trainer (0: half of the cores)", flag="--train-threads", low=0
    )
    seed: int = _setting(0, "seed of the adapter's start", flag="--seed")


@dataclass(frozen=True)
class Config:
    """The whole configuration."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    @property
    def journal_path(self) -> Path:
        """The journal's file."""
        return Path(self.data.path).expanduser() / "journal.db"

    @property
    def checkpoint_dir(self) -> Path:
        """The folder that holds adapters and optimiser states."""
        if self.train.save:
            return Path(self.train.save).expanduser()
        return Path(self.data.path).expanduser() / "checkpoints"

    @property
    def served_name(self) -> str:
        """The name that clients use for the policy."""
        return self.model.served_name or Path(self.model.path).expanduser().resolve().name

    @property
    def loss_path(self) -> str:
        """The loss hook: the one asked for, or the method's own."""
        if self.train.custom_loss_function_path:
            return self.train.custom_loss_function_path
        if self.train.method == "opd" and self.train.opd_top_k:
            return "openclaw_rl.losses.topk_opd_loss"
        return METHODS[self.train.method][0]

    @property
    def reward_path(self) -> str:
        """The reward hook: the one asked for, or the method's own."""
        return self.judge.custom_rm_path or METHODS[self.train.method][1]
