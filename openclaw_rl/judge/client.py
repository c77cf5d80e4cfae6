"""One completion of a judge's model, wherever it runs.

Guarantees: an endpoint that cannot be reached, is overloaded or broke off raises
`EngineUnavailable`; a prompt that does not fit raises an error for which `is_overflow` holds; a
completion that was cut off says so. A schema is used where the endpoint takes one and given up,
once, where it does not. No error holds text of the conversation.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from openclaw_rl.engine.chat import ChatTokenizer
from openclaw_rl.engine.types import Engine, collect
from openclaw_rl.errors import EngineError, EngineRefused, EngineUnavailable

Prompt = Sequence[Mapping[str, str]]

_OVERFLOW_WORDS = ("context length", "context_length", "too long", "maximum context", "too large")


@dataclass(frozen=True, slots=True)
class Completion:
    """What a judge wrote. `finished`: not cut off by a limit. `in_reasoning`: `text` begins inside
    its reasoning."""

    text: str
    finished: bool
    in_reasoning: bool = False


def is_overflow(error: EngineError) -> bool:
    """Whether the endpoint refused because the prompt does not fit."""
    return isinstance(error, EngineRefused) and "too long" in str(error)


class EngineJudge:
    """A model behind an engine of ours; the prompt is rendered here."""

    def __init__(self, engine: Engine, chat: ChatTokenizer) -> None:
        self._engine, self._chat = engine, chat
        self._use_schema = True

    async def complete(
        self, prompt: Prompt, *, schema: Mapping[str, Any], temperature: float, max_tokens: int
    ) -> Completion:
        """Raises `EngineError`."""
        text, ids = await asyncio.to_thread(self._render, prompt)
        in_reasoning = text.rfind("<think>") > text.rfind("</think>")
        sampling: dict[str, Any] = {
            "temperature": temperature,
            "max_new_tokens": max_tokens,
            "stop_token_ids": sorted(self._chat.eos_ids),
        }
        # A grammar would hold from the first token on, so a model that is to reason first would
        # never get to its verdict.
        if self._use_schema and not in_reasoning:
            try:
                return await self._generate(ids, sampling | {"json_schema": json.dumps(schema)})
            except EngineRefused as error:
                if is_overflow(error):
                    raise
                self._use_schema = False
        return await self._generate(ids, sampling, in_reasoning)

    async def _generate(
        self, ids: Sequence[int], sampling: Mapping[str, Any], in_reasoning: bool = False
    ) -> Completion:
        rid = f"judge-{uuid.uuid4().hex}"
        reply = await collect(self._engine.generate(ids, sampling, rid=rid, interval=None))
        finished = reply.finish is not None and reply.finish.type == "stop"
        return Completion(self._chat.decode(reply.ids), finished, in_reasoning)

    def _render(self, prompt: Prompt) -> tuple[str, list[int]]:
        try:
            text = self._chat.render(prompt)
        except EngineRefused:  # some templates know no system role
            whole = "\n\n".join(message["content"] for message in prompt)
            text = self._chat.render([{"role": "user", "content": whole}])
        return text, self._chat.encode(text)


_NAMED_BY = {"max_tokens": "max_completion_tokens", "temperature": "temperature"}
"""Words by which an endpoint says what it does not take; any other refusal may be the schema's."""


class OpenAIJudge:
    """A model at an OpenAI-compatible address (`https://host`, `https://host/v1`, or the full path
    of its chat completions)."""

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None) -> None:
        import openai  # takes a second, and few judges need it

        base = url.rstrip("/").removesuffix("/chat/completions")
        self._openai = openai.AsyncOpenAI(
            base_url=base if "/v" in urlsplit(base).path else f"{base}/v1",
            api_key=api_key or "none",
            max_retries=0,  # the turn waits in the journal
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        )
        self._openai.organization = self._openai.project = None  # not those of the environment
        self._errors, self._model = openai, model or openai.omit
        self._refused: set[str] = set()
        """What the endpoint does not take."""

    async def complete(
        self, prompt: Prompt, *, schema: Mapping[str, Any], temperature: float, max_tokens: int
    ) -> Completion:
        """Content only: reasoning in a field of its own is not read. Raises `EngineError`."""
        named = {"name": "verdict", "strict": True, "schema": schema}
        wanted = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "response_format": {"type": "json_schema", "json_schema": named},
        }
        while True:
            sent: dict[str, Any] = {k: v for k, v in wanted.items() if k not in self._refused}
            if "max_tokens" not in sent:
                sent["max_completion_tokens"] = max_tokens
            try:
                return await self._complete(prompt, sent)
            except self._errors.APIStatusError as error:
                status, text = error.status_code, error.response.text.lower()
            if status in (408, 409, 425, 429) or status >= 500:
                raise EngineUnavailable(f"the judge is not ready (status {status})")
            if any(word in text for word in _OVERFLOW_WORDS) and "max_completion" not in text:
                raise EngineRefused(400, "prompt is too long for the judge")
            given_up = [k for k in wanted if k in sent and _NAMED_BY.get(k, "") in text]
            if status not in (400, 422) or not given_up:
                raise EngineRefused(status, f"the judge refused the request (status {status})")
            self._refused.add(given_up[0])

    async def _complete(self, prompt: Prompt, options: Mapping[str, Any]) -> Completion:
        messages: Any = list(prompt)
        model: Any = self._model
        try:
            answer = await self._openai.chat.completions.create(
                model=model, messages=messages, **options
            )
            choice = answer.choices[0]
            return Completion(choice.message.content or "", choice.finish_reason != "length")
        except self._errors.APIConnectionError as error:
            kind = type(error).__name__
            raise EngineUnavailable(f"the judge cannot be reached ({kind})") from None
        except (ValueError, AttributeError, TypeError, IndexError):
            raise EngineUnavailable("the judge's answer is not a chat completion") from None

    async def close(self) -> None:
        await self._openai.close()


JudgeClient = EngineJudge | OpenAIJudge
