"""What a dialect is: how a body becomes a `ChatRequest`, and how a reply goes out again.

The gateway knows only these types. A new dialect is one `Dialect` and a route.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any, Literal, Protocol

from openclaw_rl.wire.errors import WireError
from openclaw_rl.wire.reply import ReplyEvent
from openclaw_rl.wire.request import ChatRequest


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
class Head:
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
    stream: Callable[[Head], ReplyStream]
    whole: Callable[
        [Head, Sequence[ReplyEvent], Ending, Sequence[TokenLogprob] | None], dict[str, Any]
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
