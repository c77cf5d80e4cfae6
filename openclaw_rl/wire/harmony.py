"""gpt-oss' harmony format: a reply is a row of messages, each in a channel.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary
    to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

`analysis` is reasoning, `final` (and `commentary` without a recipient) is content, a recipient
makes it a tool call. Guarantees as in `reply.py`: the cut does not matter, no part of a mark is
shown, a call is one event, what is not a valid call stays text, verbatim.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from openclaw_rl.wire.calls import Call, is_object
from openclaw_rl.wire.reply import ReplyEvent, ReplyReader, new_call_id
from openclaw_rl.wire.syntax import Tools, held

CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKS = (CHANNEL, MESSAGE, START, "<|constrain|>", *ENDS)

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_BEGINS = (CHANNEL, START, "to=")
_NEXT = (START, CHANNEL)
"""What begins the next message where the model left the end of the last one out."""
_LONGEST_HEADER = 500
"""Characters within which a header ends by `<|message|>`, or is none; real ones have about 60."""


class HarmonyParser(ReplyReader):
    """Reads one reply; `tools` is None where calls are text."""

    def __init__(self, *, tools: Tools | None, new_id: Callable[[], str] = new_call_id) -> None:
        super().__init__(new_id)
        self._tools = tools
        self._buf = ""
        self._later: list[str] = []  # pieces of a call's body that cannot end it
        self._state: Literal["header", "body", "call"] = "header"
        self._header = ""
        self._kind: Literal["reasoning", "content"] = "content"
        self._next = ""  # a line break between two messages of one kind
        self._recipient = ""

    def feed(self, text: str) -> list[ReplyEvent]:
        if self._state == "call" and ">" not in text:
            self._later.append(text)
            return []
        self._run(text, final=False)
        return self._take()

    def finish(self) -> list[ReplyEvent]:
        self._run("", final=True)
        return self._take()

    def _run(self, text: str, *, final: bool) -> None:
        self._buf += "".join(self._later) + text
        self._later.clear()
        steps = {"header": self._read_header, "body": self._read_body, "call": self._read_call}
        while self._buf and steps[self._state](final):
            pass

    def _read_header(self, final: bool) -> bool:
        """`<|start|>assistant`, channel, recipient, up to `<|message|>`."""
        text = self._buf.lstrip()
        if not text or (not final and any(mark.startswith(text) for mark in _BEGINS)):
            return False
        begin = next((mark for mark in _BEGINS if text.startswith(mark)), "")
        at = text.find(MESSAGE, 0, _LONGEST_HEADER)
        if begin and at < 0 and not final and len(text) < _LONGEST_HEADER:
            return False
        if not begin or at < 0:  # a reply without channels, or a mark that begins none
            self._begin_text("content")
            self._show(begin)
            self._buf = text[len(begin) :] if begin else self._buf
            return True
        self._header = text[: at + len(MESSAGE)]
        self._buf = text[at + len(MESSAGE) :]
        recipient = _RECIPIENT.search(self._header)
        name = _NAME.search(self._header)
        if recipient is not None:
            self._recipient = recipient[1].removeprefix("functions.")
            self._state = "call"
        else:
            self._begin_text("reasoning" if name and name[1] == "analysis" else "content")
        return True

    def _begin_text(self, kind: Literal["reasoning", "content"]) -> None:
        self._kind = kind
        self._next = "\n" if (self._reasoning if kind == "reasoning" else self._content) else ""
        self._state = "body"

    def _read_body(self, final: bool) -> bool:
        end = self._end()
        if end is not None:
            at, mark = end
            self._show(self._buf[:at])
            self._buf = self._buf[at + len(mark) :]
            self._state = "header"
            return True
        keep = 0 if final else max(held(self._buf, mark) for mark in (*ENDS, *_NEXT))
        cut = len(self._buf) - keep
        self._show(self._buf[:cut])
        self._buf = self._buf[cut:]
        return False

    def _read_call(self, final: bool) -> bool:
        end = self._end()
        if end is None and not final:
            return False
        at, mark = end or (len(self._buf), "")
        body = self._buf[:at]
        self._buf = self._buf[at + len(mark) :]
        self._state = "header"
        if self._tools is not None and is_object(body):
            self._emit_call(Call(self._recipient, body.strip()))
        else:
            self._begin_text("content")
            self._show(self._header + body + mark)
            self._state = "header"
        return True

    def _end(self) -> tuple[int, str] | None:
        """Where the message ends: at a mark, or where the next one begins."""
        found = [(at, mark) for mark in ENDS if (at := self._buf.find(mark)) >= 0]
        found += [(at, "") for mark in _NEXT if (at := self._buf.find(mark)) >= 0]
        return min(found, default=None)

    def _show(self, text: str) -> None:
        if text:
            self._emit(self._kind, self._next + text)
            self._next = ""
