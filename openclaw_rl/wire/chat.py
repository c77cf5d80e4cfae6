"""OpenAI Chat Completions: a body in, server-sent events or the body of a reply out.

Only keys of the OpenAI API leave here, and every event is one complete `data:` line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, StrictBool
from pydantic import Field as Bounds

from openclaw_rl.wire.dialect import Dialect, Ending, Head, TextEvent, TokenLogprob, Usage
from openclaw_rl.wire.errors import WireError, error_body, invalid
from openclaw_rl.wire.reply import ReplyEvent, call_message, message_of
from openclaw_rl.wire.request import (
    LARGEST,
    ChatRequest,
    Field,
    Int32,
    Options,
    Positive,
    Refused,
    Stops,
    join_parts,
    read_object,
)

_ROLES = ("system", "developer", "user", "assistant", "tool")
_PLAIN_ROLES = ("system", "user", "assistant")


# -- in ------------------------------------------------------------------------------------------


class _StreamOptions(BaseModel):
    include_usage: StrictBool | None = None
    include_obfuscation: StrictBool | None = None


class _Function(BaseModel):
    name: str = Bounds(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(BaseModel):
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
        messages=parse_messages(options.messages),
        tools=tools,
        stream=options.stream,
        include_usage=bool(options.stream_options.include_usage),
        max_tokens=limit if limit is not None else options.max_tokens,
        sampling=options.sampling(),
        template_kwargs=options.chat_template_kwargs,
        hints={key: value for key, value in hints.items() if value},
        logprobs=options.logprobs,
        top_logprobs=options.top_logprobs,
        ignored=options.ignored(*(name for name, given in ignored.items() if given)),
    )


def parse_messages(messages: Any, *, image_ok: bool = False) -> tuple[dict[str, Any], ...]:
    """The normalised messages (see `ChatRequest`); `WireError` 400 names the field.

    Without `image_ok` image parts are refused; with it, content with images stays a list of parts.
    """
    if not isinstance(messages, list):
        raise invalid("messages", "must be a list of messages")
    if not messages:
        raise invalid("messages", "must have at least one message")
    return tuple(
        [
            message
            if _is_plain(message)
            else _message(Field(message, f"messages[{index}]").required(), image_ok)
            for index, message in enumerate(messages)
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


def _message(message: Field, image_ok: bool) -> dict[str, Any]:
    role = message["role"].value
    if role == "function":
        raise message["role"].invalid("'function' is superseded; use 'tool' and tool_call_id")
    if role not in _ROLES:
        raise message["role"].invalid(f"must be one of {', '.join(_ROLES)}")
    content = message["content"]
    if role == "assistant" and content.value is None:
        message["refusal"].text()
        content = message["refusal"]
    result: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": _content(content, role, image_ok),
    }
    if message["name"].text() is not None:
        result["name"] = message["name"].value
    if role == "assistant":
        result.update(_assistant(message))
    if role == "tool":
        result["tool_call_id"] = message["tool_call_id"].string(empty=False)
    return result


def _content(content: Field, role: str, image_ok: bool) -> Any:
    if content.value is None and role in ("assistant", "tool"):
        return None if role == "assistant" else ""  # a tool that returned nothing
    if isinstance(content.value, str):
        return content.value
    if not isinstance(content.value, list):
        raise content.invalid("must be a string or a list of parts")
    return join_parts([_part(part.required(), role, image_ok) for part in content.items()])


def _part(part: Field, role: str, image_ok: bool) -> dict[str, Any]:
    kind = part["type"].value
    if kind == "text" or (kind == "refusal" and role == "assistant"):
        return {"type": "text", "text": part[kind].string()}
    if kind == "image_url":
        if not image_ok or role != "user":
            raise part.invalid("images are not supported: this model reads text only")
        part["image_url"]["url"].string()
        return {"type": "image_url", "image_url": dict(part["image_url"].value)}
    if kind in ("input_audio", "file", "video_url"):
        raise part.invalid(f"parts of the type '{kind}' are not supported")
    raise part["type"].invalid("must be 'text'")


def _assistant(message: Field) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key in ("reasoning_content", "reasoning"):  # the second is OpenRouter's and vLLM's name
        if message[key].text() is not None:
            result["reasoning_content"] = message[key].value
            break
    if message["function_call"].value:
        raise message["function_call"].invalid("superseded; use tool_calls")
    if message["audio"].value:
        raise message["audio"].invalid("audio is not supported: this model reads text only")
    if calls := [_call(call.required()) for call in message["tool_calls"].items()]:
        result["tool_calls"] = calls
    return result


def _call(call: Field) -> dict[str, Any]:
    if call["type"].value not in (None, "function"):
        raise call["type"].invalid("must be 'function'")
    function = call["function"].required()
    arguments = function["arguments"]
    if isinstance(arguments.value, dict):
        arguments = Field(json.dumps(arguments.value, ensure_ascii=False), arguments.path)
    name = function["name"].string(empty=False)
    return call_message(call["id"].string(), name, arguments.string())


# -- out -----------------------------------------------------------------------------------------

_LOWEST = -9999.0
"""What the OpenAI API writes for a log-probability that JSON cannot hold (minus infinity)."""

_DONE = b"data: [DONE]\n\n"


class ChatStream:
    """Writes one streamed reply; see `ReplyStream`. Keeps no text."""

    def __init__(self, head: Head) -> None:
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


def chat_completion(
    head: Head,
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


def _head(head: Head, kind: str) -> dict[str, Any]:
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
