"""The one family of errors. Every message says what is wrong and what to do; none carries
conversation text or a secret."""

from __future__ import annotations

MISCONFIGURED = 2
"""Exit status of a process that must not be started again: it would fail the same way."""


class OpenClawRLError(Exception):
    """Base of all errors raised by openclaw-rl on purpose."""


class ConfigError(OpenClawRLError):
    """A misconfiguration, found before anything starts. The message is one line."""


class HookError(OpenClawRLError):
    """A user's hook (reward, loss, rollout, ...) cannot be loaded or broke its contract."""


class JournalError(OpenClawRLError):
    """The journal cannot be opened, or an operation does not fit the state of a turn."""


class EngineError(OpenClawRLError):
    """An engine did not do what was asked."""


class EngineUnavailable(EngineError):
    """The engine cannot be reached, or broke off; the same request may succeed later."""


class EngineTooSlow(EngineUnavailable):
    """The engine did not answer within the time that it was given."""


class EngineRefused(EngineError):
    """The engine refused the request itself; repeating it changes nothing."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ContextOverflow(EngineRefused):
    """Prompt (and asked tokens) do not fit the context of the engine."""

    def __init__(self, prompt_tokens: int, limit: int) -> None:
        super().__init__(
            400,
            f"prompt is too long: {prompt_tokens} tokens, but the context holds {limit} tokens",
        )
        self.prompt_tokens = prompt_tokens
        self.limit = limit
