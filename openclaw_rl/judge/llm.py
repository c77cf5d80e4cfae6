"""One completion of a judge's model, wherever it runs.

Guarantees: an endpoint that cannot be reached, is overloaded or broke off raises
`EngineUnavailable`; a prompt that does not fit raises `ContextOverflow` or an `EngineRefused` for
which `is_overflow` holds; a completion that was cut off says so (`finished` False).

`EngineLLM` speaks SGLang's `/generate` through the engine room and renders the prompt itself;
`ChatLLM` speaks to any OpenAI-compatible address. A schema is used where the endpoint takes one
and given up, once, where it does not.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from openclaw_rl.engine.types import Engine, collect
from openclaw_rl.errors import ContextOverflow, EngineRefused, EngineUnavailable
from openclaw_rl.judge.votes import THINK_END, THINK_START

_OVERFLOW_WORDS = ("context length", "context_length", "too long", "maximum context", "too large")


@dataclass(frozen=True, slots=True)
class Completion:
    """What a judge wrote. `in_reasoning`: `text` begins inside its reasoning."""

    text: str
    finished: bool
    in_reasoning: bool = False


class JudgeLLM(Protocol):
    """`context_tokens` is None where nobody knows it."""

    context_tokens: int | None

    async def count(self, messages: Sequence[Mapping[str, str]]) -> int | None:
        """Tokens of the prompt, or None where they cannot be counted here."""
        ...

    async def complete(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        schema: Mapping[str, Any],
        temperature: float,
        max_tokens: int,
    ) -> Completion: ...


class Tokenizer(Protocol):
    """What is needed of `engine.chat.ChatTokenizer`."""

    @property
    def context_length(self) -> int | None: ...

    @property
    def eos_ids(self) -> Any: ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


def smaller(first: int | None, second: int | None) -> int | None:
    """The smaller one of two limits; None is no limit."""
    return min((limit for limit in (first, second) if limit), default=None)


def is_overflow(error: Exception) -> bool:
    """Whether the endpoint refused because the prompt does not fit."""
    if isinstance(error, ContextOverflow):
        return True
    return isinstance(error, EngineRefused) and "too long" in str(error)


class EngineLLM:
    """A model behind `/generate`. `template_kwargs` go to its chat template."""

    def __init__(
        self,
        engine: Engine,
        chat: Tokenizer,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        context_tokens: int | None = None,
    ) -> None:
        self._engine, self._chat = engine, chat
        self._template_kwargs = dict(template_kwargs or {})
        self._use_schema = True
        self.context_tokens = smaller(context_tokens, chat.context_length)

    async def count(self, messages: Sequence[Mapping[str, str]]) -> int | None:
        _, ids = await asyncio.to_thread(self._prompt, messages)
        return len(ids)

    async def complete(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        schema: Mapping[str, Any],
        temperature: float,
        max_tokens: int,
    ) -> Completion:
        text, ids = await asyncio.to_thread(self._prompt, messages)
        in_reasoning = text.rfind(THINK_START) > text.rfind(THINK_END)
        sampling: dict[str, Any] = {
            "temperature": temperature,
            "max_new_tokens": max_tokens,
            "stop_token_ids": sorted(self._chat.eos_ids),
        }
        # A grammar would hold from the first token on, so a model that is to reason first would
        # never get to its verdict.
        if self._use_schema and not in_reasoning:
            try:
                return await self._generate(
                    ids, sampling | {"json_schema": json.dumps(schema)}, in_reasoning
                )
            except EngineRefused as error:
                if is_overflow(error):
                    raise
                self._use_schema = False
        return await self._generate(ids, sampling, in_reasoning)

    async def _generate(
        self, ids: Sequence[int], sampling: Mapping[str, Any], in_reasoning: bool
    ) -> Completion:
        rid = f"judge-{uuid.uuid4().hex}"
        reply = await collect(self._engine.generate(ids, sampling, rid=rid))
        finished = reply.finish is not None and reply.finish.type == "stop"
        return Completion(self._chat.decode(reply.ids), finished, in_reasoning)

    def _prompt(self, messages: Sequence[Mapping[str, str]]) -> tuple[str, list[int]]:
        try:
            text = self._chat.render(messages, (), self._template_kwargs)
        except EngineRefused:
            # Some templates know no system role.
            whole = "\n\n".join(message["content"] for message in messages)
            merged = [{"role": "user", "content": whole}]
            text = self._chat.render(merged, (), self._template_kwargs)
        return text, self._chat.encode(text)


class ChatLLM:
    """A model at an OpenAI-compatible address (`https://host/v1`, or the full path)."""

    def __init__(
        self,
        url: str,
        http: aiohttp.ClientSession,
        *,
        model: str | None = None,
        api_key: str | None = None,
        context_tokens: int | None = None,
    ) -> None:
        base = url.rstrip("/")
        if not base.endswith("/chat/completions"):
            base += "/chat/completions" if "/v" in base.partition("://")[2] else _DEFAULT_PATH
        self._url, self._http, self._model = base, http, model
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._use_schema = self._use_temperature = True
        self._limit_name = "max_tokens"
        self.context_tokens = context_tokens

    async def count(self, messages: Sequence[Mapping[str, str]]) -> int | None:
        return None

    async def complete(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        schema: Mapping[str, Any],
        temperature: float,
        max_tokens: int,
    ) -> Completion:
        while True:
            body: dict[str, Any] = {"messages": list(messages), self._limit_name: max_tokens}
            body |= {"model": self._model} if self._model else {}
            if self._use_temperature:
                body["temperature"] = temperature
            if self._use_schema:
                named = {"name": "verdict", "strict": True, "schema": schema}
                body["response_format"] = {"type": "json_schema", "json_schema": named}
            status, text = await self._post(body)
            if status == 200:
                return _read_completion(text)
            if not (status in (400, 422) and self._give_up(text, body)):
                raise _refusal(status, text)

    async def _post(self, body: Mapping[str, Any]) -> tuple[int, str]:
        try:
            async with self._http.post(self._url, json=body, headers=self._headers) as response:
                text = await response.text()
                status = response.status
        except (aiohttp.ClientError, OSError, UnicodeDecodeError) as error:
            raise EngineUnavailable(
                f"the judge cannot be reached ({type(error).__name__})"
            ) from None
        if status in (408, 409, 425, 429) or status >= 500:
            raise EngineUnavailable(f"the judge is not ready (status {status})")
        return status, text

    def _give_up(self, text: str, sent: Mapping[str, Any]) -> bool:
        """Leave out, for good, what the endpoint does not take; False if there is nothing more.

        Compared with what was `sent`: another vote may have learnt the same meanwhile.
        """
        lower = text.lower()
        if "max_completion_tokens" in lower and "max_tokens" in sent:
            self._limit_name = "max_completion_tokens"
        elif any(word in lower for word in _OVERFLOW_WORDS):
            return False
        elif "temperature" in lower and "temperature" in sent:
            self._use_temperature = False
        elif "response_format" in sent:
            self._use_schema = False
        else:
            return False
        return True


_DEFAULT_PATH = "/v1/chat/completions"


def _read_completion(text: str) -> Completion:
    """Content only: reasoning that comes in a field of its own is not read at all."""
    try:
        choice = json.loads(text)["choices"][0]
        content = choice["message"].get("content")
        finished = choice.get("finish_reason") != "length"
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise EngineUnavailable("the judge's answer is no chat completion") from None
    return Completion(content if isinstance(content, str) else "", finished)


def _refusal(status: int, text: str) -> EngineRefused:
    # The body may echo the conversation: only the status goes into the message.
    if status in (400, 413, 422) and any(word in text.lower() for word in _OVERFLOW_WORDS):
        return EngineRefused(400, "prompt is too long for the judge")
    return EngineRefused(status, f"the judge refused the request (status {status})")
