"""What every dialect makes of a body: one `ChatRequest`, and the checks that all of them share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openclaw_rl.wire.errors import invalid


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A valid request, normalised, whatever dialect it came in.

    `messages`: roles system, user, assistant, tool (developer became system); text parts joined by
    newlines into a str; `content` None only for assistants; arguments of tool calls as JSON text.
    `tools` is empty where the client wants no calls. `max_tokens` None means: whatever fits.
    `sampling` holds only what was given. `hints` are the body's names for a session.
    `show_reasoning` false: reasoning is sampled and recorded, but its text is not sent.
    `ignored` names given keys without effect.
    """

    model: str | None
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    tool_choice: Any
    stream: bool
    include_usage: bool
    max_tokens: int | None
    sampling: dict[str, Any]
    template_kwargs: dict[str, Any]
    hints: dict[str, Any]
    logprobs: bool
    top_logprobs: int
    ignored: tuple[str, ...]
    show_reasoning: bool = True


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`, its texts whole Unicode; `WireError` 400 for anything else."""
    try:
        data: Any = json.loads(body.decode("utf-8-sig"))
        if b"\\ud" in body or b"\\uD" in body:
            data = _whole_characters(data)
    except UnicodeDecodeError:
        raise invalid(None, "the body is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise invalid(
            None, f"the body is not valid JSON (line {error.lineno}, column {error.colno})"
        ) from None
    except RecursionError:
        raise invalid(None, "the body is nested too deeply") from None
    except ValueError:
        raise invalid(None, "the body is not valid JSON") from None
    if not isinstance(data, dict):
        raise invalid(None, "the body must be a JSON object")
    return data


def _whole_characters(value: Any) -> Any:
    """JavaScript clients cut texts in the middle of a character; half of one has no UTF-8."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_whole_characters(item) for item in value]
    if isinstance(value, dict):
        return {_whole_characters(key): _whole_characters(item) for key, item in value.items()}
    return value


def given_keys(data: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a body that say something: null counts as not given."""
    return {key: value for key, value in data.items() if value is not None}


def text(given: Mapping[str, Any], key: str, prefix: str = "") -> str | None:
    """The string at `key`; None where not given."""
    value = given.get(key)
    if value is not None and not isinstance(value, str):
        raise invalid(prefix + key, "must be a string")
    return value


def string(value: Any, where: str) -> str:
    """`value`, which must be a string."""
    if not isinstance(value, str):
        raise invalid(where, "must be a string")
    return value


def flag(given: Mapping[str, Any], key: str, prefix: str = "", *, default: bool = False) -> bool:
    """The truth value at `key`; `default` where not given."""
    value = given.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise invalid(prefix + key, "must be true or false")
    return value


def obj(given: Mapping[str, Any], key: str, prefix: str = "") -> dict[str, Any]:
    """The object at `key`; empty where not given."""
    value = given.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid(prefix + key, "must be an object")
    return value


_WORDS: dict[type, str] = {
    str: "a string",
    int: "an integer",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}


def check_types(given: Mapping[str, Any], types: Mapping[str, type]) -> None:
    """Keys that are known, though without effect, must at least be of their type."""
    for key, kind in types.items():
        value = given.get(key)
        if value is not None and (type(value) is not kind):  # a bool is no integer here
            raise invalid(key, f"must be {_WORDS[kind]}")
