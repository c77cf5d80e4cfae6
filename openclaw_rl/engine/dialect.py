"""How one kind of engine is spoken to: what is asked, and how its answers are read. No I/O here;
`client.py` does that, and is the same for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from openclaw_rl.engine.types import Abilities, Adapter, Delta, Scores


class Reader(Protocol):
    """Reads the events of one stream, in order."""

    def read(self, payload: bytes) -> Delta:
        """The new tokens of one event. Raises EngineError."""
        ...


class Dialect(Protocol):
    """Paths are those below the engine's address. `sampling` has SGLang's names."""

    abilities: Abilities
    path: str
    """Where texts are generated and scored."""
    info_paths: tuple[str, ...]
    """Where the model is told, newest first."""
    load_path: str
    unload_path: str

    def generation(
        self,
        ids: Sequence[int],
        sampling: Mapping[str, Any],
        rid: str,
        adapter: Adapter | None,
        top: int,
        stream: bool = True,
    ) -> tuple[dict[str, Any], Reader]:
        """The request for a stream, and the reader of what it brings. Raises EngineRefused for
        parameters that the engine lacks. `stream` False: in few large events."""
        ...

    def scoring(
        self, ids: Sequence[int], start: int, top: int, rid: str, adapter: Adapter | None
    ) -> dict[str, Any]:
        """The request that scores `ids[start:]`, with the `top` likeliest tokens of each place."""
        ...

    def scores(self, data: bytes, ids: Sequence[int], start: int, top: int) -> Scores | None:
        """The values of its answer; None if the engine aborted it. Raises EngineError."""
        ...

    def info(self, answer: Any) -> dict[str, Any]:
        """Of an answer from `info_paths`: `model_path` and `context_length`, where told."""
        ...


def models_of(answer: Any) -> list[dict[str, Any]]:
    """The entries of an OpenAI-style list of models."""
    data = answer.get("data") if isinstance(answer, dict) else None
    return [entry for entry in data or () if isinstance(entry, dict) and "id" in entry]


def adapters_of(answer: Any) -> frozenset[str]:
    """Of an answer from `/v1/models`, the names of the adapters: entries with a `parent`, in vLLM's
    list and in SGLang's."""
    return frozenset(str(one["id"]) for one in models_of(answer) if one.get("parent"))
