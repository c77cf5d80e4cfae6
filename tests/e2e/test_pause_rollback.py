"""Training is paused, resumed and rolled back by commands while `up` runs, in real processes."""

import asyncio
import json
import os
import sys

import pytest

from openclaw_rl.journal import Version
from tests.e2e.system import System
from tests.e2e.test_learning import converse
from tests.fakes.model import tiny_model

BATCH = 4

pytestmark = pytest.mark.slow


async def command(system: System, *words: str) -> tuple[int, str]:
    """`openclaw-rl WORDS` as a process of its own: exit status and what it said."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "openclaw_rl.cli", *words, "--data", str(system.data),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=dict(os.environ),
    )  # fmt: skip
    said, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode()


async def greedy(system: System) -> str | None:
    made = await system.client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Tell me."}], max_tokens=24,
        temperature=0, extra_headers={"x-turn-type": "side"},
    )  # fmt: skip
    return made.choices[0].message.content


def newest(system: System) -> Version:
    with system.journal() as journal:
        return journal.versions(1)[0]


async def batch(system: System, number: int) -> None:
    talks = (converse(system, BATCH * number + n, "Perfect, thanks.") for n in range(BATCH))
    await asyncio.gather(*talks)


async def test_a_pause_holds_training_not_serving_and_a_rollback_serves_an_earlier_version(
    tmp_path,
):
    flags = ["--method", "rl", "--lr", "0.01", "--rollout-batch-size", str(BATCH),
             "--dtype", "float32", "--practice", "0"]  # fmt: skip
    async with System(tmp_path, tiny_model(tmp_path / "tiny"), *flags) as system:
        status, said = await command(system, "pause", "on holiday")
        assert (status, said.partition(";")[0]) == (0, "training is paused (on holiday)")
        await system.until_line(r"\[rollout\] 0: training is paused \(on holiday\)")
        await batch(system, 0)  # served, and judged
        await system.until(lambda: system.outcomes().ready == BATCH)
        await system.until_line(rf"ready {BATCH}/{BATCH} · trained 0 .* · paused")

        await command(system, "resume")
        await system.until(lambda: newest(system).version == 1)
        first = await greedy(system)
        await batch(system, 1)
        await system.until(lambda: newest(system).version == 2)
        assert await greedy(system) != first

        status, said = await command(system, "rollback", "7")
        assert (status, said.rpartition("; ")[2]) == (2, "there are 2, 1, 0\n")
        status, said = await command(system, "rollback", "1")
        assert status == 0
        await system.until(lambda: newest(system).version == 3)
        assert await greedy(system) == first
        found = json.loads((await command(system, "status", "--json"))[1])
        assert found["version"] == "3"
        assert found["last_served"]["restored"] == 1
        assert found["paused"] is None
        assert system.outcomes().balanced()
