"""Megatron's arguments from config.json, against slime's own scripts."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from openclaw_rl.errors import ConfigError
from openclaw_rl.slime.model_args import model_args, read_config
from tests.launch.models import CONFIGS, DIFFERENT, SLIMES_ARGS, llama, qwen2, qwen3, qwen3_5


def as_dict(words):
    """Flag -> values, numbers by value: 1e-6 is 1e-06."""
    found, flag = {}, None
    for word in words:
        if word.startswith("--"):
            assert word not in found, f"{word} twice"
            found[flag := word] = []
        else:
            try:
                found[flag].append(float(word))
            except ValueError:
                found[flag].append(word)
    return found


def expected(name, words):
    values = as_dict(words)
    for flag, (ours, slimes) in DIFFERENT.get(name, {}).items():
        assert values[flag] == [float(slimes)], "the script was mended: take it out of DIFFERENT"
        values[flag] = [float(ours)]
    return values


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_arguments_are_those_of_slimes_script(name):
    assert as_dict(model_args(CONFIGS[name])) == expected(name, SLIMES_ARGS[name])


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_table_is_slimes_script(name):
    slime = os.environ.get("SLIME_DIR")
    if not slime:
        pytest.skip("SLIME_DIR names no clone of slime")
    script = Path(slime) / "scripts" / "models" / f"{name}.sh"
    shell = 'source "$1" && printf "%s\\0" "${MODEL_ARGS[@]}"'
    done = subprocess.run(["bash", "-c", shell, "-", script], capture_output=True, check=True)
    assert as_dict(done.stdout.decode().split("\0")[:-1]) == as_dict(SLIMES_ARGS[name])


def test_newer_form_of_config_json_gives_the_same():
    older = CONFIGS["llama3.1-8B-Instruct"]
    newer = dict(older)
    newer["rope_parameters"] = {**newer.pop("rope_scaling"), "rope_theta": newer.pop("rope_theta")}
    assert model_args(newer) == model_args(older)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "qwen3_moe"}, "MODEL_ARGS_FILE"),
        ({}, "model_type"),
        ({**qwen3(1, 8, 8, 2, 1, tied=True), "num_key_value_heads": None}, "num_key_value_heads"),
        ({**qwen3(1, 8, 8, 2, 1, tied=True), "hidden_act": "gelu"}, "gelu"),
        ({**qwen3(1, 8, 8, 2, 1, tied=True), "attention_bias": True}, "biases"),
        ({**qwen2(1, 8, 8, 2, 1, tied=True), "use_sliding_window": True}, "sliding"),
        ({**qwen3(1, 8, 8, 2, 1, tied=True), "rope_scaling": {"type": "yarn"}}, "yarn"),
        ({**qwen3(1, 8, 8, 2, 1, tied=True), "rope_theta": None}, "rope_theta"),
        ({**qwen3(1, 8, 8, 2, 1, tied=True), "rope_scaling": "x"}, "rope_scaling is not an object"),
        ({**qwen3(1, 8, 8, 2, 1, tied=True), "head_dim": "x"}, "head_dim"),
        ({**qwen3(1, 8, 8, 2, 1, tied=True), "num_attention_heads": 0}, "num_attention_heads"),
        ({**qwen3(1, 8, 8, 2, 1, tied=True), "num_hidden_layers": True}, "num_hidden_layers"),
        ({**qwen3(1, 8, 8, 2, 1, tied=True), "vocab_size": float("inf")}, "vocab_size"),
        ({**qwen3(1, 8, 8, 2, 1, tied=True), "text_config": [1]}, "text_config is not an object"),
        (
            {**llama(1, 8, 8, 2, 1, tied=True, factor=8.0), "max_position_embeddings": None},
            "max_position_embeddings",
        ),
        (
            {
                **llama(1, 8, 8, 2, 1, tied=True, factor=8.0),
                "rope_scaling": {"rope_type": "llama3"},
            },
            "factor",
        ),
    ],
)
def test_what_the_flags_would_not_express_is_refused(config, words):
    with pytest.raises(ConfigError, match=words):
        model_args(config)


def test_rope_scaling_other_than_megatrons_is_refused():
    config = llama(1, 8, 8, 2, 1, tied=True, factor=8.0)
    config["rope_scaling"] = {**config["rope_scaling"], "low_freq_factor": 2.0}
    with pytest.raises(ConfigError, match="built into"):
        model_args(config)


def test_qwen3_5_without_an_output_gate_is_refused():
    config = qwen3_5(1, 8, 8, 2, 1, tied=True)
    config["text_config"]["attn_output_gate"] = False
    with pytest.raises(ConfigError, match="no output gate"):
        model_args(config)


def test_an_unreadable_config_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match="not a JSON object"):
        read_config(tmp_path)
