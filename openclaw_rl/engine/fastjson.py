"""JSON of what passes an engine: prompts of ten thousand ids, and an event for every token.

`orjson` where it can, the standard library where it cannot (NaN from an engine, lone surrogates,
writing integers beyond 64 bits, which no engine sends): the same values either way.
"""

from __future__ import annotations

import json
from typing import Any

import orjson


def dumps(value: Any) -> bytes:
    """The JSON of `value`, whose numbers are finite."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value).encode()


def loads(data: bytes) -> Any:
    """The value in `data`. Raises ValueError."""
    try:
        return orjson.loads(data)
    except ValueError:
        return json.loads(data)
