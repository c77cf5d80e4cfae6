"""The loop closes: what is praised becomes more likely, what is blamed less, in real processes."""

import asyncio
import statistics

import aiohttp
import pytest

from tests.e2e.system import System
from tests.fakes.model import tiny_model

BATCH, STEPS = 8, 4


async def converse(system: System, number: int, words: str) -> str:
    """One turn and the user's `words` on it; returns the turn's id."""
    headers = {"x-session-id": f"talk-{number}"}
    question = {"role": "user", "content": f"Question {number}: what is the capital of France?"}
    first = await system.client.chat.completions.create(
        model="tiny", messages=[question], max_tokens=12, extra_headers=headers
    )
    await system.client.chat.completions.create(
        model="tiny",
        messages=[
            question,
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": words},
        ],
        max_tokens=1,
        extra_headers=headers,
    )
    return first.id.removeprefix("chatcmpl-")


@pytest.mark.slow
@pytest.mark.parametrize(("words", "sign"), [("Perfect, thanks.", 1), ("That is wrong.", -1)])
async def test_praised_replies_become_likelier_and_blamed_ones_less(tmp_path, words, sign):
    """Each in a run of its own: the replies of a random model have nothing in common by which
    praise of one could be told from blame of another."""
    model = tiny_model(tmp_path / "tiny")
    flags = ["--method", "rl", "--lr", "0.003", "--rollout-batch-size", str(BATCH),
             "--num-rollout", str(STEPS), "--dtype", "float32"]  # fmt: skip
    async with System(tmp_path, model, *flags) as system:
        turns = await asyncio.gather(*(converse(system, n, words) for n in range(BATCH * STEPS)))
        await system.until(lambda: system.outcomes().trained == BATCH * STEPS)

        # Policy against base, which is what served before the first step.
        changes: list[float] = []
        journal = system.journal()
        async with aiohttp.ClientSession() as http:
            policy, base = system.engine("policy", http), system.engine("teacher", http)
            for turn_id in turns:
                turn = journal.turn(turn_id)
                ids, start = [*turn.prompt_ids, *turn.output_ids], len(turn.prompt_ids)
                before, after = (
                    (await base.score(ids, start)).log_probs,
                    (await policy.score(ids, start)).log_probs,
                )
                changes.append(statistics.fmean(after) - statistics.fmean(before))
                if set(turn.output_versions) == {"0"}:  # sampled by the base: the same values
                    gaps = [abs(a - b) for a, b in zip(turn.output_logprobs, before, strict=True)]
                    assert max(gaps) < 1e-3
        journal.close()
        assert sign * statistics.fmean(changes) > 0.02
        assert system.outcomes().balanced()


@pytest.mark.slow
async def test_case_56_one_conversation_alone_is_trained_with_the_default_settings(tmp_path):
    async with System(tmp_path, tiny_model(tmp_path / "tiny")) as system:
        messages: list[dict[str, str]] = []
        # More than a batch: a random model may say nothing, and nothing follows such a reply.
        for words in ["What is a tree?", *["Perfect, thanks. And another?"] * 23]:
            messages.append({"role": "user", "content": words})
            reply = await system.client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=4
            )
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        await system.until(lambda: system.outcomes().trained == 16)
        assert system.outcomes().balanced()


@pytest.mark.slow
async def test_one_correction_is_practised_until_a_batch_is_full(tmp_path):
    flags = ["--rollout-batch-size", "4", "--practice-idle-seconds", "0", "--num-rollout", "1",
             "--standing-rule-path", "openclaw_rl.rewards.feedback.standing_rule"]  # fmt: skip
    async with System(tmp_path, tiny_model(tmp_path / "tiny"), *flags) as system:
        for number in range(2):
            await converse(system, number, "Too long, please answer in one short sentence.")
        await system.until(lambda: system.outcomes().trained >= 4)
        practised = system.outcomes().by_source["practice"]["bound"]
        assert practised >= 2
        assert system.outcomes().balanced()
        # The person's own turns are learnt first.
        journal = system.journal()
        mine = [head for head in journal.heads(100) if head.next_state is not None]
        journal.close()
        assert {head.state for head in mine} <= {"trained", "dropped"}
