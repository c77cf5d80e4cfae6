"""From a placed request to the exact tokens that are served.

Guarantees: recorded replies stand in the history as the model wrote them (clients strip reasoning
and re-serialise arguments); where the template then gives the same text again, the prompt begins
with the tokens that were sampled, and text is only tokenised for what is new; where the template
rewrites history, the whole text is tokenised and the turn begins a new segment.

Tokens and replies of recent turns are kept in memory, the least recently used go first; whatever
was evicted is read from the journal again.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any

from cachetools import LRUCache

from openclaw_rl.engine.chat import ChatTokenizer, Prompt
from openclaw_rl.gateway.status import Metrics
from openclaw_rl.journal.writer import AsyncJournal
from openclaw_rl.session.tracker import Placement
from openclaw_rl.types import Message, Turn
from openclaw_rl.wire.dialect import ChatRequest
from openclaw_rl.wire.formats import ReplyFormat
from openclaw_rl.wire.reply import opens_reasoning

RECENT_BYTES = 128 * 2**20
INLINE_CHARS, INLINE_NEW_CHARS = 4_000, 500
"""Longer requests are rendered and tokenised in a thread, so that other streams go on; those that
begin a conversation earlier: tokenising takes about 1 ms per 1,000 characters."""

Recent = tuple[Turn, dict[str, Message]]
"""The prompt and output of a turn, and the replies in its history and its own by their turns (one
dict along a conversation)."""


class Prompts:
    """Builds prompts. Lives on one event loop; heavy work runs in `executor`."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        reply_format: ReplyFormat,
        journal: AsyncJournal,
        executor: Executor,
        metrics: Metrics,
    ) -> None:
        self._tokenizer = tokenizer
        self._format = reply_format
        self._journal = journal
        self._executor = executor
        self._metrics = metrics
        self._recent: LRUCache[str, Recent] = LRUCache(RECENT_BYTES, _bytes)

    @property
    def gauges(self) -> dict[str, float]:
        """How many turns are in memory, and about what they take there."""
        return {"recent_turns": len(self._recent), "recent_bytes": self._recent.currsize}

    async def build(
        self, placement: Placement, request: ChatRequest, size: int, limit: int | None = None
    ) -> Prompt:
        """What is served: the messages with the recorded replies put back, and their exact tokens.

        `size` is about the request's length in characters. Raises as `ChatTokenizer.prompt`.
        """
        parent, replies = await self._recall(placement)
        messages = list[Message](request.messages)
        for index, turn_id in placement.served_replies.items():
            messages[index] = replies.get(turn_id, messages[index])

        def meaning(reply: str, prompt: str) -> Any:
            return self._format.meaning(reply, request.tools, in_reasoning=opens_reasoning(prompt))

        def work() -> Prompt:
            return self._tokenizer.prompt(
                tuple(messages), request.tools, request.template_kwargs, parent, meaning, limit
            )

        if size <= (INLINE_NEW_CHARS if parent is None else INLINE_CHARS):
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def remember(self, turn: Turn) -> Recent:
        """Keep what the next turn needs of this one. Its own parent's tokens may go, as they are
        the beginning of these: a long session costs its length, not the sum of its prompts."""
        _, replies = self._recent.get(turn.parent_id or "") or (None, {})
        replies[turn.turn_id] = turn.reply
        light = dataclasses.replace(
            turn, output_logprobs=(), output_versions=(), topk=None, messages=()
        )
        recent = light, replies
        with suppress(ValueError):  # larger than the whole memory
            self._recent[turn.turn_id] = recent
        if turn.shares_tokens and turn.parent_id is not None:
            self._recent.pop(turn.parent_id, None)
        return recent

    async def _recall(self, placement: Placement) -> tuple[Turn | None, dict[str, Message]]:
        """The parent, and the replies in the request's history by their turns."""
        parent_id, indexes = placement.turn.parent_id, placement.served_replies
        parent, replies = self._recent.get(parent_id or "") or (None, {})
        if parent_id is not None and parent is None:
            for turn in await self._load([parent_id]):
                parent, replies = self.remember(turn)
                if len(turn.messages) + 1 == placement.turn.matched:  # the same, message by message
                    for index, turn_id in indexes.items():
                        if index < len(turn.messages):
                            replies[turn_id] = turn.messages[index]
        for turn in await self._load(indexes.values() - replies.keys()):
            replies[turn.turn_id] = turn.reply
        return parent, replies

    async def _load(self, turn_ids: Iterable[str]) -> list[Turn]:
        """Turns from the journal; unknown ones are left out."""
        if not (wanted := sorted(turn_ids)):
            return []
        rows = await self._journal.read(lambda journal: [journal.turn(one) for one in wanted])
        found = [row for row in rows if row is not None]
        self._metrics.recalled.inc(len(found))
        return found


def _bytes(recent: Recent) -> int:
    """About what it takes, Python's objects around it included."""
    turn, _ = recent
    return 1_000 + 4 * (len(turn.prompt_ids) + len(turn.output_ids)) + turn.rendered_len
