"""The one fake engine of all tests: SGLang's `/generate` subset with scripted tokens.

    async with FakeEngine(tokenizer=chat) as engine:      # chat: anything with encode(text) -> ids
        engine.say("Paris.")                              # or engine.replies.append([5, 6, 2])
        engine.faults.append(Fault(abort_after=2))        # one fault per request, in order
        ... talk to engine.url ...
        assert engine.requests[0].ids == prompt

- A reply comes from `reply_fn(request)`, else the queue `replies`, else `default_reply`.
- A request whose ids begin with the prompt of a broken-off request and the tokens it got goes on
  with the rest of that reply: the resume after an abort.
- Every token has a known log-prob (`logprob_of`), so that tests can check them one by one.
- `gated = True` holds every token until `allow(n)`; `wait_until(predicate)` awaits any state.
- Two URL prefixes as the embedded host has them: `url` (policy) and `url + "/base"`.

By hand: `python -m tests.fakes.engine --port 30000 --delay 0.02`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

EOS_ID = 2
"""`<|im_end|>` of the tiny tokenizer."""


@dataclass
class Fault:
    """What goes wrong with one request. All counts are tokens of that request."""

    abort_after: int | None = None
    """The engine ends it with finish_reason abort (a weight update)."""
    kill_after: int | None = None
    """The connection breaks after so many tokens, without an end."""
    status: int | None = None
    """Refused with this status and `message` instead of any token."""
    message: str = ""
    stream_error: str | None = None
    """Refused as SGLang does in streams: status 200, then `{"error": {"message": ...}}`."""
    abort_status: int | None = None
    """With `abort_after`: `status_code` beside the abort, as SGLang reports bad requests."""
    logprobs: str = "ok"
    """ok | missing | fewer | none (null, as engines write what is not finite) | shifted"""
    logprobs_from: int = 0
    """The lie about log-probs begins at this token."""
    ignore_budget: bool = False
    """No finish by length: the abort comes just when all tokens are there."""
    bump_version_at: int | None = None
    """The weights change in place before this token: tokens from here on carry version + 1."""


@dataclass
class Request:
    """One recorded `/generate` request and what became of it."""

    ids: list[int]
    sampling: dict[str, Any]
    body: dict[str, Any]
    headers: dict[str, str]
    base: bool
    rid: str
    reply: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    """Tokens made so far, that is, let through the gate."""
    written: int = 0
    """How many of them have been written to the client."""
    finish: dict[str, Any] | None = None
    aborted: bool = False
    """Asked to stop, by `/abort_request` or `FakeEngine.pause`."""
    disconnected: bool = False
    done: bool = False
    entries: list[str] = field(default_factory=list, repr=False)
    """`output_token_logprobs` as JSON texts, lies included."""


def logprob_of(token: int, position: int) -> float:
    """The fake's log-prob of a token at an absolute position; exact in float32."""
    return -(1 + (token * 7 + position * 3) % 127) / 64.0


def candidates_of(request: Request, token: int, position: int, k: int) -> list[tuple[float, int]]:
    """The fake's likeliest tokens in the place of `token`: it and the ids after it, each half a
    nat below the one before."""
    return [(logprob_of(token, position) - rank / 2, token + rank) for rank in range(k)]


NO_FOLDER = "/no/such"
"""Adapters are everywhere but below this path."""


class FakeEngine:
    """See the module. Every attribute may be changed while it runs."""

    owned_by = "sglang"
    """What it says that it is."""

    def __init__(
        self,
        *,
        tokenizer: Any = None,
        version: str = "0",
        cumulative: bool = True,
        delay: float = 0.0,
        context_length: int = 4096,
        default_reply: Sequence[int] = (101, 102, 103, EOS_ID),
        model_path: str = "fake-model",
    ) -> None:
        self.tokenizer = tokenizer
        self.version = version
        self.cumulative = cumulative
        self.delay = delay
        self.context_length = context_length
        self.default_reply = list(default_reply)
        self.model_path = model_path
        self.eos_ids: set[int] = {EOS_ID}
        self.replies: deque[list[int]] = deque()
        self.reply_fn: Callable[[Request], Sequence[int]] | None = None
        self.logprob: Callable[[int, int], float] = logprob_of
        self.candidates: Callable[[Request, int, int, int], list[tuple[float, int]]] | None
        self.candidates = candidates_of
        """What `top_logprobs_num` gives; None: an engine that ignores it."""
        self.faults: deque[Fault | None] = deque()
        self.requests: list[Request] = []
        self.aborts: list[str] = []
        self.gated = False
        self.paused = False
        self.healthy = True
        self.adapters: dict[str, str] = {}
        """Name to path. A restart forgets them."""
        self.unloaded: list[str] = []
        self.load_error: str | None = None
        """Why the next adapter cannot be loaded."""
        self.load_status = 400
        """The status beside it."""
        self.middlewares: list[Any] = []
        """What sees each request first, from the next start on."""
        self.slow_load = False
        """Adapters are never done loading."""
        self.chunk_bytes: int | None = None
        """Writes of at most so many bytes: events arrive in pieces."""
        self.tokens_per_chunk = 1
        self._permits = 0
        self._waiting = 0
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        self._port = 0
        self._live: dict[int, tuple[Request, web.Request]] = {}

    # --- scripting ---------------------------------------------------------------------------

    def say(self, text: str, *, end: bool = True) -> list[int]:
        """Queues the tokens of `text` (and the end token) as the next reply; returns them."""
        ids = list(self.tokenizer.encode(text)) + ([EOS_ID] if end else [])
        self.replies.append(ids)
        return ids

    async def allow(self, tokens: int = 1) -> None:
        """Lets so many more tokens through the gate (over all requests together)."""
        self._permits += tokens
        await self._notify()

    async def open_gate(self) -> None:
        self.gated = False
        await self._notify()

    async def wait_until(self, predicate: Callable[[], bool], seconds: float = 10.0) -> None:
        """Until `predicate()` holds; it is asked whenever the engine's state changes."""
        async with asyncio.timeout(seconds):
            await self._await(predicate)

    async def arrived(self, count: int) -> None:
        await self.wait_until(lambda: len(self.requests) >= count)

    async def update_weights(self, version: str) -> None:
        """As slime does it: abort what is under way, hold what arrives, load, go on."""
        under_way = [request for request, _ in self._live.values() if request.reply]
        await self.pause()
        # Not those that arrived since: they wait for the end of the pause, as in SGLang.
        await self.wait_until(lambda: all(request.done for request in under_way), 60.0)
        self.version = version
        await self.resume()

    async def pause(self) -> None:
        self.paused = True
        for request, _ in self._live.values():
            if request.reply:
                request.aborted = True
        await self._notify()

    async def resume(self) -> None:
        self.paused = False
        await self._notify()

    # --- life --------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self, port: int | None = None) -> None:
        """Listens; after `stop` on the same port again unless another is given."""
        app = web.Application(client_max_size=1 << 30, middlewares=self.middlewares)
        self._add_routes(app.router)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05)
        await self._runner.setup()
        wanted = self._port if port is None else port
        site = web.TCPSite(self._runner, "127.0.0.1", wanted, reuse_address=True)
        await site.start()
        addresses = self._runner.addresses
        self._port = addresses[0][1]

    def _add_routes(self, router: web.UrlDispatcher) -> None:
        for prefix in ("", "/base"):
            router.add_post(prefix + "/generate", self._generate)
            router.add_post(prefix + "/abort_request", self._abort)
            router.add_get(prefix + "/health", self._health)
            router.add_get(prefix + "/model_info", self._info)
        router.add_get("/v1/models", self._models)
        router.add_post("/load_lora_adapter", self._load_adapter)
        router.add_post("/unload_lora_adapter", self._unload_adapter)

    async def stop(self) -> None:
        """Dies at once: connections are reset, not ended."""
        self.adapters.clear()
        runner, self._runner = self._runner, None
        if runner is None:
            return
        for site in list(runner.sites):
            await site.stop()
        server = runner.server
        if server is not None:
            for connection in list(server.connections):
                transport = connection.transport
                if transport is not None:
                    transport.abort()
        await runner.cleanup()

    async def __aenter__(self) -> FakeEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # --- routes ------------------------------------------------------------------------------

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": self.model_path,
                "tokenizer_path": self.model_path,
                "is_generation": True,
                "weight_version": self._version_of(request.path.startswith("/base")),
                "context_length": self.context_length,
            }
        )

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        rid = body.get("rid", "")
        self.aborts.append(rid)
        for live, _ in self._live.values():
            if rid and live.rid.startswith(rid):  # prefix: as SGLang
                live.aborted = True
        await self._notify()
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        base = {
            "id": self.model_path,
            "root": self.model_path,
            "parent": None,
            "max_model_len": self.context_length,
            "owned_by": self.owned_by,
        }
        loaded = [
            {"id": name, "root": path, "parent": self.model_path, "owned_by": self.owned_by}
            for name, path in self.adapters.items()
        ]
        return web.json_response({"object": "list", "data": [base, *loaded]})

    async def _load_adapter(self, http: web.Request) -> web.Response:
        body = await http.json()
        if body["lora_path"].startswith(NO_FOLDER):
            error = f"No adapter found for {body['lora_path']}"
            return web.json_response({"error": {"message": error}}, status=404)
        await self._await(lambda: not self.slow_load)
        error, self.load_error = self.load_error, None
        if error is None and body["lora_name"] in self.adapters:
            error = f"The lora adapter '{body['lora_name']}' has already been loaded."
        if error is not None:
            return web.json_response({"error": {"message": error}}, status=self.load_status)
        self.adapters[body["lora_name"]] = body["lora_path"]
        await self._notify()
        return web.Response(text="Success")

    async def _unload_adapter(self, http: web.Request) -> web.Response:
        name = (await http.json())["lora_name"]
        if self.adapters.pop(name, None) is None:
            return web.json_response({"error": {"message": "no such adapter"}}, status=404)
        self.unloaded.append(name)
        await self._notify()
        return web.Response(text="Success")

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        return await self._take(http, await http.json())

    async def _take(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        request = Request(
            ids=list(body["input_ids"]),
            sampling=dict(body.get("sampling_params") or {}),
            body=body,
            headers={name.lower(): value for name, value in http.headers.items()},
            base=http.path.startswith("/base"),
            rid=body.get("rid") or f"fake-{len(self.requests)}",
        )
        self.requests.append(request)
        self._live[id(request)] = (request, http)
        await self._notify()
        try:
            return await self._serve(http, request)
        except (ConnectionError, asyncio.CancelledError):
            request.disconnected = True
            raise
        finally:
            request.done = True
            del self._live[id(request)]
            await asyncio.shield(self._notify())

    async def _serve(self, http: web.Request, request: Request) -> web.StreamResponse:
        fault = (self.faults.popleft() if self.faults else None) or Fault()
        budget = request.sampling.get("max_new_tokens", 128)
        if fault.status is not None:
            return web.json_response({"error": {"message": fault.message}}, status=fault.status)
        adapter = request.body.get("lora_path")
        error = fault.stream_error or self._too_long(len(request.ids), budget)
        if adapter is not None and adapter not in self.adapters:
            error = f"Got LoRA adapter that has never been loaded: {adapter}"
        if error and not request.body.get("stream"):
            return web.json_response({"error": {"message": error}}, status=400)
        if budget == 0:
            await self._await(lambda: not self.paused)
            answer = self._score(request)
            if fault.abort_after is not None:
                answer["meta_info"].update(finish_reason={"type": "abort"}, input_token_logprobs=[])
            return web.json_response(answer)
        if not request.body.get("stream"):
            events = [event async for event in self._events(request, fault, whole=True)]
            return web.Response(text=events[-1], content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        if error:
            await self._write(response, json.dumps({"error": {"message": error}}))
        else:
            async for event in self._events(request, fault, whole=False):
                if event is None:
                    assert http.transport is not None
                    await asyncio.sleep(0.02)  # what was written before shall arrive
                    http.transport.abort()
                    return response
                await self._write(response, event)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _write(self, response: web.StreamResponse, event: str) -> None:
        data = b"data: " + event.encode() + b"\n\n"
        step = self.chunk_bytes or len(data)
        for at in range(0, len(data), step):
            await response.write(data[at : at + step])
            if self.chunk_bytes:
                await asyncio.sleep(0)

    # --- tokens ------------------------------------------------------------------------------

    async def _events(
        self, request: Request, fault: Fault, whole: bool
    ) -> AsyncIterator[str | None]:
        await self._await(lambda: not self.paused or request.aborted)
        request.reply = self._reply_for(request)
        budget = request.sampling.get("max_new_tokens", 128)
        stops = self.eos_ids | set(request.sampling.get("stop_token_ids") or [])
        versions: list[str] = []
        shown = 0
        while request.finish is None:
            count = len(request.sent)
            if fault.kill_after is not None and count >= fault.kill_after:
                yield None  # killed
                return
            if request.aborted or (fault.abort_after is not None and count >= fault.abort_after):
                request.finish = {"type": "abort", "message": "Aborted"}
                if fault.abort_status:
                    request.finish["status_code"] = fault.abort_status
                    request.finish["message"] = fault.message
            elif count >= len(request.reply):
                request.finish = {"type": "stop", "matched": "<script ended>"}
            else:
                if not await self._pass_gate(request):
                    continue
                if fault.bump_version_at == count:
                    self.version = str(int(self.version) + 1)
                token = request.reply[count]
                request.entries.append(self._entry(request, fault, token))
                request.sent.append(token)
                versions.append(self._version_of(request.base))
                if token in stops and not request.sampling.get("ignore_eos"):
                    request.finish = {"type": "stop", "matched": token}
                elif len(request.sent) >= budget and not fault.ignore_budget:
                    request.finish = {"type": "length", "length": budget}
            interval = request.sampling.get("stream_interval") or self.tokens_per_chunk
            full = len(request.sent) - shown >= (interval if shown else 1)
            if request.finish is not None or (full and not whole):
                yield self._event(request, fault, shown, versions)
                request.written = shown = len(request.sent)
                await self._notify()

    async def _pass_gate(self, request: Request) -> bool:
        if self.delay:
            await asyncio.sleep(self.delay)
        await self._await(lambda: request.aborted or not self.gated or self._permits > 0)
        if request.aborted:
            return False
        if self.gated:
            self._permits -= 1
        return True

    def _event(self, request: Request, fault: Fault, shown: int, versions: list[str]) -> str:
        """The JSON of one event. Joined from texts: a benchmark must not wait for its fake."""
        sent = request.sent
        version = versions[-1] if versions else self._version_of(request.base)
        meta = (
            f'"id": {json.dumps(request.rid)}, "finish_reason": {json.dumps(request.finish)}, '
            f'"prompt_tokens": {len(request.ids)}, "completion_tokens": {len(sent)}, '
            f'"cached_tokens": {len(request.ids) // 2}, "weight_version": {json.dumps(version)}'
        )
        lie = fault.logprobs if len(sent) > fault.logprobs_from else "ok"
        start = 0 if self.cumulative else shown
        if request.body.get("return_logprob") and lie != "missing":
            entries = request.entries[start:]
            if lie == "fewer":
                entries = entries[:-1]
            meta += f', "output_token_logprobs": [{", ".join(entries)}]'
            if request.body.get("top_logprobs_num") and self.candidates is not None:
                at = len(request.ids) + start
                tops = self._tops(request, sent[start:], at)
                meta += f', "output_top_logprobs": {json.dumps(tops)}'
        ids = sent if self.cumulative else sent[shown:]
        return f'{{"text": "", "output_ids": {ids}, "meta_info": {{{meta}}}}}'

    def _entry(self, request: Request, fault: Fault, token: int) -> str:
        at = len(request.sent)
        value: float | None = self.logprob(token, len(request.ids) + at)
        if at >= fault.logprobs_from:
            if fault.logprobs == "shifted":
                token += 1
            value = None if fault.logprobs == "none" else value
        return json.dumps([value, token, None])

    def _tops(self, request: Request, ids: Sequence[int], at: int) -> list[Any]:
        assert self.candidates is not None
        k = request.body["top_logprobs_num"]
        return [
            [[value, other, None] for value, other in self.candidates(request, token, at + n, k)]
            for n, token in enumerate(ids)
        ]

    def _score(self, request: Request) -> dict[str, Any]:
        ids, start = request.ids, max(0, request.body.get("logprob_start_len") or 0)
        entries: list[list[Any]] = [
            [self.logprob(token, start + at), token, None] for at, token in enumerate(ids[start:])
        ]
        if entries:
            entries[0][0] = None  # SGLang never gives a value for the first one asked for
        request.finish = {"type": "length", "length": 0}
        meta = {
            "id": request.rid,
            "finish_reason": request.finish,
            "prompt_tokens": len(ids),
            "completion_tokens": 0,
            "cached_tokens": 0,
            "weight_version": self._version_of(request.base),
            "input_token_logprobs": entries,
            "output_token_logprobs": [],
        }
        if request.body.get("top_logprobs_num") and self.candidates is not None:
            meta["input_top_logprobs"] = self._tops(request, ids[start:], start)
            meta["input_top_logprobs"][:1] = [None]
        return {"text": "", "output_ids": [], "meta_info": meta}

    def _reply_for(self, request: Request) -> list[int]:
        for old in reversed(self.requests):
            head = len(old.ids)
            if old is request or not old.done or old.base != request.base or not old.reply:
                continue
            if old.finish is not None and old.finish["type"] != "abort":
                continue
            got = request.ids[head:]
            if request.ids[:head] == old.ids and got == old.reply[: len(got)]:
                return old.reply[len(got) :]
        if self.reply_fn is not None:
            return list(self.reply_fn(request))
        return self.replies.popleft() if self.replies else list(self.default_reply)

    def _too_long(self, prompt: int, budget: int) -> str | None:
        """SGLang's own two sentences."""
        limit = self.context_length
        if prompt >= limit:
            return (
                f"The input ({prompt} tokens) is longer than the model's context length "
                f"({limit} tokens)."
            )
        if prompt + budget > limit:
            return (
                "Requested token count exceeds the model's maximum context length of "
                f"{limit} tokens. You requested a total of {prompt + budget} tokens: {prompt} "
                f"tokens from the input messages and {budget} tokens for the completion."
            )
        return None

    def _version_of(self, base: bool) -> str:
        return "base" if base else self.version

    async def _await(self, predicate: Callable[[], bool]) -> None:
        if predicate():
            return
        self._waiting += 1
        try:
            async with self._changed:
                await self._changed.wait_for(predicate)
        finally:
            self._waiting -= 1

    async def _notify(self) -> None:
        if not self._waiting:
            return
        async with self._changed:
            self._changed.notify_all()


async def _main() -> None:
    parser = argparse.ArgumentParser(description="A fake engine with scripted tokens.")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds a token")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each reply")
    parser.add_argument("--incremental", action="store_true")
    options = parser.parse_args()
    engine = FakeEngine(
        delay=options.delay,
        cumulative=not options.incremental,
        default_reply=[71 + at % 26 for at in range(options.tokens - 1)] + [EOS_ID],  # a to z
        context_length=1 << 20,
    )
    await engine.start(options.port)
    print(f"fake engine on {engine.url}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
