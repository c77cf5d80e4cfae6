"""Cuts a streamed text at the first stop string: neither it nor the beginning of one is shown.

The tokens of a stop string were sampled and stay in the recorded turn; only the shown text ends
before it, as OpenAI's API says.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopCut:
    """Feed text in pieces, get what may be shown. `matched` is the stop string that was met."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The part of all text so far that is new and certain to come before any stop string."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        held = self._held + text
        met = [(at, stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if met:
            found, self.matched = min(met, key=lambda one: one[0])
            self._held = ""
            return held[:found]
        keep = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """What was held back in case a stop string followed."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
