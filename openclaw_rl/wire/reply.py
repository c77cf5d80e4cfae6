"""Incremental reading of a model's reply: reasoning in `<think>`, text, and tool calls.

Guarantees: the message does not depend on how the text was cut into pieces; no part of a tag is
ever shown; text that merely resembles a tag is released as soon as it cannot become one; a tool
call is one event, emitted when it is complete; what is not a valid call stays text, verbatim.
White space is dropped in four places only: around reasoning that holds nothing else, the newlines
after `</think>`, the newlines between text and a call, white space behind a call.

How calls are written is `syntax.py`'s business; `formats.py` knows which model writes how.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from openclaw_rl.wire.calls import Call
from openclaw_rl.wire.syntax import HERMES, CallSyntax, Section, Tools, held

THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ReplyEvent:
    """One thing to show: a piece of `text`, or one whole tool call (the `index`-th of the reply).

    `arguments` is the JSON text that the model wrote.
    """

    kind: Literal["reasoning", "content", "tool_call"]
    text: str = ""
    index: int = 0
    call_id: str = ""
    name: str = ""
    arguments: str = ""


def new_call_id() -> str:
    """A fresh tool-call id of letters and digits only: agents drop every other character."""
    return "call" + secrets.token_hex(12)


class ReplyReader:
    """What every reader of replies keeps: the events not yet taken, and the message so far."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._events: list[ReplyEvent] = []
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def feed(self, text: str) -> list[ReplyEvent]:
        """Take the next piece of the reply; return what can be shown now."""
        raise NotImplementedError

    def finish(self) -> list[ReplyEvent]:
        """The reply is over: release everything that was held back."""
        raise NotImplementedError

    def message(self) -> dict[str, Any]:
        """The reply so far as an assistant message; `content` is null only beside tool calls."""
        content = "".join(self._content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not self._calls else None,
        }
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [dict(call) for call in self._calls]
        return message

    def _emit(self, kind: Literal["reasoning", "content"], text: str) -> None:
        if not text:
            return
        (self._reasoning if kind == "reasoning" else self._content).append(text)
        if self._events and self._events[-1].kind == kind:
            text = self._events.pop().text + text
        self._events.append(ReplyEvent(kind, text))

    def _emit_call(self, call: Call) -> None:
        call_id = call.call_id or self._new_id()
        index = len(self._calls)
        self._events.append(ReplyEvent("tool_call", "", index, call_id, call.name, call.arguments))
        function = {"name": call.name, "arguments": call.arguments}
        self._calls.append({"id": call_id, "type": "function", "function": function})

    def _take(self) -> list[ReplyEvent]:
        events, self._events = self._events, []
        return events


class ReplyParser(ReplyReader):
    """Reads one reply. `tools`: the tools that may be called (None: calls are text);
    `reasoning`: read `<think>`; `in_reasoning`: the prompt already opened `<think>`. Ids come from
    `new_id` where the model writes none."""

    def __init__(
        self,
        *,
        tools: Tools | None,
        reasoning: bool = True,
        in_reasoning: bool = False,
        syntax: CallSyntax = HERMES,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        super().__init__(new_id)
        self._tools = tools
        self._syntax = syntax
        self._bare = syntax.bare and tools is not None
        self._opened = reasoning and in_reasoning
        self._state: Literal["start", "reasoning", "content", "call"] = (
            "start" if reasoning else "content"
        )
        self._buf = ""  # not yet understood; short, except inside a call
        self._later: list[str] = []  # pieces of a call that cannot close it, joined when needed
        self._mark = ""  # inside a call: what opened it
        self._end: str | None = None  # inside a call: what closes it (None: the reply's end)
        self._scanned = 0  # inside a call: no closing tag of it begins before this position
        self._begun = False  # inside a call: its first characters were seen, and fit
        self._trim = False  # newlines right after </think> are not content
        self._space = ""  # white space whose fate depends on what follows
        self._after_call = False

    def feed(self, text: str) -> list[ReplyEvent]:
        """Take the next piece of the reply; return what can be shown now."""
        if self._state == "call" and self._waits_for_more(text):
            return []
        self._buf += text
        self._run(final=False)
        return self._take()

    def finish(self) -> list[ReplyEvent]:
        """The reply is over: release everything that was held back."""
        self._collect()
        self._run(final=True)
        if self._state == "content":
            space, self._space = self._space, ""
            if space and not self._after_call:
                self._emit("content", space)
        return self._take()

    # -- the automaton: each step returns whether another one may follow ----------------------

    def _run(self, *, final: bool) -> None:
        steps = {
            "start": self._start,
            "reasoning": self._reason,
            "content": self._text,
            "call": self._call,
        }
        while steps[self._state](final):
            pass

    def _start(self, final: bool) -> bool:
        """Before the first visible character: does the reply (again) open its reasoning?"""
        text = self._buf.lstrip()
        if text.startswith(THINK):
            self._buf = text[len(THINK) :]
            self._opened = True
        elif not final and THINK.startswith(text):
            return False
        self._state = "reasoning" if self._opened else "content"
        return True

    def _reason(self, final: bool) -> bool:
        end = self._buf.find(END_THINK)
        if end >= 0:
            self._show_reasoning(self._buf[:end])
            self._buf = self._buf[end + len(END_THINK) :]
            self._space = ""
            self._trim = True
            self._state = "content"
            return True
        keep = 0 if final else held(self._buf, END_THINK)
        cut = len(self._buf) - keep
        self._show_reasoning(self._buf[:cut])
        self._buf = self._buf[cut:]
        return False

    def _text(self, final: bool) -> bool:
        if self._trim:
            self._buf = self._buf.lstrip("\n")
            if not self._buf:
                return False
            self._trim = False
        if self._tools is None:
            self._emit("content", self._buf)
            self._buf = ""
            return False
        if self._bare and self._buf.strip():
            self._bare = False
            if self._buf.lstrip().startswith("{"):
                return self._open("", None)
        found = [(at, mark) for mark in self._syntax.marks if (at := self._buf.find(mark)) >= 0]
        if found:
            begin, mark = min(found)
            self._show_content(self._buf[:begin])
            self._buf = self._buf[begin + len(mark) :]
            return self._open(mark, self._syntax.marks[mark])
        keep = 0 if final else self._syntax.longest(self._buf)
        cut = len(self._buf) - keep
        self._show_content(self._buf[:cut])
        self._buf = self._buf[cut:]
        return False

    def _open(self, mark: str, end: str | None) -> bool:
        self._mark, self._end = mark, end
        self._scanned, self._begun = 0, False
        self._state = "call"
        return True

    def _call(self, final: bool) -> bool:
        if not self._begun:
            fits = self._syntax.fits(self._buf)
            if fits is False:
                return self._reject()
            self._begun = bool(fits)
        rest = self._buf
        if self._end is not None:
            while (end := self._buf.find(self._end, self._scanned)) >= 0:
                section = self._read(self._buf[:end])
                if section.calls:
                    return self._accept(section.calls, self._buf[end + len(self._end) :])
                if not section.inside:
                    return self._reject()
                self._scanned = end + len(self._end)  # the tag stands inside a value of the call
            self._scanned = max(self._scanned, len(self._buf) - len(self._end) + 1)
            rest = self._buf[: len(self._buf) - held(self._buf, self._end)]
        if not final:
            return False
        # The reply ended inside a call: a whole call whose closing tag is missing is still one.
        section = self._read(rest)
        if not section.calls:
            return self._reject()
        self._accept(section.calls, "")
        self._show_content(section.rest)
        return True

    def _read(self, body: str) -> Section:
        return self._syntax.read(self._mark, body, self._tools or {})

    # -- helpers ------------------------------------------------------------------------------

    def _waits_for_more(self, text: str) -> bool:
        """Inside a call, keep pieces in a list until one can end it: linear for long arguments."""
        if not self._begun or (self._end is not None and self._end[-1] in text):
            self._collect()
            return False
        self._later.append(text)
        return True

    def _collect(self) -> None:
        if self._later:
            self._buf += "".join(self._later)
            self._later.clear()

    def _accept(self, calls: Sequence[Call], rest: str) -> bool:
        space, self._space = self._space, ""
        if self._content and not self._after_call:
            self._emit("content", space.rstrip("\n"))
        for call in calls:
            self._emit_call(call)
        self._after_call = True
        self._buf = rest
        self._state = "content"
        return True

    def _reject(self) -> bool:
        """Not a call after all: its tag is text, and what follows is read again."""
        self._show_content(self._mark)
        self._state = "content"
        return True

    def _show_reasoning(self, text: str) -> None:
        text = self._space + text
        if self._reasoning or text.strip():
            self._space = ""
            self._emit("reasoning", text)
        else:
            self._space = text

    def _show_content(self, text: str) -> None:
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        if body:
            self._emit("content", body)
            self._after_call = False
