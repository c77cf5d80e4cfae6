"""The user's side of the wire: conversations with the official `openai` client, streamed.

Training turns are ordinary requests. Held-out questions are asked with the header
`x-turn-type: side`, so that they are served but never judged or trained.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from openai import AsyncOpenAI

from openclaw_rl.journal import Journal

from .user import HELD_OUT_QUESTIONS, Question, Verdict, count_words, draw_conversation, judge_reply

MAX_TOKENS = 64
"""A reply of the small model is cut here; what is cut is unfinished, and the user says so."""

GOODBYE_TOKENS = 4
"""The reply to the closing remark is of no interest and is never trained."""


async def ask(
    client: AsyncOpenAI,
    model: str,
    messages: Sequence[dict[str, str]],
    *,
    max_tokens: int = MAX_TOKENS,
    side: bool = False,
    session: str | None = None,
) -> str:
    """Send `messages`, read the stream to its end, and return the reply's text."""
    headers = {"x-turn-type": "side"} if side else {}
    if session:
        headers["x-session-id"] = session
    stream = await client.chat.completions.create(
        model=model,
        messages=list(messages),
        max_tokens=max_tokens,
        stream=True,
        extra_headers=headers,
    )  # type: ignore[call-overload]
    parts: list[str] = []
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            parts.append(chunk.choices[0].delta.content)
    return "".join(parts)


async def learnt(book: Journal, batch: int, quiet: float = 6.0) -> None:
    """Wait until what was said is judged, practised and trained: for `quiet` seconds no batch was
    full, nothing was being judged or trained, and nothing changed."""
    since = time.monotonic()
    while time.monotonic() - since < quiet:
        outcomes = await asyncio.to_thread(book.outcomes)
        busy = outcomes.judging or outcomes.leased or outcomes.ready >= batch
        if await asyncio.to_thread(book.changed) or busy:
            since = time.monotonic()
        await asyncio.sleep(0.25)


@dataclass
class Users:
    """`count` users who talk at the same time, one conversation after the other.

    After each conversation its user waits for `before_next`. `pause()` waits until nobody waits
    for a reply; `resume()` lets them go on. `recent` holds the last opinions, newest last.
    """

    client: AsyncOpenAI
    model: str
    seed: int
    count: int = 8
    questions: int = 2
    before_next: Callable[[], Awaitable[None]] | None = None
    recent: deque[tuple[bool, int]] = field(default_factory=lambda: deque(maxlen=32))
    conversations: int = 0
    _open: asyncio.Event = field(default_factory=asyncio.Event)
    _talking: int = 0
    _quiet: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Talk until cancelled."""
        self._open.set()
        self._quiet.set()
        async with asyncio.TaskGroup() as group:
            for number in range(self.count):
                group.create_task(self._one(random.Random(f"{self.seed}/{number}")))

    async def pause(self) -> None:
        """Let replies under way end, and start no other."""
        self._open.clear()
        await self._quiet.wait()

    def resume(self) -> None:
        """Go on talking."""
        self._open.set()

    async def _one(self, rng: random.Random) -> None:
        while True:
            talk = draw_conversation(rng, length=self.questions)
            messages = [{"role": "user", "content": talk.opening()}]
            while True:
                last = talk.finished
                reply = await self._turn(messages, GOODBYE_TOKENS if last else MAX_TOKENS)
                if last:
                    break
                words = talk.answer(reply)
                self.recent.append((talk.opinions[-1].pleased, count_words(reply)))
                messages += [
                    {"role": "assistant", "content": reply},
                    {"role": "user", "content": words},
                ]
            self.conversations += 1
            if self.before_next is not None:
                await self.before_next()

    async def _turn(self, messages: list[dict[str, str]], max_tokens: int) -> str:
        await self._open.wait()
        self._talking += 1
        self._quiet.clear()
        try:
            return await ask(self.client, self.model, messages, max_tokens=max_tokens)
        finally:
            self._talking -= 1
            if not self._talking:
                self._quiet.set()


@dataclass(frozen=True)
class Exam:
    """Held-out questions answered at one weight version."""

    version: int
    satisfied: float
    mean_words: float
    verdicts: dict[str, float]
    """Share of each verdict."""
    example: str
    """The reply to the first held-out question."""


async def examine(
    client: AsyncOpenAI, model: str, version: int, repeats: int = 2, streams: int = 24
) -> Exam:
    """Ask each held-out question `repeats` times, fresh, and tell how the user liked it."""
    gate = asyncio.Semaphore(streams)

    async def one(question: Question) -> str:
        async with gate:
            message = {"role": "user", "content": question.text}
            return await ask(client, model, [message], side=True)

    questions = [question for question in HELD_OUT_QUESTIONS for _ in range(repeats)]
    replies = await asyncio.gather(*(one(question) for question in questions))
    opinions = [judge_reply(q, r) for q, r in zip(questions, replies, strict=True)]
    return Exam(
        version=version,
        satisfied=statistics.fmean(opinion.pleased for opinion in opinions),
        mean_words=statistics.fmean(count_words(reply) for reply in replies),
        verdicts={
            kind.value: statistics.fmean(opinion.verdict is kind for opinion in opinions)
            for kind in Verdict
        },
        example=replies[0],
    )
