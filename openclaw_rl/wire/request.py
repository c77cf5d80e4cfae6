"""What every dialect makes of a body: one `ChatRequest`; and how a body is read.

A request is understood completely, or refused with 400 and the path of the field before anything
else happens. What would change the *shape* of the reply and cannot be honoured is refused by name;
what only bends sampling, speed or bookkeeping is listed in `ignored`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
)
from pydantic import Field as Bounds

from openclaw_rl.wire.errors import invalid, unsupported


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
    ignored: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    show_reasoning: bool = True


Positive = Annotated[int, Bounds(ge=1)]
Int32 = Annotated[int, Bounds(le=2**31 - 1)]  # engines keep these so, and die of larger ones
Stops = Annotated[
    list[Annotated[str, Bounds(min_length=1)]],
    Bounds(fail_fast=True),  # a million wrong items are one error
    BeforeValidator(lambda stops: [stops] if isinstance(stops, str) else stops),
]
"""One string, or a list of them."""
P = TypeVar("P")
Parts = Annotated[
    list[P],
    Bounds(fail_fast=True),
    BeforeValidator(
        lambda said: [{"type": "text", "text": said}] if isinstance(said, str) else said
    ),
]
"""A content: a string, or a list of parts."""
LARGEST = 1e6  # beyond any use, and still a float

_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "stop", "stop_token_ids",
)  # fmt: skip


class Body(BaseModel):
    """A body or a part of one, by type and range; keys that stand nowhere here have no effect."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @classmethod
    def read(cls, value: Any, at: str = "") -> Self:
        """The object `value`, whose path is `at`; null counts as not given. `WireError` 400 names
        the first field that is wrong, and quotes nothing."""
        if isinstance(value, dict):
            value = {key: one for key, one in value.items() if one is not None}
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            first = error.errors(include_input=False)[0]
        steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
        message = _WORDS.get(first["type"], first["msg"].replace("Input should", "must"))
        raise invalid((at + "".join(steps)).lstrip("."), message) from None


_WORDS = {
    "missing": "is required",
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "string_too_short": "must not be empty",
    "none_required": "is not supported",
}


Refused = Mapping[str, tuple[Sequence[Any], str]]


class Options(Body):
    """What a body says beside its messages; what both dialects know.

    `refused` would change the shape of the reply: the key, the values that do not, and the words
    for all others.
    """

    model_config = ConfigDict(extra="allow")
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
    def read(cls, value: Any, at: str = "") -> Self:
        """The options of a body, see `Body.read`."""
        for key, (harmless, words) in cls.refused.items():
            if value.get(key) not in (None, *harmless):
                raise unsupported(key, words)
        return super().read(value, at)

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
    except (ValueError, RecursionError):
        raise invalid(None, "the body is not JSON in UTF-8, or nested too deeply") from None
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
