"""The JSON inside `<tool_call>`: an object, or a list of objects, with `name` and `arguments`.

The arguments stay the model's own text, to the character; nothing is repaired.
"""

from __future__ import annotations

import json
from typing import Any

_WHITE = " \t\n\r"


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def parse_calls(body: str) -> list[tuple[str, str]]:
    """`(name, arguments as JSON text)` of each call in `body`; empty if it is not wholly valid."""
    try:
        start = _skip(body, 0)
        value, end = _DECODER.raw_decode(body, start)
        if _skip(body, end) != len(body):
            return []
        if isinstance(value, dict):
            return [_one_call(body, start)]
        if isinstance(value, list):
            return [_one_call(body, at) for at in _elements(body, start)]
    except (ValueError, RecursionError):
        pass
    return []


def in_string(text: str) -> bool:
    """Whether `text`, the beginning of a JSON text, ends inside a string."""
    inside = False
    at = 0
    while at < len(text):
        if text[at] == '"':
            inside = not inside
        elif text[at] == "\\" and inside:
            at += 1
        at += 1
    return inside


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _WHITE:
        at += 1
    return at


def _elements(text: str, at: int) -> list[int]:
    """Where each element of the (valid) list at `at` begins."""
    starts: list[int] = []
    at = _skip(text, at + 1)
    while text[at] != "]":
        starts.append(at)
        _, at = _DECODER.raw_decode(text, at)
        at = _skip(text, at)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return starts


def _one_call(text: str, at: int) -> tuple[str, str]:
    """The call object at `at` of a valid JSON text; `ValueError` if it is no call."""
    if text[at] != "{":
        raise ValueError("not an object")
    fields: dict[str, tuple[Any, str]] = {}
    at = _skip(text, at + 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        start = _skip(text, _skip(text, at) + 1)
        value, at = _DECODER.raw_decode(text, start)
        fields[key] = (value, text[start:at])
        at = _skip(text, at)
        if text[at] == ",":
            at = _skip(text, at + 1)
    name = fields.get("name", (None, ""))[0]
    if not isinstance(name, str) or not name:
        raise ValueError("no name")
    value, raw = fields.get("arguments") or fields.get("parameters") or ({}, "{}")
    if isinstance(value, str):  # encoded twice: the string is the JSON text
        value, raw = _DECODER.decode(value), value
    if not isinstance(value, dict):
        raise ValueError("arguments are no object")
    return name, raw
