"""One table from everything that can go wrong to what a client is told, in its own dialect.

Nothing here repeats conversation text into a log; an unexpected exception is logged by type and
place only, because its message may hold some.
"""

from __future__ import annotations

import json
import logging
import traceback

from aiohttp import web

from openclaw_rl.errors import (
    ContextOverflow,
    EngineError,
    EngineRefused,
    EngineUnavailable,
    JournalError,
)
from openclaw_rl.gateway.limits import TooManyRequests
from openclaw_rl.wire.dialect import Dialect
from openclaw_rl.wire.errors import (
    WireError,
    body_too_large,
    internal,
    invalid,
    prompt_too_long,
    too_many_requests,
    unavailable,
)

log = logging.getLogger("openclaw_rl.gateway")

http_log = logging.getLogger("openclaw_rl.gateway.http")
"""For aiohttp's own lines."""


class _TypesOnly(logging.Filter):
    """aiohttp logs what it cannot read byte for byte, keys and conversations among it."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            record.msg, record.args = f"{record.getMessage()}: {type(error).__name__}", ()
            record.exc_info = record.exc_text = None
        return True


http_log.addFilter(_TypesOnly())

RETRY_AFTER = {429: "1", 503: "5"}
"""Seconds after which trying again makes sense."""


def to_wire(error: Exception) -> WireError:
    """What the client is told about `error`."""
    match error:
        case WireError():
            return error
        case ContextOverflow():
            return prompt_too_long(error.prompt_tokens, error.limit)
        case EngineRefused():
            status = error.status if 400 <= error.status < 500 else 400
            return WireError(status, str(error), code="engine_refused")
        case EngineUnavailable():
            return unavailable(f"the engine is away: {error}")
        case EngineError():
            return WireError(502, str(error), type="server_error", code="engine_error")
        case TooManyRequests():
            return too_many_requests(str(error))
        case JournalError():
            return WireError(503, str(error), type="server_error", code="journal_unavailable")
        case web.HTTPRequestEntityTooLarge():
            return body_too_large(_limit(error))
        case web.HTTPException():
            return _http(error)
        case web.RequestPayloadError():
            return invalid(None, "the body cannot be read: it is not encoded as its headers say")
        case RecursionError():
            return invalid(None, "the request is nested too deeply")
    frames = traceback.extract_tb(error.__traceback__)
    where = " < ".join(f"{frame.filename}:{frame.lineno}" for frame in reversed(frames[-6:]))
    log.error("unexpected %s at %s", type(error).__name__, where)
    return internal()


def error_response(error: WireError, dialect: Dialect) -> web.Response:
    """A plain response with the error object of `dialect`."""
    headers = {"Retry-After": RETRY_AFTER[error.status]} if error.status in RETRY_AFTER else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(
        status=dialect.error_status(error),
        body=json.dumps(dialect.error_body(error)).encode(),
        content_type="application/json",
        headers=headers,
    )


def _limit(error: web.HTTPRequestEntityTooLarge) -> int:
    # aiohttp says it in words only: "Maximum request body size N exceeded, ..."
    numbers = [int(word) for word in (error.text or "").split() if word.isdigit()]
    return numbers[0] if numbers else 0


def _http(error: web.HTTPException) -> WireError:
    words = {
        404: "there is no such route; the API is at /v1 (POST /v1/chat/completions, "
        "POST /v1/messages)",
        405: "this route does not take this method",
    }
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status)
    return WireError(error.status, words.get(error.status, error.reason), code=code)
