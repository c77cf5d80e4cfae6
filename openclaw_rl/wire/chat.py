"""OpenAI Chat Completions: a body in, server-sent events or the body of a reply out.

Only keys of the OpenAI API leave here, and every event is one complete `data:` line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator
from pydantic import Field as Bounds

from openclaw_rl.wire.dialect import (
    LARGEST,
    Body,
    ChatRequest,
    Dialect,
    Ending,
    Int32,
    Options,
    Parts,
    Positive,
    Refused,
    ReplyInfo,
    Stops,
    TextEvent,
    TokenLogprob,
    Usage,
    WireError,
    effort_kwargs,
    invalid,
    read_object,
)
from openclaw_rl.wire.reply import ReplyEvent, call_message, message_of

_PLAIN_ROLES = ("system", "user", "assistant")


# -- in ------------------------------------------------------------------------------------------


class _StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Function(Body):
    name: str = Bounds(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(Body):
    type: Literal["function"]
    function: _Function


_TEXT_ONLY = "only text replies are supported"
_OLD = "superseded; use tools and tool_choice"


class ChatOptions(Options):
    """What Chat Completions knows beside the messages, SGLang's and vLLM's additions included."""

    refused: ClassVar[Refused] = {
        "n": ([1], "only one choice per request is supported"),
        "audio": ([], _TEXT_ONLY),
        "modalities": ([["text"]], _TEXT_ONLY),
        "response_format": (
            [{"type": "text"}, {}], "only the type 'text' is supported; ask for JSON in the prompt"
        ),
        "tool_choice": (["auto", "none"], "a call cannot be forced; use 'auto' or 'none'"),
        "functions": ([[]], _OLD),
        "function_call": ([], _OLD),
        **dict.fromkeys(
            ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema",
             "structured_outputs", "regex", "ebnf", "structural_tag", "web_search_options"),
            ([], "constrained replies are not supported"),
        ),
    }  # fmt: skip

    tools: list[_Tool] = Bounds([], fail_fast=True)
    stream_options: _StreamOptions = _StreamOptions()
    max_completion_tokens: Positive | None = None
    min_p: float | None = Bounds(None, ge=0, le=1)
    frequency_penalty: float | None = Bounds(None, ge=-2, le=2)
    presence_penalty: float | None = Bounds(None, ge=-2, le=2)
    repetition_penalty: float | None = Bounds(None, gt=0, le=LARGEST)
    stop: Stops | None = None
    stop_token_ids: list[Annotated[Int32, Bounds(ge=0)]] = Bounds([], fail_fast=True)
    logprobs: bool = False
    top_logprobs: int = Bounds(0, ge=0, le=20)
    user: str | None = None
    prompt_cache_key: str | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None


class _Part(Body):
    type: Literal["text", "refusal", "image_url"]
    text: str | None = Bounds(None, validation_alias=AliasChoices("text", "refusal"))
    image_url: dict[str, Any] | None = None


class _CalledFunction(Body):
    name: str = Bounds(min_length=1)
    arguments: Annotated[
        str,
        BeforeValidator(
            lambda given: json.dumps(given, ensure_ascii=False) if type(given) is dict else given
        ),
    ]


class _Call(Body):
    id: str
    type: Literal["function"] | None = None
    function: _CalledFunction


class _Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Parts[_Part] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """OpenRouter's and vLLM's name for it."""
    tool_calls: list[_Call] = Bounds([], fail_fast=True)
    tool_call_id: str | None = None
    function_call: None = None
    audio: None = None


def parse_chat_request(raw: bytes) -> ChatRequest:
    """Read and check a body; `WireError` 400 names the first field that is wrong."""
    body = read_object(raw)
    options = ChatOptions.read(body)
    if options.top_logprobs and not options.logprobs:
        raise invalid("top_logprobs", "needs logprobs: true")
    tools = () if body.get("tool_choice") == "none" else tuple(body.get("tools") or ())
    limit = options.max_completion_tokens
    hints = {key: getattr(options, key) for key in ("prompt_cache_key", "user", "metadata")}
    ignored = {
        "parallel_tool_calls": not options.parallel_tool_calls,
        "stream_options.include_obfuscation": options.stream_options.include_obfuscation,
        "tools.function.strict": any(tool["function"].get("strict") for tool in tools),
    }
    return ChatRequest(
        model=options.model,
        messages=parse_messages(body.get("messages")),
        tools=tools,
        stream=options.stream,
        include_usage=bool(options.stream_options.include_usage),
        max_tokens=limit if limit is not None else options.max_tokens,
        sampling=options.sampling(),
        template_kwargs={**effort_kwargs(options.reasoning_effort), **options.chat_template_kwargs},
        hints={key: value for key, value in hints.items() if value},
        logprobs=options.logprobs,
        top_logprobs=options.top_logprobs,
        ignored=options.ignored(*(name for name, given in ignored.items() if given)),
    )


def parse_messages(messages: Any, *, image_ok: bool = False) -> tuple[dict[str, Any], ...]:
    """The normalised messages (see `ChatRequest`); `WireError` 400 names the field.

    Without `image_ok` image parts are refused; with it, content with images stays a list of parts.
    """
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", "must be a list of at least one message")
    return tuple(
        [
            message if _is_plain(message) else _read_message(message, f"messages[{at}]", image_ok)
            for at, message in enumerate(messages)
        ]
    )


def _is_plain(message: Any) -> bool:
    """Whether a message is in our form already, as most of a long history are."""
    return (
        type(message) is dict
        and len(message) == 2
        and type(message.get("content")) is str
        and message.get("role") in _PLAIN_ROLES
    )


def _read_message(message: Any, at: str, image_ok: bool) -> dict[str, Any]:
    read = _Message.read(message, at)
    role = "system" if read.role == "developer" else read.role
    result: dict[str, Any] = {"role": role, "content": _content(read, at, image_ok)}
    if read.name is not None:
        result["name"] = read.name
    if role == "assistant":
        reasoning = read.reasoning if read.reasoning_content is None else read.reasoning_content
        if reasoning is not None:
            result["reasoning_content"] = reasoning
        if read.tool_calls:
            result["tool_calls"] = [
                call_message(call.id, call.function.name, call.function.arguments)
                for call in read.tool_calls
            ]
    if role == "tool":
        if not read.tool_call_id:
            raise invalid(f"{at}.tool_call_id", "is required")
        result["tool_call_id"] = read.tool_call_id
    return result


def _content(message: _Message, at: str, image_ok: bool) -> Any:
    """The text of a message, None where it has none; a list of parts where one is an image."""
    if message.content is None:
        if message.role not in ("assistant", "tool"):
            raise invalid(f"{at}.content", "is required")
        return message.refusal if message.role == "assistant" else ""  # a tool may return nothing
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(message.content):
        if part.type == "image_url":
            if not image_ok or message.role != "user" or not part.image_url:
                where = f"{at}.content[{index}]"
                raise invalid(where, "images are not supported: this model reads text only")
            parts.append({"type": "image_url", "image_url": part.image_url})
        elif part.text is None:
            raise invalid(f"{at}.content[{index}].text", "is required")
        else:
            parts.append({"type": "text", "text": part.text})
    if all(part["type"] == "text" for part in parts):
        return "\n".join([part["text"] for part in parts])
    return parts


# -- out -----------------------------------------------------------------------------------------

_LOWEST = -9999.0
"""What the OpenAI API writes for a log-probability that JSON cannot hold (minus infinity)."""

_ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}

_DONE = b"data: [DONE]\n\n"


class ChatStream:
    """Writes one streamed reply; see `ReplyStream`. Keeps no text."""

    def __init__(self, head: ReplyInfo) -> None:
        self._include_usage = head.request.include_usage
        self._head = _head(head, "chat.completion.chunk")
        self._texts = {
            "reasoning": TextEvent(lambda text: self._chunk({"reasoning_content": text})),
            "content": TextEvent(lambda text: self._chunk({"content": text})),
        }

    def start(self, usage: Usage) -> bytes:
        """The first chunk: the role."""
        return self._chunk({"role": "assistant", "content": ""})

    def event(self, event: ReplyEvent, logprobs: Sequence[TokenLogprob] | None = None) -> bytes:
        """One piece of the reply; a tool call goes out whole, in one chunk."""
        if event.kind == "tool_call":
            call = call_message(event.call_id, event.name, event.arguments)
            return self._chunk({"tool_calls": [{"index": event.index, **call}]}, logprobs=logprobs)
        if logprobs is None:
            return self._texts[event.kind](event.text)
        key = "content" if event.kind == "content" else "reasoning_content"
        return self._chunk({key: event.text}, logprobs=logprobs)

    def logprobs(self, tokens: Sequence[TokenLogprob]) -> bytes:
        """Log-probabilities of tokens that show no text (yet)."""
        return self._chunk({}, logprobs=tokens)

    def keepalive(self) -> bytes:
        """A chunk that says nothing: clients' idle watchdogs count data, not SSE comments."""
        return self._chunk({})

    def end(self, ending: Ending) -> bytes:
        """The chunk with the finish reason, the usage (empty `choices`) where the client asked
        for it, and the end of the stream."""
        data = self._chunk({}, ending.reason)
        if self._include_usage:
            data += _data({**self._head, "choices": [], "usage": _usage(ending.usage)})
        return data + _DONE

    def fail(self, error: WireError) -> bytes:
        """An error object in place of the rest."""
        return _data(error_body(error)) + _DONE

    def _chunk(
        self,
        delta: Mapping[str, Any],
        reason: str | None = None,
        logprobs: Sequence[TokenLogprob] | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": reason}
        if logprobs is not None:
            choice["logprobs"] = _logprobs(logprobs)
        body = {**self._head, "choices": [choice]}
        if self._include_usage:
            body["usage"] = None
        return _data(body)


def error_body(error: WireError) -> dict[str, Any]:
    """The OpenAI error object, as the body of a response or of one stream event."""
    other = "server_error" if error.status >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": error.message,
            "type": _ERROR_TYPES.get(error.status, other),
            "param": error.param,
            "code": error.code,
        }
    }


def chat_completion(
    head: ReplyInfo,
    events: Sequence[ReplyEvent],
    ending: Ending,
    logprobs: Sequence[TokenLogprob] | None = None,
) -> dict[str, Any]:
    """The body of an unstreamed reply."""
    choice = {
        "index": 0,
        "message": message_of(events),
        "logprobs": None if logprobs is None else _logprobs(logprobs),
        "finish_reason": ending.reason,
    }
    return {**_head(head, "chat.completion"), "choices": [choice], "usage": _usage(ending.usage)}


def _head(head: ReplyInfo, kind: str) -> dict[str, Any]:
    # The id carries the turn's, so that feedback can name it.
    return {
        "id": f"chatcmpl-{head.turn_id}",
        "object": kind,
        "created": head.created,
        "model": head.model,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    content = [{**_token(one), "top_logprobs": [_token(top) for top in one.top]} for one in tokens]
    return {"content": content, "refusal": None}


def _token(item: TokenLogprob) -> dict[str, Any]:
    return {
        "token": item.token,
        "logprob": item.logprob if math.isfinite(item.logprob) else _LOWEST,
        "bytes": None if item.bytes is None else list(item.bytes),
    }


def _data(body: Mapping[str, Any]) -> bytes:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.encode("utf-8", "replace") + b"\n\n"


CHAT = Dialect(
    name="chat",
    parse=parse_chat_request,
    stream=ChatStream,
    whole=chat_completion,
    error_body=error_body,
)
