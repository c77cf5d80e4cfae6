"""Stands between OpenClaw and the gateway: records every request, breaks replies on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web


@dataclass
class Seen:
    """One request of OpenClaw, and the turn that the gateway made of it."""

    path: str
    headers: Mapping[str, str]
    body: Any
    status: int = 0
    turn_id: str | None = None

    @property
    def last_text(self) -> str:
        """Text of the last message, OpenClaw's own transient ones left out."""
        texts = map(text_of, reversed(self.body["messages"]))
        return next(text for text in texts if not text.startswith("<<<BEGIN_OPENCLAW"))

    @property
    def is_heartbeat(self) -> bool:
        """Whether OpenClaw asks of its own accord."""
        words = ("Read HEARTBEAT.md if it exists", "Follow the heartbeat monitor")
        return any(
            word in text_of(message)
            for message in self.body["messages"]
            if message["role"] == "user"
            for word in words
        )


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message, whichever form it has."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or ())


@dataclass
class Wire:
    """A proxy to `upstream`, which may change at any time.

    A chat request whose last message contains one of `break_once` reaches the gateway, but its
    answer is lost: OpenClaw gets a 500, once.
    """

    upstream: str
    seen: list[Seen] = field(default_factory=list)
    break_once: list[str] = field(default_factory=list)

    async def until(self, predicate: Callable[[], bool], seconds: float = 120) -> None:
        """Until `predicate()` holds; it is asked after each request."""
        async with asyncio.timeout(seconds), self._answered:
            await self._answered.wait_for(predicate)

    async def __aenter__(self) -> Wire:
        self._answered = asyncio.Condition()
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120))
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._http.close()

    @property
    def chats(self) -> list[Seen]:
        """The model requests."""
        return [one for one in self.seen if one.path.endswith("/chat/completions")]

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        chat = request.path.endswith("/chat/completions")
        headers = {name.lower(): value for name, value in request.headers.items()}
        seen = Seen(request.path, headers, await request.json() if chat else None)
        self.seen.append(seen)
        try:
            return await self._forward(request, raw, seen)
        finally:
            async with self._answered:
                self._answered.notify_all()

    async def _forward(self, request: web.Request, raw: bytes, seen: Seen) -> web.StreamResponse:
        chat = seen.body is not None
        kept = {k: v for k, v in seen.headers.items() if k not in ("host", "content-length")}
        async with self._http.request(
            request.method, self.upstream + request.raw_path, data=raw, headers=kept
        ) as answer:
            seen.status, seen.turn_id = answer.status, answer.headers.get("X-Turn-Id")
            if chat and (broken := next((b for b in self.break_once if b in seen.last_text), None)):
                self.break_once.remove(broken)
                await answer.read()
                seen.status = 500
                return web.json_response({"error": {"message": "lost"}}, status=500)
            response = web.StreamResponse(
                status=answer.status, headers={"Content-Type": answer.content_type}
            )
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response
