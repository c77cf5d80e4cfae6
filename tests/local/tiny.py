"""A tiny trainer-side model and a journal that keeps books, for the tests of the trainer."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from openclaw_rl.config import Config, TrainConfig, hook_args
from openclaw_rl.hooks import Sample
from openclaw_rl.journal import Version
from openclaw_rl.types import TopK

VOCAB = 61


def peft_model(seed: int = 0, dtype: torch.dtype = torch.float64, rank: int = 4) -> Any:
    """A random Llama with a LoRA adapter on all linear layers whose B is not zero."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        tie_word_embeddings=False, initializer_range=0.2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        base = LlamaForCausalLM(config).to(dtype)
        lora = LoraConfig(r=rank, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(base, lora)
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.data = p.data.to(dtype)
                if "lora_B" in name:
                    p.data.normal_(std=0.05)
    return model


def train_args(tmp_path: Any = "unused", **changes: Any) -> Namespace:
    """Complete trainer arguments; `changes` override."""
    train = TrainConfig(save=str(tmp_path), lr=1e-2, gradient_checkpointing="off")
    given = vars(hook_args(Config(train=train)))
    return Namespace(**(given | changes))


def conversation(
    seed: int, turns: int, *, teacher: bool = True, prefix: str = "t", top_k: int = 0
) -> tuple[Sample, list[Sample]]:
    """One session: as a merged segment, and as one sample a turn. Same tokens, same signals.

    `top_k`: a turn with a teacher has so many candidates a token, some of them unknown.
    """
    g = torch.Generator().manual_seed(seed)
    ids = lambda n: torch.randint(3, VOCAB, (n,), generator=g).tolist()  # noqa: E731
    size = lambda a, b: int(torch.randint(a, b, (1,), generator=g))  # noqa: E731
    tokens: list[int] = []
    single: list[Sample] = []
    spans: list[dict[str, Any]] = []
    mask: list[int] = []
    rollout: list[float] = []
    teachers: list[float] = []
    candidates: list[list[int]] = []
    values: list[list[float]] = []
    first = 0

    def topk(rows: int, has: bool) -> tuple[list[list[int]], list[list[float]]]:
        if not has:
            return [[-1] * top_k] * rows, [[float("nan")] * top_k] * rows
        own = [torch.randperm(VOCAB, generator=g)[:top_k].tolist() for _ in range(rows)]
        lps = (-4 * torch.rand(rows, top_k, generator=g) - 1).tolist()
        own[0][-1], lps[0][-1] = -1, float("nan")
        return own, lps

    for k in range(turns):
        context, output = ids(size(2, 7)), ids(size(1, 9))
        n = len(output)
        lps = (-3 + 0.5 * torch.randn(n, generator=g)).tolist()
        has = teacher and size(0, 2) == 1
        taught = (-3 + 0.5 * torch.randn(n, generator=g)).tolist() if has else [float("nan")] * n
        reward = float(size(-1, 2))
        if k == 0:
            first = len(context)
        else:
            mask += [0] * len(context)
            rollout += [0.0] * len(context)
            teachers += [float("nan")] * len(context)
            if top_k:
                none = topk(len(context), False)
                candidates += none[0]
                values += none[1]
        tokens += context + output
        spans.append(
            {"turn_id": f"{prefix}{seed}.{k}", "start": len(mask), "end": len(mask) + n,
             "reward": reward, "has_teacher": has}
        )  # fmt: skip
        mask += [1] * n
        rollout += lps
        teachers += taught
        alone = {**spans[-1], "start": 0, "end": n}
        metadata: dict[str, Any] = {"turns": [alone]}
        if top_k:
            own, lps_of_own = topk(n, has)
            candidates += own
            values += lps_of_own
            metadata["topk"] = TopK(own, lps_of_own)
        single.append(
            Sample(
                index=k,
                rollout_id=k,
                tokens=list(tokens),
                response_length=n,
                loss_mask=[1] * n,
                reward=reward,
                rollout_log_probs=lps,
                teacher_log_probs=taught,
                metadata=metadata,
                status=Sample.Status.COMPLETED,
            )
        )
    merged = Sample(
        index=0, rollout_id=0, tokens=tokens, response_length=len(tokens) - first, loss_mask=mask,
        reward=sum(s["reward"] for s in spans) / turns, rollout_log_probs=rollout,
        teacher_log_probs=teachers, metadata={"turns": spans}, status=Sample.Status.COMPLETED,
    )  # fmt: skip
    if top_k:
        merged.metadata["topk"] = TopK(candidates, values)
    return merged, single


class Books:
    """The journal's leasing rules in memory, with every end of a turn written down."""

    def __init__(self) -> None:
        self.ready: list[str] = []
        self.leased: dict[tuple[str, int], list[str]] = {}
        self.trained: dict[str, list[str]] = {}
        self.dropped: dict[str, list[str]] = {}
        self.counters: dict[str, int] = {}
        self.published: dict[str, dict[str, Any]] = {}
        self.made: list[Version] = []
        self.requests: dict[str, str] = {}

    def publish(self, role: str, url: str, info: Any, now: float) -> None:
        self.published[role] = dict(info)

    def lease(self, rollout_id: int, host: str, turn_ids: list[str]) -> None:
        assert (host, rollout_id) not in self.leased
        for turn in turn_ids:
            self.ready.remove(turn)
        self.leased[host, rollout_id] = list(turn_ids)

    def leases(self, host: str) -> dict[int, list[str]]:
        return {r: ids for (h, r), ids in sorted(self.leased.items()) if h == host}

    def give_back(self, rollout_id: int, host: str) -> int:
        ids = self.leased.pop((host, rollout_id), [])
        self.ready = ids + self.ready
        return len(ids)

    def mark_trained(self, rollout_id: int, host: str, version: str) -> int:
        ids = self.leased.pop((host, rollout_id), [])
        for turn in ids:
            self.trained.setdefault(turn, []).append(version)
        return len(ids)

    def drop_leased(self, rollout_id: int, host: str, turn_ids: Any, reason: str) -> int:
        ids = self.leased.get((host, rollout_id), [])
        ended = [t for t in ids if t in set(turn_ids)]
        self.leased[host, rollout_id] = [t for t in ids if t not in ended]
        self.dropped.setdefault(reason, []).extend(ended)
        return len(ended)

    def count(self, name: str, n: int = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + n

    def record_version(self, v: Version) -> None:
        self.made.insert(0, v)

    def versions(self, limit: int = 100) -> list[Version]:
        return self.made[:limit]

    def ask(self, name: str, value: str, now: float) -> None:
        self.requests[name] = value

    def asked(self) -> dict[str, str]:
        return dict(self.requests)

    def answered(self, name: str, value: str) -> None:
        if self.requests.get(name) == value:
            del self.requests[name]

    def first_prompts(self, limit: int, max_tokens: int) -> list[list[int]]:
        return []
