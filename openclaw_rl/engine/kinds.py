"""The two kinds of engine: what each is asked, and what its answers mean. Nothing is padded.

**SGLang**'s `/generate`, which the embedded engine speaks too. A stream repeats the whole reply
with every event (its default) or brings only what is new (`--incremental-streaming-output`, and the
embedded engine); which one shows in the number of ids. The version of a token is the adapter's that
was asked for; without one, what the engine says.

**vLLM**'s `/v1/completions`, in token ids. Weights are adapters: the name asked for decides the
version of a token, "base" without one. It computes log-probs before the temperature (raw, its
default), so they are the policy's at temperature 1 only; with `--logprobs-mode processed_logprobs`
(`any_temperature`) after it. Where they are another temperature's, `logprobs` is None: such a turn
is served, and not trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import orjson

from openclaw_rl.engine.transport import NO_REASON, Lost, read_event, refusal
from openclaw_rl.engine.types import Abilities, Adapter, Candidates, Delta, Finish, Scores
from openclaw_rl.errors import EngineError, EngineRefused

_IDS = range(2**31)
"""What can be a token id: journals keep 32 bits."""
_ROUNDING = 1e-3
"""A log-prob may exceed 0 by rounding, not by more."""
_LARGE_PIECE = 256
"""Tokens of an event where nobody reads along: what a lost connection may cost."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What an engine is asked for one try of a reply. `interval`: tokens of an event after the
    first, None for few large events, as far as the engine lets one choose."""

    ids: Sequence[int]
    sampling: Mapping[str, Any]
    rid: str
    adapter: Adapter | None = None
    top: int = 0
    interval: int | None = 1


class _Kind:
    """What the two have in common. `abilities` are those of an engine started with its defaults,
    until more is known."""

    abilities: Abilities

    def __init__(self, abilities: Abilities | None = None) -> None:
        self.abilities = abilities or self.abilities

    def scores(self, data: bytes, ids: Sequence[int], start: int, top: int) -> Scores | None:
        """The values of its answer to `scoring`, one for each of `ids[start:]`, named by that id;
        None if the engine aborted it. Raises EngineError."""
        try:
            found = self._scored(orjson.loads(data), ids[start:], start, top)
            if found is None:
                return None
            entries, places = found
            if (values := _log_probs(ids[start:], entries)) is not None:
                return Scores(values, places)
        except (ValueError, LookupError, TypeError, AttributeError):
            pass
        raise EngineError("the engine's scores do not line up with the ids asked for")

    def _scored(
        self, answer: Any, wanted: Sequence[int], start: int, top: int
    ) -> tuple[Sequence[Any], list[Candidates] | None] | None:
        """An entry `[log-prob, id]` and the candidates for each of `wanted`."""
        raise NotImplementedError


class SGLang(_Kind):
    """Paths are those below the engine's address, `sampling` has SGLang's names."""

    abilities = Abilities(top_logprobs=256, any_temperature=True)
    path = "/generate"
    """Where texts are generated and scored."""
    abort_path: str | None = "/abort_request"
    """None: a request ends when its connection closes."""
    load_path, unload_path = "/load_lora_adapter", "/unload_lora_adapter"

    def generation(self, asked: Generation) -> tuple[dict[str, Any], Callable[[bytes], Delta]]:
        """The request for a reply, and what reads its events, in order. Raises EngineRefused for
        parameters that the engine lacks; the reading raises EngineError or Lost."""
        body = self._body(asked.ids, asked.adapter, asked.top)
        body |= {"rid": asked.rid, "stream": True, "sampling_params": dict(asked.sampling)}
        if asked.interval != 1:
            body["sampling_params"]["stream_interval"] = asked.interval or _LARGE_PIECE
        return body, _SGLangReader(len(asked.ids), asked.top > 0, asked.adapter).read

    def scoring(
        self, ids: Sequence[int], start: int, top: int, adapter: Adapter | None
    ) -> dict[str, Any]:
        """The request that scores `ids[start:]`, with the `top` likeliest tokens of each place."""
        return self._body(ids, adapter, top) | {
            "stream": False,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            # One earlier than wanted: SGLang gives no value for the first position asked for.
            "logprob_start_len": start - 1,
        }

    def _scored(
        self, answer: Any, wanted: Sequence[int], start: int, top: int
    ) -> tuple[Sequence[Any], list[Candidates] | None] | None:
        meta, count = answer["meta_info"], len(wanted)
        if (meta.get("finish_reason") or {}).get("type") == "abort":
            return None
        places = (meta.get("input_top_logprobs") or []) if top else []
        return meta["input_token_logprobs"][-count:], _candidates(count, places[-count:])

    @staticmethod
    def _body(ids: Sequence[int], adapter: Adapter | None, top: int) -> dict[str, Any]:
        body: dict[str, Any] = {"input_ids": list(ids), "return_logprob": True}
        if top:
            body["top_logprobs_num"] = top
        if adapter is not None:
            body["lora_path"] = adapter.name
        return body


class _SGLangReader:
    """Gives every token once, in order, whichever form the stream has."""

    def __init__(self, prompt_tokens: int, top: bool, adapter: Adapter | None) -> None:
        self._prompt_tokens, self._top, self._adapter = prompt_tokens, top, adapter
        self._version = adapter.version if adapter is not None else ""
        self._seen = 0

    def read(self, payload: bytes) -> Delta:
        event = read_event(payload, self._prompt_tokens)
        try:
            meta, listed = event["meta_info"], event["output_ids"]
            total, size = int(meta["completion_tokens"]), len(listed)
            finish = self._finish(meta.get("finish_reason"))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise EngineError("the engine's event is not one of /generate") from None
        if self._adapter is None and meta.get("weight_version") is not None:
            self._version = str(meta["weight_version"])
        cached = int(meta.get("cached_tokens") or 0)
        new = total - self._seen
        whole = size >= total  # a busy server's lists may be ahead of its count
        if not whole and size != new:
            if finish is None or finish.type != "abort":
                raise EngineError(f"the engine sent {size} ids where {new} of {total} are new")
            new = 0  # it names the last id alone; what did not arrive is generated again
        if new <= 0:
            return Delta([], [], self._version, finish, cached)
        start, self._seen = self._seen if whole else 0, total

        def fresh(values: Any) -> list[Any]:
            """What goes with the new ids; as few as to fit none of them where that is unclear."""
            if not isinstance(values, list) or (not whole and len(values) != new):
                return []
            return values[start : start + new]

        ids = _token_ids(fresh(listed))
        values = _log_probs(ids, fresh(meta.get("output_token_logprobs")))
        top = _candidates(new, fresh(meta.get("output_top_logprobs"))) if self._top else None
        return Delta(ids, values, self._version, finish, cached, top)

    def _finish(self, reason: Any) -> Finish | None:
        if reason is None:
            return None
        if reason["type"] == "abort":
            status = reason.get("status_code")
            message = str(reason.get("message") or NO_REASON)[:300]
            if status == 500:  # its own fault, or this request's: not to be tried for ever
                raise Lost(f"the engine failed: {message}", faulty=True)
            if status is not None and 400 <= status < 500:
                raise refusal(status, message, self._prompt_tokens)
        return _finish(reason["type"], reason.get("matched"))


_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_SAME = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty"),
    }
)
GRAMMARS = {
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


class VLLM(_Kind):
    """The same for vLLM; `abilities` with `--max-logprobs 20` and raw log-probs, its defaults."""

    abilities = Abilities(top_logprobs=20, any_temperature=False)
    path = "/v1/completions"
    abort_path: str | None = None
    load_path, unload_path = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

    def generation(self, asked: Generation) -> tuple[dict[str, Any], Callable[[bytes], Delta]]:
        body = self._body(asked.ids, asked.adapter) | {
            **_parameters(asked.sampling),
            "stream": asked.interval is not None,
            "logprobs": max(1, asked.top),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            "request_id": asked.rid,
        }
        reader = partial(
            _read_vllm,
            prompt_tokens=len(asked.ids),
            version=asked.adapter.version if asked.adapter is not None else "base",
            top=asked.top,
            ours=self.abilities.any_temperature or body["temperature"] == 1,
        )
        return body, reader

    def scoring(
        self, ids: Sequence[int], start: int, top: int, adapter: Adapter | None
    ) -> dict[str, Any]:
        return self._body(ids, adapter) | {"max_tokens": 1, "prompt_logprobs": top}

    def _scored(
        self, answer: Any, wanted: Sequence[int], start: int, top: int
    ) -> tuple[Sequence[Any], list[Candidates] | None] | None:
        choice = answer["choices"][0]
        if choice.get("finish_reason") == "abort":
            return None
        places = [
            {int(token): about["logprob"] for token, about in place.items()}
            for place in choice["prompt_logprobs"][start:]
        ]
        pairs = zip(places, wanted, strict=True)
        entries = [_entry(place[token], token) for place, token in pairs]
        return entries, _likeliest(places, len(wanted), top)

    @staticmethod
    def _body(ids: Sequence[int], adapter: Adapter | None) -> dict[str, Any]:
        model = {} if adapter is None else {"model": adapter.name}
        return {**_DEFAULTS, **model, "prompt": list(ids)}


def _parameters(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """By vLLM's names; it would take no notice of one that it does not know."""
    found: dict[str, Any] = {}
    for name, value in sampling.items():
        if name in GRAMMARS:
            if value:
                found["structured_outputs"] = {GRAMMARS[name]: value}
        elif name in _SAME or name in _RENAMED:
            found[_RENAMED.get(name, name)] = value
        else:
            raise EngineRefused(400, f"vLLM does not know the sampling parameter {name}")
    return found


def _read_vllm(payload: bytes, prompt_tokens: int, version: str, top: int, ours: bool) -> Delta:
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
    finish = None if kind is None else _finish(kind, choice.get("stop_reason"))
    if not _token_ids(ids):
        return Delta([], [], version, finish, top=[] if top else None)
    values = None
    if ours:
        with suppress(LookupError, TypeError, ValueError):
            pairs = zip(given["token_logprobs"], given["tokens"], strict=True)
            values = _log_probs(ids, [_entry(value, name) for value, name in pairs])
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
        found = _candidates(
            count, [[_entry(value, token) for token, value in place.items()] for place in places]
        )
    except (AttributeError, TypeError, ValueError):
        return None
    return found and [place[:top] for place in found]


# --- for both ------------------------------------------------------------------------------------

EngineAPI = SGLang | VLLM
KINDS: Mapping[str, type[SGLang] | type[VLLM]] = {"sglang": SGLang, "vllm": VLLM}
"""By the names that settings use."""


def engine_api(kind: str | None, known: Mapping[str, Any] = MappingProxyType({})) -> EngineAPI:
    """How an engine of this kind is spoken to (None and "embedded": as SGLang is). `known`: what
    was found out of its abilities, by name."""
    api = KINDS.get(kind or "", SGLang)
    found = {one.name: known[one.name] for one in fields(Abilities) if one.name in known}
    return api(replace(api.abilities, **found))


def _token_ids(values: Any) -> list[int]:
    """`values`, if they are token ids. Raises EngineError: a reply with a hole would be trained as
    if the tokens behind it had followed at once."""
    if not isinstance(values, list) or not _are_ids(values):
        raise EngineError("the engine sent something that is not a token id")
    return values


def _log_probs(ids: Sequence[int], entries: Sequence[Any]) -> list[float] | None:
    """The values of `entries` `[log-prob, id, ...]` if they name these ids, each beside a finite
    value; else None. Nothing is padded."""
    try:
        values = [entry[0] for entry in entries]
        named = [entry[1] for entry in entries] == list(ids)
    except (TypeError, LookupError):
        return None
    return values if named and all(map(_is_log_prob, values)) else None


def _candidates(count: int, places: Any) -> list[Candidates] | None:
    """`count` lists of `[log-prob, id, ...]`, likeliest first; None where they are not that. A
    null for the log-prob of an impossible token is left out with it."""
    try:
        found = [[(one[0], one[1]) for one in place if one[0] is not None] for place in places]
    except (TypeError, LookupError):
        return None
    for pairs in found:
        ids = [token for _, token in pairs]
        if not _are_ids(ids) or len(set(ids)) < len(ids):
            return None
        if not all(_is_log_prob(value) for value, _ in pairs):
            return None
        pairs.sort(reverse=True)
    return found if len(found) == count else None


def _finish(kind: Any, matched: Any) -> Finish:
    """The end that the engine names. Raises EngineError for one that is not known."""
    if kind not in ("stop", "length", "abort"):
        raise EngineError(f"the engine ended with an unknown finish reason {str(kind)[:40]!r}")
    return Finish(kind, matched if isinstance(matched, str) else None)


def _are_ids(values: Iterable[Any]) -> bool:
    return all(type(value) is int and value in _IDS for value in values)


def _is_log_prob(value: Any) -> bool:
    return type(value) in (int, float) and -math.inf < value <= _ROUNDING
