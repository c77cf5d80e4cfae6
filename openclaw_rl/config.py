"""The one configuration: every setting with its default, bounds and help, declared once.

`load_config` fills the tree from a TOML file, the environment and flags; later ones win. It is
passed on as it is, to child processes as JSON. Every mistake is a `ConfigError` of one line.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import ipaddress
import json
import os
import re
import tomllib
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from openclaw_rl.errors import ConfigError

METHODS: Mapping[str, tuple[str, str]] = {
    # method -> (loss hook, reward hook); both can be replaced by their own flag
    "combined": ("openclaw_rl.losses.combined_loss", "openclaw_rl.rewards.combined.custom_rm"),
    "rl": ("openclaw_rl.losses.grpo_loss", "openclaw_rl.rewards.prm.custom_rm"),
    "opd": ("openclaw_rl.losses.opd_loss", "openclaw_rl.rewards.hindsight.custom_rm"),
}


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _address(url: str) -> str:
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        if not url or (parts.scheme in ("http", "https") and parts.hostname and parts.port != 0):
            return url.rstrip("/")
    raise ValueError("give the server's address, like http://127.0.0.1:8000")


def _header(key: str) -> str:
    if any(ord(char) <= 32 or ord(char) > 126 for char in key):
        raise ValueError("must be printable ASCII without spaces")
    return key


Address = Annotated[str, AfterValidator(_address)]
Key = Annotated[str, AfterValidator(_header), Field(repr=False)]
"""A secret: from the file or the environment, never a flag, never shown."""
Port = Annotated[int, Field(ge=0, le=65535)]
Temperature = Annotated[float, Field(ge=0, le=5)]


def _setting(
    default: Any, *, flag: str | None = None, env: str | None = None, **bounds: Any
) -> Any:
    """A setting whose flag is not simply its name, or that has an environment variable."""
    return Field(default, json_schema_extra={"flag": flag, "env": env}, **bounds)


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True,
        validate_default=False, protected_namespaces=(),
    )  # fmt: skip
    all_in_environment: ClassVar[bool] = False
    """Every setting of the section has an environment variable of its own name."""


class ModelConfig(_Section):
    """The policy's base model."""

    path: str = _setting("", flag="--model", env="MODEL_PATH")
    """folder of the base model (Hugging Face format)"""
    served_name: str = ""
    """name that clients use for it (default: the folder's name)"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """number format of the weights"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""


class DataConfig(_Section):
    """Where conversations are kept. Nothing in it leaves the machine."""

    path: str = _setting("runs/default", flag="--data", env="DATA_PATH")
    """folder of the journal"""
    replay: bool = _setting(True, env="DATA_REPLAY")
    """learn at the start from past conversations that lie in that folder"""
    retention_days: NonNegativeFloat = 0.0
    """forget finished sessions after this many days (0: never)"""
    retention_gb: NonNegativeFloat = 0.0
    """largest size in GB, oldest go first (0: no limit)"""
    next_state_hours: PositiveFloat = 24.0
    """give up waiting for a turn's next state after this"""


class GatewayConfig(_Section):
    """The HTTP service that agents talk to."""

    host: str = _setting("127.0.0.1", env="HOST")
    """address to listen on; other than the loopback needs a key"""
    port: Port = _setting(30000, env="PORT")
    """port of the gateway"""
    api_key: Key = _setting("", env="OPENCLAW_RL_API_KEY")
    """key that clients must send (environment or file only, never a flag)"""
    unnamed: Literal["auto", "main", "side"] = "auto"
    """requests that name no session and no turn type: main, side, or auto (main for plain chat
    clients)"""
    temperature: Temperature = 1.0
    """sampling temperature where the client names none; only turns sampled at a temperature that
    the trainer reproduces are trained"""
    client_sampling: Literal["follow", "ignore"] = "follow"
    """whether a client's own temperature, top-p, top-k, min-p, penalties and logit bias are used
    (follow), or the gateway's sampling wins (ignore). A turn sampled under a filter, a penalty or a
    bias is served but cannot be trained, because the trainer cannot recompute its distribution: a
    client that always sends such values teaches nothing until this is `ignore`. The default follows
    the client, as every such server does"""
    max_tokens: PositiveInt = 8192
    """longest reply where the client names none"""
    context_length: NonNegativeInt = 0
    """tokens of context (0: as the model's own configuration)"""
    reply_format: str = "auto"
    """how the model writes tool calls and reasoning: auto (as its chat template says), hermes,
    qwen3-coder, deepseek, glm, kimi, llama3, mistral, gpt-oss"""
    keepalive_seconds: PositiveFloat = 10.0
    """a waiting stream gets an empty chunk this often"""
    engine_wait_seconds: NonNegativeFloat = 600.0
    """how long a request waits for an absent engine"""
    max_inflight: PositiveInt = 256
    """requests under way at once; more get a 429"""
    max_body_mb: PositiveFloat = 32.0
    """largest request body"""

    @property
    def url(self) -> str:
        """Where the gateway listens, as seen from this machine."""
        host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


class EngineConfig(_Section):
    """The engine that samples: the embedded one, or one at an address."""

    url: Address = _setting("", flag="--engine-url")
    """address of an external engine (default: the embedded one)"""
    kind: Literal["auto", "vllm", "sglang"] = _setting("auto", flag="--engine")
    """what is at --engine-url: vllm or sglang, which gets our weights as adapters (auto: up and
    train ask it; serve by itself takes it for an engine or router that speaks SGLang's /generate,
    and whose weights are not trained here)"""
    command: str = _setting("", flag="--engine-cmd")
    """command line that starts the engine at --engine-url, and is kept up"""
    api_key: Key = _setting("", env="ENGINE_API_KEY")
    """key of the engine (environment or file only)"""
    adapter_dir_at_engine: str = ""
    """the folder of checkpoints as the engine sees it, which reads its adapters there (default:
    under the same path)"""
    port: Port = _setting(30100, flag="--engine-port")
    """port of the embedded engine (loopback)"""
    max_streams: PositiveInt = 24
    """sequences decoded together"""
    kv_tokens: NonNegativeInt = 0
    """tokens of the embedded engine's KV cache; no request can be longer (0: as many as fit in
    about a third of the GPU memory that the weights leave, or in 1 GiB on a CPU)"""
    threads: NonNegativeInt = _setting(0, flag="--engine-threads")
    """CPU threads of the engine (0: half of the cores)"""


class JudgeConfig(_Section):
    """Who reads what happened next, and how it becomes a reward."""

    custom_rm_path: str = _setting("", env="CUSTOM_RM_PATH")
    """reward hook: module.function or ./file.py (default: the method's own)"""
    prm_url: Address = _setting("", env="PRM_URL")
    """OpenAI-compatible address of the PRM (default: the base model)"""
    prm_model: str = _setting("", env="PRM_MODEL")
    """model name at the PRM's address"""
    prm_api_key: Key = _setting("", env="PRM_API_KEY")
    """key for it"""
    prm_model_path: str = _setting("", env="PRM_MODEL_PATH")
    """folder of the PRM's model: its tokenizer; on slime, also what serves it (default: the base
    model)"""
    judge_url: Address = _setting("", env="JUDGE_URL")
    """OpenAI-compatible address of the judge that writes hints"""
    judge_model: str = _setting("", env="JUDGE_MODEL")
    """model name at the judge's address"""
    judge_api_key: Key = _setting("", env="JUDGE_API_KEY")
    """key for it"""
    judge_model_path: str = _setting("", env="JUDGE_MODEL_PATH")
    """folder of the judge's model (default: the base model)"""
    teacher_url: Address = ""
    """engine that scores the hinted reply (default: the base)"""
    teacher_api_key: Key = _setting("", env="TEACHER_API_KEY")
    """key for it"""
    prm_m: int = _setting(3, env="PRM_M", ge=1, le=64)
    """votes per turn"""
    temperature: Temperature = _setting(0.6, flag="--judge-temperature")
    """temperature of PRM and judge"""
    timeout_seconds: PositiveFloat = _setting(120.0, flag="--judge-timeout")
    """time a reward may take"""
    concurrency: PositiveInt = _setting(8, flag="--judge-concurrency")
    """turns judged at once"""
    min_hint_chars: NonNegativeInt = 10
    """hints of this length or less do not count"""
    standing_rule_path: str = "openclaw_rl.rewards.hindsight.standing_rule"
    """hook that makes one rule for every reply out of a person's corrections, for practice (without
    an LLM: openclaw_rl.rewards.feedback.standing_rule, the newest correction about form)"""
    practice: NonNegativeFloat = 6.0
    """practice turns for each judged turn, made while nobody talks: past questions, answered again
    and distilled with the standing rule in view, fill up a batch (0: none)"""
    practice_anchors: float = _setting(0.0, ge=0, le=1)
    """part of practice that is about something else, with the base itself as its teacher, so that
    what a person wants of their questions spreads less to other work"""
    practice_idle_seconds: NonNegativeFloat = 20.0
    """practise when nobody has talked for so long"""
    reward_key: str = ""
    """key of the score where the reward is a dict"""


class RolloutConfig(_Section):
    """When a batch is full and who is in it."""

    batch_size: PositiveInt = _setting(16, flag="--rollout-batch-size")
    """ready turns in a batch"""
    session_share: float = _setting(0.25, gt=0, le=1)
    """largest part of a batch that one session may give while others want places; alone it may
    fill the batch"""
    max_staleness: NonNegativeInt = 8
    """drop turns older than this many weight versions"""
    max_sample_tokens: NonNegativeInt = 0
    """longest sample in tokens; a turn beyond is dropped (0: no limit)"""
    function_path: str = _setting(
        "openclaw_rl.rollout.generate_rollout", flag="--rollout-function-path"
    )
    """rollout hook"""


class TrainConfig(_Section):
    """The background training of a LoRA adapter (embedded host)."""

    method: Literal["combined", "rl", "opd"] = _setting("combined", env="METHOD")
    """rewards (rl), hints (opd), or both"""
    custom_loss_function_path: str = _setting("", env="CUSTOM_LOSS_FUNCTION_PATH")
    """loss hook (default: the method's own)"""
    custom_advantage_function_path: str = ""
    """advantage hook"""
    custom_convert_samples_to_train_data_path: str = ""
    """conversion hook"""
    w_rl: NonNegativeFloat = _setting(1.0, env="W_RL")
    """weight of the reward"""
    # 2, 2 and the lr below: chosen on users a to c of benchmarks/learning.py (docs/learning.md).
    w_opd: NonNegativeFloat = _setting(2.0, env="W_OPD")
    """weight of the distillation term"""
    opd_clip: NonNegativeFloat = 2.0
    """bound on the distillation term of a token (0: none)"""
    opd_top_k: int = _setting(0, env="OPD_TOP_K", ge=0, le=64)
    """distil over this many candidates of each token (0: the sampled one; the published form takes
    4)"""
    opd_subset: Literal["student", "teacher", "overlap"] = "student"
    """whose candidates: the policy's own, the teacher's, or those of both"""
    opd_tail: bool = False
    """all other tokens together count as one more candidate"""
    opd_hints: int = _setting(1, ge=1, le=3)
    """hints a turn of which one is chosen, by how far the teacher's candidates and the policy's
    overlap"""
    opd_baseline: Literal["current", "old", "rollout"] = "current"
    """what the teacher is measured against: this forward, that before the step, the engine's"""
    tis_clip: float = _setting(-1.0, ge=-1)
    """upper bound of the weights that correct a token for the difference between engine and trainer
    (0: no such weights; -1: 2 with an external engine, else none)"""
    eps_clip: NonNegativeFloat = 0.2
    """lower clip of the ratio"""
    eps_clip_high: NonNegativeFloat = 0.28
    """upper clip of the ratio"""
    kl_loss_coef: NonNegativeFloat = 0.0
    """weight of the KL to the base (0: not computed)"""
    entropy_coef: NonNegativeFloat = 0.0
    """weight of the entropy bonus"""
    lr: NonNegativeFloat = 3e-4
    """learning rate"""
    weight_decay: NonNegativeFloat = 0.0
    """Adam's weight decay"""
    clip_grad: NonNegativeFloat = 1.0
    """largest gradient norm (0: no clipping)"""
    # A healthy step of the published runs has a norm of 3 to 8, the one that broke a policy 2243.
    max_grad_norm_skip: NonNegativeFloat = 100.0
    """no step beyond this gradient norm (0: no limit)"""
    # 0.02 per token is healthy, 0.2 to 0.4 late in a second epoch, 233 in the run that broke. Turns
    # of older versions raise it honestly, so the limit is generous.
    max_logprob_diff: NonNegativeFloat = 1.0
    """no step where the log-probs of engine and trainer differ by more a token (0: no limit)"""
    num_steps_per_rollout: PositiveInt = 1
    """optimiser steps on a batch"""
    lora_rank: PositiveInt = 16
    """rank of the adapter"""
    lora_alpha: NonNegativeFloat = 32.0
    """scale of the adapter"""
    max_tokens_per_gpu: NonNegativeInt = 0
    """tokens in a micro-batch, padding included (0: 512 on a CPU, 4096 on a GPU)"""
    loss_chunk_tokens: int = _setting(512, ge=2)
    """tokens whose logits are held at a time"""
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"
    """recompute activations (auto: on a GPU)"""
    save: str = _setting("", env="CKPT_SAVE_DIR")
    """folder of the checkpoints (default: inside --data)"""
    keep_checkpoints: PositiveInt = 4
    """checkpoints kept"""
    num_rollout: NonNegativeInt = 0
    """stop training after this many batches in all (0: never); serving goes on"""
    device: str = _setting("", flag="--train-device")
    """device of the trainer with an external engine (default: as --device)"""
    threads: NonNegativeInt = _setting(0, flag="--train-threads")
    """CPU threads of the trainer (0: half of the cores)"""
    seed: int = 0
    """seed of the adapter's start"""


class GuardsConfig(_Section):
    """What decides whether a version is served (slime: whether training goes on). Limit 0: none."""

    enabled: bool = _setting(True, flag="--guards")
    """probe every version before it is served, and refuse it where it is worse than the limits"""
    probes: str = ""
    """your own prompts beside the shipped ones: a file with one a line, or .jsonl with lists of
    messages"""
    probe_tokens: PositiveInt = 64
    """longest reply to a probe"""
    every: PositiveInt = _setting(1, flag="--probe-every")
    """on slime, which serves versions before they are probed: probe one in so many"""
    # 0.3 to 0.55 where SmolLM2-135M learnt fast and well; TT-OPD: 0.7 to 1.15 diverging, above 1.5
    # collapsed.
    max_kl: NonNegativeFloat = 1.0
    """KL to the base on the replies, in nats a token"""
    # 0.05 to 0.18 in healthy runs.
    max_harm: NonNegativeFloat = 0.25
    """how much less likely the base's replies to unrelated requests may become, in nats a token"""
    # 0.3 to 0.7 in healthy runs (-1.0 to -1.4 against -0.68).
    max_drift: NonNegativeFloat = 1.3
    """how much less likely than its own replies the base may find them, in nats a token"""
    max_empty: NonNegativeFloat = 0.1
    """share of replies without a word, above the base's"""
    max_cut: NonNegativeFloat = 0.25
    """share of replies that find no end, above the base's"""
    # Twice the base's share is the presumed threshold; the base has 0.1 to 0.3.
    max_repetition: NonNegativeFloat = 0.25
    """share of replies that repeat themselves, above the base's"""
    # Healthy: as the base (0.11 to 0.16); 0.36 to 0.44 where a run said sorry to all. Equal short
    # commands of an agent are no collapse: 0 there.
    max_similarity: NonNegativeFloat = 0.2
    """likeness (ROUGE-L) of replies to different questions, above the base's"""
    # The base: 0. As with likeness, an agent's commands are no collapse.
    max_vague: NonNegativeFloat = 0.25
    """share of replies that fit other questions nearly as well, by the base's log-probs"""
    max_fall: NonNegativeFloat = 0.25
    """share of sound replies below that of the best version so far"""
    max_batch_empty: NonNegativeFloat = 0.5
    """share of a batch without a word: such a batch is not learnt"""
    # Off: a small base loops by itself, and learns not to from the same turns.
    max_batch_looping: NonNegativeFloat = 0.0
    """share of a batch that mostly repeats itself"""
    # Off: one person alone fills batches.
    max_batch_session: NonNegativeFloat = 0.0
    """share of one session in a batch"""


class SlimeConfig(_Section):
    """The cluster, who gets which GPUs, and where slime is."""

    all_in_environment = True

    num_gpus: PositiveInt = 8
    """GPUs of one machine"""
    num_nodes: PositiveInt = 1
    """machines (above 1: of the Ray at RAY_ADDRESS)"""
    actor_gpus: NonNegativeInt = 0
    """GPUs that train, in all (0: half; where ROLLOUT_GPUS is given, the rest)"""
    rollout_gpus: NonNegativeInt = 0
    """GPUs that serve: policy, PRM, judge and teacher together (0: those that do not train)"""
    rollout_gpus_per_engine: PositiveInt = 1
    """GPUs of one engine of the policy"""
    prm_gpus: NonNegativeInt = 0
    """the PRM's share of ROLLOUT_GPUS (0: computed; the policy keeps half)"""
    prm_gpus_per_engine: NonNegativeInt = 0
    """GPUs of one engine of it (0: as the policy)"""
    judge_gpus: NonNegativeInt = 0
    """the judge's share, unless it shares the PRM's engine"""
    judge_gpus_per_engine: NonNegativeInt = 0
    """GPUs of one engine of it (0: as the policy)"""
    teacher: str = "base"
    """who teaches: base (the policy's initial weights, frozen), policy (the current ones), or the
    folder of a model with the same tokenizer"""
    teacher_gpus: NonNegativeInt = 0
    """the teacher's share, unless it shares an engine"""
    teacher_gpus_per_engine: NonNegativeInt = 0
    """GPUs of one engine of it (0: as the policy)"""
    slime_dir: str = ""
    """slime's folder"""
    megatron_dir: str = ""
    """Megatron-LM's folder"""
    train_script: str = ""
    """what is submitted (default: train_async.py of slime)"""
    model_args_file: str = ""
    """script that sets MODEL_ARGS, instead of those computed from config.json"""
    ray_address: str = ""
    """a Ray that is there already: auto or HOST:6379 (the script is its driver), or http://HOST:8265
    (a job is submitted); empty: one of its own on this machine, which ends with the script"""
    dry_run: bool = False
    """1: print the command and the files, start nothing"""


class Config(_Section):
    """The whole configuration. `Config()` is all defaults; sections can be given as they are."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    gateway: GatewayConfig = GatewayConfig()
    engine: EngineConfig = EngineConfig()
    judge: JudgeConfig = JudgeConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    guards: GuardsConfig = GuardsConfig()
    slime: SlimeConfig = SlimeConfig()

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    """Key of a setting -> where its value comes from; what is not in it is a default."""

    @property
    def journal_path(self) -> Path:
        """The journal's file."""
        return Path(self.data.path).expanduser() / "journal.db"

    @property
    def checkpoint_dir(self) -> Path:
        """The folder that holds adapters and optimiser states."""
        save = self.train.save
        return Path(save).expanduser() if save else self.journal_path.with_name("checkpoints")

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

    @property
    def tis_clip(self) -> float:
        """Bound of the importance weights; 0: none. An engine of another make computes other
        log-probs than the trainer does."""
        if self.train.tis_clip < 0:
            return 2.0 if self.engine.url else 0.0
        return self.train.tis_clip

    @model_validator(mode="after")
    def _check(self) -> Config:
        gateway, train = self.gateway, self.train
        if not is_loopback(gateway.host) and not gateway.api_key:
            raise ConfigError(
                f"--host {gateway.host} can be reached from other machines: set "
                "OPENCLAW_RL_API_KEY first, or keep 127.0.0.1"
            )
        if ":" in gateway.api_key:
            raise ConfigError(
                "OPENCLAW_RL_API_KEY must not contain ':' (KEY:SESSION names a session)"
            )
        for role in ("prm", "judge"):
            named, url = (getattr(self.judge, f"{role}_{part}") for part in ("model", "url"))
            if named and not url:
                raise ConfigError(f"--{role}-model is a name at --{role}-url: set that, too")
        if train.opd_top_k and train.method == "rl":
            raise ConfigError("--opd-top-k distils from hints, and --method rl asks for none")
        if train.opd_hints > 1 and not train.opd_top_k:
            raise ConfigError("--opd-hints above 1 needs --opd-top-k to choose by candidates")
        if -1 < train.tis_clip < 0:
            raise ConfigError(f"--tis-clip {train.tis_clip:g}: must be -1, or at least 0")
        for flag, url in (
            ("--engine-url", self.engine.url),
            ("--teacher-url", self.judge.teacher_url),
        ):
            if "/v1/" in f"{urlsplit(url).path}/":
                raise ConfigError(f"{flag}: give the server itself, like http://127.0.0.1:8000")
        return self


class Setting(NamedTuple):
    """One setting of the tree, and what it is called elsewhere."""

    section: str
    name: str
    default: Any
    help: str
    flag: str | None
    """None: a secret."""
    env: str | None
    choices: tuple[str, ...]

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def attribute(self) -> str:
        """The name that hooks see, where `hook_args` says no other: the flag's."""
        return (self.flag or self.env or "").removeprefix("--").replace("-", "_").lower()

    def of(self, config: Config) -> Any:
        """Its value in `config`."""
        return getattr(getattr(config, self.section), self.name)


def settings(*sections: str) -> Iterator[Setting]:
    """All settings, or those of some sections, in the order of the tree."""
    for section in sections or tuple(Config.model_fields):
        kind: type[_Section] = type(Config.model_fields[section].default)
        for name, field in kind.model_fields.items():
            extra: Any = field.json_schema_extra or {}
            flag = extra.get("flag") or "--" + name.replace("_", "-")
            env = name.upper() if kind.all_in_environment else extra.get("env")
            choices: tuple[str, ...] = getattr(field.annotation, "__args__", ())
            yield Setting(
                section, name, field.default, " ".join((field.description or "").split()),
                flag if field.repr else None, env,
                ("on", "off") if field.annotation is bool else choices,
            )  # fmt: skip


# -- sources ---------------------------------------------------------------------------------------


def add_flags(
    parser: argparse.ArgumentParser,
    wanted: Callable[[Setting], bool] = lambda setting: setting.section != "slime",
    listed: Collection[str] | None = None,
) -> None:
    """Add the flags of all `wanted` settings to `parser`, grouped by section. `--help` names the
    secrets' variables too; where `listed` names sections, it is silent about the others."""
    for section, field in Config.model_fields.items():
        items = [setting for setting in settings(section) if wanted(setting)]
        if not any(setting.flag for setting in items):
            continue
        shown = listed is None or section in listed
        about = (type(field.default).__doc__ or "").splitlines()[0]
        if keys := [setting.env or "" for setting in items if not setting.flag]:
            about += f" Keys come from the environment, not from flags: {', '.join(keys)}."
        group = parser.add_argument_group(f"[{section}]", about) if shown else parser
        for setting in items:
            if setting.flag is None:
                continue
            notes = []
            if setting.default != "" and "default" not in setting.help:
                value = setting.default
                notes.append(
                    f"default {'on' if value is True else 'off' if value is False else value}"
                )
            if setting.env:
                notes.append(f"environment {setting.env}")
            words = setting.help + (f" ({', '.join(notes)})" if notes else "")
            group.add_argument(
                setting.flag,
                dest=setting.key,
                metavar="|".join(setting.choices) or setting.name.upper(),
                help=words.replace("%", "%%") if shown else argparse.SUPPRESS,
            )


def environment() -> dict[str, str]:
    """This process's environment, for a command line to hand on."""
    return dict(os.environ)


def load_config(
    flags: Mapping[str, str | None], environ: Mapping[str, str], file: str | None = None
) -> Config:
    """Return the configuration from `file`, `environ` and `flags` (later ones win).

    `flags` has keys such as `gateway.port`, as `add_flags` parses them. Raises `ConfigError`.
    """
    path = Path(file or "").expanduser()
    tree = _read_file(path) if file else {}
    sections: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for section, field in Config.model_fields.items():
        kind: type[_Section] = type(field.default)
        words: dict[str, str] = {}
        names: dict[str, str] = {}
        for setting in settings(section):
            if setting.env and (value := environ.get(setting.env)):
                words[setting.name], names[setting.name] = value, setting.env
                origins[setting.key] = f"environment {setting.env}"
            if setting.flag and (given := flags.get(setting.key)) is not None:
                words[setting.name], names[setting.name] = given, setting.flag
                origins[setting.key] = f"flag {setting.flag}"
        try:
            read = kind.model_validate(tree.get(section, {}), strict=True)
        except ValidationError as error:
            origin = f"{path}: [{section}] {{}}".format
            raise _one_line(error, kind, origin) from None
        for name in read.model_fields_set:
            origins.setdefault(f"{section}.{name}", f"file {path}")
        try:
            told = kind.model_validate_strings(words)
        except ValidationError as error:
            raise _one_line(error, kind, names.__getitem__) from None
        sections[section] = read.model_copy(update=told.model_dump(exclude_unset=True))
    config = Config(**sections)
    config._origins.update(origins)
    return config


def _read_file(path: Path) -> dict[str, Any]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: {path} is not valid TOML: {error}") from error
    for section, content in tree.items():
        if section not in Config.model_fields:
            raise ConfigError(f"{path}: no section [{section}]{_similar(section, Config)}")
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: [{section}] must be a section")
    return tree


def _similar(word: str, kind: type[BaseModel]) -> str:
    close = difflib.get_close_matches(word, kind.model_fields, 1)
    return (
        f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(kind.model_fields)}"
    )


def _one_line(
    error: ValidationError, kind: type[_Section], origin: Callable[[str], str]
) -> ConfigError:
    """What is wrong with the first setting that is wrong; a secret is not quoted."""
    first = error.errors()[0]
    name = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return ConfigError(f"{origin(name)}: no such setting{_similar(name, kind)}")
    words = first["msg"].removeprefix("Value error, ").replace("Input should", "must")
    words = re.sub(r", (unable|got) .*", "", words)
    if first["type"] != "value_error":  # those of this module, about keys and addresses
        words += f", not {str(first['input'])[:80]!r}"
    return ConfigError(f"{origin(name)}: {words}")


def render_config(config: Config) -> str:
    """The whole tree as TOML that can be loaded again, and where each value came from; secrets are
    only said to be set."""
    lines = []
    for section in Config.model_fields:
        lines += ["", f"[{section}]"]
        for setting in settings(section):
            origin, value = config._origins.get(setting.key, "default"), setting.of(config)
            if setting.flag:
                text = json.dumps(value, ensure_ascii=False)
                lines.append(f"{setting.name} = {text}  # {origin}")
            else:
                lines.append(f"# {setting.name}: {f'set ({origin})' if value else 'not set'}")
    return "\n".join(lines[1:])


# -- what hooks see --------------------------------------------------------------------------------


def hook_args(config: Config) -> Namespace:
    """The namespace that hooks receive, with slime's attribute names: the settings from `[engine]`
    to `[guards]` under the names of their flags (`--prm-m`: `prm_m`), text that is empty as None,
    and the following."""
    gateway, engine, train = config.gateway, config.engine, config.train
    named = {
        setting.attribute: None if (value := setting.of(config)) == "" else value
        for setting in settings("engine", "judge", "rollout", "train", "guards")
    }
    return Namespace(**named | {
        "hf_checkpoint": config.model.path,
        "dtype": config.model.dtype,
        "device": train.device or config.model.device,
        "context_length": gateway.context_length or None,
        "journal_path": str(config.journal_path),
        "save": str(config.checkpoint_dir),
        "host_name": "local",
        "engine_kind": engine.kind if engine.url else "embedded",
        "custom_rm_path": config.reward_path,
        "segment_steps": train.num_steps_per_rollout,
        "any_temperature": True,  # the local trainer learns each turn at its own
        "rollout_temperature": gateway.temperature,
        "custom_loss_function_path": config.loss_path,
        # the weight of a signal that the method does not use is 0: judge and loss agree
        "w_rl": train.w_rl if train.method != "opd" else 0.0,
        "w_opd": train.w_opd if train.method != "rl" else 0.0,
        "use_tis": config.tis_clip > 0,
        "tis_clip": config.tis_clip,
        "use_kl_loss": train.kl_loss_coef > 0,
        "kl_loss_type": "low_var_kl",
        "adam_beta1": 0.9,
        "adam_beta2": 0.98,
        "adam_eps": 1e-8,
    })  # fmt: skip
