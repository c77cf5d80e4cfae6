"""What every dialect makes of a body: one `ChatRequest`; and how a body is read.

A request is understood completely, or refused with 400 and the path of the field before anything
else happens. What would change the *shape* of the reply and cannot be honoured is refused by name;
what only bends sampling, speed or bookkeeping is listed in `ignored`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
)
from pydantic import Field as Bounds

from openclaw_rl.wire.errors import WireError, invalid, unsupported


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


Positive = Annotated[int, Bounds(ge=1)]
Int32 = Annotated[int, Bounds(le=2**31 - 1)]  # engines keep these so, and die of larger ones
Stops = Annotated[
    list[Annotated[str, Bounds(min_length=1)]],
    Bounds(fail_fast=True),  # a million wrong items are one error
    BeforeValidator(lambda stops: [stops] if isinstance(stops, str) else stops),
]
"""One string, or a list of them."""
LARGEST = 1e6  # beyond any use, and still a float

_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "stop", "stop_token_ids",
)  # fmt: skip


Refused = Mapping[str, tuple[Sequence[Any], str]]


class Options(BaseModel):
    """What a body says beside its messages, by type and range; what both dialects know.

    Null counts as not given. `refused` would change the shape of the reply: the key, the values
    that do not, and the words for all others. Keys that stand nowhere here have no effect.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    refused: ClassVar[Refused] = {}

    messages: Any = None
    model: str | None = None
    stream: bool = False
    max_tokens: Positive | None = None
    metadata: dict[str, Any] = {}
    chat_template_kwargs: dict[str, Any] = {}
    temperature: float | None = Bounds(None, ge=0, le=LARGEST)
    top_p: float | None = Bounds(None, gt=0, le=1)
    top_k: Annotated[Int32, AfterValidator(lambda k: k or -1)] | None = Bounds(None, ge=-1)

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Self:
        """The options of a body; `WireError` 400 names the first that is wrong."""
        for key, (harmless, words) in cls.refused.items():
            if body.get(key) not in (None, *harmless):
                raise unsupported(key, words)
        try:
            return cls.model_validate({k: v for k, v in body.items() if v is not None})
        except ValidationError as error:
            first = error.errors(include_input=False)[0]
            steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
            message = (
                first["msg"]
                .replace("Input should", "must")
                .replace("Field required", "is required")
            )
            raise invalid("".join(steps).lstrip("."), message) from None

    def sampling(self) -> dict[str, Any]:
        """What was given of how to sample, by SGLang's names; -1 is no `top_k`."""
        known = [key for key in _SAMPLING if key in type(self).model_fields]
        return {key: value for key in known if (value := getattr(self, key)) not in (None, [])}

    def ignored(self, *more: str) -> tuple[str, ...]:
        """The given keys without effect, and `more`."""
        return tuple(sorted({*(self.model_extra or {}).keys() - self.refused.keys(), *more}))


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
