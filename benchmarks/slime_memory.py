"""Memory of the slime host: the arithmetic of docs/slime.md, for any dense model.

    python -m benchmarks.slime_memory                  the table for Qwen3-8B on 4, 8 and 16 GPUs
    python -m benchmarks.slime_memory --model FOLDER   that model

Megatron holds weights in bfloat16, gradients in float32, and Adam's two moments and the master
weights in float32, spread over the data-parallel ranks (slime always uses the distributed
optimiser). Activations are those of full recomputation with sequence parallelism. It is
arithmetic, not a measurement.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from benchmarks.memory import GB, Shape

QWEN3_8B = Shape("Qwen3-8B", 36, 4096, 12288, 32, 8, 128, 151936, tied=False)
QWEN3_4B = Shape()
FIXED = 5 * GB
"""CUDA context, NCCL buffers, fragments: assumed."""


@dataclass(frozen=True)
class Split:
    """A split as the launcher makes it: trainer TP x DP, engines of one GPU for the policy and for
    what is frozen."""

    gpus: int
    tensor: int
    data: int
    policy: int
    frozen: int
    card: int = 80
    offload: bool = False
    """Adam's state in the host's memory (`--optimizer-cpu-offload`)."""


SPLITS = (
    (QWEN3_4B, Split(4, 2, 1, 1, 1)),
    (QWEN3_8B, Split(4, 2, 1, 1, 1)),
    (QWEN3_8B, Split(4, 2, 1, 1, 1, offload=True)),
    (QWEN3_8B, Split(8, 4, 1, 2, 2)),
    (QWEN3_8B, Split(16, 4, 2, 4, 4)),
)


def trainer(shape: Shape, split: Split, tokens: int) -> tuple[float, float, float, float]:
    """Bytes on one training GPU: weights, gradients, optimiser, and all else with micro-batches of
    `tokens` tokens."""
    part = shape.parameters / split.tensor
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    kept = 2 * tokens * shape.layers * shape.hidden
    layer = 2 * 2 * tokens * (4 * shape.hidden + 2 * q + 2 * kv + 4 * shape.intermediate)
    logits = 12 * tokens * shape.vocab  # float32: logits, their softmax, their gradient
    rest = (kept + layer + logits) / split.tensor + FIXED
    return 2 * part, 4 * part, 0.0 if split.offload else 12 * part / split.data, rest


def kv_tokens(shape: Shape, split: Split, fraction: float) -> int:
    """Tokens that one engine of one GPU holds in its cache beside the weights."""
    one = 4 * shape.kv_heads * shape.head_dim * shape.layers
    return int((fraction * split.card * GB - 2 * shape.parameters) // one)


def row(shape: Shape, split: Split, tokens: int = 16384, fraction: float = 0.8) -> str:
    """One row of the table."""
    weights, gradients, adam, rest = trainer(shape, split, tokens)
    total = weights + gradients + adam + rest
    fits = "yes" if total < split.card * GB else f"no ({split.card} GB)"
    thousand = kv_tokens(shape, split, fraction) // 1000
    cells = [
        f"{split.gpus}",
        shape.name,
        f"{split.tensor} × {split.data}",
        f"{split.policy} + {split.frozen}",
        f"{weights / GB:.1f}",
        f"{gradients / GB:.1f}",
        "host" if split.offload else f"{adam / GB:.1f}",
        f"{rest / GB:.1f}",
        f"**{total / GB:.0f}**",
        fits,
        f"{thousand},000",
    ]
    return "| " + " | ".join(cells) + " |"


def markdown(splits: tuple[tuple[Shape, Split], ...] = SPLITS) -> str:
    """The table for the docs."""
    head = (
        "| GPUs | model | trainer TP × DP | policy + frozen | weights | gradients | Adam | rest "
        "| **GB a training GPU** | fits 80 GB | KV tokens an engine |\n" + "|---" * 11 + "|"
    )
    return "\n".join([head, *(row(shape, split) for shape, split in splits)])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a model (default: Qwen3-8B)")
    options = parser.parse_args()
    if options.model is None:
        print(markdown())
    else:
        shape = Shape.of(options.model)
        print(markdown(tuple((shape, split) for _, split in SPLITS)))


if __name__ == "__main__":
    main()
