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
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from openclaw_rl.errors import JournalError
from openclaw_rl.journal.store import Journal

P = ParamSpec("P")
T = TypeVar("T")

_GROUP_SECONDS = 0.015
"""How long a commit collects. It spares small writes a commit each, and does not keep the first
of many large ones, or other processes, waiting for the last."""


class _Write(NamedTuple):
    action: Callable[[Journal], Any]
    done: Future[Any]


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

    def write(
        self, action: Callable[Concatenate[Journal, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """Have `action` run on the journal in the writer thread; done when it is committed. It need
        not be awaited."""
        return asyncio.wrap_future(self._ask(lambda journal: action(journal, *args, **kwargs)))

    async def write_within(self, seconds: float, action: Callable[[Journal], Any]) -> bool:
        """Have `action` run as `write` does; whether it was committed within so long, or had begun
        (a disk may hang: then it counts as done). False: it never happens. Raises its error."""
        done = self._ask(action)
        try:
            await asyncio.wait_for(asyncio.wrap_future(done), seconds)
        except TimeoutError:
            return not done.cancel()
        return True

    async def read(
        self, action: Callable[Concatenate[Journal, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `action`, which only reads, in the reader thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._readers, partial(action, self._reader, *args, **kwargs)
        )

    def _ask(self, action: Callable[[Journal], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        if self._closed:
            done.set_exception(JournalError("the journal is closed"))
        else:
            self._queue.put(_Write(action, done))
        return done

    def _run(self) -> None:
        waiting: list[_Write] = []
        more = True
        while more or waiting:
            if more:
                more = self._take(waiting)
            del waiting[: self._commit(waiting)]

    def _take(self, waiting: list[_Write]) -> bool:
        """Add all that is asked for (at least one in all); False when nothing more will be."""
        while not waiting or not self._queue.empty():
            item = self._queue.get()
            if item is None:
                return False
            waiting.append(item)
        return True

    def _commit(self, waiting: list[_Write]) -> int:
        """Carry out and commit writes from the front of `waiting`, and say so; how many."""
        tell: list[Callable[[], None]] = []
        deadline = time.monotonic() + _GROUP_SECONDS
        count = 0
        try:
            with self._writer.batch():
                while count < len(waiting) and (not count or time.monotonic() < deadline):
                    write = waiting[count]
                    count += 1
                    if write.done.set_running_or_notify_cancel():
                        tell.append(self._perform(write))
        except Exception as error:
            # Nothing of it was kept. Where the journal was not even to be had, nobody waits longer.
            count = count or len(waiting)
            for write in waiting[:count]:
                if not write.done.cancelled():
                    write.done.set_exception(error)
            return count
        for one in tell:
            one()
        return count

    def _perform(self, write: _Write) -> Callable[[], None]:
        """What tells the outcome of a write, when it is committed."""
        try:
            # A transaction of its own: an error in it must not leave half a write.
            with self._writer.batch():
                return partial(write.done.set_result, write.action(self._writer))
        except Exception as error:
            return partial(write.done.set_exception, error)
