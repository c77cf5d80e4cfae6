"""What a client is told when something goes wrong, in the words of the OpenAI API.

A `WireError` never carries conversation text: it names the field, not its value.
"""

from __future__ import annotations

from typing import Any

from openclaw_rl.errors import OpenClawRLError


class WireError(OpenClawRLError):
    """An error with an HTTP status and an OpenAI error object.

    `param` is the path of the offending field (`messages[2].role`), `code` a word that programs
    compare, `type` the OpenAI family (`invalid_request_error`, `server_error`, ...).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param


def error_body(error: WireError) -> dict[str, Any]:
    """The OpenAI error object, as the body of a response or of one stream event."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


def invalid(param: str | None, message: str, *, code: str | None = None) -> WireError:
    """400: the request itself is wrong at `param`."""
    return WireError(400, f"{param}: {message}" if param else message, param=param, code=code)


def unsupported(param: str, message: str) -> WireError:
    """400: `param` would change the shape of the reply and cannot be honoured here."""
    return invalid(param, message, code="unsupported_parameter")


def prompt_too_long(prompt_tokens: int, limit: int) -> WireError:
    """400 for a prompt beyond the context, worded so that agents compact their history."""
    return WireError(
        400,
        f"prompt is too long: {prompt_tokens} tokens > {limit} maximum. This model's maximum "
        f"context length is {limit} tokens. Please reduce the length of the messages.",
        code="context_length_exceeded",
        param="messages",
    )


def unauthorized(message: str = "a valid API key is required") -> WireError:
    """401: no key, or a wrong one."""
    return WireError(401, message, type="authentication_error", code="invalid_api_key")


def too_many_requests(message: str) -> WireError:
    """429: a limit of this server is reached; the same request may succeed later."""
    return WireError(429, message, type="rate_limit_error", code="rate_limit_exceeded")


def body_too_large(limit: int) -> WireError:
    """413: the body has more than `limit` bytes."""
    return WireError(
        413, f"the request body is larger than {limit} bytes", code="request_too_large"
    )


def unavailable(message: str, code: str = "engine_unavailable") -> WireError:
    """503: the engine (or what `code` says) is away; the same request may succeed later."""
    return WireError(503, message, type="server_error", code=code)


def internal(message: str = "internal error") -> WireError:
    """500: our own fault."""
    return WireError(500, message, type="server_error", code="internal_error")
