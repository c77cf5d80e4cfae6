"""vLLM's `/v1/completions`, spoken in token ids.

Guarantees as SGLang's dialect: ids in order, each once; a log-prob is given where the engine named
that id beside a finite value. Weights are adapters: the name asked for decides the version of a
token, "base" without one.

vLLM computes log-probs at one of two places (`vllm/v1/sample/sampler.py`, 0.32). By default (raw)
before temperature and penalties: they are ours at temperature 1 without any. With `--logprobs-mode
processed_logprobs` (`any_temperature`) after these, and after top-k, top-p and min-p, whose cut
leaves another distribution than the trained one: they are ours where nothing is cut off. Elsewhere
`logprobs` is None: such a turn is served, and not trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from openclaw_rl.engine.dialect import Reader, models_of
from openclaw_rl.engine.events import broken_off
from openclaw_rl.engine.fastjson import loads
from openclaw_rl.engine.scores import are_ids, is_log_prob
from openclaw_rl.engine.types import Abilities, Adapter, Candidates, Delta, Finish, Scores
from openclaw_rl.errors import EngineError, EngineRefused, EngineUnavailable

_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    **{
        name: name
        for name in (
            *("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos"),
            *("frequency_penalty", "presence_penalty", "repetition_penalty"),
        )
    },
}
_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Said in every request: where one is missing vLLM takes the model's own generation settings."""
_UNBENT: Mapping[str, float] = {
    "temperature": 1.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
_UNCUT: Mapping[str, float] = {"top_k": -1, "top_p": 1.0, "min_p": 0.0, "min_new_tokens": 0}
"""Values under which raw and processed log-probs are those of the policy sampled from."""
_COLDEST = 0.01
"""vLLM raises lower temperatures to it; at 0 it gives log-probs at temperature 1."""
_GRAMMARS = {
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}
_NO_VALUE = -9999.0
"""What vLLM writes for minus infinity, which JSON lacks."""
_BASE = "base"


class VLLM:
    """See `Dialect`. `abilities` are those of a vLLM started with its defaults (`--max-logprobs
    20`, raw log-probs) until more is known."""

    abilities = Abilities(
        top_logprobs=20, abort_by_id=False, scores_alone=False, any_temperature=False
    )
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
        stream: bool = True,
    ) -> tuple[dict[str, Any], Reader]:
        body = {
            **_DEFAULTS,
            **_parameters(sampling),
            "prompt": list(ids),
            "stream": True,
            "logprobs": max(1, top),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            "request_id": rid,
        }
        if adapter is not None:
            body["model"] = adapter.name
        version = adapter.version if adapter is not None else _BASE
        return body, _Reader(len(ids), version, top, self._ours(sampling))

    def _ours(self, sampling: Mapping[str, Any]) -> bool:
        """Whether the log-probs are those of the policy at the temperature sampled from."""
        harmless = _UNBENT
        if self.abilities.any_temperature:
            harmless = _UNCUT
            if sampling.get("temperature", 1.0) < _COLDEST:
                return False
        return all(sampling.get(name, value) == value for name, value in harmless.items())

    def scoring(
        self, ids: Sequence[int], start: int, top: int, rid: str, adapter: Adapter | None
    ) -> dict[str, Any]:
        body = {**_DEFAULTS, "prompt": list(ids), "max_tokens": 1, "prompt_logprobs": top}
        if adapter is not None:
            body["model"] = adapter.name
        return body

    def scores(self, data: bytes, ids: Sequence[int], start: int, top: int) -> Scores | None:
        try:
            choice = loads(data)["choices"][0]
            if choice.get("finish_reason") == "abort":
                return None
            entries = choice["prompt_logprobs"]
            if len(entries) == len(ids):
                places = [
                    {int(token): float(about["logprob"]) for token, about in entry.items()}
                    for entry in entries[start:]
                ]
                values = [place[token] for place, token in zip(places, ids[start:], strict=True)]
                if all(map(_known, values)):
                    return Scores(values, [_best(place, top) for place in places] if top else None)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError):
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


class _Reader:
    """Reads one stream of chunks."""

    def __init__(self, prompt_tokens: int, version: str, top: int, ours: bool) -> None:
        self._prompt_tokens, self._version = prompt_tokens, version
        self._top, self._ours = top, ours
        self._last: int | None = None

    def read(self, payload: bytes) -> Delta:
        try:
            event = loads(payload)
        except ValueError:
            raise EngineError("the engine sent an event that is no JSON") from None
        if not isinstance(event, dict):
            raise EngineError("the engine sent an event that is no JSON object")
        if "error" in event:
            raise broken_off(event["error"], payload, self._prompt_tokens)
        choices = event.get("choices")
        if not choices:
            return Delta([], [], self._version)  # usage only
        choice = choices[0] if isinstance(choices, list) else None
        if not isinstance(choice, dict):
            raise EngineError("the engine sent an event without a choice")
        ids = choice.get("token_ids")
        if ids is None:  # never passed over: what its text was made of would be missing
            raise EngineError("the engine's event lacks token_ids: its vLLM is older than 0.10.2")
        if not isinstance(ids, list) or not are_ids(ids):
            raise EngineError("the engine sent what is no token id")
        self._last = ids[-1] if ids else self._last
        values, top = self._logprobs(ids, choice.get("logprobs"))
        return Delta(ids, values, self._version, self._finish(choice), top=top)

    def _logprobs(
        self, ids: list[int], given: Any
    ) -> tuple[list[float] | None, list[Candidates] | None]:
        if not ids:
            return [], [] if self._top else None
        if not self._ours or not isinstance(given, dict):
            return None, None
        values = given.get("token_logprobs")
        if given.get("tokens") != [f"token_id:{token}" for token in ids] or (
            not isinstance(values, list) or len(values) != len(ids) or not all(map(_known, values))
        ):
            return None, None
        return [float(value) for value in values], self._candidates(given, len(ids))

    def _candidates(self, given: Mapping[str, Any], count: int) -> list[Candidates] | None:
        places = given.get("top_logprobs")
        if not self._top or not isinstance(places, list) or len(places) != count:
            return None
        try:
            named = [{int(k.removeprefix("token_id:")): v for k, v in p.items()} for p in places]
        except (AttributeError, ValueError, TypeError):
            return None
        if not all(are_ids([*place]) for place in named):
            return None
        return [_best(place, self._top) for place in named]

    def _finish(self, choice: Mapping[str, Any]) -> Finish | None:
        kind = choice.get("finish_reason")
        if kind is None:
            return None
        if kind == "error":
            raise EngineUnavailable("the engine failed at this request")
        if kind not in ("stop", "length", "abort"):
            raise EngineError(f"the engine ended with an unknown finish reason {str(kind)[:40]!r}")
        matched = choice.get("stop_reason")
        if kind == "stop" and matched is None:
            matched = self._last  # the model's own end of turn: vLLM names only what was asked for
        return Finish(kind, matched if isinstance(matched, int | str) else None)


def _parameters(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """By vLLM's names; it would take no notice of one that it does not know."""
    found: dict[str, Any] = {}
    for name, value in sampling.items():
        if name in _GRAMMARS:
            if value:
                found["structured_outputs"] = {_GRAMMARS[name]: value}
        elif name in _NAMES:
            found[_NAMES[name]] = value
        else:
            raise EngineRefused(400, f"vLLM knows no sampling parameter like {name}")
    return found


def _known(value: Any) -> bool:
    return is_log_prob(value) and value > _NO_VALUE


def _best(place: Mapping[int, float], top: int) -> Candidates:
    """The `top` likeliest; vLLM adds the token itself where it is not among them."""
    pairs = [(float(value), token) for token, value in place.items() if _known(value)]
    return sorted(pairs, key=lambda pair: -pair[0])[:top]
