"""Server-sent events, as bytes come: data payloads are given out whole, however the network cut
them. Each byte is looked at once, so a line in a thousand pieces costs what it costs in one."""

from __future__ import annotations


class EventLines:
    """Splits a byte stream into the payloads of its `data:` lines.

    Lines end with LF or CRLF; comments, other fields and empty lines are skipped. One `data:` line
    is one payload: engines send JSON without line breaks.
    """

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        *ended, rest = chunk.split(b"\n")
        payloads: list[bytes] = []
        for line in ended:
            if self._pieces:
                line = b"".join([*self._pieces, line])
                self._pieces = []
            if line.startswith(b"data:"):
                payloads.append(line[5:].strip())
        if rest:
            self._pieces.append(rest)
        return payloads
