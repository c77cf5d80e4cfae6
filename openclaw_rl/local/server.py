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

    def event(self) -> bytes:
        return b"data: " + self.body() + b"\n\n"


class EngineServer:
    """A running server. `url` is the policy, `base_url` the bare base model; a request carries
    `key` as a bearer token. Make it with `serve_engine`."""

    def __init__(self, core: EngineCore, key: str) -> None:
        self.key, self.url = key, ""
        self._core = core
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[self._guard()])
        for prefix in ("", "/base"):
            app.router.add_post(f"{prefix}/generate", self._generate)
            app.router.add_post(f"{prefix}/abort_request", self._abort)
            app.router.add_get(f"{prefix}/health", self._health)
            app.router.add_get(f"{prefix}/model_info", self._model_info)
        self.runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=2.0,
            keepalive_timeout=75,
        )

    @property
    def base_url(self) -> str:
        return f"{self.url}/base"

    async def close(self) -> None:
        await self.runner.cleanup()

    def _guard(self) -> Middleware:
        """Refuses whoever does not send the key, which no web page knows. `/health` tells anybody
        that the engine lives, as SGLang's does (a router asks without a key)."""
        wanted = f"Bearer {self.key}".encode()

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            sent = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not request.path.endswith("/health") and not hmac.compare_digest(sent, wanted):
                return _error(401, "this engine takes requests with its key only")
            try:
                return await handler(request)
            except EngineRefused as error:
                return _error(error.status, str(error))
            except EngineUnavailable as error:
                return _error(503, str(error))

        return guard

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        reply = _Reply(GenerateRequest.read(await http.read()))
        arrived: asyncio.Queue[Chunk] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def deliver(chunk: Chunk) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, chunk)

        self._core.submit(reply.request, deliver, policy=_is_policy(http))
        try:
            if reply.request.stream:
                return await _stream(http, reply, arrived)
            while reply.last.finish is None:
                reply.add(await arrived.get())
        finally:
            if reply.last.finish is None:  # the client went away, or the server stops
                self._core.abort(reply.request.rid)
        if "status_code" in reply.last.finish:
            return _error(reply.last.finish["status_code"], reply.last.finish["message"])
        return web.Response(body=reply.body(), content_type="application/json")

    async def _abort(self, http: web.Request) -> web.Response:
        try:
            rid = json.loads(await http.read())["rid"]
        except (ValueError, RecursionError, TypeError, KeyError):
            raise EngineRefused(400, "abort_request needs a rid") from None
        self._core.abort(rid)
        return web.Response()

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response(status=200 if self._core.alive else 503)

    async def _model_info(self, http: web.Request) -> web.Response:
        info = {
            "model_path": self._core.model.path,
            "weight_version": self._core.version if _is_policy(http) else BASE_VERSION,
            "context_length": self._core.context_length,
            "num_running_reqs": self._core.load[0],
        }
        return web.json_response(info)


async def serve_engine(core: EngineCore, port: int = 0, *, key: str | None = None) -> EngineServer:
    """Serves a started core on the loopback, in the running event loop. Port 0 takes a free one,
    key None makes one."""
    server = EngineServer(core, key or secrets.token_urlsafe())
    await server.runner.setup()
    await web.TCPSite(server.runner, "127.0.0.1", port).start()
    server.url = f"http://127.0.0.1:{server.runner.addresses[0][1]}"
    return server


async def _stream(
    http: web.Request, reply: _Reply, arrived: asyncio.Queue[Chunk]
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(http)
    interval = reply.request.sampling_params.stream_interval
    while reply.last.finish is None:
        chunk = await arrived.get()
        if reply.tokens and reply.last.version != chunk.version:
            await response.write(reply.event())
        reply.add(chunk)
        if chunk.finish is not None or (len(reply.tokens) >= interval and arrived.empty()):
            await response.write(reply.event())
    await response.write(b"data: [DONE]\n\n")
    return response


def _is_policy(http: web.Request) -> bool:
    return not http.path.startswith("/base/")


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)
