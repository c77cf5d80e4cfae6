"""What a client is told when something goes wrong, whatever dialect it speaks.

A `WireError` never carries conversation text: it names the field, not its value.
"""

from __future__ import annotations

from openclaw_rl.errors import OpenClawRLError


class WireError(OpenClawRLError):
    """An error with an HTTP status. `param` is the path of the offending field
    (`messages[2].role`), `code` a word that programs compare."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param


def invalid(param: str | None, message: str, *, code: str | None = None) -> WireError:
    """400: the request itself is wrong at `param`."""
    return WireError(400, f"{param}: {message}" if param else message, param=param, code=code)


def unsupported(param: str, message: str) -> WireError:
    """400: `param` would change the shape of the reply and cannot be honoured here."""
    return invalid(param, message, code="unsupported_parameter")


def unavailable(message: str, code: str = "engine_unavailable") -> WireError:
    """503: the engine (or what `code` says) is away; the same request may succeed later."""
    return WireError(503, message, code=code)


def prompt_too_long(prompt_tokens: int, limit: int) -> WireError:
    """400 for a prompt beyond the context, worded so that agents compact their history."""
    return WireError(
        400,
        f"prompt is too long: {prompt_tokens} tokens > {limit} maximum. This model's maximum "
        f"context length is {limit} tokens. Please reduce the length of the messages.",
        code="context_length_exceeded",
        param="messages",
    )
