"""Messages by meaning: what makes two histories the same conversation.

Guarantees: the same conversation has the same hashes however a client re-serialises it (arguments
re-written, ids reduced to letters and digits, reasoning stripped, text parts joined, transient
messages gone); each message is hashed once, so reading a request costs its length, and reading one
that goes on from another costs comparing the two and hashing what is new.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from openclaw_rl.types import Message

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
SYSTEM_ROLES = ("system", "developer")


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
class Step:
    """`messages[end - 1]` of a history. `digest` is "" where it is neither history nor feedback.

    Of a NORMAL message, `node` is the hash of a turn whose reply it is ("" if it is not an
    assistant's), `empty` the hash of a turn that answered the history up to it with nothing.
    """

    end: int
    trace: Trace
    digest: str = ""
    node: str = ""
    empty: str = ""
    size: int = field(default=0, compare=False)
    """About how many characters it takes in memory."""


@dataclass(frozen=True, slots=True)
class History:
    """A request as a history: a step for each message; `marks` are those of NORMAL messages.
    `fresh_end` is behind the last message that is new to whoever wrote the reply before it (NORMAL
    or NUDGE). Another reading may go on from the `messages` that this one is of."""

    messages: Sequence[Message] = field(repr=False, compare=False)
    steps: Sequence[Step]
    marks: Sequence[Step]
    fresh_end: int
    system_hash: str
    request_hash: str
    history_hash: str

    @property
    def size(self) -> int:
        """About how many characters it takes in memory."""
        return sum(step.size for step in self.steps)


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


def read_history(messages: Sequence[Message], before: History | None = None) -> History:
    """Read a request's messages. What it shares with `before`, an earlier reading of whatever
    request, is taken from there; the result is the same without."""
    steps = [] if before is None else list(before.steps[: _shared(before.messages, messages)])
    steps += _read_on(messages, steps)
    marks = [step for step in steps if step.empty]
    fresh = [step for step in steps if step.digest]
    system = [_understand(one)[1] for one in messages if one.get("role") in SYSTEM_ROLES]
    system_hash = _hash("\0".join(system))[:16]
    chain = marks[-1].empty if marks else f"{_START}."
    return History(
        messages=messages,
        steps=steps,
        marks=marks,
        fresh_end=fresh[-1].end if fresh else 0,
        system_hash=system_hash,
        request_hash=f"{system_hash}.{_hash(''.join([step.digest for step in fresh]))}",
        history_hash=f"{chain}{len(marks)}-{marks[0].digest[:16] if marks else ''}",
    )


def _shared(old: Sequence[Message], new: Sequence[Message]) -> int:
    """How many messages lead both and leave the same in their history. A system text leaves
    nothing, and agents change it with every request."""
    count = 0
    for pair in zip(old, new, strict=False):
        if pair[0] != pair[1] and any(one.get("role") not in SYSTEM_ROLES for one in pair):
            break
        count += 1
    return count


def _read_on(messages: Sequence[Message], before: Sequence[Step]) -> list[Step]:
    """The steps of the messages behind those of the steps `before`."""
    marked = [step for step in before if step.empty]
    count = len(marked)
    first = marked[0].digest if marked else ""
    chain = marked[-1].empty[:-1] if marked else _START
    steps = []
    for end, message in enumerate(messages[len(before) :], len(before) + 1):
        trace, text = _understand(message)
        own = node = empty = ""
        if trace in (Trace.NORMAL, Trace.NUDGE):
            own = _digest(message, text)
        if trace is Trace.NORMAL:
            chain = _hash(chain + own)
            count += 1
            first = first or own
            empty = f"{chain}."
            if message.get("role") == "assistant":
                node = f"{chain}.{count}-{first[:16]}-{own[:16]}"
        size = sum(100 + len(v if isinstance(v, str) else str(v)) for v in message.values())
        steps.append(Step(end, trace, own, node, empty, size))
    return steps


def extend(history_hash: str, reply: Message) -> str:
    """The node hash of a turn that answered the history `history_hash` with `reply`."""
    chain, _, state = history_hash.partition(".")
    trace, text = _understand(reply)
    if trace is Trace.EMPTY:
        return f"{chain}."
    own = _digest(reply, text)
    count, _, first = state.partition("-")
    return f"{_hash(chain + own)}.{int(count) + 1}-{first or own[:16]}-{own[:16]}"


def similarity(node_hash: str) -> str:
    """What two versions of one turn share when something between its first message and its reply
    was re-worded: the number of messages, the first one and the reply. "" for empty replies."""
    return node_hash.partition(".")[2]


def reply_of(node_hash: str) -> str:
    """What all turns with one reply share. "" for empty replies."""
    return node_hash.rpartition("-")[2] if similarity(node_hash) else ""


def followed(messages: Sequence[Message]) -> list[Message]:
    """What was said from here on until the policy speaks again, transient messages and the internal
    context that OpenClaw puts into texts left out."""
    found: list[Message] = []
    for message in messages:
        if trace_of(message) in (Trace.SYSTEM, Trace.TRANSIENT, Trace.EMPTY):
            continue
        if message.get("role") == "assistant":
            break
        content = message.get("content")
        if message.get("role") == "user" and isinstance(content, str) and _INTERNAL.search(content):
            message = {**message, "content": _INTERNAL.sub("", content).strip()}
        found.append(message)
    return found


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
    return (Trace.SYSTEM if role in SYSTEM_ROLES else Trace.NORMAL), text.strip()


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
