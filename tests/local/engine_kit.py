"""What the engine's tests share: a caller that waits for replies, and a plain reference."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from openclaw_rl.local.engine import Chunk, EngineCore
from openclaw_rl.local.sampling import GenerateRequest, SamplingParams, TokenScore


@dataclass
class Answer:
    """All chunks of one request."""

    chunks: list[Chunk] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    progress: threading.Condition = field(default_factory=threading.Condition)

    @property
    def scores(self) -> list[TokenScore]:
        return [score for chunk in self.chunks for score in chunk.tokens]

    @property
    def ids(self) -> list[int]:
        return [score.token for score in self.scores]

    @property
    def logprobs(self) -> list[float]:
        return [score.logprob for score in self.scores]

    @property
    def versions(self) -> list[str]:
        return [chunk.version for chunk in self.chunks for _ in chunk.tokens]

    @property
    def prompt(self) -> list[TokenScore]:
        return [score for chunk in self.chunks for score in chunk.prompt]

    @property
    def finish(self) -> dict:
        return self.chunks[-1].finish

    @property
    def cached(self) -> int:
        return self.chunks[-1].cached_tokens

    def deliver(self, chunk: Chunk) -> None:
        with self.progress:
            self.chunks.append(chunk)
            self.progress.notify_all()
        if chunk.finish is not None:
            self.done.set()

    def wait(self) -> Answer:
        assert self.done.wait(60), "the request did not end"
        return self

    def wait_tokens(self, count: int) -> None:
        with self.progress:
            assert self.progress.wait_for(lambda: len(self.ids) >= count, 60)


class Caller:
    """Submits to a core."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core

    def send(self, ids: list[int], *, policy: bool = True, **values) -> Answer:
        fields = GenerateRequest.model_fields
        names = {k: values.pop(k) for k in list(values) if k in fields}
        values.setdefault("ignore_eos", True)
        values.setdefault("max_new_tokens", 8)
        params = SamplingParams(**values)
        request = GenerateRequest(input_ids=tuple(ids), sampling_params=params, **names)
        answer = Answer()
        self.core.submit(request, answer.deliver, policy=policy)
        return answer

    def score(self, ids: list[int], start: int = 0, **values) -> Answer:
        return self.send(ids, max_new_tokens=0, logprob_start_len=start, **values).wait()


def reference(net, prompt: list[int], output: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probs of `output` after `prompt` by one plain forward pass of an ordinary model."""
    ids = torch.tensor([prompt + output])
    with torch.no_grad():
        logits = net(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    picked = torch.tensor(output)[:, None]
    return logits.log_softmax(-1).gather(-1, picked)[:, 0].tolist()


def random_adapter(model, seed: int = 0, size: float = 0.05) -> dict[str, torch.Tensor]:
    """A PEFT state dict of random matrices for all linear layers but the output."""
    draw = torch.Generator().manual_seed(seed)
    rank = model.lora.rank
    state = {}
    for name, layer in model.modules.items():
        if name == "lm_head":
            continue
        out, into = layer.weight.shape
        key = f"base_model.model.{name}"
        state[f"{key}.lora_A.weight"] = torch.randn(rank, into, generator=draw) * size
        state[f"{key}.lora_B.weight"] = torch.randn(out, rank, generator=draw) * size
    return state
