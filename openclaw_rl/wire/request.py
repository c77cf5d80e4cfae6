"""What every dialect makes of a body: one `ChatRequest`; and how a body is read.

A request is understood completely, or refused with 400 and the path of the field before anything
else happens. What would change the *shape* of the reply and cannot be honoured is refused by name;
what only bends sampling, speed or bookkeeping is listed in `ignored`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openclaw_rl.wire.errors import WireError, invalid


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


_WORDS: dict[type, str] = {
    str: "a string", int: "an integer", bool: "true or false", dict: "an object", list: "a list",
}  # fmt: skip


class Field:
    """A value of a body and its path, such as `messages[2].role`, which every error names.

    Null counts as not given, and what an absent object holds is absent.
    """

    __slots__ = ("path", "value")

    def __init__(self, value: Any, path: str) -> None:
        self.value = value
        self.path = path

    def __getitem__(self, key: str) -> Field:
        return Field(self.object().get(key), f"{self.path}.{key}" if self.path else key)

    def invalid(self, message: str) -> WireError:
        """400: this field is wrong."""
        return invalid(self.path, message)

    def unsupported(self, message: str) -> WireError:
        """400: this field would change the shape of the reply and cannot be honoured here."""
        return invalid(self.path, message, code="unsupported_parameter")

    def check(self, kind: type) -> Any:
        """The value, which must be of `kind` where it is given (a bool is no integer)."""
        if self.value is not None and type(self.value) is not kind:
            raise self.invalid(f"must be {_WORDS[kind]}")
        return self.value

    def text(self) -> str | None:
        """The string here; None where not given."""
        text: str | None = self.check(str)
        return text

    def string(self, *, empty: bool = True) -> str:
        """The string that must be here; without `empty` it must say something."""
        if not isinstance(self.value, str):
            raise self.invalid("must be a string")
        if not self.value and not empty:
            raise self.invalid("must not be empty")
        return self.value

    def flag(self, *, default: bool = False) -> bool:
        """The truth value here; `default` where not given."""
        return default if self.value is None else bool(self.check(bool))

    def positive(self) -> int | None:
        """The integer here, at least 1; None where not given."""
        value: int | None = self.value
        if value is not None and (type(value) is not int or value < 1):
            raise self.invalid("must be an integer of at least 1")
        return value

    def object(self) -> dict[str, Any]:
        """The object here; empty where not given."""
        return self.check(dict) or {}

    def required(self) -> Field:
        """This field, which must be an object."""
        if type(self.value) is not dict:
            raise self.invalid("must be an object")
        return self

    def items(self) -> list[Field]:
        """The parts of the list here; none where not given."""
        items = self.check(list) or ()
        return [Field(item, f"{self.path}[{index}]") for index, item in enumerate(items)]


class Body(Field):
    """A whole body. What was asked of it is understood; all else that it says is ignored."""

    __slots__ = ("_asked",)

    def __init__(self, raw: bytes) -> None:
        super().__init__(read_object(raw), "")
        self._asked: set[str] = set()

    def __getitem__(self, key: str) -> Field:
        self._asked.add(key)
        return super().__getitem__(key)

    def ignored(self, types: Mapping[str, type], *more: str) -> tuple[str, ...]:
        """The given keys that nobody asked for, and `more`. Those in `types` are known, though
        without effect, and must at least be of their type."""
        rest = {key for key, value in self.value.items() if value is not None} - self._asked
        for key in rest & types.keys():
            Field(self.value[key], key).check(types[key])
        return tuple(sorted({*rest, *more}))


def read_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`, its texts whole Unicode; `WireError` 400 for anything else."""
    try:
        data = read_json(raw.decode("utf-8-sig"))
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


def read_json(text: str) -> Any:
    """The value of a JSON text. JavaScript programs cut texts in the middle of a character: half of
    one has no UTF-8, and becomes U+FFFD. Raises `ValueError` or `RecursionError`."""
    value = json.loads(text)
    if "\\ud" in text or "\\uD" in text:
        text = json.dumps(value, ensure_ascii=False)
        value = json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    return value


def join_parts(parts: Sequence[dict[str, Any]]) -> Any:
    """Parts of a message as one string, or as they are where there is more than text."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return list(parts)


# -- sampling ------------------------------------------------------------------------------------

_RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0.0, math.inf, "at least 0"),
    "top_p": (0.0, 1.0, "above 0 and at most 1"),
    "min_p": (0.0, 1.0, "from 0 to 1"),
    "frequency_penalty": (-2.0, 2.0, "from -2 to 2"),
    "presence_penalty": (-2.0, 2.0, "from -2 to 2"),
    "repetition_penalty": (0.0, math.inf, "above 0"),
}
_LARGEST = 1e6  # beyond any use, and still a float
_LARGEST_INT = 2**31 - 1  # engines keep these in 32 bits, and die of larger ones


def read_sampling(
    body: Field, numbers: Iterable[str] = _RANGES, *, no_top_k: int = -1
) -> dict[str, Any]:
    """The `numbers` and the top_k that were given, by SGLang's names.

    `top_k` is at least 1, or -1 for no limit, for which the client's word is `no_top_k`.
    """
    result: dict[str, Any] = {}
    for key in numbers:
        low, high, words = _RANGES[key]
        value = body[key].value
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise body[key].invalid("must be a number")
        outside = not low <= value <= high or value > _LARGEST
        if outside or (words.startswith("above") and value == low):
            raise body[key].invalid(f"must be {words}")
        result[key] = float(value)
    top_k = body["top_k"].value
    if top_k is not None:
        if not _is_int32(top_k) or (top_k < 1 and top_k != no_top_k):
            raise body["top_k"].invalid(
                f"must be an integer of at least 1, or {no_top_k} for no limit"
            )
        result["top_k"] = -1 if top_k == no_top_k else top_k
    return result


def read_stops(field: Field) -> dict[str, Any]:
    """Stop strings as `{"stop": [...]}`; empty where there are none."""
    stops = [field.value] if isinstance(field.value, str) else field.value
    if stops is None:
        return {}
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise field.invalid("must be a non-empty string or a list of them")
    return {"stop": list(stops)} if stops else {}


def read_stop_tokens(field: Field) -> dict[str, Any]:
    """Stop tokens as `{"stop_token_ids": [...]}`; empty where there are none."""
    ids = field.check(list) or []
    if not all(_is_int32(token) and token >= 0 for token in ids):
        raise field.invalid("must be a list of token ids")
    return {"stop_token_ids": list(ids)} if ids else {}


def _is_int32(value: Any) -> bool:
    return type(value) is int and value <= _LARGEST_INT
