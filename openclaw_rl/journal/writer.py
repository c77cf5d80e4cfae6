"""`AsyncJournal`: the journal for an event loop, which it never blocks.

Owns one writer thread and one reader thread, each with its own connection. Guarantees: a write
whose future is done has been committed; writes are committed in the order they were asked for;
all that pile up while one commit runs go into the next one together; one that fails undoes only
itself. A write whose future is cancelled before it began never happens.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from openclaw_rl.errors import JournalError
from openclaw_rl.journal.store import Journal

P = ParamSpec("P")
T = TypeVar("T")

_GROUP_SECONDS = 0.015
"""How long a commit collects. It spares small writes a commit each, and does not keep the first
of many large ones, or other processes, waiting for the last."""


class AsyncJournal:
    def __init__(self, writer: Journal, reader: Journal) -> None:
        self._writer, self._reader = writer, reader
        self._waiting: deque[tuple[Callable[[Journal], Any], Future[Any]]] = deque()
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="journal-writer")
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="journal-reader")
        self._closed = False

    @classmethod
    def open(cls, path: str | Path, create: bool = True) -> AsyncJournal:
        """As `Journal.open`; blocks for a moment."""
        writer = Journal.open(path, create)
        return cls(writer, Journal.open(path, False))

    async def close(self) -> None:
        """Finish the writes that were asked for, then close. Later ones raise `JournalError`."""
        self._closed = True
        for pool, journal in (self._writing, self._writer), (self._reading, self._reader):
            await asyncio.to_thread(pool.shutdown)
            journal.close()

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
            self._reading, partial(action, self._reader, *args, **kwargs)
        )

    def _ask(self, action: Callable[[Journal], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        if self._closed:
            done.set_exception(JournalError("the journal is closed"))
        else:
            self._waiting.append((action, done))
            self._writing.submit(self._commit)
        return done

    def _commit(self) -> None:
        """Carry out and commit what waits, in one transaction, and say so."""
        if not self._waiting:
            return  # an earlier call has done it
        begun: list[Future[Any]] = []
        tell: list[Callable[[], None]] = []
        deadline = time.monotonic() + _GROUP_SECONDS
        try:
            with self._writer.batch():
                while self._waiting and (not begun or time.monotonic() < deadline):
                    action, done = self._waiting.popleft()
                    if done.set_running_or_notify_cancel():
                        begun.append(done)
                        tell.append(self._perform(action, done))
        except Exception as error:
            # Nothing of it was kept. Where the journal was not even to be had, nobody waits longer.
            if not begun:
                waiting = [self._waiting.popleft()[1] for _ in range(len(self._waiting))]
                begun = [done for done in waiting if done.set_running_or_notify_cancel()]
            tell = [partial(done.set_exception, error) for done in begun]
        for one in tell:
            one()

    def _perform(self, action: Callable[[Journal], Any], done: Future[Any]) -> Callable[[], None]:
        """What tells the outcome of a write, when it is committed."""
        try:
            # A transaction of its own: an error in it must not leave half a write.
            with self._writer.batch():
                return partial(done.set_result, action(self._writer))
        except Exception as error:
            return partial(done.set_exception, error)
