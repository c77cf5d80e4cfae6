"""vLLM's `/v1/completions`, spoken in token ids.

Weights are adapters: the name asked for decides the version of a token, "base" without one.

vLLM computes log-probs before the temperature (raw, its default), so they are those of the policy
at temperature 1 only; with `--logprobs-mode processed_logprobs` (`any_temperature`) after it. Where
they are another temperature's, `logprobs` is None: such a turn is served, and not trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from openclaw_rl.engine.api import (
    Reader,
    are_ids,
    checked_ids,
    finish_of,
    is_log_prob,
    models_of,
    read_event,
)
from openclaw_rl.engine.types import Abilities, Adapter, Candidates, Delta, Finish, Scores
from openclaw_rl.errors import EngineError, EngineRefused, EngineUnavailable

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
    """See `EngineAPI`. `abilities` are those of a vLLM started with its defaults (`--max-logprobs
    20`, raw log-probs) until more is known."""

    abilities = Abilities(top_logprobs=20, abort_by_id=False, any_temperature=False)
    path = "/v1/completions"
    info_paths: tuple[str, ...] = ("/v1/models",)
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
    ) -> tuple[dict[str, Any], Reader]:
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
        return body, _Reader(len(ids), version, top, ours)

    def scoring(
        self, ids: Sequence[int], start: int, top: int, adapter: Adapter | None
    ) -> dict[str, Any]:
        return _body(ids, adapter) | {"max_tokens": 1, "prompt_logprobs": top}

    def scores(self, data: bytes, ids: Sequence[int], start: int, top: int) -> Scores | None:
        try:
            choice = orjson.loads(data)["choices"][0]
            if choice.get("finish_reason") == "abort":
                return None
            entries = choice["prompt_logprobs"]
            if len(entries) == len(ids):
                places = [
                    {int(token): about["logprob"] for token, about in entry.items()}
                    for entry in entries[start:]
                ]
                values = [place[token] for place, token in zip(places, ids[start:], strict=True)]
                if all(map(_known, values)):
                    return Scores(values, [_best(place, top) for place in places] if top else None)
        except (ValueError, LookupError, TypeError, AttributeError):
            pass
        raise EngineError("the engine's scores do not line up with the ids asked for")

    def info(self, answer: Any) -> dict[str, Any]:
        for entry in models_of(answer):
            if not entry.get("parent"):
                return {
                    "model_path": entry.get("root") or entry["id"],
                    "context_length": entry.get("max_model_len"),
                }
        raise EngineError("the engine's list of models has no base model")


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
            raise EngineRefused(400, f"vLLM knows no sampling parameter like {name}")
    return found


class _Reader:
    """Reads the chunks of one stream, or the one answer that is not a stream."""

    def __init__(self, prompt_tokens: int, version: str, top: int, ours: bool) -> None:
        self._prompt_tokens, self._version = prompt_tokens, version
        self._top, self._ours = top, ours
        self._last: int | None = None

    def read(self, payload: bytes) -> Delta:
        event = read_event(payload, self._prompt_tokens)
        try:
            choice = event["choices"][0]
            ids, given = choice["token_ids"], choice.get("logprobs")
        except (LookupError, TypeError, AttributeError):
            # Never passed over: what its text was made of would be missing.
            raise EngineError(
                "the engine's event lacks token_ids: its vLLM is older than 0.10.2"
            ) from None
        if checked_ids(ids):
            self._last = ids[-1]
        values, top = self._logprobs(ids, given)
        return Delta(ids, values, self._version, self._finish(choice), top=top)

    def _logprobs(
        self, ids: list[int], given: Any
    ) -> tuple[list[float] | None, list[Candidates] | None]:
        """None where they are not those of the policy, or not one for each id, named by it."""
        if not ids:
            return [], [] if self._top else None
        if not self._ours or not isinstance(given, dict):
            return None, None
        values = given.get("token_logprobs")
        if given.get("tokens") != [f"{_NAMED}{token}" for token in ids] or (
            not isinstance(values, list) or len(values) != len(ids) or not all(map(_known, values))
        ):
            return None, None
        return values, self._candidates(given.get("top_logprobs"), len(ids))

    def _candidates(self, places: Any, count: int) -> list[Candidates] | None:
        if not self._top or not isinstance(places, list) or len(places) != count:
            return None
        try:
            named = [{int(k.removeprefix(_NAMED)): v for k, v in p.items()} for p in places]
        except (AttributeError, ValueError):
            return None
        if not all(map(are_ids, named)):
            return None
        return [_best(place, self._top) for place in named]

    def _finish(self, choice: Mapping[str, Any]) -> Finish | None:
        kind, matched = choice.get("finish_reason"), choice.get("stop_reason")
        if kind is None:
            return None
        if kind == "error":
            raise EngineUnavailable("the engine failed at this request")
        if kind == "stop" and matched is None:
            matched = self._last  # the model's own end of turn: vLLM names only what was asked for
        return finish_of(kind, matched)


def _known(value: Any) -> bool:
    return is_log_prob(value) and value > _NO_VALUE


def _best(place: Mapping[int, float], top: int) -> Candidates:
    """The `top` likeliest; vLLM adds the token itself where it is not among them."""
    pairs = [(value, token) for token, value in place.items() if _known(value)]
    return sorted(pairs, reverse=True)[:top]
