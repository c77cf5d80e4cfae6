"""Counters, gauges and histograms in Prometheus' text format: numbers only, never a text.

Names and labels are fixed words of ours (routes, states, reasons), so their number is bounded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

Labels = tuple[tuple[str, str], ...]

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0,
)  # fmt: skip
"""Bucket bounds: from the gateway's own share of a turn (milliseconds) to a long reply."""

PREFIX = "openclaw_rl_"


class Histogram:
    """Counts values by upper bound."""

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> list[str]:
        """The lines of the text format."""
        lines, total = [], 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._sum}", f"{name}_count {total}"]


class Metrics:
    """The gateway's numbers since it started. For one event loop, hence without a lock."""

    def __init__(self) -> None:
        self._counters: dict[str, dict[Labels, float]] = {}
        self._histograms: dict[str, Histogram] = {}

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Raise counter `name` (without prefix and `_total`) by `amount`."""
        series = self._counters.setdefault(name, {})
        key = tuple(sorted(labels.items()))
        series[key] = series.get(key, 0) + amount

    def get(self, name: str, **labels: str) -> float:
        """The value of one counter; without labels the sum over all of them."""
        series = self._counters.get(name, {})
        return series.get(tuple(sorted(labels.items())), 0) if labels else sum(series.values())

    def observe(self, name: str, seconds: float) -> None:
        """Count one duration in histogram `name` (without prefix and `_seconds`)."""
        self._histograms.setdefault(name, Histogram()).observe(seconds)

    def render(self, gauges: dict[str, dict[Labels, float]] | None = None) -> str:
        """All of it, and `gauges` as they are now."""
        lines: list[str] = []
        for name, series in sorted(self._counters.items()):
            lines += _family(f"{PREFIX}{name}_total", "counter", series)
        for name, series in sorted((gauges or {}).items()):
            lines += _family(PREFIX + name, "gauge", series)
        for name, histogram in sorted(self._histograms.items()):
            full = f"{PREFIX}{name}_seconds"
            lines += [f"# TYPE {full} histogram", *histogram.lines(full)]
        return "\n".join(lines) + "\n"


def _family(name: str, kind: str, series: dict[Labels, float]) -> list[str]:
    return [f"# TYPE {name} {kind}"] + [
        f"{name}{_label_text(labels)} {_number(value)}" for labels, value in sorted(series.items())
    ]


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(value)


def _label_text(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{_escape(value)}"' for key, value in labels) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
