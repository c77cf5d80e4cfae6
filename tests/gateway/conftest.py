"""A gateway in this process between a real OpenAI client and the fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
import pytest
from openai import AsyncOpenAI
from tokenizers import Tokenizer

from openclaw_rl.config import (
    Config,
    DataConfig,
    EngineConfig,
    GatewayConfig,
    ModelConfig,
    TrainConfig,
)
from openclaw_rl.engine.chat import ChatTokenizer
from openclaw_rl.gateway.app import serving
from openclaw_rl.journal.store import Journal
from openclaw_rl.types import Turn
from tests.fakes.engine import FakeEngine
from tests.fakes.model import tiny_tokenizer
from tests.fakes.templates import QWEN3_LIKE

LIMITS = {
    "shutdown_seconds": ["app.SHUTDOWN_SECONDS"],
    "journal_seconds": ["core.JOURNAL_SECONDS"],
    "body_seconds": ["access.BODY_SECONDS"],
    "max_turns": ["core.MAX_TURNS"],
    "recent_bytes": ["prompts.RECENT_BYTES"],
}
"""What a test may change that is no setting."""


@dataclass
class World:
    """Everything a test touches. `chat` speaks through the SDK, `http` raw."""

    url: str
    engine: FakeEngine
    client: AsyncOpenAI
    http: aiohttp.ClientSession
    journal: Journal
    config: Config
    tokenizer: ChatTokenizer

    async def chat(self, messages: Any, *, stream: bool = False, **options: Any) -> Any:
        """One request by the SDK; streamed ones are read to the end and joined."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        made = await self.client.chat.completions.with_raw_response.create(
            model="tiny", messages=messages, stream=stream, **options
        )
        parsed = made.parse()
        if not stream:
            return Answer(parsed.choices[0].message, parsed.choices[0].finish_reason,
                          parsed.usage, made.headers, [parsed])  # fmt: skip
        chunks = [chunk async for chunk in parsed]
        return joined(chunks, made.headers)

    async def post(self, body: bytes | dict[str, Any], path: str = "/v1/chat/completions",
                   **headers: str) -> tuple[int, Any]:  # fmt: skip
        """One raw request: status and JSON body."""
        kind: dict[str, Any] = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.http.post(self.url + path, headers=headers, **kind) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> Any:
        async with self.http.get(self.url + path) as response:
            assert response.status == 200
            return await response.json()

    async def metrics(self) -> str:
        async with self.http.get(self.url + "/metrics") as response:
            assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            return await response.text()

    async def waiting(self) -> int:
        """How many requests wait for the engine."""
        return int((await self.get("/healthz"))["requests"]["waiting_for_engine"])

    def turns(self) -> list[Turn]:
        """All recorded turns, oldest first."""
        found = [self.journal.turn(turn_id) for turn_id in self.journal.turn_ids()]
        return [turn for turn in found if turn is not None]

    def only_turn(self) -> Turn:
        (turn,) = self.turns()
        return turn


@dataclass
class Answer:
    message: Any
    finish_reason: str | None
    usage: Any
    headers: Any
    chunks: list[Any]

    @property
    def text(self) -> str | None:
        return self.message.content

    @property
    def reasoning(self) -> str | None:
        return getattr(self.message, "reasoning_content", None)

    @property
    def turn_id(self) -> str:
        return self.headers["x-turn-id"]

    def replay(self) -> dict[str, Any]:
        """The assistant message as a client sends it back."""
        message: dict[str, Any] = {"role": "assistant", "content": self.message.content}
        if self.message.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.message.tool_calls]
        return message


@dataclass
class Joined:
    content: str | None
    reasoning_content: str | None
    tool_calls: list[Any]


def joined(chunks: list[Any], headers: Any) -> Answer:
    """A streamed reply put together."""
    content, reasoning, calls, finish, usage = "", "", [], None, None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            calls += choice.delta.tool_calls or []
            finish = choice.finish_reason or finish
    message = Joined(content or (None if calls else ""), reasoning or None, calls)
    return Answer(message, finish, usage, headers, chunks)


async def eventually(predicate: Callable[[], Any]) -> None:
    """Until `predicate()` is true (or gives a true awaitable), for what has no event to await:
    a commit in another thread, a counter behind HTTP."""
    for _ in range(1000):
        value = predicate()
        if await value if inspect.isawaitable(value) else value:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never happened")


def whole_text(served: World, ids: Any) -> str:
    """The text of ids, special tokens included."""
    backend = Tokenizer.from_file(str(Path(served.config.model.path) / "tokenizer.json"))
    return backend.decode(list(ids), skip_special_tokens=False)


@contextlib.asynccontextmanager
async def world(
    folder: Path, model: Path, *, top_k: int = 0, engine_api_key: str = "", **changes: Any
) -> AsyncIterator[World]:
    """A gateway and its engine. `changes` are settings of `[gateway]`, `engine_url`, or names of
    `LIMITS`; `engine=` brings a fake of one's own."""
    tokenizer = ChatTokenizer.load(str(model))
    async with contextlib.AsyncExitStack() as stack:
        engine = changes.pop("engine", None)
        if engine is None:
            engine = await stack.enter_async_context(FakeEngine(tokenizer=tokenizer))
        engine_url = changes.pop("engine_url", engine.url)
        for name, value in {"shutdown_seconds": 1.0, **changes}.items():
            for path in LIMITS.get(name, ()):
                stack.enter_context(mock.patch(f"openclaw_rl.gateway.{path}", value))
                changes.pop(name, None)
        config = Config(
            model=ModelConfig(path=str(model), served_name="tiny"),
            data=DataConfig(path=str(folder)),
            gateway=GatewayConfig(**{"port": 0, "engine_wait_seconds": 10.0, **changes}),
            engine=EngineConfig(url=engine_url or "", api_key=engine_api_key),
            train=TrainConfig(opd_top_k=top_k),
        )
        url = await stack.enter_async_context(serving(config))
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key=config.gateway.api_key or "-",
                             max_retries=0, timeout=20)  # fmt: skip
        stack.push_async_callback(client.close)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        journal = stack.enter_context(Journal.open(config.journal_path))
        yield World(url, engine, client, http, journal, config, tokenizer)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny tokenizer with a template that keeps everything."""
    return tiny_tokenizer(tmp_path_factory.mktemp("chatml"))


@pytest.fixture(scope="session")
def qwen_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny tokenizer with a template that drops old reasoning."""
    return tiny_tokenizer(tmp_path_factory.mktemp("qwen"), template=QWEN3_LIKE)


@pytest.fixture
async def served(tmp_path: Path, model: Path) -> AsyncIterator[World]:
    async with world(tmp_path, model) as made:
        yield made
