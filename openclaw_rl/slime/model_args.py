"""Megatron's model arguments, computed from the model's own `config.json`.

Guarantees: for every dense Qwen2.5, Qwen3, Qwen3.5 and Llama 3 model the arguments are those that
slime's `scripts/models/*.sh` write out by hand (a test compares them size by size); a model that
these rules do not describe in full is refused with its reason, never guessed at.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from openclaw_rl.errors import ConfigError

JsonConfig = Mapping[str, Any]


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
        raise ConfigError(f"{path} is no JSON object")
    return config


def model_args(config: JsonConfig) -> list[str]:
    """Megatron's flags for the model that `config` (a `config.json`) describes.

    Raises `ConfigError` where the architecture is not one of ours, or has a part that the flags
    would not express.
    """
    kind = str(config.get("model_type"))
    if kind not in _KINDS:
        known = ", ".join(sorted(_KINDS))
        raise ConfigError(
            f"no model arguments are known for model_type {kind!r} (only dense {known}): "
            "set MODEL_ARGS_FILE to a script with MODEL_ARGS, such as slime's scripts/models/*.sh"
        )
    text = config.get("text_config") or config
    if not isinstance(text, dict):
        raise ConfigError("config.json: text_config is no object")
    missing = [name for name in _NEEDED if not _is_number(text.get(name))]
    if missing:
        raise ConfigError(f"config.json has no {', '.join(missing)} (a number above 0)")
    if text.get("hidden_act", "silu") != "silu":
        raise ConfigError(
            f"hidden_act {text['hidden_act']!r} is not the gated SiLU of these models"
        )
    return _KINDS[kind](text, config)


_NEEDED = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
)


def _common(text: JsonConfig, config: JsonConfig) -> list[str]:
    flags = [
        *("--swiglu", "--disable-bias-linear"),
        *("--normalization", "RMSNorm"),
        *("--norm-epsilon", _number(text["rms_norm_eps"])),
        *("--num-layers", _number(text["num_hidden_layers"])),
        *("--hidden-size", _number(text["hidden_size"])),
        *("--ffn-hidden-size", _number(text["intermediate_size"])),
        *("--num-attention-heads", _number(text["num_attention_heads"])),
        *("--group-query-attention", "--num-query-groups", _number(text["num_key_value_heads"])),
        *("--rotary-base", _number(_rope(text)["rope_theta"])),
        *("--vocab-size", _number(text["vocab_size"])),
    ]
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    return flags if tied else [*flags, "--untie-embeddings-and-output-weights"]


def _qwen2(text: JsonConfig, config: JsonConfig) -> list[str]:
    _no_scaling(text)
    _no_window(text)
    return [*_common(text, config), "--use-rotary-position-embeddings", "--add-qkv-bias"]


def _qwen3(text: JsonConfig, config: JsonConfig) -> list[str]:
    _no_scaling(text)
    _no_window(text)
    _no_bias(text)
    return [
        *_common(text, config),
        *("--use-rotary-position-embeddings", "--qk-layernorm"),
        *("--kv-channels", _number(_head_dim(text))),
    ]


def _llama(text: JsonConfig, config: JsonConfig) -> list[str]:
    _no_bias(text)
    flags = [
        *_common(text, config),
        "--use-rotary-position-embeddings",
        *("--kv-channels", _number(_head_dim(text))),
        *("--max-position-embeddings", _number(_given(text, "max_position_embeddings"))),
    ]
    rope = _rope(text)
    if rope["rope_type"] == "llama3":
        # Megatron's --use-rope-scaling has these three built in; another value would be ignored.
        fixed = {"low_freq_factor": 1, "high_freq_factor": 4}
        fixed["original_max_position_embeddings"] = 8192
        if any(rope.get(name, value) != value for name, value in fixed.items()):
            raise ConfigError(f"Megatron's rope scaling has {fixed} built in, this model another")
        flags += [
            "--use-rope-scaling",
            "--rotary-scaling-factor",
            _number(float(_given(rope, "factor"))),
        ]
    else:
        _no_scaling(text)
    return flags


def _qwen3_5(text: JsonConfig, config: JsonConfig) -> list[str]:
    _no_scaling(text)
    _no_bias(text)
    if not text.get("attn_output_gate", True):
        raise ConfigError("slime's Qwen3.5 layers have an output gate, this model has none")
    return [
        *("--spec", "slime_plugins.models.qwen3_5", "get_qwen3_5_spec"),
        *_common(text, config),
        *("--qk-layernorm", "--apply-layernorm-1p"),
        *("--use-gated-attention", "--attention-output-gate"),
        *("--kv-channels", _number(_head_dim(text))),
        *("--position-embedding-type", "rope"),
        *("--rotary-percent", _number(_given(_rope(text), "partial_rotary_factor", 0.25))),
    ]


_KINDS: Mapping[str, Callable[[JsonConfig, JsonConfig], list[str]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_5": _qwen3_5,
}
"""`model_type` -> its rules. Where slime can load the weights of a Hugging Face folder itself."""


def _rope(text: JsonConfig) -> dict[str, Any]:
    """Base, type and scaling of the rotary embedding, in the older or the newer form of
    `config.json` (`rope_theta` and `rope_scaling`, or `rope_parameters`)."""
    found = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise ConfigError("config.json: rope_parameters or rope_scaling is no object")
    rope = dict(found)
    rope.setdefault("rope_theta", text.get("rope_theta"))
    rope.setdefault("rope_type", rope.get("type", "default"))
    _given(rope, "rope_theta")
    return rope


def _no_scaling(text: JsonConfig) -> None:
    kind = _rope(text)["rope_type"]
    if kind != "default":
        raise ConfigError(f"rope scaling of type {kind!r} is not expressed by these flags")


def _no_window(text: JsonConfig) -> None:
    if text.get("use_sliding_window"):
        raise ConfigError("sliding-window attention is not expressed by these flags")


def _no_bias(text: JsonConfig) -> None:
    if text.get("attention_bias") or text.get("mlp_bias"):
        raise ConfigError("biases in attention or MLP are not expressed by these flags")


def _head_dim(text: JsonConfig) -> int:
    if text.get("head_dim") is not None:
        return int(_given(text, "head_dim"))
    return int(text["hidden_size"] // text["num_attention_heads"])


def _given(values: JsonConfig, name: str, default: float | None = None) -> float:
    """The number at `name`. Raises `ConfigError` where there is none."""
    value = values.get(name, default)
    if not _is_number(value):
        raise ConfigError(f"config.json has no {name} (a number above 0)")
    return float(value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _number(value: float) -> str:
    """As people write it: 1000000 for 1000000.0, 1e-06 as it is."""
    return str(int(value)) if float(value).is_integer() else repr(value)
