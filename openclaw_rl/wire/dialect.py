"""What a dialect is: how a body becomes a `ChatRequest`, and how a reply goes out again.

A request is understood completely, or refused with 400 and the path of the field before anything
else happens. What would change the *shape* of the reply and cannot be honoured is refused by name;
what only bends sampling, speed or bookkeeping is listed in `ignored`. The gateway knows only these
types: a new dialect is one `Dialect` and a route.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic import Field as Bounds

from openclaw_rl.errors import OpenClawRLError
from openclaw_rl.wire.reply import ReplyEvent

# -- errors ---------------------------------------------------------------------------------------


class WireError(OpenClawRLError):
    """An error with an HTTP status. It carries no conversation text: `param` is the path of the
    offending field (`messages[2].role`), not its value, `code` a word that programs compare."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param


def invalid(param: str | None, message: str, *, code: str | None = None) -> WireError:
    """400: the request itself is wrong at `param`."""
    return WireError(400, f"{param}: {message}" if param else message, param=param, code=code)


def unsupported(param: str, message: str) -> WireError:
    """400: `param` would change the shape of the reply and cannot be honoured here."""
    return invalid(param, message, code="unsupported_parameter")


def unavailable(message: str, code: str = "engine_unavailable") -> WireError:
    """503: the engine (or what `code` says) is away; the same request may succeed later."""
    return WireError(503, message, code=code)


def prompt_too_long(prompt_tokens: int, limit: int) -> WireError:
    """400 for a prompt beyond the context, worded so that agents compact their history."""
    return WireError(
        400,
        f"prompt is too long: {prompt_tokens} tokens > {limit} maximum. This model's maximum "
        f"context length is {limit} tokens. Please reduce the length of the messages.",
        code="context_length_exceeded",
        param="messages",
    )


# -- in -------------------------------------------------------------------------------------------


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


def effort_kwargs(effort: str | None) -> dict[str, Any]:
    """A client's effort of reasoning as arguments of the model's template, which reads what it has
    a name for: "none" ends thinking, any other is told as it is."""
    if effort is None:
        return {}
    if effort == "none":
        return {"enable_thinking": False, "thinking": False}
    return {"reasoning_effort": effort}


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


# -- out ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One sampled token as `logprobs` reports it. `top` holds the most likely alternatives.

    `bytes` are the token's own bytes, or None where unknown (`token` alone may be half a
    character).
    """

    token: str
    logprob: float
    bytes: Sequence[int] | None = None
    top: Sequence[TokenLogprob] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens; `cached` is part of `prompt`, `reasoning` part of `completion`."""

    prompt: int
    completion: int = 0
    cached: int = 0
    reasoning: int = 0


@dataclass(frozen=True, slots=True)
class Ending:
    """How a reply ended. `stop_sequence`: the client's own stop string that ended it.
    `context_full`: it ended by length below the client's limit, at the end of the context."""

    reason: Literal["stop", "length", "tool_calls"]
    usage: Usage
    stop_sequence: str | None = None
    context_full: bool = False


@dataclass(frozen=True, slots=True)
class ReplyInfo:
    """What a reply says about itself: the turn's id, the served name, seconds since the epoch."""

    turn_id: str
    model: str
    created: int
    request: ChatRequest


def turn_of_reply(reply_id: str) -> str:
    """The turn's id in the id of a reply of any dialect; a bare one stays as it is."""
    return reply_id.removeprefix("chatcmpl-").removeprefix("msg_")


class ReplyStream(Protocol):
    """Writes one streamed reply. Each method returns the bytes to send now."""

    def start(self, usage: Usage) -> bytes:
        """What comes before anything else; `usage` is what is known by then."""

    def event(self, event: ReplyEvent, logprobs: Sequence[TokenLogprob] | None = None) -> bytes:
        """One piece of the reply."""

    def logprobs(self, tokens: Sequence[TokenLogprob]) -> bytes:
        """Log-probabilities of tokens that show no text (yet)."""

    def keepalive(self) -> bytes:
        """Something that says nothing, to be sent while nothing else is."""

    def end(self, ending: Ending) -> bytes:
        """The end of a reply that is whole."""

    def fail(self, error: WireError) -> bytes:
        """The end of a stream that broke after it had begun."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One way of speaking. `whole` makes the body of an unstreamed reply; its log-probs are None
    where the client asked for none. `id_header` names the header with the reply's id, if any."""

    name: str
    parse: Callable[[bytes], ChatRequest]
    stream: Callable[[ReplyInfo], ReplyStream]
    whole: Callable[
        [ReplyInfo, Sequence[ReplyEvent], Ending, Sequence[TokenLogprob] | None], dict[str, Any]
    ]
    error_body: Callable[[WireError], dict[str, Any]]
    error_status: Callable[[WireError], int] = lambda error: error.status
    id_header: str | None = None


class TextEvent:
    """A stream event of which only a text changes: all around it is encoded once.

    `encode` makes the event of a text. Behind the text there must be nothing from outside.
    """

    __slots__ = ("_before", "_behind")

    _HOLE = "\ue000"

    def __init__(self, encode: Callable[[str], bytes]) -> None:
        hole = encode_basestring(self._HOLE).encode()
        self._before, _, self._behind = encode(self._HOLE).rpartition(hole)

    def __call__(self, text: str) -> bytes:
        """The event of `text`."""
        return self._before + encode_basestring(text).encode("utf-8", "replace") + self._behind
