"""`AsyncJournal`: the journal for an event loop, which it never blocks.

Owns one writer thread and one reader thread, each with its own connection. Guarantees: a write
whose future is done has been committed; writes are committed in the order they were asked for;
all that pile up while one commit runs go into the next one together; one that fails undoes only
itself. A write whose future is cancelled before it began never happens.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from openclaw_rl.errors import JournalError
from openclaw_rl.journal.records import Endpoint, Outcomes
from openclaw_rl.journal.store import Journal
from openclaw_rl.types import Message, Turn

T = TypeVar("T")

_GROUP_SECONDS = 0.015
"""How long a commit collects. It spares small writes a commit each, and does not keep the first
of many large ones, or other processes, waiting for the last."""


class _Write:
    """One write; `done` gets its outcome after the commit."""

    def __init__(self, action: Callable[[Journal], Any]) -> None:
        self.action = action
        self.done: Future[Any] = Future()
        self.result: Any = None
        self.error: BaseException | None = None


class AsyncJournal:
    def __init__(self, writer: Journal, reader: Journal) -> None:
        self._writer = writer
        self._reader = reader
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
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
        return asyncio.wrap_future(self._ask(action))

    async def write_within(self, seconds: float, action: Callable[[Journal], Any]) -> bool:
        """Have `action` run as `write` does; whether it was committed within so long, or had begun
        (a disk may hang: then it counts as done). False: it never happens. Raises its error."""
        done = self._ask(action)
        try:
            await asyncio.wait_for(asyncio.wrap_future(done), seconds)
        except TimeoutError:
            return not done.cancel()
        return True

    def _ask(self, action: Callable[[Journal], T]) -> Future[T]:
        write = _Write(action)
        if self._closed:
            write.done.set_exception(JournalError("the journal is closed"))
        else:
            self._queue.put(write)
        return write.done

    async def read(self, action: Callable[[Journal], T]) -> T:
        """Run `action`, which only reads, in the reader thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._readers, action, self._reader)

    def set_next_state(
        self, turn_id: str, messages: Sequence[Message], now: float
    ) -> asyncio.Future[bool]:
        return self.write(lambda journal: journal.set_next_state(turn_id, messages, now))

    def count(self, name: str, n: int = 1) -> asyncio.Future[None]:
        """Need not be awaited."""
        return self.write(lambda journal: journal.count(name, n))

    def end_session(
        self, session_id: str, now: float, *, owner: str | None = None
    ) -> asyncio.Future[int]:
        return self.write(lambda journal: journal.end_session(session_id, now, owner=owner))

    async def heads(self, limit: int) -> list[Turn]:
        return await self.read(lambda journal: journal.heads(limit))

    async def turn(self, turn_id: str) -> Turn | None:
        return await self.read(lambda journal: journal.turn(turn_id))

    async def endpoint(self, role: str) -> Endpoint | None:
        return await self.read(lambda journal: journal.endpoint(role))

    async def outcomes(self) -> Outcomes:
        return await self.read(lambda journal: journal.outcomes())

    def _run(self) -> None:
        waiting: list[_Write] = []
        more = True
        while more or waiting:
            if more:
                more = self._take(waiting)
            count = self._commit(waiting)
            for write in waiting[:count]:
                _settle(write)
            del waiting[:count]

    def _take(self, waiting: list[_Write]) -> bool:
        """Add all that is asked for (at least one in all); False when nothing more will be."""
        while not waiting or not self._queue.empty():
            item = self._queue.get()
            if item is None:
                return False
            waiting.append(item)
        return True

    def _commit(self, group: list[_Write]) -> int:
        """Carry out and commit writes from the front of `group`; how many."""
        count = 0
        deadline = time.monotonic() + _GROUP_SECONDS
        try:
            with self._writer.batch():
                while count < len(group) and (not count or time.monotonic() < deadline):
                    self._perform(group[count])
                    count += 1
        except Exception as error:  # nothing of it was kept
            count = count or len(group)  # the journal was not even to be had: nobody waits for more
            for write in group[:count]:
                write.error = write.error or error
        return count

    def _perform(self, write: _Write) -> None:
        if not write.done.set_running_or_notify_cancel():
            return
        try:
            # A transaction of its own: an error in it must not leave half a write.
            with self._writer.batch():
                write.result = write.action(self._writer)
        except Exception as error:
            write.error = error


def _settle(write: _Write) -> None:
    done = write.done
    # Not running yet where the journal was not to be had at all.
    if done.cancelled() or not (done.running() or done.set_running_or_notify_cancel()):
        return
    if write.error is not None:
        done.set_exception(write.error)
    else:
        done.set_result(write.result)
