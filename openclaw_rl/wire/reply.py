"""Reading a model's reply as it grows: reasoning, text and tool calls. One automaton for all
families of models; `formats.py` has the table of how each of them writes.

Guarantees: the message does not depend on how the text was cut into pieces; no part of a mark is
ever shown; text that merely resembles a mark is released as soon as it cannot become one; a tool
call is one event, emitted when it is complete; what is not a valid call stays text, verbatim.
White space is dropped in four places only: around reasoning that holds nothing else, the newlines
after reasoning, the newlines between text and a call, white space behind a call.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from openclaw_rl.wire.calls import Found, Read, Tools, schemas

THINK, END_THINK = "<think>", "</think>"


@dataclass(slots=True)  # frozen would cost a microsecond a token
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


def opens_reasoning(prompt: str) -> bool:
    """Whether a reply to the prompt begins inside `<think>`."""
    return prompt.rstrip().endswith(THINK)


def message_of(events: Iterable[ReplyEvent]) -> dict[str, Any]:
    """The assistant message of a reply."""
    texts: dict[str, list[str]] = {"content": [], "reasoning": []}
    calls = []
    for event in events:
        if event.kind == "tool_call":
            calls.append(call_message(event.call_id, event.name, event.arguments))
        else:
            texts[event.kind].append(event.text)
    return assistant_message("".join(texts["content"]), "".join(texts["reasoning"]), calls)


def assistant_message(
    content: str, reasoning: str, calls: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """A reply as a message; `content` is null only beside tool calls."""
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


def call_message(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """One entry of `tool_calls`; `arguments` is a JSON text."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def new_call_id() -> str:
    """A fresh tool-call id of letters and digits only: agents drop every other character."""
    return "call" + secrets.token_hex(12)


# -- how a family writes -------------------------------------------------------------------------


class Marks:
    """Literal marks to look for in a growing text. A match of one of `before` is empty: it ends
    what stands before it, and is itself still to be read."""

    def __init__(self, *marks: str, before: Iterable[str] = ()) -> None:
        self.all = (*marks, *before)
        self.longest = max(map(len, self.all), default=0)
        patterns = [*map(re.escape, marks), *(f"(?={re.escape(mark)})" for mark in before)]
        self._search = re.compile("|".join(patterns) or r"(?!)").search
        self._first = {mark[0] for mark in self.all}

    def search(self, text: str, at: int = 0) -> re.Match[str] | None:
        """The first mark in `text` from `at` on."""
        return self._search(text, at)

    def held(self, text: str) -> int:
        """How many characters at the end of `text` may be the beginning of a mark."""
        for at in range(max(0, len(text) - self.longest + 1), len(text)):
            if text[at] in self._first and any(mark.startswith(text[at:]) for mark in self.all):
                return len(text) - at
        return 0


@dataclass(frozen=True, slots=True)
class Section:
    """What is held back until it is read: from an opening mark to one of `close` (without any: to
    the end of the reply).

    `fits(body)` looks at the first characters: False where no section begins like this, so that
    the text is released at once; None while that is open. What is not valid becomes text: its
    opening mark, and what follows is read again; all of it with `whole`.
    """

    close: Marks
    read: Read
    fits: Callable[[str], bool | None] = lambda body: True
    whole: bool = False


@dataclass(frozen=True)
class ReplyFormat:
    """How a family writes. `sections`: what opens one, and what it is. `bare`: a section without
    an opening mark, with which a message may begin. `think`: what stands around reasoning at the
    beginning of the reply. `ends`: what ends a message, of which such a reply may have several;
    of these, `inner` do not end the reply. `within`: marks inside sections."""

    name: str
    sections: Mapping[str, Section]
    bare: Section | None = None
    think: tuple[str, str] | None = (THINK, END_THINK)
    ends: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    within: tuple[str, ...] = ()

    @cached_property
    def in_text(self) -> Marks:
        """What counts in text."""
        return Marks(*self.ends, *self.sections)

    @cached_property
    def in_reasoning(self) -> Marks:
        """What ends reasoning."""
        if self.think is not None:
            return Marks(self.think[1])
        return Marks(*self.ends, before=self.sections)

    @cached_property
    def marks(self) -> frozenset[str]:
        """All marks: they must stay visible although the tokenizer may call them special."""
        closing = (mark for section in self.sections.values() for mark in section.close.all)
        return frozenset((*self.in_text.all, *(self.think or ()), *self.within, *closing))

    def parser(
        self,
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        in_reasoning: bool = False,
        new_id: Callable[[], str] = new_call_id,
    ) -> ReplyParser:
        """A reader of one reply. `tools`: those of the request; none: calls are text.
        `in_reasoning`: the prompt already opened the reasoning. Ids of calls come from `new_id`
        where the model writes none."""
        return ReplyParser(self, schemas(tools) if tools else None, in_reasoning, new_id)

    def message(
        self, text: str, tools: Sequence[Mapping[str, Any]] | None, *, in_reasoning: bool = False
    ) -> dict[str, Any]:
        """The assistant message of a whole reply."""
        parser = self.parser(tools, in_reasoning=in_reasoning)
        return message_of([*parser.feed(text), *parser.finish()])

    def meaning(
        self, text: str, tools: Sequence[Mapping[str, Any]] | None, *, in_reasoning: bool = False
    ) -> Any:
        """A value that is equal for texts that mean the same reply: white space around its parts
        and the writing of arguments do not count."""
        message = self.message(text, tools, in_reasoning=in_reasoning)
        texts = [(message.get(key) or "").strip() for key in ("reasoning_content", "content")]
        called = [call["function"] for call in message.get("tool_calls", ())]
        # Cut off in its reasoning is not the same as done with it.
        closed = bool(texts[0] and self.think and self.think[1] in text)
        return texts, closed, [(call["name"], json.loads(call["arguments"])) for call in called]


def begins(body: str, *words: str) -> bool | None:
    """Whether `body` begins with one of `words`, white space aside; None while it may."""
    text = body.lstrip()
    if any(text.startswith(word) for word in words):
        return True
    return None if any(word.startswith(text) for word in words) else False


# -- the automaton -------------------------------------------------------------------------------


class ReplyParser:
    """Reads one reply; see `ReplyFormat.parser`."""

    def __init__(
        self, form: ReplyFormat, tools: Tools | None, in_reasoning: bool, new_id: Callable[[], str]
    ) -> None:
        self._form = form
        self._tools = tools
        self._new_id = new_id
        read = tools is not None or bool(form.ends)
        self._marks = form.in_text if read else Marks()
        self._bare = form.bare if read else None
        self._at_begin = True  # nothing of this message was read: a bare section may follow
        # Each step reads on in `_buf` and returns whether another one may follow.
        self._step: Callable[[bool], bool] = self._start if form.think else self._text
        self._in_reasoning = in_reasoning
        self._events: list[ReplyEvent] = []  # not yet taken
        self._shown: list[ReplyEvent] = []
        self._calls = 0
        self._said = {"reasoning": False, "content": False}
        self._buf = ""  # not yet understood; short, except inside a section
        self._trim = False  # newlines right behind reasoning are not content
        self._space = ""  # white space of which the next character decides
        self._after_call = False
        self._section: Section | None = None
        self._mark = ""  # what opened the section
        self._begun = False  # the first characters of the section were seen, and fit
        self._scanned = 0  # no mark that closes the section begins before this position
        self._later: list[str] = []  # pieces of the section that do not close it
        self._tail = ""  # the last characters of them

    def feed(self, text: str) -> list[ReplyEvent]:
        """Take the next piece of the reply; return what can be shown now."""
        if self._section is not None and self._begun:  # linear in the length of long arguments
            close = self._section.close
            self._tail += text
            if close.search(self._tail) is None:
                self._tail = self._tail[-close.longest :] if close.longest else ""
                self._later.append(text)
                return []
        return self._read(text, final=False)

    def finish(self) -> list[ReplyEvent]:
        """The reply is over: release everything that was held back."""
        events = self._read("", final=True)
        self._release_space()
        return events + self._take()

    def message(self) -> dict[str, Any]:
        """The reply so far as an assistant message."""
        return message_of(self._shown)

    def _read(self, text: str, *, final: bool) -> list[ReplyEvent]:
        if self._later:
            text = "".join([*self._later, text])
            self._later.clear()
        self._buf += text
        while self._step(final):
            pass
        return self._take()

    def _take(self) -> list[ReplyEvent]:
        events, self._events = self._events, []
        self._shown += events
        return events

    # -- steps ---------------------------------------------------------------------------------

    def _start(self, final: bool) -> bool:
        """Before the first visible character: does the reply (again) open its reasoning?"""
        assert self._form.think is not None
        mark = self._form.think[0]
        text = self._buf.lstrip()
        if text.startswith(mark):
            self._buf = text[len(mark) :]
            self._in_reasoning = True
        elif not final and mark.startswith(text):
            return False
        self._step = self._reasoning if self._in_reasoning else self._text
        return True

    def _reasoning(self, final: bool) -> bool:
        marks = self._form.in_reasoning
        match = marks.search(self._buf)
        if match is None:
            self._show("reasoning", self._cut(0 if final else marks.held(self._buf)))
            return False
        self._show("reasoning", self._buf[: match.start()])
        self._buf = self._buf[match.end() :]
        self._space = ""
        self._trim = self._at_begin = True
        self._step = self._text
        return True

    def _text(self, final: bool) -> bool:
        if self._trim:
            self._buf = self._buf.lstrip("\n")
            if not self._buf:
                return False
            self._trim = False
        if self._at_begin and self._bare is not None and self._buf.strip():
            self._at_begin = False
            if self._bare.fits(self._buf) is not False:
                return self._open(self._bare, "")
        match = self._marks.search(self._buf)
        if match is None:
            self._show("content", self._cut(0 if final else self._marks.held(self._buf)))
            return False
        self._show("content", self._buf[: match.start()])
        self._buf = self._buf[match.end() :]
        if match[0] in self._form.sections:
            return self._open(self._form.sections[match[0]], match[0])
        self._release_space()
        self._trim = self._at_begin = True
        return True

    def _in_section(self, final: bool) -> bool:
        section = self._section
        assert section is not None
        if not self._begun:
            fits = section.fits(self._buf)
            if fits is False:
                return self._reject(section)
            self._begun = bool(fits)
        while (match := section.close.search(self._buf, self._scanned)) is not None:
            found = section.read(self._mark, self._buf[: match.start()], self._tools or {})
            if found.calls or found.then:
                self._buf = self._buf[match.end() :]
                return self._accept(found)
            if not found.inside:
                return self._reject(section, match.end())
            self._scanned = match.start() + 1  # the mark stands inside a value of the call
        if not final:
            self._scanned = max(self._scanned, len(self._buf) - section.close.longest + 1)
            self._tail = self._buf[self._scanned :]
            return False
        # The reply ended inside a call: a whole call whose closing mark is missing is still one.
        body = self._buf[: len(self._buf) - section.close.held(self._buf)]
        found = section.read(self._mark, body, self._tools or {})
        if not found.calls:
            return self._reject(section, len(self._buf))
        self._buf = ""
        return self._accept(found)

    # -- parts ---------------------------------------------------------------------------------

    def _open(self, section: Section, mark: str) -> bool:
        self._section, self._mark = section, mark
        self._scanned, self._begun, self._tail = 0, False, ""
        self._step = self._in_section
        return True

    def _accept(self, found: Found) -> bool:
        """The section is what it seemed to be: calls, or the head of a message."""
        self._section = None
        self._step = self._text
        if isinstance(found.then, Section):
            return self._open(found.then, found.mark)
        if found.then:
            self._space = "\n" if self._said[found.then] else ""
            self._step = self._reasoning if found.then == "reasoning" else self._text
            self._at_begin = False
            return True
        space, self._space = self._space, ""
        if self._said["content"] and not self._after_call:
            self._emit("content", space.rstrip("\n"))
        for call in found.calls:
            call_id = call.call_id or self._new_id()
            event = ReplyEvent("tool_call", "", self._calls, call_id, call.name, call.arguments)
            self._events.append(event)
            self._calls += 1
        self._after_call = True
        return True

    def _reject(self, section: Section, end: int = 0) -> bool:
        """Not a call after all: what opened it is text, and what follows is read again."""
        self._section = None
        self._step = self._text
        shown = self._mark
        if section.whole:
            shown += self._buf[:end]
            self._buf = self._buf[end:]
        self._show("content", shown)
        return True

    def _cut(self, keep: int) -> str:
        """Take what is known off the buffer; `keep` characters stay."""
        cut = len(self._buf) - keep
        text, self._buf = self._buf[:cut], self._buf[cut:]
        return text

    def _show(self, kind: Literal["reasoning", "content"], text: str) -> None:
        if self._space:
            text, self._space = self._space + text, ""
        if kind == "reasoning":
            if self._said["reasoning"] or text.strip():
                self._emit("reasoning", text)
            else:
                self._space = text
            return
        body = text.rstrip()
        self._space = text[len(body) :]
        if body:
            self._emit("content", body)
            self._after_call = False

    def _release_space(self) -> None:
        """White space at the end of a message is part of it, but not behind a call."""
        space, self._space = self._space, ""
        if not self._after_call and self._step == self._text:
            self._emit("content", space)

    def _emit(self, kind: Literal["reasoning", "content"], text: str) -> None:
        if not text:
            return
        self._said[kind] = True
        if self._events and self._events[-1].kind == kind:
            text = self._events.pop().text + text
        self._events.append(ReplyEvent(kind, text))
