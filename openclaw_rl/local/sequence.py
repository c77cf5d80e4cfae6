"""A request under way: its tokens, how far it is computed, and when it ends. Pure state."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from openclaw_rl.local.cache import Slot
from openclaw_rl.local.request import Deliver, GenerateRequest, TokenScore


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` is prompt + output; the first `computed` of them have keys and values in `slot`.

    The last token of a sequence that generates has none yet: feeding it makes the next one.
    """

    request: GenerateRequest
    deliver: Deliver
    order: int  # of arrival
    tokens: list[int]
    prompt_len: int
    random: random.Random
    slot: Slot | None = None
    computed: int = 0
    cached_tokens: int | None = None  # of the first admission
    prompt_scores: list[TokenScore] = field(default_factory=list)
    prompt_sent: bool = False
    counts: Tensor | None = None  # of output tokens, where penalties ask

    @property
    def pending(self) -> int:
        """Tokens to compute before the next one can be drawn."""
        return len(self.tokens) - self.computed

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def score_from(self) -> int:
        """First position whose logits are needed to score the prompt (its length: none are)."""
        if not self.request.scores_prompt:
            return self.prompt_len
        return self.request.logprob_start_len

    def restart(self) -> None:
        """Keys and values are gone; everything sampled stays."""
        self.slot = None
        self.computed = 0
        if not self.prompt_sent:
            self.prompt_scores.clear()

    def ended_by(self, token: int, eos: frozenset[int], context: int) -> dict[str, Any] | None:
        """finish_reason after `token` was appended, or None. Stop strings are not looked at."""
        params = self.request.sampling
        if token in params.stop_token_ids or (not params.ignore_eos and token in eos):
            return {"type": "stop", "matched": token}
        if self.output_len >= params.max_new_tokens or len(self.tokens) >= context:
            return {"type": "length", "length": self.output_len}
        return None
