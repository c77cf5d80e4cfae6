"""Incremental reading of a model's reply: reasoning, text and tool calls (Qwen3/Hermes, SmolLM2).

Guarantees: the message does not depend on how the text was cut into pieces; no part of a tag is
ever shown; text that merely resembles a tag is released as soon as it cannot become one; a tool
call is one event, emitted when it is complete; what is not a valid call stays text, verbatim.
White space is dropped in four places only: around reasoning that holds nothing else, the newlines
after `</think>`, the newlines between text and a call, white space behind a call.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from openclaw_rl.wire.calls import in_string, parse_calls

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"


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


def held(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of `tag` (never the whole)."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0


class ReplyParser:
    """Reads one reply. `tools`: read tool calls at all; `reasoning`: read `<think>`;
    `in_reasoning`: the prompt already opened `<think>`. Ids come from `new_id`."""

    def __init__(
        self,
        *,
        tools: bool,
        reasoning: bool,
        in_reasoning: bool,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._tools = tools
        self._opened = reasoning and in_reasoning
        self._new_id = new_id
        self._state: Literal["start", "reasoning", "content", "call"] = (
            "start" if reasoning else "content"
        )
        self._buf = ""  # not yet understood; short, except inside a call
        self._later: list[str] = []  # pieces of a call that cannot close it, joined when needed
        self._scanned = 0  # inside a call: no closing tag of it begins before this position
        self._begun = False  # inside a call: its first character was seen, and fits
        self._trim = False  # newlines right after </think> are not content
        self._space = ""  # white space whose fate depends on what follows
        self._after_call = False
        self._events: list[ReplyEvent] = []
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []

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
        if not self._tools:
            self._emit("content", self._buf)
            self._buf = ""
            return False
        begin = self._buf.find(CALL)
        if begin >= 0:
            self._show_content(self._buf[:begin])
            self._buf = self._buf[begin + len(CALL) :]
            self._scanned = 0
            self._begun = False
            self._state = "call"
            return True
        keep = 0 if final else held(self._buf, CALL)
        cut = len(self._buf) - keep
        self._show_content(self._buf[:cut])
        self._buf = self._buf[cut:]
        return False

    def _call(self, final: bool) -> bool:
        if not self._begun:
            body = self._buf.lstrip()
            if body and body[0] not in "{[":
                return self._reject()
            self._begun = bool(body)
        while (end := self._buf.find(END_CALL, self._scanned)) >= 0:
            calls = parse_calls(self._buf[:end])
            if calls:
                self._accept(calls, self._buf[end + len(END_CALL) :])
                return True
            if not in_string(self._buf[:end]):
                return self._reject()
            self._scanned = end + len(END_CALL)  # the tag stands inside a string of the call
        if not final:
            self._scanned = max(self._scanned, len(self._buf) - len(END_CALL) + 1)
            return False
        # The reply ended inside a call: whole JSON whose closing tag is missing is still a call.
        calls = parse_calls(self._buf[: len(self._buf) - held(self._buf, END_CALL)])
        if calls:
            self._accept(calls, "")
            return True
        return self._reject()

    # -- helpers ------------------------------------------------------------------------------

    def _waits_for_more(self, text: str) -> bool:
        """Inside a call, keep pieces in a list until one can end it: linear for long arguments."""
        if not self._begun or ">" in text:
            self._collect()
            return False
        self._later.append(text)
        return True

    def _collect(self) -> None:
        if self._later:
            self._buf += "".join(self._later)
            self._later.clear()

    def _accept(self, calls: list[tuple[str, str]], rest: str) -> None:
        space, self._space = self._space, ""
        if self._content and not self._after_call:
            self._emit("content", space.rstrip("\n"))
        for name, arguments in calls:
            call_id = self._new_id()
            self._events.append(
                ReplyEvent("tool_call", "", len(self._calls), call_id, name, arguments)
            )
            function = {"name": name, "arguments": arguments}
            self._calls.append({"id": call_id, "type": "function", "function": function})
        self._after_call = True
        self._buf = rest
        self._state = "content"

    def _reject(self) -> bool:
        """Not a call after all: its tag is text, and what follows is read again."""
        self._show_content(CALL)
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

    def _emit(self, kind: Literal["reasoning", "content"], text: str) -> None:
        if not text:
            return
        (self._reasoning if kind == "reasoning" else self._content).append(text)
        if self._events and self._events[-1].kind == kind:
            text = self._events.pop().text + text
        self._events.append(ReplyEvent(kind, text))

    def _take(self) -> list[ReplyEvent]:
        events, self._events = self._events, []
        return events


def parse_reply(
    text: str,
    *,
    tools: bool,
    reasoning: bool,
    in_reasoning: bool = False,
    new_id: Callable[[], str] = new_call_id,
) -> dict[str, Any]:
    """The assistant message of a whole reply."""
    parser = ReplyParser(tools=tools, reasoning=reasoning, in_reasoning=in_reasoning, new_id=new_id)
    parser.feed(text)
    parser.finish()
    return parser.message()
