"""Weights that are adapters at an engine outside, as the gateway meets them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.engine.chat import ChatTokenizer
from openclaw_rl.journal import Journal, Version
from openclaw_rl.types import State
from tests.fakes.vllm import FakeVLLM
from tests.gateway.conftest import World, eventually, world


def announce(journal: Journal, url: str, version: int, **more: Any) -> None:
    info = {"engine": "vllm", "adapter": f"name-{version}", "weight_version": str(version), **more}
    journal.publish("policy", url, info, time.time())


def said(journal: Journal) -> tuple[Any, Any]:
    found = journal.endpoint("gateway")
    info = found.info if found is not None else {}
    return info.get("adapter"), info.get("in_use")


async def ask(served: World) -> str:
    answer = await served.client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hello."}]
    )
    return answer.choices[0].message.content or ""


@pytest.mark.parametrize("engine_url", [""])
async def test_new_requests_use_the_new_version_and_the_old_one_is_in_use_to_the_end(
    tmp_path: Path, model: Path, engine_url: str
) -> None:
    async with FakeVLLM(tokenizer=ChatTokenizer.load(str(model))) as engine:
        engine.adapters |= {"name-1": "/1", "name-2": "/2"}
        changes = {"engine": engine, "engine_url": engine_url}
        async with world(tmp_path, model, **changes) as served:
            engine.gated = True
            engine.say("First.")
            engine.say("Second.")
            announce(served.journal, engine.url, 1)
            old = asyncio.create_task(ask(served))
            await engine.arrived(1)
            announce(served.journal, engine.url, 2)
            await eventually(lambda: said(served.journal) == ("name-2", ["name-1"]))
            new = asyncio.create_task(ask(served))
            await engine.arrived(2)
            assert [body["model"] for body in engine.raw] == ["name-1", "name-2"]
            await engine.open_gate()
            assert {await old, await new} == {"First.", "Second."}
            await eventually(lambda: said(served.journal) == ("name-2", []))
            turns = [
                served.journal.turn(request.rid.partition("-")[0]) for request in engine.requests
            ]
        versions = [set(turn.output_versions) for turn in turns if turn is not None]
        assert versions == [{"1"}, {"2"}]


@pytest.mark.parametrize("processed", [True, False])
async def test_what_the_host_found_that_the_engine_can_do_is_known_here(
    tmp_path: Path, model: Path, processed: bool
) -> None:
    """At a temperature other than 1 only processed log-probs are those of the policy."""
    async with FakeVLLM(tokenizer=ChatTokenizer.load(str(model))) as engine:
        engine.adapters["name-1"] = "/1"
        changes = {"engine": engine, "engine_url": "", "temperature": 0.6}
        async with world(tmp_path, model, **changes) as served:
            engine.say("Fine.")
            able = {"any_temperature": processed, "of_a_later_release": 1}
            announce(served.journal, engine.url, 1, abilities=able)
            assert await ask(served) == "Fine."
            turn = served.only_turn()
    assert engine.raw[0]["temperature"] == 0.6
    assert (turn.drop_reason is None) is processed
    assert bool(turn.output_logprobs) is processed


async def test_what_nobody_expects_of_an_announcement_is_logged_and_the_next_one_is_found(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeVLLM(tokenizer=ChatTokenizer.load(str(model))) as engine:
        engine.adapters |= {"name-1": "/1", "name-2": "/2"}
        async with world(tmp_path, model, engine=engine, engine_url="") as served:
            announce(served.journal, engine.url, 1, abilities=12345)  # no names in it
            await eventually(lambda: "TypeError" in caplog.text)
            announce(served.journal, engine.url, 2)
            await eventually(lambda: said(served.journal)[0] == "name-2")
            engine.say("Fine.")
            assert await ask(served) == "Fine."
    assert "12345" not in caplog.text
    assert caplog.text.count("looking for the engine failed") == 1


async def test_what_is_said_of_another_engine_does_not_count_at_a_fixed_address(
    tmp_path: Path, model: Path
) -> None:
    """`serve --engine-url`, in a folder where another engine once got adapters."""
    with Journal.open(tmp_path / "journal.db") as journal:
        announce(journal, "http://127.0.0.1:9", 1)
    async with world(tmp_path, model) as served:
        served.engine.say("As I am.")
        assert await ask(served) == "As I am."
        assert "lora_path" not in served.engine.requests[0].body


async def test_the_mismatch_of_the_last_batch_is_in_the_metrics(served: World) -> None:
    async def gauges() -> set[str]:
        lines = (await served.metrics()).splitlines()
        return {line for line in lines if line.startswith("openclaw_rl_mismatch_")}

    assert await gauges() == set(), "nothing is known, so nothing is said"
    about = {"rollout": 7, "mean": 0.0125, "max": 0.5, "tokens": 640, "skipped": None}
    served.journal.publish("trainer", "", {**about, "truncated": 0.25}, time.time())
    assert await gauges() == {
        "openclaw_rl_mismatch_mean 0.0125",
        "openclaw_rl_mismatch_max 0.5",
        "openclaw_rl_mismatch_truncated 0.25",
        "openclaw_rl_mismatch_rollout 7.0",
    }
    served.journal.publish("trainer", "", {**about, "truncated": None}, time.time())
    assert len(await gauges()) == 3, "without importance weights none is truncated"


async def test_a_pause_and_the_figures_of_versions_are_in_the_metrics(served: World) -> None:
    async def gauges() -> set[str]:
        lines = (await served.metrics()).splitlines()
        ours = ("openclaw_rl_training_", "openclaw_rl_served_", "openclaw_rl_refused_")
        return {line for line in lines if line.startswith(ours)}

    assert await gauges() == {"openclaw_rl_training_paused 0.0"}
    served.journal.ask("pause", "by hand", time.time())
    for one in (
        Version(version=3, state="served", figures={"kl": 0.25, "harm": -0.5}),
        Version(version=4, state="served", figures={"kl": 0.5}),
        Version(version=5, state="refused", figures={"kl": 2.0}),
    ):
        served.journal.record_version(one)
    assert await gauges() == {
        "openclaw_rl_training_paused 1.0",
        "openclaw_rl_served_version 4.0",
        "openclaw_rl_served_kl 0.5",
        "openclaw_rl_refused_version 5.0",
        "openclaw_rl_refused_kl 2.0",
    }


async def test_an_engine_that_gives_fewer_candidates_than_are_kept_serves_all_the_same(
    tmp_path: Path, model: Path
) -> None:
    tokenizer = ChatTokenizer.load(str(model))
    async with FakeVLLM(tokenizer=tokenizer, max_logprobs=2) as engine:
        engine.adapters["name-1"] = "/1"
        async with world(tmp_path, model, engine=engine, engine_url="", top_k=3) as served:
            announce(served.journal, engine.url, 1, abilities={"top_logprobs": 2})
            engine.say("First.")
            assert await ask(served) == "First."
            assert engine.raw[0]["logprobs"] == 2
            assert served.only_turn().state is State.WAITING
