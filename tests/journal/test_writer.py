from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from openclaw_rl.errors import JournalError
from openclaw_rl.journal import AsyncJournal, Journal
from openclaw_rl.types import Turn
from tests.journal.build import record


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[AsyncJournal]:
    journal = AsyncJournal.open(path)
    yield journal
    await journal.close()


def recording(journal: AsyncJournal, turn: Turn) -> asyncio.Future[None]:
    return journal.write(Journal.record_turn, turn)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


async def test_a_write_that_is_done_is_seen_by_other_processes(path: Path):
    async with opened(path) as journal:
        await recording(journal, record())
        with Journal.open(path) as other:
            assert other.turn("t1") is not None
        said = ({"role": "user", "content": "x"},)
        assert await journal.write(Journal.set_next_state, "t1", said)
        assert (await journal.read(Journal.turn, "t1")).next_state == said


async def test_writes_that_pile_up_are_committed_together(path: Path):
    async with opened(path) as journal:
        gate, commits = threading.Event(), []
        first = journal.write(lambda _: gate.wait(10))
        journal._writer._db.set_trace_callback(
            lambda sql: commits.append(sql) if sql == "COMMIT" else None
        )
        rest = [recording(journal, record(f"t{n}")) for n in range(64)]
        gate.set()
        await asyncio.gather(first, *rest)
        await journal.write(lambda _: None)
        assert len(commits) <= 16  # few; how few depends on the machine's speed
        assert (await journal.read(Journal.outcomes)).seen == 64


async def test_nobody_is_told_before_the_commit(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("openclaw_rl.journal.writer._GROUP_SECONDS", 0.0)  # one write a commit
    async with opened(path) as journal:
        gate, hold = threading.Event(), threading.Event()
        journal.write(lambda _: gate.wait(10))
        first = recording(journal, record("a"))
        held = journal.write(lambda _: hold.wait(10))
        last = recording(journal, record("b"))
        gate.set()
        await first
        with Journal.open(path) as other:
            assert other.turn_ids() == ["a"]
        assert not held.done()
        assert not last.done()
        hold.set()
        await asyncio.gather(held, last)


async def test_purging_in_the_writer_thread_works_too(path: Path):
    async with opened(path) as journal:
        await recording(journal, record())
        assert await journal.write(lambda target: target.purge(session_id="s1")) == 1


async def test_one_failing_write_undoes_only_itself(path: Path):
    async with opened(path) as journal:
        gate = threading.Event()
        journal.write(lambda _: gate.wait(10))

        def half(target: Journal) -> None:
            target.count("half")
            raise ValueError("broken off")

        results = [
            recording(journal, record("a")),
            journal.write(half),
            recording(journal, record("a")),
            recording(journal, record("b")),
        ]
        gate.set()
        a, broken, twice, b = await asyncio.gather(*results, return_exceptions=True)
        assert a is None
        assert b is None
        assert isinstance(broken, ValueError)
        assert isinstance(twice, JournalError)
        outcomes = await journal.read(Journal.outcomes)
        assert outcomes.seen == 2
        assert outcomes.counters == {}


async def test_a_write_given_up_before_it_began_never_happens(path: Path):
    """Nobody is told that the turn is there, so it must not appear later: it would wait for a next
    state that never comes."""
    async with opened(path) as journal:
        gate = threading.Event()
        journal.write(lambda _: gate.wait(10))
        cancelled = recording(journal, record("cancelled"))
        cancelled.cancel()
        late = journal.write_within(0.0, lambda target: target.record_turn(record("late")))
        assert await late is False
        journal.write(Journal.count, "not awaited")
        gate.set()
        after = await journal.write(Journal.outcomes)
        assert after.seen == 0
        assert after.counters == {"not awaited": 1}


async def test_a_write_that_had_begun_counts_as_done(path: Path):
    async with opened(path) as journal:
        begun, gate = threading.Event(), threading.Event()

        def slow(target: Journal) -> None:
            begun.set()
            gate.wait(10)
            target.record_turn(record())

        asked = asyncio.ensure_future(journal.write_within(0.0, slow))
        asyncio.get_running_loop().call_soon(begun.wait, 10)  # it is asked for by then
        assert await asked is True
        gate.set()
        await journal.write(lambda _: None)
        assert (await journal.read(Journal.outcomes)).seen == 1


async def test_closing_finishes_what_was_asked_for(path: Path):
    journal = AsyncJournal.open(path)
    asked = [recording(journal, record(f"t{n}")) for n in range(20)]
    await journal.close()
    await asyncio.gather(*asked)
    with Journal.open(path) as again:
        assert again.outcomes().seen == 20
    with pytest.raises(JournalError, match="closed"):
        await recording(journal, record("late"))
    await journal.close()
