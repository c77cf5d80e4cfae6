"""vLLM's `/v1/completions`, spoken in token ids.

Weights are adapters: the name asked for decides the version of a token, "base" without one.

vLLM computes log-probs before the temperature (raw, its default), so they are those of the policy
at temperature 1 only; with `--logprobs-mode processed_logprobs` (`any_temperature`) after it. Where
they are another temperature's, `logprobs` is None: such a turn is served, and not trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import orjson

from openclaw_rl.engine.transport import Lost, read_event
from openclaw_rl.engine.types import (
    Abilities,
    Adapter,
    Candidates,
    Delta,
    Scores,
    candidates,
    finish_of,
    log_probs,
    token_ids,
)
from openclaw_rl.errors import EngineError, EngineRefused

_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_SAME = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty"),
    }
)
_GRAMMARS = {
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}
_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Said in every request: where one is missing vLLM takes the model's own generation settings."""
_NO_VALUE = -9999.0
"""What vLLM writes for minus infinity, which JSON lacks."""
_NAMED = "token_id:"


class VLLM:
    """The same for vLLM as `SGLang` for SGLang; see there for the methods. `abilities` are those
    of a vLLM started with its defaults (`--max-logprobs 20`, raw log-probs) until more is known."""

    abilities = Abilities(top_logprobs=20, any_temperature=False)
    path = "/v1/completions"
    abort_path: str | None = None
    load_path, unload_path = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

    def __init__(self, abilities: Abilities = abilities) -> None:
        self.abilities = abilities

    def generation(
        self,
        ids: Sequence[int],
        sampling: Mapping[str, Any],
        rid: str,
        adapter: Adapter | None,
        top: int,
        interval: int | None = 1,
    ) -> tuple[dict[str, Any], Callable[[bytes], Delta]]:
        body = _body(ids, adapter) | {
            **_parameters(sampling),
            "stream": interval is not None,
            "logprobs": max(1, top),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            "request_id": rid,
        }
        version = adapter.version if adapter is not None else "base"
        ours = self.abilities.any_temperature or body["temperature"] == 1
        reader = partial(_read, prompt_tokens=len(ids), version=version, top=top, ours=ours)
        return body, reader

    def scoring(
        self, ids: Sequence[int], start: int, top: int, adapter: Adapter | None
    ) -> dict[str, Any]:
        return _body(ids, adapter) | {"max_tokens": 1, "prompt_logprobs": top}

    def scores(self, data: bytes, ids: Sequence[int], start: int, top: int) -> Scores | None:
        wanted = ids[start:]
        try:
            choice = orjson.loads(data)["choices"][0]
            if choice.get("finish_reason") == "abort":
                return None
            places = choice["prompt_logprobs"]
            if len(places) == len(ids):
                found = [
                    {int(token): about["logprob"] for token, about in place.items()}
                    for place in places[start:]
                ]
                pairs = zip(found, wanted, strict=True)
                values = log_probs(wanted, [_entry(place[token], token) for place, token in pairs])
                if values is not None:
                    return Scores(values, _likeliest(found, len(wanted), top))
        except (ValueError, LookupError, TypeError, AttributeError):
            pass
        raise EngineError("the engine's scores do not line up with the ids asked for")


def _body(ids: Sequence[int], adapter: Adapter | None) -> dict[str, Any]:
    model = {} if adapter is None else {"model": adapter.name}
    return {**_DEFAULTS, **model, "prompt": list(ids)}


def _parameters(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """By vLLM's names; it would take no notice of one that it does not know."""
    found: dict[str, Any] = {}
    for name, value in sampling.items():
        if name in _GRAMMARS:
            if value:
                found["structured_outputs"] = {_GRAMMARS[name]: value}
        elif name in _SAME or name in _RENAMED:
            found[_RENAMED.get(name, name)] = value
        else:
            raise EngineRefused(400, f"vLLM does not know the sampling parameter {name}")
    return found


def _read(payload: bytes, prompt_tokens: int, version: str, top: int, ours: bool) -> Delta:
    """The tokens of a chunk of a stream, or of the one answer that is none. `ours`: log-probs are
    the policy's, and given where there is one for each id, named by it."""
    event = read_event(payload, prompt_tokens)
    try:
        choice = event["choices"][0]
        ids, given = choice["token_ids"], choice.get("logprobs")
    except (LookupError, TypeError, AttributeError):
        # Never passed over: what its text was made of would be missing.
        raise EngineError(
            "the engine's event lacks token_ids: its vLLM is older than 0.10.2"
        ) from None
    kind = choice.get("finish_reason")
    if kind == "error":
        raise Lost("the engine failed at this request", faulty=True)
    finish = None if kind is None else finish_of(kind, choice.get("stop_reason"))
    if not token_ids(ids):
        return Delta([], [], version, finish, top=[] if top else None)
    values = None
    if ours:
        with suppress(LookupError, TypeError, ValueError):
            pairs = zip(given["token_logprobs"], given["tokens"], strict=True)
            values = log_probs(ids, [_entry(value, name) for value, name in pairs])
    places = () if values is None else given.get("top_logprobs") or ()
    return Delta(ids, values, version, finish, top=_likeliest(places, len(ids), top))


def _entry(value: Any, token: Any) -> tuple[float | None, int]:
    """As SGLang writes it; a token may be written `token_id:7`."""
    return value if value > _NO_VALUE else None, int(str(token).removeprefix(_NAMED))


def _likeliest(
    places: Iterable[Mapping[Any, Any]], count: int, top: int
) -> list[Candidates] | None:
    """The `top` likeliest of each place; vLLM adds the token itself where it is not among them."""
    if not top:
        return None
    try:
        found = candidates(
            count, [[_entry(value, token) for token, value in place.items()] for place in places]
        )
    except (AttributeError, TypeError, ValueError):
        return None
    return found and [place[:top] for place in found]
