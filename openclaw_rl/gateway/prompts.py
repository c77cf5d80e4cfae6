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
import functools
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import TypeVar

from cachetools import LRUCache

from openclaw_rl.engine.chat import CHARACTERS_A_TOKEN, ChatTokenizer, KnownPrompt, text_sha
from openclaw_rl.gateway.status import Metrics
from openclaw_rl.journal.writer import AsyncJournal
from openclaw_rl.session.tracker import Placement
from openclaw_rl.types import Message, Turn
from openclaw_rl.wire.errors import prompt_too_long
from openclaw_rl.wire.formats import ReplyFormat
from openclaw_rl.wire.reply import THINK
from openclaw_rl.wire.request import ChatRequest

T = TypeVar("T")

KNOWN_TOKEN_BYTES = 96 * 2**20
KNOWN_REPLY_BYTES = 32 * 2**20
INLINE_CHARS = 10_000
"""Longer requests are rendered in a thread, so that other streams go on."""
ENCODE_INLINE_CHARS = 500
"""Longer texts are tokenised in a thread: about 1 ms per 1,000 characters, during which the
tokenizer lets other threads run."""

_OVERHEAD_BYTES = 500
"""Python's objects around one entry, roughly; keeps tiny ones from being counted as free."""


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
        self._tokens: LRUCache[str, KnownPrompt] = LRUCache(KNOWN_TOKEN_BYTES, _token_bytes)
        self._replies: LRUCache[str, Message] = LRUCache(KNOWN_REPLY_BYTES, _message_bytes)

    @property
    def known_turns(self) -> int:
        """Turns of which anything is in memory."""
        return len(self._replies)

    @property
    def known_bytes(self) -> float:
        """About what they take there."""
        return self._tokens.currsize + self._replies.currsize

    async def fill(
        self,
        record: Turn,
        request: ChatRequest,
        placement: Placement,
        size: int,
        limit: int | None = None,
    ) -> bool:
        """Put into `record` what is served: the messages with the recorded replies put back, and
        their exact tokens. Whether the reply begins inside `<think>`.

        `size` is about the request's length in characters. Raises `EngineRefused` (400) for
        messages that the template refuses, and `WireError` for a prompt that cannot but have
        `limit` tokens or more: it is not tokenised to know how many.
        """
        parent, replies = await self._recall(placement)
        messages = list[Message](request.messages)
        for index, turn_id in placement.known_replies.items():
            messages[index] = replies.get(turn_id, messages[index])
        work = functools.partial(self._render, request, messages, parent)
        text, known_ids = work() if size <= INLINE_CHARS else await self._in_thread(work)
        if limit is not None and (fewest := len(text) // CHARACTERS_A_TOKEN) >= limit:
            raise prompt_too_long(fewest, limit)
        if known_ids is not None:
            record.prompt_ids = known_ids
        elif len(text) <= ENCODE_INLINE_CHARS:
            record.prompt_ids = array("i", self._tokenizer.encode(text))
        else:
            encode = functools.partial(self._tokenizer.encode, text)
            record.prompt_ids = array("i", await self._in_thread(encode))
        record.shares_tokens = known_ids is not None
        record.messages, record.tools = tuple(messages), request.tools
        record.template_kwargs = request.template_kwargs
        record.rendered_len, record.rendered_sha = len(text), text_sha(text)
        return _opens_reasoning(text)

    def remember(self, turn: Turn) -> KnownPrompt:
        """Keep what the next turn needs of this one. Its own parent's tokens may go, as they are
        the beginning of these: a long session costs its length, not the sum of its prompts."""
        tokens = array("i", turn.prompt_ids)
        tokens.extend(turn.output_ids)
        output = tokens[len(turn.prompt_ids) :]
        known = KnownPrompt(turn.rendered_len, turn.rendered_sha, tokens, output)
        with suppress(ValueError):  # larger than the whole memory
            self._tokens[turn.turn_id] = known
        self._keep_reply(turn.turn_id, turn.reply)
        if turn.shares_tokens and turn.parent_id is not None:
            self._tokens.pop(turn.parent_id, None)
        return known

    async def _recall(self, placement: Placement) -> tuple[KnownPrompt | None, dict[str, Message]]:
        """The tokens of the parent, and the replies in the request's history by their turns."""
        parent_id, known = placement.parent_id, placement.known_replies
        parent = self._tokens.get(parent_id or "")
        replies = {id_: self._replies[id_] for id_ in known.values() if id_ in self._replies}
        if parent_id is not None and parent is None:
            for turn in await self._load([parent_id]):
                parent = self.remember(turn)
                replies[parent_id] = turn.reply
                if len(turn.messages) + 1 == placement.matched:  # the same, message by message
                    for index, turn_id in known.items():
                        if index < len(turn.messages):
                            replies.setdefault(turn_id, turn.messages[index])
        for turn in await self._load(sorted(known.values() - replies.keys())):
            replies[turn.turn_id] = turn.reply
        for turn_id in replies.keys() - self._replies.keys():
            self._keep_reply(turn_id, replies[turn_id])
        return parent, replies

    async def _load(self, turn_ids: Sequence[str]) -> list[Turn]:
        """Turns from the journal; unknown ones are left out."""
        if not turn_ids:
            return []
        rows = await self._journal.read(lambda journal: [journal.turn(one) for one in turn_ids])
        found = [row for row in rows if row is not None]
        self._metrics.recalled.inc(len(found))
        return found

    def _keep_reply(self, turn_id: str, reply: Message) -> None:
        with suppress(ValueError):
            self._replies[turn_id] = reply

    def _render(
        self, request: ChatRequest, messages: Iterable[Message], parent: KnownPrompt | None
    ) -> tuple[str, array[int] | None]:
        """The prompt's text, and its ids where it goes on from the parent's."""
        text = self._tokenizer.render(list(messages), request.tools, request.template_kwargs)
        if parent is None:
            return text, None
        meaning = functools.partial(
            self._format.meaning,
            tools=request.tools,
            in_reasoning=_opens_reasoning(text[: parent.rendered_len]),
        )
        return text, self._tokenizer.continue_prompt(parent, text, meaning)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def _opens_reasoning(prompt: str) -> bool:
    return prompt.rstrip().endswith(THINK)


def _token_bytes(known: KnownPrompt) -> int:
    return _OVERHEAD_BYTES + 4 * (len(known.tokens) + len(known.output_ids))


def _message_bytes(message: Message) -> int:
    return _OVERHEAD_BYTES + len(str(message))
