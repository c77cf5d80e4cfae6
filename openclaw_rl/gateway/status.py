"""What `/healthz` and `/metrics` tell: states and counts, never texts, addresses or keys.

Labels are fixed words of ours (routes, states, reasons), so their number is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from openclaw_rl.errors import OpenClawRLError
from openclaw_rl.journal import Journal, Outcomes

EngineState = Literal["ok", "waiting", "unknown"]

BIND_AFTER = 20
"""From this many turns on, "nothing binds" is worth a warning."""

_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0,
)  # fmt: skip
"""Bucket bounds: from the gateway's own share of a turn (milliseconds) to a long reply."""

_STATES = ("waiting", "judging", "ready", "leased", "trained", "side")
_MISMATCH = ("mean", "max", "truncated", "rollout")

disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """The gateway's counters and histograms since it started, and gauges as they are now."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        counter = partial(Counter, namespace="openclaw_rl", registry=registry)
        seconds = partial(Histogram, namespace="openclaw_rl", registry=registry, buckets=_SECONDS)
        self.requests = counter("requests", "HTTP requests", ["route", "status"])
        self.turns = counter("turns", "replies that were served whole", ["kind"])
        self.unfinished = counter("unfinished_turns", "replies that broke off", ["reason"])
        self.identity = counter("identity", "how sessions were recognised", ["source"])
        self.continued = counter("continued_turns", "prompts that go on from a turn", ["tokens"])
        self.recalled = counter("recalled_turns", "turns read from the journal again")
        self.prompt_tokens = counter("prompt_tokens", "tokens of prompts")
        self.cached_tokens = counter("cached_tokens", "of them in the engine's cache")
        self.completion_tokens = counter("completion_tokens", "tokens of replies")
        self.engine_waits = counter("engine_waits", "requests that waited for the engine")
        self.ignored_sampling = counter(
            "ignored_sampling", "parameters of clients that were not followed", ["name"]
        )
        self.journal_failed = counter("journal_failed", "writes that the journal refused")
        self.prepare = seconds("prepare_seconds", "from the request to its prompt")
        self.first_token = seconds("first_token_seconds", "from the request to the first token")
        self.commit = seconds("commit_seconds", "for the journal to take a turn")

    def text(
        self, gauges: Mapping[str, float], counts: Outcomes | None, trainer: Mapping[str, Any]
    ) -> str:
        """Prometheus' text format, with `gauges` as they are now, the journal's turns by state and
        reason, and how far engine and trainer were apart on the last batch, where known."""
        now = CollectorRegistry()
        gauge = partial(Gauge, namespace="openclaw_rl", registry=now)
        mismatch = {f"mismatch_{name}": trainer.get(name) for name in _MISMATCH}
        for name, value in {**gauges, **mismatch}.items():
            if value is not None:
                gauge(name, name).set(value)
        if counts is not None:
            states = {name: getattr(counts, name) for name in _STATES}
            for name, label, values in (
                ("journal_turns", "state", states),
                ("journal_dropped", "reason", counts.dropped),
            ):
                labelled = gauge(name, name, [label])
                for word, number in values.items():
                    labelled.labels(word).set(number)
        return (generate_latest(self._registry) + generate_latest(now)).decode()


def training_gauges(path: Path) -> dict[str, float]:
    """Whether training is paused, and the number and figures of the version that was served last
    (`served_*`) and of the one refused last (`refused_*`); empty where the journal cannot be read.
    """
    try:
        with Journal.open(path, create=False) as journal:
            gauges = {"training_paused": float("pause" in journal.asked())}
            versions = journal.versions()
    except OpenClawRLError:
        return {}
    for one in {one.state: one for one in reversed(versions)}.values():  # the newest of each state
        figures = {"version": one.version, **one.figures}
        gauges |= {f"{one.state}_{name}": value for name, value in figures.items()}
    return gauges


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
