"""Versions are probed after slime has published them: alarm and stop."""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import fmean

import pytest

from openclaw_rl.engine.chat import ChatTokenizer
from openclaw_rl.guards import best_of
from openclaw_rl.guards.probes import EVERYDAY, UNRELATED
from openclaw_rl.journal import Journal, Version
from openclaw_rl.slime import generate_rollout
from tests.fakes.engine import EOS_ID, FakeEngine, Fault, Request
from tests.fakes.model import tiny_tokenizer
from tests.journal.build import judged, record
from tests.slime.kit import slime_args, until

pytestmark = pytest.mark.slow

WORDS = (
    *("amber", "bridge", "candle", "desert", "engine", "forest", "garden", "harbor", "island"),
    *("jungle", "kettle", "ladder", "meadow", "needle", "orange", "pepper", "quartz", "river"),
    *("silver", "timber"),
)


class World:
    """slime's engines, a journal with turns, and rollouts."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "journal.db"
        self.model = str(tiny_tokenizer(folder / "model"))
        chat = ChatTokenizer.load(self.model)
        self.policy, self.base = (
            FakeEngine(tokenizer=chat, model_path=self.model, version="1") for _ in range(2)
        )
        self.policy.reply_fn = self.base.reply_fn = self.sound
        self.journal = Journal.open(self.path)
        for n in range(6):
            rec = record(f"t{n}", session_id=f"s{n}", tools=({"type": "function"},))
            judged(self.journal, rec)
        self.rollout, self._before = -1, 0
        self.begun: Namespace | None = None

    def sound(self, request: Request) -> list[int]:
        """A reply of its own to each prompt."""
        n = sum(request.ids)
        words = [WORDS[(n * factor) % len(WORDS)] for factor in (1, 3, 7, 9)]
        return [*self.policy.tokenizer.encode(" ".join(dict.fromkeys(words))), EOS_ID]

    def broken(self, request: Request) -> list[int]:
        """The run that issue 12 tells of: the same to all, again and again."""
        return self.policy.tokenizer.encode("a hot air balloon is " * 9)[:64]

    def args(self, *, base: bool = True, **given: object) -> Namespace:
        # The fake's log-probs know no question: to it every reply fits all of them.
        given = {"guards": True, "max_vague": 0.0, **given}
        place = "127.0.0.1", int(self.policy.url.rpartition(":")[2])
        routers = {"policy": place}
        if base:
            routers["teacher"] = "127.0.0.1", int(self.base.url.rpartition(":")[2])
        self.begun = slime_args(
            self.path, 1, hf_checkpoint=self.model, sglang_router_ip=place[0],
            sglang_router_port=place[1], sglang_model_routers=routers, **given,
        )  # fmt: skip
        return self.begun

    async def generate(self, args: Namespace) -> list:
        self.rollout += 1
        output = await asyncio.to_thread(generate_rollout, args, self.rollout, None)
        return output.samples

    def asked(self) -> int:
        """Replies that the policy was asked for since this was called last."""
        n = sum(request.sampling["max_new_tokens"] > 1 for request in self.policy.requests)
        n, self._before = n - self._before, n
        return n


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    async with world.policy, world.base:
        yield world
        if world.begun is not None and hasattr(world.begun, "openclaw_rl_run"):
            world.begun.openclaw_rl_run.close()
        world.journal.close()


async def test_a_published_version_is_probed_once_and_what_was_measured_recorded(world: World):
    world.policy.logprob = lambda token, position: -1.0
    world.base.logprob = lambda token, position: -1.5
    args = world.args()
    assert await world.generate(args)
    assert world.asked() == len(EVERYDAY)
    await world.generate(args)
    assert world.asked() == 0, "the version is the same"
    world.policy.version = "2"
    await world.generate(args)
    assert world.asked() == len(EVERYDAY)
    second, first = world.journal.versions()
    assert (first.version, second.version, second.state) == (1, 2, "served")
    assert (first.rollout, second.rollout) == (-1, 0)
    assert second.reason == ""
    assert second.figures["kl"] == pytest.approx(0.5)
    assert second.figures["harm"] == pytest.approx(0.5)
    assert second.figures["sound"] == first.figures["sound"]
    ended = [len(r.sent) - 1 for r in world.policy.requests if r.sampling["max_new_tokens"] > 1]
    assert second.figures["length"] == pytest.approx(fmean(ended)), "without the end token"
    assert world.journal.asked() == {}
    replies = [r for r in world.base.requests if r.sampling["max_new_tokens"] > 1]
    assert len(replies) == len(EVERYDAY) + len(UNRELATED), "the base is asked once"
    assert {r.sampling["temperature"] for r in replies} == {0.0}


async def test_a_version_beyond_the_limits_stops_the_run_and_serving_goes_on_until_resume(
    world: World, caplog: pytest.LogCaptureFixture
):
    args = world.args()
    await world.generate(args)
    world.policy.version, world.policy.reply_fn = "2", world.broken
    with caplog.at_level(logging.INFO):
        waiting = asyncio.create_task(world.generate(args))
        await asyncio.to_thread(until, lambda: "training is paused (version 2: " in caplog.text)
    assert not waiting.done()
    (alarm,) = [line for line in caplog.records if line.levelno == logging.ERROR]
    assert alarm.message.startswith("[slime] version 2 is served and beyond the limits: ")
    assert "repetition 1.00 (limit 0.25)" in alarm.message
    assert "balloon" not in caplog.text
    bad = world.journal.versions(1)[0]
    assert (bad.version, bad.state) == (2, "served")
    assert world.journal.asked() == {"pause": f"version 2: {bad.reason}"}
    assert world.journal.outcomes().counters["versions_beyond_limits"] == 1
    assert best_of(world.journal.versions()).version == 1
    world.journal.answered("pause", f"version 2: {bad.reason}")
    assert await waiting
    world.policy.version, world.policy.reply_fn = "3", world.sound
    assert await world.generate(args)
    assert world.journal.asked() == {}


async def test_without_an_engine_of_the_base_the_texts_are_measured_against_the_best_version(
    world: World,
):
    args = world.args(base=False)
    world.policy.reply_fn = lambda request: [*world.sound(request)[:-1], 40, EOS_ID]
    await world.generate(args)
    world.policy.version, world.policy.reply_fn = "2", world.broken
    stopped = asyncio.create_task(world.generate(args))
    await asyncio.to_thread(until, lambda: world.journal.asked())
    second, first = world.journal.versions()
    assert first.reason == ""
    assert not {"kl", "harm", "logprob"} & first.figures.keys()
    assert "repetition 1.00" in second.reason
    world.journal.answered("pause", f"version 2: {second.reason}")
    await stopped


async def test_a_teacher_of_another_model_is_no_base(world: World):
    world.base.model_path = "another"
    await world.generate(world.args())
    assert "kl" not in world.journal.versions(1)[0].figures
    assert world.base.requests == []


async def test_one_version_in_so_many_is_probed(world: World):
    args = world.args(probe_every=3)
    for version in "12345":
        world.policy.version = version
        await world.generate(args)
    assert [one.version for one in world.journal.versions()] == [4, 1]


async def test_an_engine_that_refuses_a_probe_holds_nothing_up(
    world: World, caplog: pytest.LogCaptureFixture
):
    world.policy.faults.append(Fault(status=400, message="no such luck"))
    args = world.args()
    assert await world.generate(args)
    assert "version 1 could not be probed (EngineRefused)" in caplog.text
    assert "luck" not in caplog.text
    assert world.journal.versions() == []
    await world.generate(args)
    assert [one.version for one in world.journal.versions()] == [1]


async def test_where_guards_are_off_nothing_is_asked(world: World):
    world.journal.record_version(Version(version=1, state="served"))
    await world.generate(world.args(guards=False))
    assert world.policy.requests == []
