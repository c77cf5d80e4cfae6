"""What a request asks of the embedded engine, and how its tokens are drawn and scored.

Guarantees: a request read from JSON is well formed and asks for nothing that is not served, or is
refused naming the field. The token is drawn from softmax(logits / temperature) after penalties, cut
to top_k, top_p and min_p where asked; its log-prob is that of softmax(logits / temperature) over
the whole vocabulary, before the cut, as SGLang reports it. Temperature 0 is argmax, with the
log-prob at temperature 1. Log-probs are natural logarithms.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from openclaw_rl.errors import EngineRefused

_SHORTLIST = 256  # candidates looked at before the whole vocabulary is sorted
_SCORE_ROWS = 64  # positions whose float32 logits are held at once while scoring
_GREEDY_BELOW = 1e-6  # as SGLang: a smaller temperature counts as 0
_INT32 = 2**31 - 1
_TokenId = Annotated[int, Field(ge=0, le=_INT32)]
_STRICT = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


class SamplingParams(BaseModel):
    """SGLang's `sampling_params`, the part served here.

    The penalties count output tokens only. `top_k` -1 is off. `max_new_tokens` 0 scores the prompt
    and samples nothing. An event of a stream has `stream_interval` tokens where it can.
    """

    model_config = ConfigDict(extra="forbid", **_STRICT)
    temperature: float = Field(default=1.0, ge=0, le=1e6)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1, le=_INT32)
    min_p: float = Field(default=0.0, ge=0, le=1)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, gt=0, le=1e6)
    max_new_tokens: int = Field(default=128, ge=0, le=_INT32)
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    stop_token_ids: tuple[_TokenId, ...] = ()
    ignore_eos: bool = False
    stream_interval: int = Field(default=1, ge=1, le=_INT32)

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW or self.top_k == 1

    @property
    def cut(self) -> bool:
        """Whether part of the vocabulary is cut off before the draw."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalised(self) -> bool:
        return (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) != (0, 0, 1)


class GenerateRequest(BaseModel):
    """One prompt, in the form of SGLang's `/generate`. `logprob_start_len` < 0: none of the prompt
    is scored; otherwise the prompt's tokens behind this position are. Routers add fields of their
    own, which are ignored."""

    model_config = _STRICT
    input_ids: tuple[_TokenId, ...] = Field(min_length=1)
    sampling_params: SamplingParams = SamplingParams()
    rid: str = Field(default_factory=lambda: uuid.uuid4().hex, min_length=1)
    return_logprob: Literal[True] = True
    logprob_start_len: int = Field(default=-1, ge=-1, le=_INT32)
    top_logprobs_num: int = Field(default=0, ge=0, le=256)  # a teacher's largest opd_top_k is 64
    stream: bool = False

    @classmethod
    def read(cls, body: bytes) -> GenerateRequest:
        """A `/generate` body as a request. Raises EngineRefused(400) naming the field."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            # Without the input, which may be a conversation.
            first = error.errors(include_input=False, include_url=False, include_context=False)[0]
            where = ".".join(map(str, first["loc"])) or "body"
            raise EngineRefused(400, f"{where[:100]}: {first['msg']}") from None

    @property
    def score_from(self) -> int:
        """First position whose logits score the prompt (its length: none are wanted)."""
        start, end = self.logprob_start_len, len(self.input_ids)
        return min(start, end) if start >= 0 else end


class TokenScore(NamedTuple):
    """A token, its log-prob, and the likeliest in its place as (log-prob, id)."""

    token: int
    logprob: float
    top: tuple[tuple[float, int], ...] = ()


def draw(
    logits: Tensor,
    params: Sequence[SamplingParams],
    uniforms: Sequence[float],
    counts: Sequence[Tensor | None],
    tops: Sequence[int],
) -> list[TokenScore]:
    """One token a row, by inverting the cumulative distribution. logits [R, V] in any dtype and
    layout; uniforms in [0, 1); counts [V] of output tokens where penalties ask (else None); tops:
    how many of the likeliest are told beside it."""
    z = logits.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    for row, seen, one in zip(z, counts, params, strict=True):
        if seen is not None:
            penalise(row, seen, one)
    heat = [one.temperature if one.temperature >= _GREEDY_BELOW else 1.0 for one in params]
    if any(value != 1.0 for value in heat):
        z /= torch.tensor(heat, device=z.device)[:, None]
    normaliser = z.logsumexp(-1, keepdim=True)
    greedy = [one.greedy for one in params]
    if all(greedy):
        ids = z.argmax(-1)
    else:
        weights = (z - normaliser).exp_()
        if at := [i for i, one in enumerate(params) if one.cut]:
            weights[at] = _cut(weights[at], [params[i] for i in at])
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        total = cumulative[:, -1:].contiguous()
        wanted = torch.tensor(uniforms, dtype=torch.float64, device=z.device)[:, None] * total
        ids = torch.searchsorted(cumulative, wanted, right=True)  # never one of weight zero
        # Rounding can lift a number to the total itself: then the last one with weight.
        ids = torch.minimum(ids, torch.searchsorted(cumulative, total))[:, 0]
        if any(greedy):
            ids = torch.where(torch.tensor(greedy, device=z.device), z.argmax(-1), ids)
    logprobs = (z.gather(-1, ids[:, None]) - normaliser)[:, 0]
    # One transfer: float64 holds every token id exactly.
    tokens, values = torch.stack([ids.double(), logprobs.double()]).tolist()
    return [
        TokenScore(int(tokens[i]), values[i], *_likeliest(z[i : i + 1], normaliser[i : i + 1], top))
        for i, top in enumerate(tops)
    ]


def penalise(row: Tensor, counts: Tensor, params: SamplingParams) -> None:
    """Applies the penalties of one row in place. `counts` [V]: how often each token was output."""
    factor = torch.where(row > 0, 1 / params.repetition_penalty, params.repetition_penalty)
    row.mul_(torch.where(counts > 0, factor, 1.0))
    row.sub_(counts, alpha=params.frequency_penalty)
    row.sub_((counts > 0).to(row.dtype), alpha=params.presence_penalty)


def _cut(weights: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Probabilities [F, V] with what is cut off set to 0. A token stays if it is among the top_k,
    if the tokens before it (likeliest first) hold at most top_p, and if it has at least min_p of
    the likeliest one."""
    limits = [(one.top_k if one.top_k > 0 else torch.inf, one.top_p, one.min_p) for one in params]
    top_k, top_p, min_p = torch.tensor(limits, device=weights.device).T[:, :, None]
    size = min(_SHORTLIST, weights.shape[-1])
    while True:
        share, ids = weights.topk(size)  # sorted
        before = share.cumsum(-1, dtype=torch.float64) - share
        keep = (torch.arange(size, device=weights.device) < top_k) & (before <= top_p)
        keep &= share >= share[:, :1] * min_p
        # The cut is inside the shortlist when its last candidate falls to it.
        if size == weights.shape[-1] or not bool(keep[:, -1].any()):
            return torch.zeros_like(weights).scatter_(-1, ids, share * keep)
        size = weights.shape[-1]


def score(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenScore]:
    """The given `tokens` under the first rows of `logits` [R, V], at temperature 1."""
    found: list[TokenScore] = []
    for start in range(0, len(tokens), _SCORE_ROWS):
        part = tokens[start : start + _SCORE_ROWS]
        z = logits[start : start + len(part)].float().contiguous()
        normaliser = z.logsumexp(-1, keepdim=True)
        ids = torch.tensor(part, device=z.device)[:, None]
        values = (z.gather(-1, ids) - normaliser)[:, 0].tolist()
        tops = _likeliest(z, normaliser, top)
        found += [TokenScore(*one) for one in zip(part, values, tops, strict=True)]
    return found


def _likeliest(z: Tensor, normaliser: Tensor, top: int) -> list[tuple[tuple[float, int], ...]]:
    """For each row of z [R, V]: the `top` best as (log-prob, id)."""
    if not top:
        return [()] * z.shape[0]
    values, ids = z.topk(top, dim=-1)
    best = (values - normaliser).tolist()
    return [tuple(zip(v, i, strict=True)) for v, i in zip(best, ids.tolist(), strict=True)]
