"""The HTTP service: thin routes over `core.Gateway`, and its life from start to graceful end.

await run(config)                           # until SIGINT or SIGTERM
async with serving(config) as url: ...      # in the same process (tests, benchmarks)

Nothing here repeats what clients sent into a log or an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import signal
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Literal

from aiohttp import web
from pydantic import Field as Bounds

from openclaw_rl import __version__
from openclaw_rl.config import Config
from openclaw_rl.errors import (
    ContextOverflow,
    EngineError,
    EngineRefused,
    EngineUnavailable,
    JournalError,
)
from openclaw_rl.gateway.access import Caller, caller_of, from_a_website, read_body
from openclaw_rl.gateway.core import Gateway, open_gateway
from openclaw_rl.gateway.replies import ClientGone, Shown, StreamedReply, whole_reply
from openclaw_rl.gateway.status import training_gauges, warnings
from openclaw_rl.wire.anthropic import MESSAGES, parse_count_request
from openclaw_rl.wire.chat import CHAT
from openclaw_rl.wire.dialect import (
    Body,
    Dialect,
    TokenLogprob,
    WireError,
    invalid,
    prompt_too_long,
    read_object,
    turn_of_reply,
    unavailable,
)
from openclaw_rl.wire.reply import ReplyEvent

log = logging.getLogger("openclaw_rl.gateway")
http_log = logging.getLogger("openclaw_rl.gateway.http")
"""For aiohttp's own lines."""

GATEWAY = web.AppKey("gateway", Gateway)
CALLER: web.RequestKey[Caller] = web.RequestKey("caller", Caller)

DIALECTS = {"/v1/chat/completions": CHAT, "/v1/messages": MESSAGES}
SHUTDOWN_SECONDS = 5.0
"""How long replies under way may go on after the gateway was told to stop."""
SWITCH_SECONDS = 0.0005
"""How long a thread (tokenizer, journal) waits for the busy event loop to let it go on. Python's
5 ms, once for each statement of SQLite's, would be most of a reply's commit under load."""
_TELL_SECONDS = 1.0
"""Time to tell clients that their reply was ended, before their connections are closed."""
_RETRY_AFTER = {429: "1", 503: "5"}
"""Seconds after which trying again makes sense."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def serving(config: Config) -> AsyncIterator[str]:
    """Serve while the block runs; gives the base URL. Port 0 takes any free port.

    Leaving the block stops accepting, lets replies under way finish for up to `SHUTDOWN_SECONDS`,
    ends the others with an error, and closes the journal after the last commit.
    """
    async with open_gateway(config) as gateway:
        runner = web.AppRunner(
            _application(gateway),
            handler_cancellation=True,  # a client that leaves cancels its handler
            shutdown_timeout=SHUTDOWN_SECONDS + _TELL_SECONDS,
            access_log=None,
            logger=http_log,
        )
        await runner.setup()
        try:
            site = web.TCPSite(runner, config.gateway.host, config.gateway.port, reuse_address=True)
            await site.start()
            port = runner.addresses[0][1]
            yield config.gateway.model_copy(update={"port": port}).url
        finally:
            gateway.grace.end_in(SHUTDOWN_SECONDS)
            await runner.cleanup()


def _application(gateway: Gateway) -> web.Application:
    app = web.Application(
        client_max_size=int(gateway.config.gateway.max_body_mb * 2**20),
        middlewares=[_answer_errors, _check_key],
    )
    app[GATEWAY] = gateway
    for path, dialect in DIALECTS.items():
        app.router.add_post(path, partial(_reply, dialect=dialect))
    app.router.add_post("/v1/messages/count_tokens", _count_tokens)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/v1/models/{name:.+}", _models)
    app.router.add_post("/v1/feedback", _feedback)
    app.router.add_post("/v1/sessions/{session_id:.+}/end", _end_session)
    app.router.add_get("/healthz", _health)
    app.router.add_get("/metrics", _metrics)
    return app


async def run(
    config: Config,
    stop: asyncio.Event | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM (or until `stop` is set). `on_ready` gets the base URL."""
    stop = stop or asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, RuntimeError):  # not in a thread of a host
            loop.add_signal_handler(number, stop.set)
    async with serving(config) as url:
        # What was imported and loaded stays: scanning it again and again would stall every stream.
        gc.collect()
        gc.freeze()
        sys.setswitchinterval(SWITCH_SECONDS)
        log.info("gateway %s: model %s at %s/v1", __version__, config.served_name, url)
        if on_ready is not None:
            on_ready(url)
        await stop.wait()
        log.info("stopping: replies under way have %.0f s", SHUTDOWN_SECONDS)


# -- around every route ----------------------------------------------------------------------------


@web.middleware
async def _check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    api_key = request.app[GATEWAY].config.gateway.api_key
    caller = caller_of(request.headers, api_key)
    if caller is None:
        if request.path != "/healthz":  # a monitor needs no more than states and counts
            raise WireError(401, "a valid API key is required", code="invalid_api_key")
        caller = Caller("")
    elif not api_key and from_a_website(request.headers):
        raise WireError(
            403,
            "web pages may not call a gateway that has no key: set OPENCLAW_RL_API_KEY",
            code="origin_refused",
        )
    request[CALLER] = caller
    return await handler(request)


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    status = 499  # nginx's word for a client that left
    try:
        response = await handler(request)
        status = response.status
        return response
    except ClientGone:
        return web.Response(status=status)  # nobody is there to read it
    except Exception as failed:
        error = _told(failed)
        # In Anthropic's words on its routes and to its clients.
        own = request.path.startswith("/v1/messages") or "anthropic-version" in request.headers
        dialect = MESSAGES if own else CHAT
        status = dialect.error_status(error)
        response = web.json_response(dialect.error_body(error), status=status)
        if error.status in _RETRY_AFTER:
            response.headers["Retry-After"] = _RETRY_AFTER[error.status]
        if error.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        if isinstance(failed, web.HTTPMethodNotAllowed):
            response.headers["Allow"] = failed.headers["Allow"]
        return response
    finally:
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "none"
        request.app[GATEWAY].metrics.requests.labels(route, str(status)).inc()


def _told(error: Exception) -> WireError:
    """What the client is told about `error`: the one table of all that can go wrong."""
    match error:
        case WireError():
            return error
        case ContextOverflow():
            return prompt_too_long(error.prompt_tokens, error.limit)
        case EngineRefused():
            status = error.status if 400 <= error.status < 500 else 400
            return WireError(status, str(error), code="engine_refused")
        case EngineUnavailable():
            return unavailable(f"the engine is unavailable: {error}")
        case EngineError():
            return WireError(502, str(error), code="engine_error")
        case JournalError():
            return unavailable(str(error), code="journal_unavailable")
        case web.HTTPRequestEntityTooLarge():
            # aiohttp says it in words only: "Maximum request body size N exceeded, ..."
            numbers = [int(word) for word in (error.text or "").split() if word.isdigit()]
            limit = numbers[0] if numbers else 0
            message = f"the request body is larger than {limit} bytes"
            return WireError(413, message, code="request_too_large")
        case web.HTTPNotFound():
            routes = " and ".join(f"POST {path}" for path in DIALECTS)
            return WireError(404, f"there is no such route; try {routes}", code="not_found")
        case web.HTTPMethodNotAllowed():
            return WireError(405, "this route does not take this method", code="method_not_allowed")
        case web.HTTPException():
            return WireError(error.status, error.reason)
        case web.RequestPayloadError():
            return invalid(None, "the body cannot be read: it is not encoded as its headers say")
        case RecursionError():
            return invalid(None, "the request is nested too deeply")
    frames = traceback.extract_tb(error.__traceback__)[-6:]  # its message may hold what was said
    where = " < ".join(f"{frame.filename}:{frame.lineno}" for frame in reversed(frames))
    log.error("unexpected %s at %s", type(error).__name__, where)
    return WireError(500, "internal error", code="internal_error")


def _types_only(record: logging.LogRecord) -> bool:
    """aiohttp logs what it cannot read byte for byte, keys and conversations among it."""
    if record.exc_info and record.exc_info[1] is not None:
        record.msg, record.args = f"{record.getMessage()}: {type(record.exc_info[1]).__name__}", ()
        record.exc_info = record.exc_text = None
    return True


http_log.addFilter(_types_only)


# -- replies ---------------------------------------------------------------------------------------


async def _reply(request: web.Request, dialect: Dialect) -> web.StreamResponse:
    gateway = request.app[GATEWAY]
    body = await read_body(request, gateway.bodies)
    with gateway.inflight.slot():
        chat = dialect.parse(body)
        if chat.ignored:
            log.info("ignored keys: %s", ", ".join(ascii(name[:40]) for name in chat.ignored[:20]))
        turn = await gateway.begin(chat, request[CALLER], _headers(request), len(body))
        if chat.stream:
            keepalive = gateway.config.gateway.keepalive_seconds
            return await _stream(request, StreamedReply(request, turn, dialect, keepalive))
        events: list[ReplyEvent] = []
        logprobs: list[TokenLogprob] = []

        async def keep(shown: Shown) -> None:
            events.extend(shown[0])
            logprobs.extend(shown[1] or ())

        await gateway.generate(turn, keep)
        return whole_reply(turn, dialect, events, logprobs)


async def _stream(request: web.Request, reply: StreamedReply) -> web.StreamResponse:
    keep_alive = asyncio.ensure_future(reply.keep_alive())
    error: Exception | None = None
    try:
        await request.app[GATEWAY].generate(reply.turn, reply.show)
    except ClientGone:
        raise
    except Exception as failed:
        error = failed
    finally:
        keep_alive.cancel()
    await asyncio.wait([keep_alive])  # nothing of it may follow the end
    if error is None:
        return await reply.end()
    if not reply.began:
        raise error
    return await reply.end(_told(error))


async def _count_tokens(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    body = await read_body(request, gateway.bodies)
    with gateway.inflight.slot():
        chat = parse_count_request(body)
        count = await gateway.count(chat, request[CALLER], _headers(request), len(body))
        return web.json_response({"input_tokens": count})


def _headers(request: web.Request) -> dict[str, str]:
    return {name.lower(): value for name, value in request.headers.items()}


# -- the other routes ------------------------------------------------------------------------------


async def _models(request: web.Request) -> web.Response:
    """The one model, listed or by name, with the keys of both APIs and the limits that clients
    keep within (named as vLLM, OpenRouter and Anthropic do). When it was made is not known."""
    gateway = request.app[GATEWAY]
    name, context = gateway.config.served_name, gateway.context_length
    longest = min(gateway.config.gateway.max_tokens, context)
    entry = {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "openclaw-rl",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
        "max_model_len": context,
        "max_completion_tokens": longest,
        "max_input_tokens": context,
        "max_tokens": longest,
    }
    asked = request.match_info.get("name")
    if asked is None:
        page = {"has_more": False, "first_id": name, "last_id": name}
        return web.json_response({"object": "list", "data": [entry], **page})
    if asked != name:
        raise WireError(404, f"the served model is {name}", code="model_not_found")
    return web.json_response(entry)


class _Feedback(Body):
    """A thumb, a score or words about a reply."""

    turn_id: str = ""
    session_id: str = ""
    text: str = ""
    score: float | None = Bounds(None, ge=-1, le=1)
    thumb: Literal["up", "down"] | None = None


async def _feedback(request: web.Request) -> web.Response:
    """A thumb, a score or words about a turn, as its next state."""
    gateway = request.app[GATEWAY]
    said = _Feedback.read(read_object(await read_body(request, gateway.bodies)))
    if bool(said.turn_id) == bool(said.session_id):
        raise invalid("turn_id", "give either turn_id or session_id")
    if said.score is None and said.thumb is None and not said.text:
        raise invalid(None, "give at least one of score, thumb and text")
    turn_id = await gateway.feedback(
        {"role": "feedback", "thumb": said.thumb, "score": said.score, "content": said.text},
        request[CALLER],
        turn_of_reply(said.turn_id) or None,
        said.session_id,
    )
    return web.json_response({"object": "feedback", "turn_id": turn_id, "accepted": True})


async def _end_session(request: web.Request) -> web.Response:
    """The session is over: its last turn need not wait for a next state."""
    session_id = request.match_info["session_id"]
    await request.app[GATEWAY].end_session(session_id, request[CALLER])
    return web.json_response({"object": "session", "session_id": session_id, "ended": True})


async def _health(request: web.Request) -> web.Response:
    """The state of everything, for people and monitors: 200 as long as the gateway serves, what is
    not well is said in the body."""
    gateway = request.app[GATEWAY]
    engine, counts = await gateway.engine_state(), await gateway.counts()
    journal_ok = gateway.journal_error is None and counts is not None
    return web.json_response(
        {
            "status": "ok",
            "version": __version__,
            "model": gateway.config.served_name,
            "reply_format": gateway.reply_format.name,
            "uptime_seconds": round(time.monotonic() - gateway.started, 1),
            "engine": {"state": engine, "weight_version": gateway.endpoint.weight_version()},
            "journal": {
                "state": "ok" if journal_ok else "failing",
                "failed_writes": gateway.failed_writes,
            },
            "requests": {
                "inflight": gateway.inflight.now,
                "waiting_for_engine": len(gateway.waiting),
            },
            "turns": None if counts is None else dataclasses.asdict(counts),
            "warnings": list(warnings(counts, engine, journal_ok)),
        }
    )


async def _metrics(request: web.Request) -> web.Response:
    """Prometheus' text format."""
    gateway = request.app[GATEWAY]
    gauges = {
        "inflight": gateway.inflight.now,
        "waiting_for_engine": len(gateway.waiting),
        **gateway.prompts.gauges,
        **await asyncio.to_thread(training_gauges, gateway.config.journal_path),
    }
    text = gateway.metrics.text(gauges, await gateway.counts(), await gateway.trainer())
    return web.Response(
        body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    )
