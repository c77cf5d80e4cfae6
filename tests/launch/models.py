"""What public models say of themselves in `config.json` (the keys that matter), and what slime's
`scripts/models/*.sh` pass to Megatron for them (at commit 624b824a8)."""

from __future__ import annotations

from typing import Any


def _dense(
    kind: str, layers: int, hidden: int, ffn: int, heads: int, groups: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-06,
        **more,
    }


def qwen3(*shape: int, tied: bool, theta: float = 1000000) -> dict[str, Any]:
    return _dense(
        "qwen3",
        *shape,
        head_dim=128,
        vocab_size=151936,
        rope_theta=theta,
        rope_scaling=None,
        tie_word_embeddings=tied,
        attention_bias=False,
        use_sliding_window=False,
        max_position_embeddings=40960,
    )


def qwen2(*shape: int, tied: bool, vocab: int = 151936, **more: Any) -> dict[str, Any]:
    given = {"rope_theta": 1000000.0, "tie_word_embeddings": tied, "vocab_size": vocab, **more}
    return _dense("qwen2", *shape, use_sliding_window=False, **given)


def llama(*shape: int, tied: bool, factor: float) -> dict[str, Any]:
    scaling = {
        "factor": factor,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    return _dense(
        "llama",
        *shape,
        head_dim=128,
        vocab_size=128256,
        rope_theta=500000.0,
        rope_scaling=scaling,
        tie_word_embeddings=tied,
        attention_bias=False,
        mlp_bias=False,
        max_position_embeddings=131072,
    ) | {"rms_norm_eps": 1e-05}


def qwen3_5(*shape: int, tied: bool) -> dict[str, Any]:
    text = _dense(
        "qwen3_5_text",
        *shape,
        head_dim=256,
        vocab_size=248320,
        attention_bias=False,
        attn_output_gate=True,
        tie_word_embeddings=tied,
        max_position_embeddings=262144,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
        },
    )
    return {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": tied}


CONFIGS: dict[str, dict[str, Any]] = {
    # layers, hidden, ffn, heads, groups
    "qwen3-0.6B": qwen3(28, 1024, 3072, 16, 8, tied=True),
    "qwen3-1.7B": qwen3(28, 2048, 6144, 16, 8, tied=True),
    "qwen3-4B": qwen3(36, 2560, 9728, 32, 8, tied=True),
    "qwen3-4B-Instruct-2507": qwen3(36, 2560, 9728, 32, 8, tied=True, theta=5000000),
    "qwen3-8B": qwen3(36, 4096, 12288, 32, 8, tied=False),
    "qwen3-14B": qwen3(40, 5120, 17408, 40, 8, tied=False),
    "qwen3-32B": qwen3(64, 5120, 25600, 64, 8, tied=False),
    "qwen2.5-0.5B": qwen2(24, 896, 4864, 14, 2, tied=True),
    "qwen2.5-1.5B": qwen2(28, 1536, 8960, 12, 2, tied=True),
    "qwen2.5-3B": qwen2(36, 2048, 11008, 16, 2, tied=True),
    "qwen2.5-7B": qwen2(28, 3584, 18944, 28, 4, tied=False, vocab=152064),
    "qwen2.5-32B": qwen2(64, 5120, 27648, 40, 8, tied=False, vocab=152064, rms_norm_eps=1e-05),
    "llama3.1-8B-Instruct": llama(32, 4096, 14336, 32, 8, tied=False, factor=8.0),
    "llama3.2-3B-Instruct": llama(28, 3072, 8192, 24, 8, tied=True, factor=32.0),
    "qwen3.5-0.8B": qwen3_5(24, 1024, 3584, 8, 2, tied=True),
    "qwen3.5-4B": qwen3_5(32, 2560, 9216, 16, 4, tied=True),
    "qwen3.5-9B": qwen3_5(32, 4096, 12288, 16, 4, tied=False),
    "qwen3.5-27B": qwen3_5(64, 5120, 17408, 24, 4, tied=False),
}
"""By the name of slime's script."""

_QWEN3 = "--swiglu --use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm "
_QWEN3 += "--group-query-attention --kv-channels 128 --qk-layernorm --vocab-size 151936"
_QWEN2 = "--swiglu --use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm "
_QWEN2 += "--group-query-attention --add-qkv-bias"
_LLAMA = "--swiglu --use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm "
_LLAMA += "--group-query-attention --kv-channels 128 --vocab-size 128256 --use-rope-scaling "
_LLAMA += "--max-position-embeddings 131072 --rotary-base 500000 --norm-epsilon 1e-5"
_QWEN3_5 = "--spec slime_plugins.models.qwen3_5 get_qwen3_5_spec --disable-bias-linear "
_QWEN3_5 += "--qk-layernorm --group-query-attention --kv-channels 256 --use-gated-attention "
_QWEN3_5 += "--normalization RMSNorm --apply-layernorm-1p --position-embedding-type rope "
_QWEN3_5 += "--norm-epsilon 1e-6 --rotary-percent 0.25 --swiglu --vocab-size 248320 "
_QWEN3_5 += "--rotary-base 10000000 --attention-output-gate"

_ROWS = """
qwen3-0.6B             qwen3   28 1024  3072 16 8 1e-6 1000000 -      tied
qwen3-1.7B             qwen3   28 2048  6144 16 8 1e-6 1000000 -      tied
qwen3-4B               qwen3   36 2560  9728 32 8 1e-6 1000000 -      tied
qwen3-4B-Instruct-2507 qwen3   36 2560  9728 32 8 1e-6 5000000 -      tied
qwen3-8B               qwen3   36 4096 12288 32 8 1e-6 1000000 -      untied
qwen3-14B              qwen3   40 5120 17408 40 8 1e-6 1000000 -      untied
qwen3-32B              qwen3   64 5120 25600 64 8 1e-6 1000000 -      untied
qwen2.5-0.5B           qwen2   24  896  4864 14 2 1e-6 1000000 151936 tied
qwen2.5-1.5B           qwen2   28 1536  8960 12 2 1e-6   10000 151936 tied
qwen2.5-3B             qwen2   36 2048 11008 16 2 1e-6 1000000 151936 tied
qwen2.5-7B             qwen2   28 3584 18944 28 4 1e-6 1000000 152064 untied
qwen2.5-32B            qwen2   64 5120 27648 40 8 1e-5 1000000 152064 untied
llama3.1-8B-Instruct   llama   32 4096 14336 32 8 -    -       8.0    untied
llama3.2-3B-Instruct   llama   28 3072  8192 24 8 -    -       32.0   tied
qwen3.5-0.8B           qwen3_5 24 1024  3584  8 2 -    -       -      tied
qwen3.5-4B             qwen3_5 32 2560  9216 16 4 -    -       -      tied
qwen3.5-9B             qwen3_5 32 4096 12288 16 4 -    -       -      untied
qwen3.5-27B            qwen3_5 64 5120 17408 24 4 -    -       -      untied
"""
"""Script, family, layers, hidden, ffn, heads, groups, epsilon, rotary base, vocabulary (Qwen2.5)
or rope factor (Llama), embeddings."""


def _expected(row: str) -> tuple[str, list[str]]:
    name, family, layers, hidden, ffn, heads, groups, eps, base, last, tied = row.split()
    fixed = {"qwen3": _QWEN3, "qwen2": _QWEN2, "llama": _LLAMA, "qwen3_5": _QWEN3_5}[family]
    words = fixed.split()
    words += ["--num-layers", layers, "--hidden-size", hidden, "--ffn-hidden-size", ffn]
    words += ["--num-attention-heads", heads, "--num-query-groups", groups]
    words += ["--norm-epsilon", eps] if eps != "-" else []
    words += ["--rotary-base", base] if base != "-" else []
    if last != "-":
        words += ["--vocab-size" if family == "qwen2" else "--rotary-scaling-factor", last]
    return name, words + (["--untie-embeddings-and-output-weights"] if tied == "untied" else [])


SLIMES_ARGS = dict(_expected(row) for row in _ROWS.strip().splitlines())

DIFFERENT = {"qwen2.5-1.5B": {"--rotary-base": ("1000000", "10000")}}
"""Where slime's script contradicts the model's config.json: flag -> (config.json, script). slime's
own check of the arguments against config.json would refuse its script's value."""
