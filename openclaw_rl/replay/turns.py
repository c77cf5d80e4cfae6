"""A past conversation as off-policy turns: each reply with the ids that the served template gives.

Guarantees: what is recorded is what the template writes for these very messages, ids and all, or
nothing: a reply that it refuses, rewrites or loses a part of is left out with a counted reason.
No log-prob and no version is made up; the trainer computes the old log-probs itself. A turn's id
is a digest of what was said, so the same conversation gives the same turns.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openclaw_rl.engine.chat import ChatTokenizer
from openclaw_rl.errors import ConfigError, ContextOverflow, EngineRefused
from openclaw_rl.replay.files import Conversation
from openclaw_rl.session.canonical import (
    Trace,
    extend,
    followed,
    read_history,
    text_of,
    trace_of,
)
from openclaw_rl.session.kind import last_user, side_pattern
from openclaw_rl.types import Message, Turn
from openclaw_rl.wire.formats import ReplyFormat, choose_format
from openclaw_rl.wire.reply import opens_reasoning

SOURCE = "replay"
"""What `status` shows these turns as bound by."""


class _LeftOut(Exception):
    """A reply that gives no turn, by reason."""


@dataclass(frozen=True, slots=True)
class Reader:
    """The served model's side: tokenizer, reply format, and how many tokens fit."""

    tokenizer: ChatTokenizer
    reply_format: ReplyFormat
    context_length: int

    @classmethod
    def open(cls, model_path: str, reply_format: str, context_length: int | None) -> Reader:
        """The reader for a served model. Raises `ConfigError`."""
        tokenizer = ChatTokenizer.load(model_path)
        chosen, _ = choose_format(reply_format, tokenizer.template, tokenizer.added_tokens.keys())
        length = context_length or tokenizer.context_length
        if not length:
            raise ConfigError("the model does not state its context length: set --context-length")
        return cls(tokenizer.showing(chosen.marks, chosen.inner), chosen, length)

    def turns(self, past: Conversation, now: float, left_out: Counter[str]) -> list[Turn]:
        """The turns of a conversation with their next states, oldest first; replies that give none
        are counted."""
        left_out.update(past.left_out)
        found: list[Turn] = []
        for index, message in enumerate(past.messages):
            if message.get("role") != "assistant" or index < past.begin:
                continue
            try:
                turn = self._turn(past, index, found[-1] if found else None)
            except _LeftOut as error:
                left_out[str(error)] += 1
            except ContextOverflow:
                left_out["too_long"] += 1
            except EngineRefused:
                left_out["template_refuses"] += 1
            else:
                turn.created = now + 1e-4 * len(found)
                found.append(turn)
        return found

    def _turn(self, past: Conversation, index: int, parent: Turn | None) -> Turn:
        history, reply = past.messages[:index], past.messages[index]
        next_state = tuple(followed(past.messages[index + 1 :]))
        _check(history, reply, next_state)
        traced = read_history(history)

        def meaning(text: str, before: str) -> Any:
            opened = opens_reasoning(before)
            return self.reply_format.meaning(text, past.tools, in_reasoning=opened)

        prompt = self.tokenizer.prompt(
            history, past.tools, {}, parent, meaning, self.context_length
        )
        whole = self.tokenizer.render((*history, reply), past.tools)
        output = self.tokenizer.reply_ids(prompt.text, whole)
        if output is None or not self._writes(reply, output, prompt.text, past.tools):
            raise _LeftOut("template_rewrites")
        if len(prompt.ids) + len(output) > self.context_length:
            raise _LeftOut("too_long")
        onto = parent if prompt.shares_tokens else None
        return Turn(
            turn_id="replay-" + _digest([(*history, reply), past.tools]),
            session_id=f"replay-{past.session_id or _digest([past.messages[0], past.tools])}",
            source=SOURCE,
            kind_reason=SOURCE,
            parent_id=onto.turn_id if onto else None,
            matched=len(onto.messages) + 1 if onto else 0,
            request_hash=traced.request_hash,
            node_hash=extend(traced.history_hash, reply),
            off_policy=True,
            messages=history,
            tools=past.tools,
            prompt_ids=prompt.ids,
            shares_tokens=prompt.shares_tokens,
            rendered_len=len(prompt.text),
            rendered_sha=prompt.sha,
            output_ids=output,
            reply=reply,
            finish_reason="tool_calls" if reply.get("tool_calls") else "stop",
            next_state=next_state,
        )

    def _writes(
        self, reply: Message, output: Sequence[int], prompt: str, tools: Sequence[Any]
    ) -> bool:
        """Whether the template wrote all of the reply in `output`: some know no tool calls."""
        names = [call["function"]["name"] for call in reply.get("tool_calls") or ()]
        offered = [*tools, *({"type": "function", "function": {"name": name}} for name in names)]
        read = self.reply_format.message(
            self.tokenizer.decode(output),
            offered if names else None,
            in_reasoning=opens_reasoning(prompt),
        )
        return _said(read) == _said(reply)


def _said(reply: Message) -> tuple[str, list[Any]]:
    """Text and calls of a reply; the writing of arguments does not count."""
    calls = []
    for call in reply.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
        calls.append((call["function"]["name"], arguments))
    return text_of(reply).strip(), calls


def _check(history: Sequence[Message], reply: Message, next_state: Sequence[Message]) -> None:
    """Raises `_LeftOut` where a reply is nothing to learn from."""
    if trace_of(reply) is Trace.EMPTY:
        raise _LeftOut("empty_reply")
    if last_user(history) is None:
        raise _LeftOut("no_user_message")
    if side_pattern(history) is not None:
        raise _LeftOut("side")
    if not next_state:
        raise _LeftOut("no_next_state")


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
