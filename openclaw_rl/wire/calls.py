"""Tool calls as JSON: an object, or a list of objects, with `name` and `arguments`.

The arguments stay the model's own text, to the character; nothing is repaired.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

_WHITE = " \t\n\r"


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


class Call(NamedTuple):
    """One tool call: its arguments as the JSON text of an object, and the id where the model
    itself wrote one."""

    name: str
    arguments: str
    call_id: str = ""


def parse_calls(body: str, separators: str = "") -> list[Call]:
    """The calls in `body`; empty if it is not wholly valid. Between two values (and behind the
    last one) there may be one of `separators`."""
    calls: list[Call] = []
    try:
        at = _skip(body, 0)
        while at < len(body):
            value, end = _DECODER.raw_decode(body, at)
            if isinstance(value, list):
                calls += [_one_call(body, start) for start in _elements(body, at)]
            else:
                calls.append(_one_call(body, at))
            at = _skip(body, end)
            if at < len(body):
                if body[at] not in separators:
                    return []
                at = _skip(body, at + 1)
    except (ValueError, RecursionError):
        return []
    return calls


def parse_json(text: str) -> Any:
    """The value of a JSON text; `ValueError` where it is none (`NaN` is none)."""
    try:
        return _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("too deep") from error


def is_object(text: str) -> bool:
    """Whether `text` is the JSON text of an object."""
    try:
        return isinstance(parse_json(text), dict)
    except ValueError:
        return False


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


def _one_call(text: str, at: int) -> Call:
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
    return Call(name, raw)
