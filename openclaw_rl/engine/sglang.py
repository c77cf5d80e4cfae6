"""SGLang's `/generate`, which the embedded engine speaks too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from openclaw_rl.engine.dialect import Reader
from openclaw_rl.engine.events import ReplyReader
from openclaw_rl.engine.scores import read_scores, scoring_body
from openclaw_rl.engine.types import Abilities, Adapter, Scores
from openclaw_rl.errors import EngineError

_LARGE_PIECE = 256
"""Tokens of an event where nobody reads along: what a lost connection may cost."""


class SGLang:
    """See `Dialect`. The version of a token is the adapter's that was asked for; without one, what
    the engine says."""

    abilities = Abilities(
        top_logprobs=256, abort_by_id=True, scores_alone=True, any_temperature=True
    )
    path = "/generate"
    info_paths: tuple[str, ...] = ("/model_info", "/get_model_info")
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
        stream: bool = True,
    ) -> tuple[dict[str, Any], Reader]:
        body: dict[str, Any] = {
            "stream": True,
            "return_logprob": True,
            "rid": rid,
            "input_ids": list(ids),
            "sampling_params": dict(sampling),
        }
        if not stream:
            body["sampling_params"]["stream_interval"] = _LARGE_PIECE
        if top:
            body["top_logprobs_num"] = top
        if adapter is not None:
            body["lora_path"] = adapter.name
        version = adapter.version if adapter is not None else ""
        return body, ReplyReader(len(ids), top=top > 0, version=version)

    def scoring(
        self, ids: Sequence[int], start: int, top: int, rid: str, adapter: Adapter | None
    ) -> dict[str, Any]:
        body = scoring_body(ids, start, top, rid)
        if adapter is not None:
            body["lora_path"] = adapter.name
        return body

    def scores(self, data: bytes, ids: Sequence[int], start: int, top: int) -> Scores | None:
        return read_scores(data, ids, start, top)

    def info(self, answer: Any) -> dict[str, Any]:
        if not isinstance(answer, dict):
            raise EngineError("the engine does not tell its model")
        return answer
