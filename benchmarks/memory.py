"""Memory of the embedded host: the arithmetic for any model, and the measured peak on a GPU.

    python -m benchmarks.memory                      the table for a 4B model on a 16 GB card
    python -m benchmarks.memory --model FOLDER       the table for that model, and, where CUDA
                                                     exists, the measured peak of a training step

The table counts what one process holds: base weights once (policy, judge, teacher, reference and
trainer share them), the adapter in float32 with Adam's two moments and its gradient, the serving
copies of the adapter, the KV cache, activations with gradient checkpointing, and the rows of
logits that exist at a time (`loss_chunk_tokens`).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

GB = 1e9


@dataclass(frozen=True)
class Shape:
    """What the arithmetic needs of a decoder. The default is Qwen3-4B's config.json."""

    name: str = "Qwen3-4B"
    layers: int = 36
    hidden: int = 2560
    intermediate: int = 9728
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 151936
    tied: bool = True

    @classmethod
    def of(cls, folder: Path) -> Shape:
        c = json.loads((folder / "config.json").read_text())
        c = c.get("text_config", c)
        heads = c["num_attention_heads"]
        return cls(
            name=folder.name,
            layers=c["num_hidden_layers"],
            hidden=c["hidden_size"],
            intermediate=c["intermediate_size"],
            heads=heads,
            kv_heads=c.get("num_key_value_heads") or heads,
            head_dim=c.get("head_dim") or c["hidden_size"] // heads,
            vocab=c["vocab_size"],
            tied=bool(c.get("tie_word_embeddings", False)),
        )

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(in, out) of the linear layers of one decoder layer."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        h, i = self.hidden, self.intermediate
        return [(h, q), (h, kv), (h, kv), (q, h), (h, i), (h, i), (i, h)]

    @property
    def parameters(self) -> int:
        body = self.layers * sum(a * b for a, b in self.linears)
        return body + self.vocab * self.hidden * (1 if self.tied else 2)

    def lora_parameters(self, rank: int) -> int:
        return self.layers * sum(rank * (a + b) for a, b in self.linears)


def table(
    shape: Shape, *, rank: int, micro: int, sample: int, chunk: int, kv_tokens: int
) -> list[tuple[str, str, float]]:
    """Rows `(what, how, bytes)` of one training step beside serving, in bfloat16 with gradient
    checkpointing. `micro` tokens are in a micro-batch (or one `sample`, if longer)."""
    tokens = max(micro, sample)
    lora = shape.lora_parameters(rank)
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # One layer recomputed: inputs of its linears and norms, q k v, gate, up and their product,
    # each with its gradient, two bytes an entry.
    layer = 2 * 2 * tokens * (4 * shape.hidden + 2 * q + 2 * kv + 4 * shape.intermediate)
    rows = min(chunk, tokens)
    return [
        ("base weights, once", f"{shape.parameters / GB:.2f}e9 × 2 bytes", 2.0 * shape.parameters),
        ("adapter, gradient, Adam", f"{lora / 1e6:.0f}e6 × 16 bytes", 16.0 * lora),
        ("adapter as served", f"{lora / 1e6:.0f}e6 × 6 bytes", 6.0 * lora),
        (
            "KV cache",
            f"{kv_tokens} tokens × {shape.layers} layers × {2 * kv} × 2 bytes",
            4.0 * kv * shape.layers * kv_tokens,
        ),
        (
            "kept activations",
            f"{tokens} tokens × {shape.layers} layers × {shape.hidden} × 2 bytes",
            2.0 * tokens * shape.layers * shape.hidden,
        ),
        ("one layer recomputed", f"{tokens} tokens", float(layer)),
        (
            "logits and their gradient",
            f"{rows} rows × {shape.vocab} × 12 bytes",
            12.0 * rows * shape.vocab,
        ),
        ("CUDA context, kernels, fragments", "assumed", 1.2 * GB),
    ]


def markdown(rows: list[tuple[str, str, float]]) -> str:
    """The table for the docs."""
    lines = ["| what | how | GB |", "|---|---|---|"]
    lines += [f"| {what} | {how} | {size / GB:.2f} |" for what, how, size in rows]
    lines.append(f"| **sum** | | **{sum(size for *_, size in rows) / GB:.2f}** |")
    return "\n".join(lines)


def measure(folder: Path, *, rank: int, micro: int, sample: int, chunk: int) -> str:
    """Peak memory of one training step on the GPU, engine cache not included."""
    import tempfile

    import torch

    from openclaw_rl.config import Config, TrainConfig, hook_args
    from openclaw_rl.hooks import Sample
    from openclaw_rl.local.learner import Learner
    from openclaw_rl.local.model import LoadedModel, LoraSpec
    from openclaw_rl.rollout.train_data import convert

    loaded = LoadedModel.load(folder, device="cuda", dtype="bfloat16", lora=LoraSpec(rank=rank))
    with tempfile.TemporaryDirectory() as place:
        train = TrainConfig(
            save=place,
            max_tokens_per_gpu=micro,
            loss_chunk_tokens=chunk,
            max_logprob_diff=0,  # made-up tokens
            max_grad_norm_skip=0,
        )
        args = hook_args(Config(train=train))
        learner = Learner(args, loaded.trainer_model())
        held = torch.cuda.memory_allocated()
        tokens = torch.randint(10, loaded.vocab_size - 10, (sample,)).tolist()
        n = sample // 2
        turn = {"turn_id": "t", "start": 0, "end": n, "reward": 1.0}
        one = Sample(
            index=0, rollout_id=0, tokens=tokens, response_length=n, loss_mask=[1] * n,
            reward=1.0, rollout_log_probs=[-1.0] * n, metadata={"turns": [turn]},
        )  # fmt: skip
        torch.cuda.reset_peak_memory_stats()
        (report,) = learner.learn(convert(args, [one]))
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    if report.skipped:
        return f"the step was skipped ({report.skipped}): no measurement"
    return (
        f"measured on {torch.cuda.get_device_name()}: {held / GB:.2f} GB held before the step, "
        f"peak {peak / GB:.2f} GB in a step on one sample of {sample} tokens ({n} trained)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of the embedded host")
    parser.add_argument("--model", type=Path, help="folder of a model (default: Qwen3-4B's shape)")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--micro", type=int, default=4096, help="max_tokens_per_gpu")
    parser.add_argument("--sample", type=int, default=4096, help="tokens of the longest sample")
    parser.add_argument("--chunk", type=int, default=512, help="loss_chunk_tokens")
    parser.add_argument("--kv-tokens", type=int, default=16384)
    given = parser.parse_args()
    shape = Shape.of(given.model) if given.model else Shape()
    sizes = {"rank": given.rank, "micro": given.micro, "sample": given.sample, "chunk": given.chunk}
    print(f"{shape.name}, bfloat16, LoRA rank {given.rank} on all linear layers\n")
    print(markdown(table(shape, **sizes, kv_tokens=given.kv_tokens)))
    print()
    try:
        import torch

        cuda = torch.cuda.is_available()
    except ImportError:
        cuda = False
    if not cuda:
        print("Not measured: that needs a CUDA device, and there is none here.")
    elif given.model is None:
        print("Not measured: give --model FOLDER.")
    else:
        print(measure(given.model, **sizes))


if __name__ == "__main__":
    main()
