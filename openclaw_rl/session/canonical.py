"""Messages by meaning: what makes two histories the same conversation.

Guarantees: the same conversation has the same hashes however a client re-serialises it (arguments
re-written, ids reduced to letters and digits, reasoning stripped, text parts joined, transient
messages gone); each message is hashed once, so reading a request costs its length.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from openclaw_rl.session.types import Message

_INTERNAL = re.compile(
    r"<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>.*?(?:<<<END_OPENCLAW_INTERNAL_CONTEXT>>>|\Z)", re.S
)
"""What OpenClaw adds to one request and never replays."""

_RUNTIME = re.compile(r"^Runtime: agent=.*$\n?", re.M)
"""OpenClaw's line about itself; it moves to another message when the history is compacted."""

_STAMP = r"(?:\[[^\]\n]{1,60}\]\s*)?"

_NUDGE = re.compile(
    _STAMP + r"The previous (?:attempt did not produce a user-visible|assistant turn (?:recorded "
    r"reasoning but did not|completed its tool calls but did not|only described the plan))"
)
"""OpenClaw's own words after a reply without visible text. They say something about that reply,
but a later history may lack them."""

_THINK = re.compile(r"<think>.*?</think>", re.S)
_NOT_ALNUM = re.compile(r"[^A-Za-z0-9]")


class Trace(Enum):
    """What a message leaves in its history."""

    SYSTEM = "system"
    TRANSIENT = "transient"
    """Never returns: neither history nor feedback."""
    EMPTY = "empty"
    """An assistant message without text and calls: clients drop it."""
    NUDGE = "nudge"
    """Feedback, but not history."""
    NORMAL = "normal"


@dataclass(frozen=True, slots=True)
class Mark:
    """The history up to `messages[end - 1]`, a message that leaves a trace.

    `node` is the hash of a turn whose reply that message is ("" if it is not an assistant's),
    `empty` the hash of a turn that answered this history with nothing.
    """

    end: int
    node: str
    empty: str


@dataclass(frozen=True, slots=True)
class History:
    """A request as a history. `traces` has one entry per message, `marks` one per NORMAL message;
    `digests` are the marks' own messages. `fresh_end` is behind the last message that is new to
    whoever wrote the reply before it (NORMAL or NUDGE)."""

    traces: tuple[Trace, ...]
    marks: tuple[Mark, ...]
    digests: tuple[str, ...]
    fresh_end: int
    system_hash: str
    request_hash: str
    history_hash: str


def text_of(message: Message) -> str:
    """The text of a message; parts joined by newlines, parts that are no text left out."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "\n".join(
            part["text"]
            for part in content
            if isinstance(part, dict) and isinstance(part.get("text"), str)
        )
    return ""


def trace_of(message: Message) -> Trace:
    """What `message` leaves in its history."""
    return _understand(message)[0]


def digest(message: Message) -> str:
    """A hash of the meaning of one message (32 hexadecimal digits)."""
    return _digest(message, _understand(message)[1])


def read_history(messages: Sequence[Message]) -> History:
    """Read a request's messages once."""
    traces: list[Trace] = []
    marks: list[Mark] = []
    digests: list[str] = []
    all_digests: list[str] = []
    system: list[str] = []
    chain = _START
    fresh_end = 0
    for index, message in enumerate(messages):
        trace, text = _understand(message)
        traces.append(trace)
        if trace is Trace.SYSTEM:
            system.append(text)
        if trace is not Trace.NORMAL and trace is not Trace.NUDGE:
            continue
        own = _digest(message, text)
        all_digests.append(own)
        fresh_end = index + 1
        if trace is Trace.NUDGE:
            continue
        chain = _hash(chain + own)
        digests.append(own)
        node = ""
        if message.get("role") == "assistant":
            node = f"{chain}.{len(digests)}-{digests[0][:16]}-{own[:16]}"
        marks.append(Mark(index + 1, node, chain + "."))
    system_hash = _hash("\0".join(system))[:16]
    state = f"{len(digests)}-{digests[0][:16] if digests else ''}"
    return History(
        traces=tuple(traces),
        marks=tuple(marks),
        digests=tuple(digests),
        fresh_end=fresh_end,
        system_hash=system_hash,
        request_hash=f"{system_hash}.{_hash(''.join(all_digests))}",
        history_hash=f"{chain}.{state}",
    )


def extend(history_hash: str, reply: Message) -> str:
    """The node hash of a turn that answered the history `history_hash` with `reply`."""
    chain, _, state = history_hash.partition(".")
    if trace_of(reply) is Trace.EMPTY:
        return f"{chain}."
    own = digest(reply)
    count, _, first = state.partition("-")
    return f"{_hash(chain + own)}.{int(count) + 1}-{first or own[:16]}-{own[:16]}"


def likeness(node_hash: str) -> str:
    """What two versions of one turn share when something between its first message and its reply
    was re-worded: the number of messages, the first one and the reply. "" for empty replies."""
    return node_hash.partition(".")[2]


def without_internal(message: Message) -> Message:
    """`message` without the internal context that OpenClaw may have put into its text."""
    content = message.get("content")
    if message.get("role") == "user" and isinstance(content, str) and _INTERNAL.search(content):
        return {**message, "content": _INTERNAL.sub("", content).strip()}
    return message


def _understand(message: Message) -> tuple[Trace, str]:
    """The trace of a message, and the part of its text that carries meaning."""
    role = message.get("role")
    text = text_of(message)
    if role == "user":
        if "<<<BEGIN_OPENCLAW" in text:
            text = _INTERNAL.sub("", text).strip()
            if not text and not _other_parts(message):
                return Trace.TRANSIENT, text
        if "Runtime: agent=" in text:
            text = _RUNTIME.sub("", text)
        text = text.strip()
        return (Trace.NUDGE if _NUDGE.match(text) else Trace.NORMAL), text
    if role == "assistant":
        if "<think>" in text:
            text = _THINK.sub("", text)
        text = text.strip()
        if text or message.get("tool_calls") or _other_parts(message):
            return Trace.NORMAL, text
        return Trace.EMPTY, text
    return (Trace.SYSTEM if role in ("system", "developer") else Trace.NORMAL), text.strip()


def _digest(message: Message, text: str) -> str:
    role = message.get("role")
    extra: list[Any] = []
    if role == "assistant":
        extra = [_call(call) for call in message.get("tool_calls") or ()]
    elif role == "tool":
        extra = [_NOT_ALNUM.sub("", str(message.get("tool_call_id", "")))]
    elif message.get("name"):
        extra = [message["name"]]
    other = _other_parts(message)
    if other:
        extra.append({"parts": other})
    if extra:
        dumped = json.dumps(extra, sort_keys=True, separators=(",", ":"))
        return _hash(f"{role}+{len(dumped)}:{dumped}{text}")
    return _hash(f"{role}:{text}")


def _other_parts(message: Message) -> list[Any]:
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return []
    return [part for part in content if not (isinstance(part, dict) and "text" in part)]


def _call(call: Any) -> list[Any]:
    function = call.get("function", {})
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = arguments.strip()
    return [_NOT_ALNUM.sub("", str(call.get("id", ""))), function.get("name"), arguments]


def _hash(text: str) -> str:
    raw = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


_START = _hash("")
