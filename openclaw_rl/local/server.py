"""The embedded engine over HTTP: the part of SGLang's API that gateway, judge and teacher use.

Guarantees: it listens on the loopback and takes requests with its key only, so that neither
another user of the machine nor a web page in a browser here can use it. `/generate` is the policy,
`/base/generate` the same weights without the adapter; a client that goes away ends its request in
the engine; a refused request is HTTP 400 with `{"error": {"message": ...}}`. A stream is
incremental and says so (`meta_info.incremental`): each event has the new tokens only, all of one
weight version. A reply that is not streamed names the version of its last token.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from openclaw_rl.errors import EngineRefused, EngineUnavailable
from openclaw_rl.local.engine import BASE_VERSION, Chunk, EngineCore
from openclaw_rl.local.sampling import GenerateRequest, TokenScore

_MAX_BODY = 64 << 20  # a million token ids as JSON take about 8 MB
_NOTHING = Chunk(version="", cached_tokens=0)


@dataclass(slots=True)
class _Reply:
    """What one request was given and is not sent yet, in SGLang's form."""

    request: GenerateRequest
    tokens: list[TokenScore] = field(default_factory=list)
    made: int = 0
    last: Chunk = _NOTHING

    def add(self, chunk: Chunk) -> None:
        self.tokens += chunk.tokens
        self.made += len(chunk.tokens)
        self.last = chunk._replace(prompt=chunk.prompt or self.last.prompt)

    def body(self) -> bytes:
        """The reply with the output since the last call."""
        request, last = self.request, self.last
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": last.finish,
            "prompt_tokens": len(request.input_ids),
            "completion_tokens": self.made,
            "cached_tokens": last.cached_tokens,
            "weight_version": last.version,
            "incremental": request.stream,
        }
        for name, scores in (("input", last.prompt), ("output", self.tokens)):
            meta[f"{name}_token_logprobs"] = [[one.logprob, one.token] for one in scores]
            if request.top_logprobs_num:
                meta[f"{name}_top_logprobs"] = [one.top for one in scores]
        ids = [one.token for one in self.tokens]
        self.tokens = []
        return json.dumps({"output_ids": ids, "meta_info": meta}).encode()


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


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
        try:
            return await handler(request)
        except EngineRefused as error:
            return _error(error.status, str(error))
        except EngineUnavailable as error:
            return _error(503, str(error))

    return guard


class _Routes:
    """What is served under one prefix: the policy, or the base."""

    def __init__(self, core: EngineCore, policy: bool) -> None:
        self._core, self._policy = core, policy

    async def generate(self, http: web.Request) -> web.StreamResponse:
        request = GenerateRequest.read(await http.read())
        arrived: asyncio.Queue[Chunk] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def deliver(chunk: Chunk) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, chunk)

        self._core.submit(request, deliver, policy=self._policy)
        reply = _Reply(request)
        try:
            if request.stream:
                return await self._stream(http, reply, arrived)
            while reply.last.finish is None:
                reply.add(await arrived.get())
        finally:
            if reply.last.finish is None:  # the client went away, or the server stops
                self._core.abort(request.rid)
        if "status_code" in reply.last.finish:
            return _error(reply.last.finish["status_code"], reply.last.finish["message"])
        return web.Response(body=reply.body(), content_type="application/json")

    async def _stream(
        self, http: web.Request, reply: _Reply, arrived: asyncio.Queue[Chunk]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        interval = reply.request.sampling_params.stream_interval
        while reply.last.finish is None:
            chunk = await arrived.get()
            if reply.tokens and reply.last.version != chunk.version:
                await response.write(b"data: " + reply.body() + b"\n\n")
            reply.add(chunk)
            enough = len(reply.tokens) >= interval and arrived.empty()
            if enough or chunk.finish is not None:
                await response.write(b"data: " + reply.body() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def health(self, http: web.Request) -> web.Response:
        return web.Response(status=200 if self._core.alive else 503)

    async def model_info(self, http: web.Request) -> web.Response:
        running, waiting = self._core.load
        return web.json_response(
            {
                "model_path": self._core.model.path,
                "weight_version": self._core.version if self._policy else BASE_VERSION,
                "context_length": self._core.context_length,
                "num_running_reqs": running,
                "num_waiting_reqs": waiting,
            }
        )

    async def abort(self, http: web.Request) -> web.Response:
        try:
            rid = json.loads(await http.read())["rid"]
        except (ValueError, RecursionError, TypeError, KeyError):
            raise EngineRefused(400, "abort_request needs a rid") from None
        self._core.abort(rid)
        return web.Response()


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


async def serve_engine(core: EngineCore, port: int = 0, *, key: str | None = None) -> EngineServer:
    """Serves a started core on the loopback, in the running event loop. Port 0 takes a free one,
    key None makes one."""
    key = key or secrets.token_urlsafe()
    app = web.Application(client_max_size=_MAX_BODY, middlewares=[_guard(key)])
    for prefix in ("", "/base"):
        routes = _Routes(core, policy=not prefix)
        app.router.add_post(f"{prefix}/generate", routes.generate)
        app.router.add_post(f"{prefix}/abort_request", routes.abort)
        app.router.add_get(f"{prefix}/health", routes.health)
        app.router.add_get(f"{prefix}/model_info", routes.model_info)
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=2.0, keepalive_timeout=75
    )
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return EngineServer(f"http://127.0.0.1:{runner.addresses[0][1]}", key, runner)
