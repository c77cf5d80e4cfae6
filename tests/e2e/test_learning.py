"""The loop closes: what is praised becomes more likely, what is blamed less, in real processes."""

import asyncio
import statistics

import aiohttp
import pytest

from openclaw_rl.engine.client import SGLangEngine
from tests.e2e.system import System
from tests.fakes.model import tiny_model

BATCH, STEPS = 8, 4


async def converse(system: System, number: int) -> tuple[str, bool]:
    """One turn and the user's answer to it; returns the turn's id and whether it was praised."""
    headers = {"x-session-id": f"talk-{number}"}
    question = {"role": "user", "content": f"Question {number}: what is the capital of France?"}
    first = await system.client.chat.completions.create(
        model="tiny", messages=[question], max_tokens=12, extra_headers=headers
    )
    praised = number % 2 == 0
    await system.client.chat.completions.create(
        model="tiny",
        messages=[
            question,
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "Perfect, thanks." if praised else "That is wrong."},
        ],
        max_tokens=1,
        extra_headers=headers,
    )
    return first.id.removeprefix("chatcmpl-"), praised


@pytest.mark.slow
async def test_praised_replies_become_likelier_and_blamed_ones_less(tmp_path):
    model = tiny_model(tmp_path / "tiny")
    flags = [
        "--method",
        "rl",
        "--lr",
        "0.003",
        "--rollout-batch-size",
        str(BATCH),
        "--num-rollout",
        str(STEPS),
        "--dtype",
        "float32",
    ]
    async with System(tmp_path, model, *flags) as system:
        talks = await asyncio.gather(*(converse(system, n) for n in range(BATCH * STEPS)))
        await system.until(lambda: system.fates().trained == BATCH * STEPS)

        # Policy against base, which is what served before the first step.
        changes: dict[bool, list[float]] = {True: [], False: []}
        journal = system.journal()
        url = f"http://127.0.0.1:{system.engine_port}"
        async with aiohttp.ClientSession() as http:
            policy, base = SGLangEngine(url, http), SGLangEngine(f"{url}/base", http)
            for turn_id, praised in talks:
                turn = journal.turn(turn_id)
                ids, start = [*turn.prompt_ids, *turn.output_ids], len(turn.prompt_ids)
                before, after = await base.score(ids, start), await policy.score(ids, start)
                changes[praised].append(statistics.fmean(after) - statistics.fmean(before))
                if set(turn.output_versions) == {"0"}:  # sampled by the base: the same values
                    assert (
                        max(abs(a - b) for a, b in zip(turn.output_logprobs, before, strict=True))
                        < 1e-3
                    )
        journal.close()
        assert statistics.fmean(changes[True]) > 0.02
        assert statistics.fmean(changes[False]) < -0.02
        assert system.fates().balanced()
