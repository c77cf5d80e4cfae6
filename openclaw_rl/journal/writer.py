"""`AsyncJournal`: the journal for an event loop, which it never blocks.

Owns one writer thread and one reader thread, each with its own connection. Guarantees: a write
whose future is done has been committed; writes are committed in the order they were asked for;
all that pile up while one commit runs go into the next one together; one that fails undoes only
itself. A write that was asked for is carried out even if nobody waits for it any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

from openclaw_rl.errors import JournalError
from openclaw_rl.journal.records import Endpoint, Fates
from openclaw_rl.journal.store import Journal
from openclaw_rl.session.types import NodeState
from openclaw_rl.types import Message, Turn

T = TypeVar("T")

_GROUP_SECONDS = 0.015
"""How long a commit collects. It spares small writes a commit each, and does not keep the first
of many large ones, or other processes, waiting for the last."""


class _Write(Generic[T]):
    __slots__ = ("action", "error", "future", "loop", "result")

    def __init__(self, action: Callable[[Journal], T], future: asyncio.Future[T]) -> None:
        self.action = action
        self.future = future
        self.loop = future.get_loop()
        self.result: T | None = None
        self.error: BaseException | None = None

    def settle(self) -> None:
        if self.future.done():  # the asker was cancelled
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)  # type: ignore[arg-type]


class AsyncJournal:
    def __init__(self, writer: Journal, reader: Journal) -> None:
        self._writer = writer
        self._reader = reader
        self._queue: queue.SimpleQueue[_Write[Any] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="journal-writer", daemon=True)
        self._thread.start()
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="journal-reader")

    @classmethod
    def open(cls, path: str | Path, create: bool = True, *, durable: bool = False) -> AsyncJournal:
        """As `Journal.open`; blocks for a moment."""
        writer = Journal.open(path, create, durable=durable)
        return cls(writer, Journal.open(path, False))

    async def close(self) -> None:
        """Finish the writes that were asked for, then close. Later ones raise `JournalError`."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._readers.shutdown)
        self._writer.close()
        self._reader.close()

    async def __aenter__(self) -> AsyncJournal:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def write(self, action: Callable[[Journal], T]) -> asyncio.Future[T]:
        """Have `action` run on the journal in the writer thread; done when it is committed."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if self._closed:
            future.set_exception(JournalError("the journal is closed"))
        else:
            self._queue.put(_Write(action, future))
        return future

    async def read(self, action: Callable[[Journal], T]) -> T:
        """Run `action`, which only reads, in the reader thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._readers, action, self._reader)

    def record_turn(self, rec: Turn) -> asyncio.Future[None]:
        return self.write(lambda journal: journal.record_turn(rec))

    def set_next_state(
        self, turn_id: str, messages: Sequence[Message], now: float
    ) -> asyncio.Future[bool]:
        return self.write(lambda journal: journal.set_next_state(turn_id, messages, now))

    def drop(self, turn_id: str, reason: str, now: float) -> asyncio.Future[bool]:
        return self.write(lambda journal: journal.drop(turn_id, reason, now))

    def count(self, name: str, n: int = 1) -> asyncio.Future[None]:
        """Need not be awaited."""
        return self.write(lambda journal: journal.count(name, n))

    def end_session(
        self, session_id: str, now: float, *, owner: str | None = None
    ) -> asyncio.Future[int]:
        return self.write(lambda journal: journal.end_session(session_id, now, owner=owner))

    def expire(
        self, now: float, next_state_ttl: float | None = None, *, ready_ttl: float | None = None
    ) -> asyncio.Future[dict[str, int]]:
        return self.write(lambda journal: journal.expire(now, next_state_ttl, ready_ttl=ready_ttl))

    async def nodes(self, limit: int) -> list[NodeState]:
        return await self.read(lambda journal: journal.nodes(limit))

    async def turn(self, turn_id: str) -> Turn | None:
        return await self.read(lambda journal: journal.turn(turn_id))

    async def tokens(self, turn_id: str) -> list[int]:
        return await self.read(lambda journal: journal.tokens(turn_id))

    async def endpoint(self, role: str) -> Endpoint | None:
        return await self.read(lambda journal: journal.endpoint(role))

    async def fates(self) -> Fates:
        return await self.read(lambda journal: journal.fates())

    def _run(self) -> None:
        waiting: list[_Write[Any]] = []
        more = True
        while more or waiting:
            if more:
                more = self._take(waiting)
            done = self._commit(waiting)
            self._tell(waiting[:done])
            del waiting[:done]

    def _take(self, waiting: list[_Write[Any]]) -> bool:
        """Add all that is asked for (at least one in all); False when nothing more will be."""
        while not waiting or not self._queue.empty():
            item = self._queue.get()
            if item is None:
                return False
            waiting.append(item)
        return True

    def _commit(self, group: list[_Write[Any]]) -> int:
        """Carry out and commit writes from the front of `group`; how many."""
        done = 0
        deadline = time.monotonic() + _GROUP_SECONDS
        try:
            with self._writer.batch():
                while done < len(group) and (not done or time.monotonic() < deadline):
                    self._perform(group[done])
                    done += 1
        except Exception as error:  # nothing of it was kept
            done = done or len(group)  # the journal was not even to be had: nobody waits for more
            for write in group[:done]:
                write.error = write.error or error
        return done

    def _perform(self, write: _Write[Any]) -> None:
        try:
            # A transaction of its own: an error in it must not leave half a write.
            with self._writer.batch():
                write.result = write.action(self._writer)
        except Exception as error:
            write.error = error

    @staticmethod
    def _tell(group: list[_Write[Any]]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[_Write[Any]]] = {}
        for write in group:
            by_loop.setdefault(write.loop, []).append(write)
        for loop, writes in by_loop.items():
            with contextlib.suppress(RuntimeError):  # a closed loop: nobody is left to tell
                loop.call_soon_threadsafe(_settle, writes)


def _settle(writes: list[_Write[Any]]) -> None:
    for write in writes:
        write.settle()
