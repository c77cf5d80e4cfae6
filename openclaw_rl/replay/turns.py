"""A past conversation as off-policy turns: each reply with the ids that the served template gives.

Guarantees: what is recorded is what the template writes for these very messages, ids and all, or
nothing: a reply that it refuses, rewrites or loses a part of is left out with a counted reason.
No log-prob and no version is made up; the trainer computes the old log-probs itself. A turn's id
is a digest of what was said, so the same conversation gives the same turns.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openclaw_rl.engine.chat import ChatTokenizer, KnownPrompt, text_sha
from openclaw_rl.errors import EngineRefused
from openclaw_rl.replay.files import Conversation
from openclaw_rl.session.canonical import (
    Trace,
    extend,
    read_history,
    text_of,
    trace_of,
    without_internal,
)
from openclaw_rl.session.kind import last_user, side_pattern
from openclaw_rl.types import Message, Turn
from openclaw_rl.wire.formats import ReplyFormat
from openclaw_rl.wire.reply import THINK

SOURCE = "replay"
"""What `status` shows these turns as bound by."""


@dataclass(frozen=True, slots=True)
class PastTurn:
    """A turn and what followed it."""

    record: Turn
    next_state: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Reader:
    """The served model's side: tokenizer, reply format, and how many tokens fit."""

    tokenizer: ChatTokenizer
    reply_format: ReplyFormat
    context_length: int

    def turns(self, past: Conversation, now: float, left_out: Counter[str]) -> list[PastTurn]:
        """The turns of a conversation, oldest first; replies that give none are counted."""
        left_out.update(past.left_out or {})
        found: list[PastTurn] = []
        parent: _Parent | None = None
        for index, message in enumerate(past.messages):
            if message.get("role") != "assistant" or index < past.begin:
                continue
            followed = _followed(past.messages, index)
            reason = _unfit(past.messages[:index], message, followed)
            built = reason or self._built(past, index, parent)
            if isinstance(built, str):
                left_out[built] += 1
                continue
            parent = built
            record = _record(past, index, built, now + 1e-4 * len(found))
            found.append(PastTurn(record, followed))
        return found

    def _built(self, past: Conversation, index: int, parent: _Parent | None) -> _Parent | str:
        """Prompt and reply of one turn in ids, or why there are none."""
        reply = past.messages[index]
        try:
            prompt = self.tokenizer.render(past.messages[:index], past.tools)
            if self.tokenizer.fewest(prompt, self.context_length) >= self.context_length:
                return "too_long"  # to tokenise it would take seconds a megabyte
            whole = self.tokenizer.render(past.messages[: index + 1], past.tools)
            output = self.tokenizer.reply_ids(prompt, whole)
            if output is None:
                return "template_rewrites"
            if not self._same(reply, self.tokenizer.decode(output), prompt, past.tools):
                return "template_rewrites"
            known = None
            if parent is not None:
                known = self.tokenizer.continue_prompt(parent.known, prompt)
            ids = list(known) if known is not None else self.tokenizer.encode(prompt)
        except EngineRefused:
            return "template_refuses"
        if len(ids) + len(output) > self.context_length:
            return "too_long"
        at = KnownPrompt(len(prompt), text_sha(prompt), [*ids, *output], output)
        turn_id = "replay-" + _digest([past.messages[: index + 1], past.tools])
        return _Parent(turn_id, index, ids, at, parent if known is not None else None)

    def _same(self, reply: Message, text: str, prompt: str, tools: Sequence[Any]) -> bool:
        """Whether the template wrote all of the reply: some know no tool calls."""
        calls = [call["function"] for call in reply.get("tool_calls") or ()]
        offered = [*tools, *({"type": "function", "function": {"name": c["name"]}} for c in calls)]
        opened = prompt.rstrip().endswith(THINK)
        read = self.reply_format.message(text, offered if calls else None, in_reasoning=opened)
        back = [call["function"] for call in read.get("tool_calls") or ()]
        return (text_of(read).strip() == text_of(reply).strip()) and [
            (call["name"], _loaded(call["arguments"])) for call in back
        ] == [(call["name"], _loaded(call["arguments"])) for call in calls]


@dataclass(frozen=True, slots=True)
class _Parent:
    """A turn in ids; `parent` where its prompt begins with that turn's prompt and reply."""

    turn_id: str
    index: int
    prompt_ids: list[int]
    known: KnownPrompt
    parent: _Parent | None


def _record(past: Conversation, index: int, built: _Parent, created: float) -> Turn:
    messages, reply = past.messages[:index], past.messages[index]
    history = read_history(messages)
    parent = built.parent
    session = past.session_id or _digest([past.messages[0], past.tools])
    return Turn(
        turn_id=built.turn_id,
        session_id=f"replay-{session}",
        source=SOURCE,
        owner="",
        kind="main",
        kind_reason=SOURCE,
        parent_id=parent.turn_id if parent else None,
        matched=parent.index + 1 if parent else 0,
        shares_tokens=parent is not None,
        prompt_ids=built.prompt_ids,
        output_ids=list(built.known.output_ids),
        output_logprobs=(),
        output_versions=(),
        finish_reason="tool_calls" if reply.get("tool_calls") else "stop",
        truncated=False,
        messages=messages,
        reply=reply,
        tools=past.tools,
        template_kwargs={},
        sampling={},
        request_hash=history.request_hash,
        node_hash=extend(history.history_hash, reply),
        rendered_len=built.known.rendered_len,
        rendered_sha=built.known.rendered_sha,
        created=created,
        off_policy=True,
    )


def _unfit(history: Sequence[Message], reply: Message, followed: Sequence[Message]) -> str:
    """Why a reply is nothing to learn from; "" where it is."""
    traces = [trace_of(message) for message in history]
    if trace_of(reply) is Trace.EMPTY:
        return "empty_reply"
    if last_user(history, traces) is None:
        return "no_user_message"
    if side_pattern(history, traces) is not None:
        return "side"
    return "" if followed else "no_next_state"


def _followed(messages: Sequence[Message], index: int) -> tuple[Message, ...]:
    """What was said after a reply, up to the next one."""
    found: list[Message] = []
    for message in messages[index + 1 :]:
        trace = trace_of(message)
        if trace in (Trace.SYSTEM, Trace.TRANSIENT, Trace.EMPTY):
            continue
        if message.get("role") == "assistant":
            break
        found.append(without_internal(message))
    return tuple(found)


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=_plain)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else list(value)


def _loaded(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
