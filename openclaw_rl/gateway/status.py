"""What `/healthz` and `/metrics` tell: states and counts, never texts, addresses or keys.

Labels are fixed words of ours (routes, states, reasons), so their number is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from openclaw_rl.journal.records import Outcomes

EngineState = Literal["ok", "waiting", "unknown"]

BIND_AFTER = 20
"""From so many turns on, "nothing binds" is worth a warning."""

_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0,
)  # fmt: skip
"""Bucket bounds: from the gateway's own share of a turn (milliseconds) to a long reply."""

disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """The gateway's counters and histograms since it started, and gauges as they are now."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = self._counter("requests", "HTTP requests", "route", "status")
        self.turns = self._counter("turns", "replies that were served whole", "kind")
        self.unfinished = self._counter("unfinished_turns", "replies that broke off", "reason")
        self.identity = self._counter("identity", "how sessions were recognised", "source")
        self.continued = self._counter("continued_turns", "prompts behind a known turn", "tokens")
        self.recalled = self._counter("recalled_turns", "turns read from the journal again")
        self.prompt_tokens = self._counter("prompt_tokens", "tokens of prompts")
        self.cached_tokens = self._counter("cached_tokens", "of them in the engine's cache")
        self.completion_tokens = self._counter("completion_tokens", "tokens of replies")
        self.engine_waits = self._counter("engine_waits", "requests that waited for the engine")
        self.ignored_sampling = self._counter(
            "ignored_sampling", "parameters of clients that were not followed", "name"
        )
        self.journal_failed = self._counter("journal_failed", "writes that the journal refused")
        self.feedback = self._counter("feedback", "feedback that was taken")
        self.ended_sessions = self._counter("ended_sessions", "sessions told to have ended")
        self.prepare = self._histogram("prepare", "from the request to its prompt")
        self.first_token = self._histogram("first_token", "from the request to the first token")
        self.commit = self._histogram("commit", "for the journal to take a turn")

    def text(self, gauges: Mapping[str, float], by_label: Mapping[str, Mapping[str, float]]) -> str:
        """Prometheus' text format. `by_label` has names as `journal_turns.state`."""
        now = CollectorRegistry()
        for name, value in gauges.items():
            Gauge(name, name, namespace="openclaw_rl", registry=now).set(value)
        for name, values in by_label.items():
            name, _, label = name.partition(".")
            gauge = Gauge(name, name, [label], namespace="openclaw_rl", registry=now)
            for word, value in values.items():
                gauge.labels(word).set(value)
        return (generate_latest(self._registry) + generate_latest(now)).decode()

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(name, about, labels, namespace="openclaw_rl", registry=self._registry)

    def _histogram(self, name: str, about: str) -> Histogram:
        return Histogram(
            f"{name}_seconds",
            about,
            namespace="openclaw_rl",
            registry=self._registry,
            buckets=_SECONDS,
        )


def warnings(counts: Outcomes | None, engine: EngineState, journal_ok: bool) -> Iterable[str]:
    """What a person should look at."""
    if not journal_ok:
        yield "the journal cannot be written: replies are served but not recorded"
    if engine == "unknown":
        yield "no engine has been published yet: requests wait for one"
    elif engine == "waiting":
        yield "the engine does not answer: requests wait for it"
    if counts is not None and counts.seen >= BIND_AFTER and counts.main == 0:
        yield "no turn was bound as main: nothing will be trained (see docs/dialects.md)"
    elif counts is not None and counts.main >= BIND_AFTER and counts.unbound == counts.main:
        yield "no turn is bound to a conversation: nothing will be judged or trained"


def journal_gauges(counts: Outcomes | None) -> dict[str, dict[str, float]]:
    """Turns by state, and the dropped ones by reason."""
    if counts is None:
        return {}
    states = ("waiting", "judging", "ready", "leased", "trained", "side")
    return {
        "journal_turns.state": {name: getattr(counts, name) for name in states},
        "journal_dropped.reason": dict(counts.dropped),
    }


def mismatch_gauges(trainer: Mapping[str, Any]) -> dict[str, float]:
    """How far engine and trainer were apart on the tokens of the last batch."""
    names = ("mean", "max", "truncated", "rollout")
    return {f"mismatch_{name}": trainer[name] for name in names if trainer.get(name) is not None}
