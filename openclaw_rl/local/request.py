"""What a request to the embedded engine is, and what comes back of it.

Guarantees: a `GenerateRequest` that was built by `parse_generate` is well formed (types, ranges,
one prompt); everything refused is refused with `EngineRefused(400, ...)` that names the field.
No torch here. Log-probs are natural logarithms.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openclaw_rl.errors import EngineRefused

BASE_VERSION = "base"
"""The weight version that replies of the base model (no adapter) carry."""

_DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's default
_MAX_TOP = 256  # what a teacher gives for the largest opd_top_k (64); bounds the reply
_GREEDY_BELOW = 1e-6  # as SGLang: a smaller temperature is 0; its inverse is no number any more
_WHOLE_MAX = 2**31 - 1

# Do not change what is sampled, or change only text, which this engine never returns.
_IGNORED = {
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "custom_params",
    "stream_interval",
}


def _refuse(text: str) -> EngineRefused:
    return EngineRefused(400, text)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """SGLang's `sampling_params`, the part served here.

    `temperature` 0 is greedy. The penalties count output tokens only. `top_k` <= 0 is off.
    `max_new_tokens` 0 scores the prompt and samples nothing. A seed makes the random numbers of
    this request its own (same prompt, weights and seed: the same draw of numbers).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_new_tokens: int = _DEFAULT_MAX_NEW_TOKENS
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    @property
    def filtered(self) -> bool:
        """Whether part of the vocabulary is cut off before the draw."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def penalised(self) -> bool:
        return (
            self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt. `policy` says whether the adapter is applied. `logprob_start_len` < 0: none of
    the prompt is scored; otherwise the prompt's entries begin at this position."""

    ids: Sequence[int]
    sampling: SamplingParams = SamplingParams()
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    policy: bool = True
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs: int = 0
    stream: bool = False

    @property
    def scores_prompt(self) -> bool:
        return self.return_logprob and 0 <= self.logprob_start_len < len(self.ids)


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token, its log-prob (None: it has no predecessor) and the likeliest in its place."""

    token: int
    logprob: float | None
    top: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one engine step gave one request: tokens of exactly one weight version.

    `prompt` holds the prompt's scores, once, in the first chunk. `finish` is SGLang's
    finish_reason, and set in the last chunk only.
    """

    tokens: tuple[TokenScore, ...]
    version: str
    cached_tokens: int = 0
    prompt: tuple[TokenScore, ...] | None = None
    finish: dict[str, Any] | None = None


Deliver = Callable[[list[tuple[str, Chunk]]], None]
"""Called by the engine thread once a step with (rid, chunk) of all requests that gave it; must be
quick, must not block, and must not raise."""


def _number(values: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = values.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise _refuse(f"sampling_params.{name} must be a number")
    if not low <= value <= high:
        raise _refuse(f"sampling_params.{name} must be between {low} and {high}, got {value}")
    return float(value)


def _whole(values: Mapping[str, Any], name: str, default: int, low: int) -> int:
    value = values.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= _WHOLE_MAX:
        raise _refuse(f"{name} must be a whole number from {low} to {_WHOLE_MAX}")
    return value


def _ids(value: Any, name: str) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or not all(type(i) is int and i >= 0 for i in value):
        raise _refuse(f"{name} must be a list of token ids")
    return tuple(value)


def parse_sampling(values: Mapping[str, Any]) -> SamplingParams:
    """Checks `sampling_params`. A parameter that would change the distribution and is not
    supported is refused, never dropped in silence."""
    stop = values.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise _refuse("sampling_params.stop must be a string or a list of strings")
    seed = values.get("sampling_seed", values.get("seed"))
    if seed is not None and type(seed) is not int:
        raise _refuse("sampling_params.sampling_seed must be a whole number")
    for name, value in values.items():
        known = name in SamplingParams.__dataclass_fields__ or name in ("sampling_seed", "n")
        if not known and name not in _IGNORED and value is not None:
            raise _refuse(f"sampling_params.{name} is not supported by the embedded engine")
    if values.get("n") not in (None, 1):
        raise _refuse("sampling_params.n must be 1")
    temperature = _number(values, "temperature", 1.0, 0.0, 1e6)
    return SamplingParams(
        temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
        top_p=_number(values, "top_p", 1.0, 1e-9, 1.0),
        top_k=_whole(values, "top_k", -1, -1),
        min_p=_number(values, "min_p", 0.0, 0.0, 1.0),
        max_new_tokens=_whole(values, "max_new_tokens", _DEFAULT_MAX_NEW_TOKENS, 0),
        stop=tuple(s for s in stops if s),
        stop_token_ids=_ids(values.get("stop_token_ids"), "sampling_params.stop_token_ids"),
        ignore_eos=bool(values.get("ignore_eos", False)),
        frequency_penalty=_number(values, "frequency_penalty", 0.0, -2.0, 2.0),
        presence_penalty=_number(values, "presence_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=_number(values, "repetition_penalty", 1.0, 1e-9, 2.0),
        seed=seed,
    )


def parse_generate(body: Any, *, policy: bool, vocab_size: int) -> GenerateRequest:
    """A `/generate` body as a request. Raises EngineRefused(400) naming the field."""
    if not isinstance(body, dict):
        raise _refuse("the body must be a JSON object")
    ids = body.get("input_ids")
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise _refuse("input_ids must be a non-empty list of token ids (one prompt a request)")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise _refuse(f"input_ids must lie between 0 and {vocab_size - 1}")
    params = body.get("sampling_params")
    if params is not None and not isinstance(params, dict):
        raise _refuse("sampling_params must be an object")
    rid = body.get("rid")
    if rid is not None and not isinstance(rid, str):
        raise _refuse("rid must be a string")
    if body.get("token_ids_logprob"):
        raise _refuse("token_ids_logprob is not supported by the embedded engine")
    top = _whole(body, "top_logprobs_num", 0, 0)
    if top > min(_MAX_TOP, vocab_size):
        raise _refuse(f"top_logprobs_num must be at most {min(_MAX_TOP, vocab_size)}")
    start = _whole(body, "logprob_start_len", -1, -1)
    if start > len(ids):
        raise _refuse("logprob_start_len lies behind the end of the prompt")
    return GenerateRequest(
        ids=ids,
        sampling=parse_sampling(params or {}),
        rid=rid or uuid.uuid4().hex,
        policy=policy,
        return_logprob=bool(body.get("return_logprob", False)),
        logprob_start_len=start,
        top_logprobs=top,
        stream=bool(body.get("stream", False)),
    )
