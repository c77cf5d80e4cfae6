"""What the gateway needs to know, as one frozen value. It reads no file and no environment:
the configuration and the command line construct it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from openclaw_rl.errors import ConfigError

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Settings of one gateway process.

    `engine_url` None means: the address that a host publishes in the journal as `policy`, looked
    up again whenever the engine moves; what is at a fixed one speaks SGLang's `/generate`, unless
    the host says otherwise of it. `context_length` None means: what the model's own
    configuration says. What the host says that the engine takes is never exceeded. Times are in
    seconds, sizes in bytes.
    """

    model_path: str
    served_name: str
    journal_path: str | Path
    host: str = "127.0.0.1"
    port: int = 30000
    api_key: str | None = field(default=None, repr=False)
    engine_url: str | None = None
    engine_api_key: str | None = field(default=None, repr=False)
    context_length: int | None = None
    temperature: float = 1.0
    """Where the client names none; only turns sampled at the trained temperature are trained."""
    top_k: int = 0
    """Candidates kept for each token of a main turn: those that a distillation over the top K
    compares with a teacher's. 0: none are asked for."""
    default_max_tokens: int | None = None
    """Tokens of a reply when the client names no limit; None: what is left of the context."""
    unnamed: Literal["auto", "main", "side"] = "auto"
    """How to take requests that name no session (see `session.tracker.Tracker`)."""
    reply_format: str = "auto"
    """How the model writes tool calls and reasoning (`wire.formats`); auto: see there."""
    keepalive_seconds: float = 10.0
    """Longest silence on a stream; OpenClaw gives up after 82 to 120 s without a data chunk."""
    wait_seconds: float = 600.0
    """How long a request waits for an engine that is away before it gets a 503."""
    shutdown_seconds: float = 5.0
    """How long replies under way may go on after the gateway was told to stop."""
    journal_seconds: float = 5.0
    """How long the end of a reply waits for its journal commit before it is served without."""
    max_body_bytes: int = 32 * MIB
    body_seconds: float = 60.0
    """How long a request's body may take to arrive."""
    max_inflight: int = 256
    max_bodies: int = 512
    """Requests that may be sending their bodies; `max_inflight` counts those that have sent it."""
    max_turns: int = 20_000
    """Turns that the session tracker keeps in memory."""
    known_prompt_bytes: int = 128 * MIB
    """Memory for token ids and replies of recent turns; older ones are read from the journal."""
    inline_chars: int = 10_000
    """Longer requests are rendered in a thread, so that other streams go on."""

    @property
    def base_url(self) -> str:
        """Where clients reach it (port 0: not known before it listens)."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def __post_init__(self) -> None:
        for name in ("keepalive_seconds", "journal_seconds", "body_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"gateway: {name} must be above 0")
        for name in (
            "max_body_bytes",
            "max_bodies",
            "max_inflight",
            "max_turns",
            "known_prompt_bytes",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"gateway: {name} must be at least 1")
