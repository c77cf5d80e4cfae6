"""The HTTP service: thin routes over `core.Gateway`, and its life from start to graceful end.

await run(config)                           # until SIGINT or SIGTERM
async with serving(config) as url: ...      # in the same process (tests, benchmarks)
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web

from openclaw_rl import __version__
from openclaw_rl.config import Config
from openclaw_rl.gateway.access import Auth, Caller, Grace, Limit, from_a_website, read_body
from openclaw_rl.gateway.core import ClientGone, Gateway, open_gateway
from openclaw_rl.gateway.feedback import parse_feedback
from openclaw_rl.gateway.replies import StreamedReply, error_response, to_wire, whole_reply
from openclaw_rl.gateway.status import journal_gauges, mismatch_gauges, warnings
from openclaw_rl.gateway.turn import OpenTurn, Shown
from openclaw_rl.wire.anthropic import MESSAGES, parse_count_request
from openclaw_rl.wire.chat import CHAT
from openclaw_rl.wire.dialect import Dialect, TokenLogprob
from openclaw_rl.wire.errors import WireError, unauthorized
from openclaw_rl.wire.reply import ReplyEvent

log = logging.getLogger("openclaw_rl.gateway")
http_log = logging.getLogger("openclaw_rl.gateway.http")
"""For aiohttp's own lines."""

CONFIG = web.AppKey("config", Config)
GATEWAY = web.AppKey("gateway", Gateway)
AUTH = web.AppKey("auth", Auth)
GRACE = web.AppKey("grace", Grace)
BODIES = web.AppKey("bodies", Limit)
CALLER: web.RequestKey[Caller] = web.RequestKey("caller", Caller)

MAX_BODIES = 512
"""Requests that may be sending their bodies; `max_inflight` counts those that have sent it."""
SHUTDOWN_SECONDS = 5.0
"""How long replies under way may go on after the gateway was told to stop."""
SWITCH_SECONDS = 0.0005
"""How long a thread (tokenizer, journal) waits for the busy event loop to let it go on. Python's
5 ms, once for each statement of SQLite's, would be most of a reply's commit under load."""
_TELL_SECONDS = 1.0
"""Time to tell clients that their reply was ended, before their connections are closed."""

OPEN_ROUTES = frozenset({"/healthz"})
"""Reachable without a key: a monitor needs no more than states and counts."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(config: Config) -> web.Application:
    """The application. It opens journal, tokenizer and connections when it starts."""
    app = web.Application(
        client_max_size=int(config.gateway.max_body_mb * 2**20),
        middlewares=[_answer_errors, _check_key],
    )
    app[CONFIG] = config
    app[AUTH] = Auth(config.gateway.api_key)
    app[GRACE] = Grace()
    app[BODIES] = Limit(MAX_BODIES)
    app.cleanup_ctx.append(_gateway)
    app.router.add_post("/v1/chat/completions", chat_completions)
    app.router.add_post("/v1/messages", messages)
    app.router.add_post("/v1/messages/count_tokens", count_tokens)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{name:.+}", model)
    app.router.add_post("/v1/feedback", feedback)
    app.router.add_post("/v1/sessions/{session_id:.+}/end", end_session)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/metrics", metrics)
    return app


@contextlib.asynccontextmanager
async def serving(config: Config) -> AsyncIterator[str]:
    """Serve while the block runs; gives the base URL. Port 0 takes any free port.

    Leaving the block stops accepting, lets replies under way finish for up to `SHUTDOWN_SECONDS`,
    ends the others with an error, and closes the journal after the last commit.
    """
    app = make_app(config)
    runner = web.AppRunner(
        app,
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
        app[GRACE].end_in(SHUTDOWN_SECONDS)
        await runner.cleanup()


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
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    status = 500
    try:
        response = await handler(request)
        status = response.status
        return response
    except ClientGone:
        status = 499  # nginx's word for it; nobody is there to read it
        return web.Response(status=499)
    except asyncio.CancelledError:
        status = 499
        raise
    except Exception as error:
        response = error_response(to_wire(error), _dialect(request))
        status = response.status
        if isinstance(error, web.HTTPMethodNotAllowed):
            response.headers["Allow"] = error.headers["Allow"]
        return response
    finally:
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "none"
        request.app[GATEWAY].metrics.requests.labels(route, str(status)).inc()


@web.middleware
async def _check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    caller = request.app[AUTH].caller(request.headers)
    if caller is None:
        if request.path not in OPEN_ROUTES:
            raise unauthorized()
        caller = Caller("")
    elif not request.app[CONFIG].gateway.api_key and from_a_website(request.headers):
        raise WireError(
            403,
            "web pages may not speak to a gateway without a key: set OPENCLAW_RL_API_KEY",
            code="origin_refused",
        )
    request[CALLER] = caller
    return await handler(request)


async def _gateway(app: web.Application) -> AsyncIterator[None]:
    async with open_gateway(app[CONFIG]) as gateway:
        app[GATEWAY] = gateway
        yield


class _TypesOnly(logging.Filter):
    """aiohttp logs what it cannot read byte for byte, keys and conversations among it."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            record.msg, record.args = f"{record.getMessage()}: {type(error).__name__}", ()
            record.exc_info = record.exc_text = None
        return True


http_log.addFilter(_TypesOnly())


# -- routes ----------------------------------------------------------------------------------------


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """OpenAI's Chat Completions, streamed or not."""
    return await _reply(request, CHAT)


async def messages(request: web.Request) -> web.StreamResponse:
    """Anthropic's Messages, streamed or not."""
    return await _reply(request, MESSAGES)


async def count_tokens(request: web.Request) -> web.Response:
    """How many tokens the prompt of a Messages request has."""
    gateway = request.app[GATEWAY]
    body = await read_body(request, request.app[BODIES])
    with gateway.inflight.slot():
        chat = parse_count_request(body)
        count = await gateway.count(chat, request[CALLER], _headers(request), len(body))
        return web.json_response({"input_tokens": count})


async def _reply(request: web.Request, dialect: Dialect) -> web.StreamResponse:
    gateway = request.app[GATEWAY]
    body = await read_body(request, request.app[BODIES])
    with gateway.inflight.slot():
        chat = dialect.parse(body)
        if chat.ignored:
            log.info("ignored keys: %s", ", ".join(ascii(name[:40]) for name in chat.ignored[:20]))
        turn = await gateway.begin(chat, request[CALLER], _headers(request), len(body))
        if chat.stream:
            return await _stream(request, turn, dialect)
        events: list[ReplyEvent] = []
        logprobs: list[TokenLogprob] = []

        async def keep(shown: Shown) -> None:
            events.extend(shown[0])
            logprobs.extend(shown[1] or ())

        async with request.app[GRACE].reply():
            await gateway.run(turn, keep)
        return whole_reply(turn, dialect, events, logprobs)


async def _stream(request: web.Request, turn: OpenTurn, dialect: Dialect) -> web.StreamResponse:
    reply = StreamedReply(request, turn, dialect, request.app[CONFIG].gateway.keepalive_seconds)
    keep_alive = asyncio.ensure_future(reply.keep_alive())
    error: Exception | None = None
    try:
        async with request.app[GRACE].reply():
            await request.app[GATEWAY].run(turn, reply.show)
    except ClientGone:
        raise
    except Exception as failed:
        error = failed
    finally:
        keep_alive.cancel()
    await asyncio.wait([keep_alive])  # nothing of it may follow the end
    if error is None:
        return await reply.finish()
    if reply.response is None:
        raise error
    return await reply.fail(to_wire(error))


async def models(request: web.Request) -> web.Response:
    """The one model that is served, in a form that both SDKs read."""
    entry = _model(request.app[GATEWAY])
    name = entry["id"]
    page = {"has_more": False, "first_id": name, "last_id": name}
    return web.json_response({"object": "list", "data": [entry], **page})


async def model(request: web.Request) -> web.Response:
    """One model by name."""
    entry = _model(request.app[GATEWAY])
    if request.match_info["name"] != entry["id"]:
        raise WireError(404, f"the served model is {entry['id']}", code="model_not_found")
    return web.json_response(entry)


async def feedback(request: web.Request) -> web.Response:
    """A thumb, a score or words about a turn, as its next state."""
    given = parse_feedback(await read_body(request, request.app[BODIES]))
    turn_id = await request.app[GATEWAY].feedback(given, request[CALLER])
    return web.json_response({"object": "feedback", "turn_id": turn_id, "accepted": True})


async def end_session(request: web.Request) -> web.Response:
    """The session is over: its last turn need not wait for a next state."""
    session_id = request.match_info["session_id"]
    await request.app[GATEWAY].end_session(session_id, request[CALLER])
    return web.json_response({"object": "session", "session_id": session_id, "ended": True})


async def healthz(request: web.Request) -> web.Response:
    """The state of everything, for people and monitors: 200 as long as the gateway serves, what is
    not well is said in the body."""
    gateway = request.app[GATEWAY]
    engine, counts = await gateway.probe()
    journal_ok = gateway.journal_error is None and counts is not None
    return web.json_response(
        {
            "status": "ok",
            "version": __version__,
            "model": gateway.config.served_name,
            "reply_format": gateway.reply_format.name,
            "uptime_seconds": round(time.monotonic() - gateway.started, 1),
            "engine": {"state": engine, "weight_version": gateway.policy.weight_version()},
            "journal": {
                "state": "ok" if journal_ok else "failing",
                "failed_writes": gateway.failed_writes,
            },
            "requests": {
                "inflight": gateway.inflight.now,
                "waiting_for_engine": gateway.waiting,
            },
            "turns": None if counts is None else dataclasses.asdict(counts),
            "warnings": list(warnings(counts, engine, journal_ok)),
        },
        dumps=json.dumps,
    )


async def metrics(request: web.Request) -> web.Response:
    """Prometheus' text format."""
    gateway = request.app[GATEWAY]
    gauges = {
        **mismatch_gauges(await gateway.trainer()),
        "inflight": gateway.inflight.now,
        "waiting_for_engine": gateway.waiting,
        "known_turns": gateway.prompts.known_turns,
        "known_bytes": gateway.prompts.known_bytes,
    }
    text = gateway.metrics.text(gauges, journal_gauges((await gateway.probe())[1]))
    return web.Response(
        body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    )


def _model(gateway: Gateway) -> dict[str, object]:
    """One model with the keys of both APIs, and the limits that clients keep within (named as vLLM,
    OpenRouter and Anthropic do). When it was made is not known: the epoch."""
    name, context = gateway.config.served_name, gateway.context_length
    longest = min(gateway.config.gateway.max_tokens, context)
    return {
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


def _headers(request: web.Request) -> dict[str, str]:
    return {name.lower(): value for name, value in request.headers.items()}


def _dialect(request: web.Request) -> Dialect:
    """In whose words an error is told: Anthropic's on its routes and to its clients."""
    own = request.path.startswith("/v1/messages") or "anthropic-version" in request.headers
    return MESSAGES if own else CHAT
