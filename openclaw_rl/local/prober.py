"""The trainer's own model as a `guards.Prober`: it needs no engine, so that a candidate is probed
before any engine has heard of it.

Guarantees: leaves weights, gradients and the training mode as they were. `give_way` is called
before each forward pass.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

import torch
from transformers import DynamicCache

from openclaw_rl.local.forward import PolicyForward

T = TypeVar("T")

_ROWS = 16
"""Sequences at a time: with prompts of 256 tokens 0.8 GB of keys and values of a 4B model."""


class LocalProber:
    """`ends`: tokens that end a reply."""

    def __init__(
        self, forward: PolicyForward, ends: Collection[int], give_way: Callable[[], None]
    ) -> None:
        self.forward, self.ends, self.give_way = forward, ends, give_way
        # The name of late and of early transformers 5.
        takes = inspect.signature(forward.causal.forward).parameters
        self._cache = "cache" if "cache" in takes else "past_key_values"

    @torch.no_grad()
    def reply(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, base: bool = False
    ) -> list[list[int]]:
        """See `guards.Prober`."""
        with self._weights(base):
            return [
                reply for piece in _pieces(prompts) for reply in self._greedy(piece, max_tokens)
            ]

    @torch.no_grad()
    def score(
        self, prompts: Sequence[Sequence[int]], replies: Sequence[Sequence[int]], *, base: bool
    ) -> list[list[float]]:
        """See `guards.Prober`."""
        found = []
        with self._weights(base):
            for piece in _pieces(list(zip(prompts, replies, strict=True))):
                self.give_way()
                hidden = self.forward.hidden([torch.tensor([*p, *r]) for p, r in piece])
                for states, (prompt, reply) in zip(hidden, piece, strict=True):
                    # A row of logits predicts the token behind it.
                    rows = states[len(prompt) - 1 : len(prompt) + len(reply) - 1]
                    log_probs = self.forward.logits(rows)[0].log_softmax(-1)
                    ids = torch.tensor(reply, dtype=torch.long, device=rows.device)
                    found.append(log_probs.gather(1, ids[:, None])[:, 0].tolist())
        return found

    def _greedy(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """Decode until every reply has ended; prompts are padded on the left."""
        device, longest = self.forward.device, max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=device)
        lengths = torch.tensor([[len(p)] for p in prompts], device=device)
        mask = (torch.arange(longest, device=device) >= longest - lengths).long()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        replies: list[list[int]] = [[] for _ in prompts]
        going = set(range(len(prompts)))
        cache = {self._cache: DynamicCache(config=self.forward.causal.config)}
        for _ in range(max_tokens):
            self.give_way()
            out = self.forward.causal(
                input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True,
                logits_to_keep=1, **cache,
            )  # fmt: skip
            ids = out.logits[:, -1].argmax(-1, keepdim=True)
            for row, token in enumerate(ids[:, 0].tolist()):
                if row in going and token in self.ends:
                    going.remove(row)
                elif row in going:
                    replies[row].append(token)
            if not going:
                break
            positions = positions[:, -1:] + 1
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
        return replies

    @contextlib.contextmanager
    def _weights(self, base: bool) -> Iterator[None]:
        """Of the base or the candidate, out of training mode, in which nothing is cached."""
        model, training = self.forward.model, self.forward.model.training
        model.eval()
        try:
            with model.disable_adapter() if base else contextlib.nullcontext():
                yield
        finally:
            model.train(training)


def _pieces(values: Sequence[T]) -> Iterator[Sequence[T]]:
    for at in range(0, len(values), _ROWS):
        yield values[at : at + _ROWS]
