"""The embedded engine over HTTP: the part of SGLang's API that the gateway, the judge and slime's
own rollout functions use.

Guarantees: it listens on the loopback and takes requests with its key only, so that neither
another user of the machine nor a web page in a browser here can use it. `/generate` is the policy,
`/base/generate` the same weights without the adapter; a client that goes away ends its request in
the engine; a refused request is HTTP 400 with `{"error": {"message": ...}}`, worded like SGLang's
where clients look at the words. A stream is incremental: each event has the new tokens only, so
that a reply costs what it is long. For clients that know only SGLang's default,
`incremental_streaming_output=False` repeats the whole reply in each event (hundreds of megabytes
for 4,000 tokens).

Beyond SGLang: `meta_info.weight_versions` is a list of `[version, tokens]` runs over all output
tokens of the reply so far; `weight_version` is the newest token's; `meta_info.incremental` is true
in each event of an incremental stream, so that its reader need not guess.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from openclaw_rl.errors import EngineRefused, EngineUnavailable
from openclaw_rl.local.engine import EngineCore
from openclaw_rl.local.request import Chunk, GenerateRequest, TokenScore, parse_generate

_MAX_BODY = 64 << 20  # a million token ids as JSON take about 8 MB


def _pairs(scores: Iterable[TokenScore]) -> list[list[Any]]:
    return [[s.logprob, s.token, None] for s in scores]


def _tops(scores: Iterable[TokenScore]) -> list[list[list[Any]] | None]:
    return [[[p, i, None] for p, i in s.top] if s.top else None for s in scores]


@dataclass(slots=True)
class Reply:
    """The reply so far, in SGLang's form."""

    request: GenerateRequest
    scores: list[TokenScore] = field(default_factory=list)
    prompt: tuple[TokenScore, ...] = ()
    versions: list[list[Any]] = field(default_factory=list)
    version: str = ""
    cached_tokens: int = 0
    finish: dict[str, Any] | None = None

    def add(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            self.version = chunk.version
            self.cached_tokens = chunk.cached_tokens
            self.finish = chunk.finish
            if chunk.prompt is not None:
                self.prompt = chunk.prompt
            if chunk.tokens:
                self.scores.extend(chunk.tokens)
                if self.versions and self.versions[-1][0] == chunk.version:
                    self.versions[-1][1] += len(chunk.tokens)
                else:
                    self.versions.append([chunk.version, len(chunk.tokens)])

    def body(self, start: int = 0) -> dict[str, Any]:
        """The reply with output from token `start` on."""
        request, scores = self.request, self.scores[start:]
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": self.finish,
            "prompt_tokens": len(request.ids),
            "completion_tokens": len(self.scores),
            "cached_tokens": self.cached_tokens,
            "weight_version": self.version,
            "weight_versions": self.versions,
        }
        if request.return_logprob:
            meta["input_token_logprobs"] = _pairs(self.prompt)
            meta["output_token_logprobs"] = _pairs(scores)
            if request.top_logprobs:
                meta["input_top_logprobs"] = _tops(self.prompt)
                meta["output_top_logprobs"] = _tops(scores)
        return {"output_ids": [s.token for s in scores], "meta_info": meta}


class _Inbox:
    """The chunks of one request that were not taken yet."""

    def __init__(self) -> None:
        self.chunks: deque[Chunk] = deque()
        self.filled = asyncio.Event()

    def put(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.filled.set()

    async def take(self) -> list[Chunk]:
        """All that is there (at least one chunk), up to the next change of version."""
        await self.filled.wait()
        taken = [self.chunks.popleft()]
        while self.chunks and self.chunks[0].version == taken[0].version:
            taken.append(self.chunks.popleft())
        if not self.chunks:
            self.filled.clear()
        return taken


class _Mailbox:
    """Brings chunks from the engine thread into one event loop: one wake-up a step."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.inboxes: dict[str, _Inbox] = {}

    def open(self, rid: str) -> _Inbox:
        if rid in self.inboxes:
            raise EngineRefused(400, "a request with this rid is under way")
        self.inboxes[rid] = _Inbox()
        return self.inboxes[rid]

    def deliver(self, chunks: list[tuple[str, Chunk]]) -> None:
        self.loop.call_soon_threadsafe(self._sort, chunks)

    def _sort(self, chunks: list[tuple[str, Chunk]]) -> None:
        for rid, chunk in chunks:
            inbox = self.inboxes.get(rid)
            if inbox is not None:  # else nobody reads it any more
                inbox.put(chunk)


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def _status(finish: dict[str, Any] | None) -> int:
    return int((finish or {}).get("status_code", 200))


class _Routes:
    def __init__(self, core: EngineCore, incremental: bool) -> None:
        self.core = core
        self.incremental = incremental
        self.mailbox = _Mailbox()

    async def generate(self, http: web.Request) -> web.StreamResponse:
        policy = not http.path.startswith("/base/")
        try:
            body = json.loads(await http.read())
            request = parse_generate(body, policy=policy, vocab_size=self.core.model.vocab_size)
            inbox = self.mailbox.open(request.rid)
        except (ValueError, RecursionError, EngineRefused) as error:
            return _error(400, str(error))
        done = False
        try:
            self.core.submit(request, self.mailbox.deliver)
            reply = Reply(request)
            if request.stream:
                response = await self._stream(http, reply, inbox)
            else:
                while reply.finish is None:
                    reply.add(await inbox.take())
                status = _status(reply.finish)
                response = (
                    web.json_response(reply.body())
                    if status == 200
                    else _error(status, str((reply.finish or {}).get("message")))
                )
            done = True
            return response
        except EngineRefused as error:
            done = True
            return _error(error.status, str(error))
        except EngineUnavailable as error:
            done = True
            return _error(503, str(error))
        finally:
            self.mailbox.inboxes.pop(request.rid, None)
            if not done:  # the client went away, or the server stops
                self.core.abort(request.rid)

    async def _stream(self, http: web.Request, reply: Reply, inbox: _Inbox) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        sent = 0
        while reply.finish is None:
            reply.add(await inbox.take())
            body = reply.body(sent if self.incremental else 0)
            if self.incremental:
                body["meta_info"]["incremental"] = True
            sent = len(reply.scores)
            await response.write(b"data: " + json.dumps(body).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def health(self, http: web.Request) -> web.Response:
        return web.Response(status=200 if self.core.alive else 503)

    async def model_info(self, http: web.Request) -> web.Response:
        base = http.path.startswith("/base/")
        running, waiting = self.core.load
        return web.json_response(
            {
                "model_path": self.core.model.path,
                "tokenizer_path": self.core.model.path,
                "is_generation": True,
                "weight_version": "base" if base else self.core.version,
                "context_length": self.core.context_length,
                "vocab_size": self.core.model.vocab_size,
                "num_running_reqs": running,
                "num_waiting_reqs": waiting,
            }
        )

    async def abort(self, http: web.Request) -> web.Response:
        body = await _object(http)
        rid = body.get("rid")
        if not isinstance(rid, str) or not rid:
            return _error(400, "abort_request needs a rid")
        self.core.abort(rid)
        return web.Response(status=200)


async def _object(http: web.Request) -> dict[str, Any]:
    """A JSON object body; an empty or other body counts as an empty one."""
    try:
        body = json.loads(await http.read() or b"{}")
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _guard(key: str) -> Middleware:
    """Refuses whoever does not send the key, which no web page knows. `/health` tells anybody that
    the engine lives, as SGLang's does (a router asks without a key)."""
    wanted = f"Bearer {key}".encode()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        sent = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        health = request.path.endswith("/health")
        if not health and not hmac.compare_digest(sent, wanted):
            return _error(401, "this engine takes requests with its key only")
        return await handler(request)

    return guard


def _app(core: EngineCore, key: str, incremental: bool) -> web.Application:
    routes = _Routes(core, incremental)
    app = web.Application(client_max_size=_MAX_BODY, middlewares=[_guard(key)])
    for prefix in ("", "/base"):
        app.router.add_post(f"{prefix}/generate", routes.generate)
        app.router.add_get(f"{prefix}/health", routes.health)
        app.router.add_get(f"{prefix}/model_info", routes.model_info)
        app.router.add_post(f"{prefix}/abort_request", routes.abort)
    return app


@dataclass(slots=True)
class EngineServer:
    """A running server. `url` is the policy, `base_url` the bare base model; a request carries
    `key` as a bearer token."""

    url: str
    key: str
    runner: web.AppRunner

    @property
    def base_url(self) -> str:
        return f"{self.url}/base"

    async def close(self) -> None:
        await self.runner.cleanup()


async def serve_engine(
    core: EngineCore,
    port: int = 0,
    *,
    key: str | None = None,
    incremental_streaming_output: bool = True,
) -> EngineServer:
    """Serves a started core on the loopback, in the running event loop. Port 0 takes a free one,
    key None makes one."""
    key = key or secrets.token_urlsafe()
    app = _app(core, key, incremental_streaming_output)
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=2.0, keepalive_timeout=75
    )
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    sockets = site._server.sockets  # type: ignore[union-attr]
    bound = sockets[0].getsockname()[1]
    return EngineServer(f"http://127.0.0.1:{bound}", key, runner)
