"""Users who talk to a served model without pause, through the official client."""

from __future__ import annotations

from typing import Protocol

import openai


class Served(Protocol):
    """What is talked to; `until_served` returns when an error may be over."""

    client: openai.AsyncOpenAI

    async def until_served(self) -> None: ...


class Talkers:
    """Users who talk without pause, and what they saw."""

    def __init__(self, system: Served) -> None:
        self.system = system
        self.acknowledged: list[str] = []
        self.errors: list[Exception] = []
        self.stopping = False
        """Asked for, not cancelled: the client's connection pool may swallow a cancellation."""

    async def one(self, number: int) -> None:
        round_ = 0
        while not self.stopping:
            round_ += 1
            headers = {"x-session-id": f"s{number}-{round_}"}
            messages: list[dict] = [{"role": "user", "content": f"Say something, {number}."}]
            for words in ("Perfect, thanks.", "That is wrong.", None):
                try:
                    stream = await self.system.client.chat.completions.create(
                        model="tiny",
                        messages=messages,
                        max_tokens=10,
                        stream=True,
                        extra_headers=headers,
                    )
                    text, name, ended = "", "", False
                    async for chunk in stream:
                        name = chunk.id
                        for choice in chunk.choices:
                            text += choice.delta.content or ""
                            ended = ended or choice.finish_reason is not None
                except (openai.APIError, OSError) as error:
                    self.errors.append(error)
                    await self.system.until_served()
                    break
                if ended:
                    self.acknowledged.append(name.removeprefix("chatcmpl-"))
                messages.append({"role": "assistant", "content": text})
                messages.append({"role": "user", "content": words})
