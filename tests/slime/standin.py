"""Stands for slime's `train_async.py` where there are no GPUs: real Ray, our hooks by flag.

Written from what slime's driver is described to do. A rollout actor loads the rollout and the
conversion hook by dotted path, calls one after the other, and splits what they give over the
data-parallel ranks, carrying slime's keys and no others; each training actor loads the advantage
and the loss hook; the next rollout begins before the present one is trained, and no weights are
updated while one waits. The engine speaks SGLang's protocol; an update aborts what is under way.

`notes.jsonl` in the checkpoint folder says what was done, for the test to compare the journal with.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import yaml

CARRIED = (
    "tokens", "response_lengths", "rewards", "truncated", "loss_masks", "sample_indices",
    "rollout_ids", "rollout_mask_sums", "rollout_log_probs", "source_names", "teacher_log_probs",
)  # fmt: skip
MICRO_BATCH = 2
TOKEN_SECONDS = 0.03


def parse(words: list[str]) -> Namespace:
    """`--some-flag 3` is `some_flag=3`; one without a value is True; a YAML file sets the rest."""
    args = Namespace(
        loss_type="policy_loss", reward_key=None, calculate_per_token_loss=False, kl_coef=0.0,
        rollout_top_p=1.0, use_critic=False, entropy_coef=0.0, use_kl_loss=False,
        start_rollout_id=0,
    )  # fmt: skip
    flags: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            flags.append([word])
        else:
            flags[-1].append(word)
    for flag, *values in flags:
        found = [yaml.safe_load(value) for value in values]
        value = True if not found else found[0] if len(found) == 1 else found
        setattr(args, flag[2:].replace("-", "_"), value)
    for name, value in yaml.safe_load(Path(args.custom_config_path).read_text()).items():
        setattr(args, name, value)
    args.global_batch_size = args.rollout_batch_size * args.n_samples_per_prompt
    tracker = Path(args.load) / "latest_checkpointed_iteration.txt"
    if tracker.is_file():
        args.start_rollout_id = int(tracker.read_text()) + 1
    return args


def load_function(path: str) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def note(args: Namespace, **what: Any) -> None:
    with open(Path(args.save) / "notes.jsonl", "a") as file:
        file.write(json.dumps(what) + "\n")


@ray.remote(num_cpus=0.1)
class Engine:
    """One model of `--sglang-config`."""

    async def start(self, model: str) -> int:
        from tokenizers import Tokenizer

        from tests.fakes.engine import EOS_ID, FakeEngine

        tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
        numbers = itertools.count()

        def reply(_: Any) -> list[int]:
            words = f"This is the answer with the number {next(numbers)}, please say what is wrong."
            return [*tokenizer.encode(words).ids, EOS_ID]

        self.engine = FakeEngine(
            delay=TOKEN_SECONDS, model_path=model, version="default", context_length=32768
        )
        self.engine.reply_fn = reply
        await self.engine.start()
        return int(self.engine.url.rpartition(":")[2])

    async def update_weights(self, version: str) -> None:
        await self.engine.update_weights(version)


@ray.remote(num_cpus=0.1)
class RolloutManager:
    def __init__(self, args: Namespace, routers: dict[str, tuple[str, int]], dp_size: int) -> None:
        import logging

        logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
        args.sglang_model_routers = routers
        args.sglang_router_ip, args.sglang_router_port = next(iter(routers.values()))
        self.args, self.dp_size = args, dp_size
        self.rollout = load_function(args.rollout_function_path)
        self.convert = load_function(args.custom_convert_samples_to_train_data_path)

    def generate(self, rollout_id: int) -> list[Any]:
        output = self.rollout(self.args, rollout_id, None, evaluation=False)
        samples = list(itertools.chain.from_iterable(output.samples))
        turns = [turn["turn_id"] for sample in samples for turn in sample.metadata["turns"]]
        note(self.args, did="generated", rollout=rollout_id, turns=turns, metrics=output.metrics)
        data = self.convert(self.args, samples)
        assert len(set(data["rollout_ids"])) == self.args.global_batch_size
        assert len(samples) >= self.dp_size
        data = {key: data[key] for key in CARRIED if key in data}
        data["total_lengths"] = [len(tokens) for tokens in data["tokens"]]
        return [
            ray.put({key: values[rank :: self.dp_size] for key, values in data.items()})
            for rank in range(self.dp_size)
        ]


@ray.remote(num_cpus=0.1, num_gpus=1)
class Trainer:
    """A data-parallel rank with a model of a few thousand weights."""

    def __init__(self, args: Namespace) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        vocabulary = int(
            json.loads((Path(args.hf_checkpoint) / "config.json").read_text())["vocab_size"]
        )
        self.args = args
        self.embedding = torch.nn.Embedding(vocabulary, 8)
        self.output = torch.nn.Linear(8, vocabulary)
        self.parameters = [*self.embedding.parameters(), *self.output.parameters()]
        self.advantages = load_function(args.custom_advantage_function_path)
        self.loss = load_function(args.custom_loss_function_path)

    def _logits(self, tokens: Any) -> Any:
        import torch

        places = torch.arange(1, len(tokens) + 1)[:, None]
        return self.output(torch.tanh(self.embedding(tokens).cumsum(0) / places))

    def gradient(self, references: list[Any], rank: int) -> Any:
        import torch

        data = ray.get(references[rank])
        data["tokens"] = [torch.tensor(tokens) for tokens in data["tokens"]]
        data["loss_masks"] = [torch.tensor(mask) for mask in data["loss_masks"]]
        data["rollout_log_probs"] = [torch.tensor(values) for values in data["rollout_log_probs"]]
        with torch.no_grad():
            data["log_probs"] = [
                self._logits(tokens)[-length - 1 : -1].log_softmax(-1)
                .gather(1, tokens[-length:, None])[:, 0]
                for tokens, length in zip(data["tokens"], data["response_lengths"], strict=True)
            ]  # fmt: skip
        self.advantages(self.args, data)
        total = torch.zeros(())
        for begin in range(0, len(data["tokens"]), MICRO_BATCH):
            batch = {key: values[begin : begin + MICRO_BATCH] for key, values in data.items()}
            batch["unconcat_tokens"] = batch["tokens"]
            logits = torch.cat([self._logits(tokens) for tokens in batch["tokens"]])[None]

            def reduce(values: Any, batch: dict[str, Any] = batch) -> Any:
                parts = values.split(batch["response_lengths"])
                rows = zip(parts, batch["loss_masks"], batch["rollout_mask_sums"], strict=True)
                return sum((part * mask).sum() / max(whole, 1) for part, mask, whole in rows)

            loss, _ = self.loss(self.args, batch, logits, reduce)
            total = total + loss / self.args.global_batch_size
        return [grad.numpy() for grad in torch.autograd.grad(total, self.parameters)]

    def step(self, gradients: list[Any]) -> float:
        import torch

        change = 0.0
        for parameter, *grads in zip(self.parameters, *gradients, strict=True):
            grad = sum(map(torch.tensor, grads))
            change += float(grad.abs().sum())
            parameter.data -= 0.01 * grad
        return change


def train(args: Namespace) -> None:
    save = Path(args.save)
    save.mkdir(parents=True, exist_ok=True)
    engines, routers = {}, {}
    for model in yaml.safe_load(Path(args.sglang_config).read_text())["sglang"]:
        engine = engines[model["name"]] = Engine.remote()
        routers[model["name"]] = ("127.0.0.1", ray.get(engine.start.remote(model["model_path"])))
    dp_size = args.actor_num_gpus_per_node // args.tensor_model_parallel_size
    trainers = [Trainer.remote(args) for _ in range(dp_size)]
    manager = RolloutManager.remote(args, routers, dp_size)
    version = 0

    def update_weights(rollout_id: int) -> None:
        nonlocal version
        version += 1
        ray.get(engines["policy"].update_weights.remote(str(version)))
        note(args, did="updated", rollout=rollout_id, version=version)

    update_weights(args.start_rollout_id - 1)
    upcoming = manager.generate.remote(args.start_rollout_id)
    for rollout_id in range(args.start_rollout_id, args.num_rollout):
        if upcoming is not None:
            current = ray.get(upcoming)
        upcoming = manager.generate.remote(rollout_id + 1)
        gradients = [t.gradient.remote(current, rank) for rank, t in enumerate(trainers)]
        change = ray.get([t.step.remote(ray.get(gradients)) for t in trainers])
        assert change[0] == change[-1] != 0.0
        note(args, did="trained", rollout=rollout_id)
        if (rollout_id + 1) % args.save_interval == 0:
            (save / "latest_checkpointed_iteration.txt").write_text(str(rollout_id))
        current, upcoming = ray.get(upcoming), None  # no update while a rollout waits
        update_weights(rollout_id)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The launcher asks for a Ray of its own by RAY_ADDRESS=local; this machine has no GPU to count.
    ray.init(num_cpus=4, num_gpus=3, object_store_memory=100_000_000, include_dashboard=False)
    train(parse(sys.argv[1:]))
