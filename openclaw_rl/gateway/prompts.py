"""From a placed request to the exact tokens that are served.

Guarantees: recorded replies stand in the history as the model wrote them (clients strip reasoning
and re-serialise arguments); where the template then gives the same text again, the prompt begins
with the tokens that were sampled, and text is only tokenised for what is new; where the template
rewrites history, the whole text is tokenised and the turn begins a new segment.
"""

from __future__ import annotations

import asyncio
import functools
from array import array
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Executor
from typing import TypeVar

from openclaw_rl.engine.chat import ChatTokenizer, KnownPrompt, text_sha
from openclaw_rl.gateway.known import KnownTurn, KnownTurns, compact
from openclaw_rl.gateway.metrics import Metrics
from openclaw_rl.gateway.turn import Prompt
from openclaw_rl.session.types import Placement
from openclaw_rl.types import Message, Turn
from openclaw_rl.wire.errors import prompt_too_long
from openclaw_rl.wire.formats import ReplyFormat
from openclaw_rl.wire.reply import THINK
from openclaw_rl.wire.request import ChatRequest

T = TypeVar("T")

ENCODE_INLINE_CHARS = 500
"""Longer texts are tokenised in a thread: about 1 ms per 1,000 characters, during which the
tokenizer lets other threads run."""

LoadTurns = Callable[[list[str]], Awaitable[list[Turn]]]
"""Reads turns from the journal; unknown ones are left out."""


class Prompts:
    """Builds prompts. Lives on one event loop; heavy work runs in `executor`."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        reply_format: ReplyFormat,
        known: KnownTurns,
        load: LoadTurns,
        executor: Executor,
        metrics: Metrics,
        inline_chars: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._format = reply_format
        self._known = known
        self._load = load
        self._executor = executor
        self._metrics = metrics
        self._inline_chars = inline_chars

    async def build(
        self, request: ChatRequest, placement: Placement, size: int, limit: int | None = None
    ) -> Prompt:
        """The prompt of `request`; `size` is about its length in characters.

        Raises `EngineRefused` (400) for messages that the template refuses, and `WireError` for a
        prompt that cannot but have `limit` tokens or more: it is not tokenised to know how many.
        """
        turns = await self._recall(placement)
        messages = _put_back(request.messages, placement, turns)
        parent = turns.get(placement.parent_id) if placement.parent_id else None
        work = functools.partial(self._render, request, messages, parent)
        text, known_ids = work() if size <= self._inline_chars else await self._in_thread(work)
        if limit is not None and (fewest := self._tokenizer.fewest(text, limit)) >= limit:
            raise prompt_too_long(fewest, limit)
        return Prompt(
            messages=messages,
            ids=compact(await self._encode(text)) if known_ids is None else known_ids,
            shares_tokens=known_ids is not None,
            rendered_len=len(text),
            rendered_sha=text_sha(text),
            in_reasoning=opens_reasoning(text),
        )

    async def _encode(self, text: str) -> list[int]:
        if len(text) <= ENCODE_INLINE_CHARS:
            return self._tokenizer.encode(text)
        return await self._in_thread(functools.partial(self._tokenizer.encode, text))

    async def _recall(self, placement: Placement) -> dict[str, KnownTurn]:
        """The turns that stand in the request's history, from memory or else the journal."""
        parent_id = placement.parent_id
        found: dict[str, KnownTurn] = {}
        if parent_id is not None:
            parent = self._known.get(parent_id)
            if parent is not None and parent.tokens is not None:
                found[parent_id] = parent
            else:
                await self._recall_parent(parent_id, placement, found)
        missing = []
        for turn_id in dict.fromkeys(placement.known_replies.values()):
            if turn_id not in found:
                turn = self._known.get(turn_id)
                if turn is None:
                    missing.append(turn_id)
                else:
                    found[turn_id] = turn
        if missing:
            for row in await self._load(missing):
                self._learn(row.turn_id, reply_only(row.reply), found)
        return found

    async def _recall_parent(
        self, parent_id: str, placement: Placement, found: dict[str, KnownTurn]
    ) -> None:
        """Read a turn that is not in memory; its messages hold the earlier replies as well."""
        for row in await self._load([parent_id]):
            self._learn(parent_id, from_journal(row), found)
            if len(row.messages) + 1 != placement.matched:
                continue  # not the same message by message: the replies are read one by one
            for index, turn_id in placement.known_replies.items():
                if index < len(row.messages) and turn_id not in self._known:
                    self._learn(turn_id, reply_only(row.messages[index]), found)

    def _learn(self, turn_id: str, turn: KnownTurn, found: dict[str, KnownTurn]) -> None:
        self._metrics.count("recalled_turns")
        self._known.put(turn_id, turn)
        found[turn_id] = turn

    def _render(
        self, request: ChatRequest, messages: tuple[Message, ...], parent: KnownTurn | None
    ) -> tuple[str, array[int] | None]:
        """The prompt's text, and its ids where it goes on from the parent's."""
        text = self._tokenizer.render(messages, request.tools, request.template_kwargs)
        if parent is None or parent.tokens is None:
            return text, None
        previous = KnownPrompt(
            rendered_len=parent.rendered_len,
            rendered_sha=parent.rendered_sha,
            tokens=parent.tokens,
            output_ids=parent.tokens[len(parent.tokens) - parent.output_len :],
        )
        meaning = functools.partial(
            self._format.meaning,
            tools=request.tools,
            in_reasoning=opens_reasoning(text[: parent.rendered_len]),
        )
        return text, self._tokenizer.continue_prompt(previous, text, meaning)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def opens_reasoning(prompt: str) -> bool:
    """Whether the reply to this prompt begins inside `<think>`."""
    return prompt.rstrip().endswith(THINK)


def from_journal(turn: Turn) -> KnownTurn:
    """What must be known of a recorded turn to continue it."""
    return KnownTurn(
        reply=turn.reply,
        tokens=compact([*turn.prompt_ids, *turn.output_ids]),
        output_len=len(turn.output_ids),
        rendered_len=turn.rendered_len,
        rendered_sha=turn.rendered_sha,
    )


def reply_only(reply: Message) -> KnownTurn:
    """A turn of which only the reply is needed."""
    return KnownTurn(reply=reply, tokens=None, output_len=0, rendered_len=0, rendered_sha="")


def _put_back(
    messages: Iterable[Message], placement: Placement, turns: dict[str, KnownTurn]
) -> tuple[Message, ...]:
    """The messages with every known reply as the model wrote it."""
    result = list(messages)
    for index, turn_id in placement.known_replies.items():
        if turn_id in turns:
            result[index] = turns[turn_id].reply
    return tuple(result)
