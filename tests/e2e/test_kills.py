"""Case 33: any process dies by `kill -9` at any moment, under load; it comes back alone."""

import asyncio
import os
import signal

import openai
import pytest

from tests.e2e.system import System
from tests.fakes.model import tiny_model

BATCH = 4


class Talkers:
    """Users who talk without pause, and what they saw."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.acknowledged: list[str] = []
        self.errors: list[Exception] = []
        self.stopping = False
        """Asked for, not cancelled: the client's connection pool may swallow a cancellation."""

    async def one(self, number: int) -> None:
        round_ = 0
        while not self.stopping:
            round_ += 1
            headers = {"x-session-id": f"s{number}-{round_}"}
            messages: list[dict] = [{"role": "user", "content": f"Say something, {number}."}]
            for words in ("Perfect, thanks.", "That is wrong.", None):
                try:
                    stream = await self.system.client.chat.completions.create(
                        model="tiny",
                        messages=messages,
                        max_tokens=10,
                        stream=True,
                        extra_headers=headers,
                    )
                    text, name, ended = "", "", False
                    async for chunk in stream:
                        name = chunk.id
                        for choice in chunk.choices:
                            text += choice.delta.content or ""
                            ended = ended or choice.finish_reason is not None
                except (openai.APIError, OSError) as error:
                    self.errors.append(error)
                    await self.system.until_served()
                    break
                if ended:
                    self.acknowledged.append(name.removeprefix("chatcmpl-"))
                messages.append({"role": "assistant", "content": text})
                messages.append({"role": "user", "content": words})


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["judge", "train", "serve"])
async def test_case_33_kill_9_loses_nothing_acknowledged(tmp_path, victim):
    model = tiny_model(tmp_path / "tiny")
    flags = ["--method", "rl", "--rollout-batch-size", str(BATCH), "--dtype", "float32"]
    async with System(tmp_path, model, *flags) as system:
        talkers = Talkers(system)
        tasks = [asyncio.create_task(talkers.one(n)) for n in range(4)]
        await system.until(lambda: system.fates().trained >= 2 * BATCH)
        seen, trained = len(system.lines), system.fates().trained
        os.kill(system.child(victim), signal.SIGKILL)
        await system.until_line(rf"\[up\] {victim} ended with status -9", after=seen)
        await system.until(lambda: system.fates().trained >= trained + 3 * BATCH)
        talkers.stopping = True
        await asyncio.gather(*tasks)

        if victim != "serve":  # only the gateway's own death can be seen by a client
            assert talkers.errors == []
        journal = system.journal()
        missing = [turn for turn in talkers.acknowledged if journal.turn(turn) is None]
        journal.close()
        assert missing == []
        assert talkers.acknowledged
        assert system.fates().balanced()
    # Every step trains exactly BATCH turns: fewer trained turns than that, and one trained twice.
    fates, journal = system.fates(), system.journal()
    version = int(journal.endpoint("policy").info["weight_version"])
    journal.close()
    assert fates.trained == version * BATCH
    assert fates.leased in (0, BATCH)
