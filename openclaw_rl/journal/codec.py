"""Values to bytes and back, exactly: ids as int32, log-probs as float32, versions run by run."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

import orjson

from openclaw_rl.errors import JournalError
from openclaw_rl.types import TopK


def pack_ints(values: Iterable[int]) -> bytes:
    """int32. Raises `JournalError` for what is no token id."""
    try:
        return array("i", values).tobytes()
    except (OverflowError, TypeError) as error:
        raise JournalError("token ids must be integers below 2**31") from error


def unpack_ints(blob: bytes) -> list[int]:
    return array("i", blob).tolist()


def pack_floats(values: Iterable[float]) -> bytes:
    """float32; NaN survives."""
    return array("f", values).tobytes()


def unpack_floats(blob: bytes) -> list[float]:
    return array("f", blob).tolist()


def pack_topk(topk: TopK | None) -> tuple[bytes | None, bytes | None]:
    """Ids and log-probs, row by row."""
    if topk is None:
        return None, None
    return (
        pack_ints(chain.from_iterable(topk.ids)),
        pack_floats(chain.from_iterable(topk.log_probs)),
    )


def unpack_topk(ids: bytes | None, log_probs: bytes | None, rows: int) -> TopK | None:
    if ids is None or log_probs is None or not rows:
        return None
    width = len(ids) // 4 // rows
    flat_ids, flat = unpack_ints(ids), unpack_floats(log_probs)
    starts = range(0, rows * width, width) if width else [0] * rows
    return TopK(
        [flat_ids[start : start + width] for start in starts],
        [flat[start : start + width] for start in starts],
    )


def pack_runs(values: Iterable[str]) -> str:
    return to_json([[value, sum(1 for _ in run)] for value, run in groupby(values)])


def unpack_runs(text: str) -> list[str]:
    return [value for value, count in json.loads(text) for _ in range(count)]


def to_json(value: Any) -> str:
    return _ENCODER.encode(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be stored as JSON")


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_plain)


def to_body(value: Any) -> tuple[bytes, bytes]:
    """JSON bytes of a message and their digest. Key order is kept: templates may print it."""
    # surrogatepass: a lone surrogate in a client's text is odd, but no reason to lose the turn.
    body = to_json(value).encode("utf-8", "surrogatepass")
    return body, digest(body)


def to_items(values: Sequence[Any]) -> bytes:
    """JSON of `values`, separated by commas: items of a and b joined by one are those of a + b.
    To be compared, never to be stored: `orjson` writes NaN as null."""
    try:
        return orjson.dumps(values, default=_plain)[1:-1]
    except TypeError:  # a lone surrogate, a number beyond 64 bits
        return to_json(values).encode("utf-8", "surrogatepass")[1:-1]


def from_body(body: bytes) -> Any:
    return json.loads(body.decode("utf-8", "surrogatepass"))


def hasher() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)


def digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
