"""SGLang's `/generate`, which the embedded engine speaks too.

A stream repeats the whole reply with every event (SGLang's default) or brings only what is new
(`--incremental-streaming-output`, and the embedded engine); which one shows in the number of ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from openclaw_rl.engine.transport import NO_REASON, Lost, read_event, refusal
from openclaw_rl.engine.types import (
    Abilities,
    Adapter,
    Delta,
    Finish,
    Scores,
    candidates,
    finish_of,
    log_probs,
    token_ids,
)
from openclaw_rl.errors import EngineError

_LARGE_PIECE = 256
"""Tokens of an event where nobody reads along: what a lost connection may cost."""


class SGLang:
    """What this kind of engine is asked, and what its answers mean; `client.py` does the rest.
    Paths are those below the engine's address, `sampling` has SGLang's names.

    The version of a token is the adapter's that was asked for; without one, what the engine says.
    """

    abilities = Abilities(top_logprobs=256, any_temperature=True)
    path = "/generate"
    """Where texts are generated and scored."""
    abort_path: str | None = "/abort_request"
    """None: a request ends when its connection closes."""
    load_path, unload_path = "/load_lora_adapter", "/unload_lora_adapter"

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
        """The request for a reply, and what reads its events, in order. `interval`: tokens of an
        event after the first, None for few large events, as far as the engine lets one choose.
        Raises EngineRefused for parameters that the engine lacks; the reading raises EngineError or
        Lost."""
        body = _body(ids, adapter, top)
        body |= {"rid": rid, "stream": True, "sampling_params": dict(sampling)}
        if interval != 1:
            body["sampling_params"]["stream_interval"] = interval or _LARGE_PIECE
        return body, _Reader(len(ids), top > 0, adapter).read

    def scoring(
        self, ids: Sequence[int], start: int, top: int, adapter: Adapter | None
    ) -> dict[str, Any]:
        """The request that scores `ids[start:]`, with the `top` likeliest tokens of each place."""
        return _body(ids, adapter, top) | {
            "stream": False,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            # One earlier than wanted: SGLang gives no value for the first position asked for.
            "logprob_start_len": start - 1,
        }

    def scores(self, data: bytes, ids: Sequence[int], start: int, top: int) -> Scores | None:
        """The values of its answer, one for each of `ids[start:]`, named by that id; None if the
        engine aborted it. Raises EngineError."""
        wanted = ids[start:]
        try:
            meta = orjson.loads(data)["meta_info"]
            if (meta.get("finish_reason") or {}).get("type") == "abort":
                return None
            values = log_probs(wanted, meta["input_token_logprobs"][-len(wanted) :])
            places = (meta.get("input_top_logprobs") or [])[-len(wanted) :] if top else []
        except (ValueError, KeyError, TypeError, AttributeError):
            values = None
        if values is None:
            raise EngineError("the engine's scores do not line up with the ids asked for")
        return Scores(values, candidates(len(wanted), places))


def _body(ids: Sequence[int], adapter: Adapter | None, top: int) -> dict[str, Any]:
    body: dict[str, Any] = {"input_ids": list(ids), "return_logprob": True}
    if top:
        body["top_logprobs_num"] = top
    if adapter is not None:
        body["lora_path"] = adapter.name
    return body


class _Reader:
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

        ids = token_ids(fresh(listed))
        values = log_probs(ids, fresh(meta.get("output_token_logprobs")))
        top = candidates(new, fresh(meta.get("output_top_logprobs"))) if self._top else None
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
        return finish_of(reason["type"], reason.get("matched"))
