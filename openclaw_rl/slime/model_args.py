"""Megatron's model arguments, computed from the model's own `config.json`.

Guarantees: for every dense Qwen2.5, Qwen3, Qwen3.5 and Llama 3 model the arguments are those that
slime's `scripts/models/*.sh` write out by hand (a test compares them size by size); a model that
these rules do not describe in full is refused with its reason, never guessed at.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openclaw_rl.errors import ConfigError

KINDS = ("llama", "qwen2", "qwen3", "qwen3_5")
"""`model_type` of the families whose Hugging Face weights slime loads by itself."""

_SIZES = {
    "--norm-epsilon": "rms_norm_eps",
    "--num-layers": "num_hidden_layers",
    "--hidden-size": "hidden_size",
    "--ffn-hidden-size": "intermediate_size",
    "--num-attention-heads": "num_attention_heads",
    "--num-query-groups": "num_key_value_heads",
    "--vocab-size": "vocab_size",
}
_LLAMA3_ROPE = {
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}
"""Built into Megatron's --use-rope-scaling: other values would be ignored there."""


def read_config(folder: Path) -> dict[str, Any]:
    """The model's `config.json`. Raises `ConfigError`."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return config


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a `config.json` that describes the language model."""
    text = config.get("text_config") or config
    if not isinstance(text, dict):
        raise ConfigError("config.json: text_config is not an object")
    return text


def model_args(config: Mapping[str, Any]) -> list[str]:
    """Megatron's flags for the model that `config` (a `config.json`) describes.

    Raises `ConfigError` where the architecture is not one of `KINDS`, or has a part that the flags
    would not express.
    """
    kind, text = str(config.get("model_type")), text_config(config)
    if kind not in KINDS:
        raise ConfigError(
            f"no model arguments are known for model_type {kind!r} (only dense {', '.join(KINDS)}):"
            " set MODEL_ARGS_FILE to a script with MODEL_ARGS, such as slime's scripts/models/*.sh"
        )
    rope = _rope(text)
    scaled = kind == "llama" and rope["rope_type"] == "llama3"
    for wrong, what in (
        (text.get("hidden_act", "silu") != "silu", f"hidden_act {text.get('hidden_act')!r}"),
        (kind != "qwen2" and (text.get("attention_bias") or text.get("mlp_bias")), "biases"),
        (kind in ("qwen2", "qwen3") and text.get("use_sliding_window"), "sliding-window attention"),
        (kind == "qwen3_5" and not text.get("attn_output_gate", True), "no output gate"),
        (rope["rope_type"] != "default" and not scaled, f"rope scaling {rope['rope_type']!r}"),
        (
            scaled and any(rope.get(key, value) != value for key, value in _LLAMA3_ROPE.items()),
            f"rope scaling other than the one built into Megatron ({_LLAMA3_ROPE})",
        ),
    ):
        if wrong:
            raise ConfigError(f"config.json has {what}, which Megatron's flags do not express")
    flags = ["--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm"]
    flags += ["--group-query-attention", "--rotary-base", _number(rope, "rope_theta")]
    for flag, name in _SIZES.items():
        flags += [flag, _number(text, name)]
    if not text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)):
        flags.append("--untie-embeddings-and-output-weights")
    if kind == "qwen3_5":
        rotary = {"partial_rotary_factor": 0.25, **rope}
        flags += ["--spec", "slime_plugins.models.qwen3_5", "get_qwen3_5_spec", "--qk-layernorm"]
        flags += ["--apply-layernorm-1p", "--use-gated-attention", "--attention-output-gate"]
        flags += ["--position-embedding-type", "rope"]
        flags += ["--rotary-percent", _number(rotary, "partial_rotary_factor")]
    else:
        flags.append("--use-rotary-position-embeddings")
    if kind == "qwen2":
        return [*flags, "--add-qkv-bias"]
    heads = {"head_dim": text["hidden_size"] // text["num_attention_heads"]}
    given = {key: value for key, value in text.items() if value is not None}
    flags += ["--kv-channels", _number(heads | given, "head_dim")]
    if kind == "qwen3":
        flags.append("--qk-layernorm")
    if kind == "llama":
        flags += ["--max-position-embeddings", _number(text, "max_position_embeddings")]
    if scaled:
        flags += ["--use-rope-scaling", "--rotary-scaling-factor", _number(rope, "factor")]
    return flags


def _rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """Base, type and scaling of the rotary embedding, in the older or the newer form of
    `config.json` (`rope_theta` and `rope_scaling`, or `rope_parameters`)."""
    found = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise ConfigError("config.json: rope_parameters or rope_scaling is not an object")
    kind = found.get("type", "default")
    return {"rope_theta": text.get("rope_theta"), "rope_type": kind, **found}


def _number(values: Mapping[str, Any], name: str) -> str:
    """The number at `name`, as people write it (1000000 for 1000000.0). Raises `ConfigError`."""
    value: Any = values.get(name)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ConfigError(f"config.json has no {name} (a number above 0)")
    return str(int(value)) if float(value).is_integer() else repr(value)
