"""Case 33: any process dies by `kill -9` at any moment, under load; it comes back alone.

One system lives through all the deaths of this file, in order; each comes at a moment that the
process is known to be in. The last test looks at the books.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import json
import os
import signal
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio

from openclaw_rl.types import State, Turn
from tests.e2e import gates
from tests.e2e.system import System
from tests.fakes.model import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

BATCH = 4
PRAISE = {"role": "user", "content": "Perfect, thanks."}
BROKEN = (openai.APIError, OSError)
"""How a client sees that the gateway died."""

_sessions = (f"s{number}" for number in itertools.count())


class Mortal(System):
    """The system, and what is to be true of it in the end."""

    acknowledged: list[str]
    """Turns whose end a client has seen."""
    held: set[str]
    """Turns that a judge had when it died."""

    @property
    def checkpoints(self) -> Path:
        return self.data / "checkpoints"

    def newest(self) -> int:
        """The version of the newest checkpoint."""
        return max(int(path.name.partition("_")[2]) for path in self.checkpoints.glob("version_*"))

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(self.data / "journal.db", timeout=30)) as db:
            return db.execute(query).fetchall()

    def turn(self, turn_id: str) -> Turn | None:
        journal = self.journal()
        try:
            return journal.turn(turn_id)
        finally:
            journal.close()

    async def engine_says(self, name: str, value: object) -> bool:
        journal = self.journal()
        endpoint = journal.endpoint("policy")
        journal.close()
        assert endpoint is not None
        headers = {"Authorization": f"Bearer {endpoint.info['key']}"}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.get(f"{endpoint.url}/model_info") as answer,
        ):
            return bool((await answer.json())[name] == value)

    async def reply(
        self, session: str, messages: list[dict[str, Any]], max_tokens: int = 10
    ) -> AsyncIterator[tuple[str, str]]:
        """(turn id, text) piece by piece. A reply that was read to its end is acknowledged."""
        stream = await self.client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=max_tokens,
            stream=True,
            extra_headers={"x-session-id": session},
        )
        ended, turn_id = False, ""
        async for chunk in stream:
            turn_id = chunk.id.removeprefix("chatcmpl-")
            for choice in chunk.choices:
                ended = ended or choice.finish_reason is not None
                yield turn_id, choice.delta.content or ""
        if ended:
            self.acknowledged.append(turn_id)

    async def whole(self, session: str, messages: list[dict[str, Any]]) -> tuple[str, str]:
        """(turn id, text) of a reply read to its end."""
        pieces = [piece async for piece in self.reply(session, messages)]
        return pieces[-1][0], "".join(text for _, text in pieces)

    async def trains_on(self, batches: int = 2) -> None:
        """It is back when it has trained so many batches more."""
        trained = self.outcomes().trained + batches * BATCH
        await self.until(lambda: self.outcomes().trained >= trained)

    async def until_dead(self, name: str, seen: int) -> None:
        await self.until_line(rf"\[up\] {name} ended with status -9", after=seen)


async def becomes(condition: Callable[[], object], seconds: float = 120) -> None:
    """For what other processes do and nothing tells: files, rows, the state of the engine."""
    async with asyncio.timeout(seconds):
        while True:
            value = condition()
            if await value if inspect.isawaitable(value) else value:
                return
            await asyncio.sleep(0.005)


def question(number: object) -> dict[str, Any]:
    return {"role": "user", "content": f"Say something, {number}."}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mortal]:
    folder = tmp_path_factory.mktemp("kills")
    flags = ["--method", "rl", "--rollout-batch-size", str(BATCH), "--dtype", "float32"]
    flags += ["--custom-rm-path", gates.__file__, "--custom-loss-function-path", gates.__file__]
    system = Mortal(folder, tiny_model(folder / "tiny"), *flags)
    system.acknowledged, system.held = [], set()
    async with system:
        yield system


@contextlib.asynccontextmanager
async def talkers(system: Mortal, users: int = 4) -> AsyncIterator[list[Exception]]:
    """Users who talk without pause; what broke for them."""
    errors: list[Exception] = []
    stopping = False  # asked for, not cancelled: the client's pool may swallow a cancellation

    async def talk() -> None:
        while not stopping:
            session = next(_sessions)
            messages = [question(session)]
            for words in ("Perfect, thanks.", "That is wrong.", None):
                try:
                    _, text = await system.whole(session, messages)
                except BROKEN as error:
                    errors.append(error)
                    await system.until_served()
                    break
                messages.append({"role": "assistant", "content": text})
                messages.append({"role": "user", "content": words})

    tasks = [asyncio.create_task(talk()) for _ in range(users)]
    try:
        yield errors
    finally:
        stopping = True
        await asyncio.gather(*tasks)


@contextlib.contextmanager
def nobody_writes(system: Mortal) -> Iterator[None]:
    """Hold the journal's write lock: whoever has something to write stands still."""
    with contextlib.closing(
        sqlite3.connect(system.data / "journal.db", timeout=30, isolation_level=None)
    ) as db:
        db.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            db.execute("ROLLBACK")


async def test_case_33_the_judge_dies_over_a_verdict(system):
    gate = gates.verdict_gate(system.data)
    async with talkers(system) as errors:
        await system.trains_on(1)
        gate.close()
        await becomes(gate.reached)
        seen = len(system.lines)
        os.kill(system.child("judge"), signal.SIGKILL)
        await system.until_dead("judge", seen)
        claimed = "SELECT turn_id FROM turns WHERE state = 'judging' AND claim_worker IS NOT NULL"
        system.held = {turn_id for (turn_id,) in system.rows(claimed)}
        gate.open()
        await system.trains_on()
    assert errors == []  # only the gateway's own death can be seen by a client
    assert system.held


async def test_case_33_the_host_dies_in_a_step(system):
    gate = gates.step_gate(system.data)
    async with talkers(system) as errors:
        gate.close()
        await becomes(gate.reached)
        seen, version = len(system.lines), system.newest()
        assert system.outcomes().leased == BATCH
        os.kill(system.child("train"), signal.SIGKILL)
        gate.open()
        await system.until_dead("train", seen)
        assert system.newest() == version
        given_back = rf"rollout {version} was not trained: {BATCH} turns given back"
        await system.until_line(given_back, after=seen)
        await system.trains_on()
    assert errors == []


async def test_case_33_the_host_dies_while_it_saves(system):
    gate = gates.step_gate(system.data)
    async with talkers(system) as errors:
        for _ in range(5):  # until it was caught in the act
            gate.close()
            await becomes(gate.reached)
            seen, version, pid = len(system.lines), system.newest(), system.child("train")
            gate.open()
            begun = f".writing_*_{pid}"
            await becomes(lambda b=begun, v=version: any(system.checkpoints.glob(b))
                          or system.newest() > v)  # fmt: skip
            os.kill(pid, signal.SIGKILL)
            await system.until_dead("train", seen)
            if system.newest() == version:
                break
        assert system.newest() == version
        given_back = rf"rollout {version} was not trained: {BATCH} turns given back"
        await system.until_line(given_back, after=seen)
        await system.trains_on()
        assert not any(system.checkpoints.glob(begun)), "half a checkpoint is left for ever"
    assert errors == []


async def test_case_33_the_host_dies_over_the_switch_of_a_version(system):
    """The checkpoint is there and the engine serves it; the journal knows nothing of it yet."""
    gate = gates.step_gate(system.data)
    async with talkers(system) as errors:
        gate.close()
        await becomes(gate.reached)
    # Nobody talks meanwhile: a gateway waits for the journal for a few seconds only.
    seen, version, pid = len(system.lines), system.newest(), system.child("train")
    with nobody_writes(system):
        gate.open()
        await becomes(lambda: system.engine_says("weight_version", str(version + 1)))
        os.kill(pid, signal.SIGKILL)
    assert system.newest() == version + 1
    learnt = f"SELECT count(*) FROM turns WHERE trained_version = '{version + 1}'"
    assert system.rows(learnt) == [(0,)]
    await system.until_dead("train", seen)
    await system.until_line(f"rollout {version} was saved before the stop", after=seen)
    async with talkers(system) as later:
        await system.trains_on()
    assert system.rows(learnt) == [(BATCH,)]
    assert errors == later == []


async def test_case_33_the_gateway_dies_while_a_reply_streams(system):
    session, messages = next(_sessions), [question("a long one")]
    lost = ""

    async def read_and_kill() -> None:
        nonlocal lost
        async for turn_id, _ in system.reply(session, messages, max_tokens=3000):
            if not lost:
                lost = turn_id
                os.kill(system.child("serve"), signal.SIGKILL)

    async with talkers(system):
        seen = len(system.lines)
        with pytest.raises(BROKEN):
            await read_and_kill()
        await system.until_dead("serve", seen)
        await system.until_served()
        await system.trains_on()
    assert system.turn(lost) is None  # nothing of a reply that nobody saw the end of
    await becomes(lambda: system.engine_says("num_running_reqs", 0))
    turn_id, text = await system.whole(session, messages)
    await system.whole(session, [*messages, {"role": "assistant", "content": text}, PRAISE])
    await becomes(lambda: system.turn(turn_id).verdict is not None)


async def test_case_33_the_gateway_dies_between_commit_and_end(system):
    """A turn that was recorded, but whose client never saw the end and asks again, is no second
    turn. The gateway is caught there by a log that nobody reads: it writes its line of a turn after
    the commit and before the end of the reply."""
    session, messages = next(_sessions), [question("once more")]
    seen, pid = len(system.lines), system.child("serve")
    ids: list[str] = []

    async def read() -> None:
        async for turn_id, _ in system.reply(session, messages):
            ids.append(turn_id)

    system.process.send_signal(signal.SIGSTOP)  # the supervisor reads the log
    try:
        fill(Path(f"/proc/{pid}/fd/2"))
        reading = asyncio.create_task(read())
        await becomes(lambda: reading.done() or (ids and system.turn(ids[0]) is not None))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(BROKEN):
            await reading
    finally:
        system.process.send_signal(signal.SIGCONT)
    await system.until_dead("serve", seen)
    await system.until_served()
    again, text = await system.whole(session, messages)
    await system.whole(session, [*messages, {"role": "assistant", "content": text}, PRAISE])
    await becomes(lambda: system.turn(again).verdict is not None)
    first = system.turn(ids[0])
    assert (first.state, first.drop_reason) == (State.DROPPED, "retried")


async def test_case_33_after_all_deaths_the_books_balance(system):
    async with talkers(system):
        await system.trains_on(1)
    still = "SELECT turn_id FROM turns WHERE state = 'judging'"
    await becomes(lambda: not system.held & {turn_id for (turn_id,) in system.rows(still)})
    await system.stop()

    assert system.outcomes().balanced()
    recorded = {turn_id for (turn_id,) in system.rows("SELECT turn_id FROM turns")}
    assert set(system.acknowledged) <= recorded
    # Every version is BATCH turns, each of them in one version: none was left out, none came twice.
    newest = system.newest()
    counts = dict(system.rows("SELECT trained_version, count(*) FROM turns WHERE "
                              "state = 'trained' GROUP BY trained_version"))  # fmt: skip
    leased = {rollout for (rollout,) in system.rows("SELECT lease_rollout FROM turns WHERE "
                                                    "state = 'leased'")}  # fmt: skip
    marked = newest - (newest - 1 in leased)  # stopped between checkpoint and mark
    assert counts == {str(version): BATCH for version in range(1, marked + 1)}
    state = json.loads((system.checkpoints / f"version_{newest:08d}" / "state.json").read_text())
    assert (state["version"], state["rollout_id"]) == (newest, newest - 1)


def fill(pipe: Path) -> None:
    """Leave no room in a pipe."""
    end = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    try:
        for piece in (b"." * 4095 + b"\n", b"\n"):
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(end, piece)
    finally:
        os.close(end)
