"""Distillation over the top K in real processes: from the candidates of the gateway's engine, by a
hint and a teacher, to weights that favour what the teacher favours."""

import asyncio
import statistics

import aiohttp
import pytest

from tests.e2e.system import System
from tests.e2e.test_learning import converse
from tests.fakes.model import tiny_model

BATCH, STEPS, K = 8, 3, 4
CORRECTION = "Too long, one sentence please."


@pytest.mark.slow
async def test_what_the_hinted_teacher_favours_becomes_likelier(tmp_path):
    model = tiny_model(tmp_path / "tiny", scale=3.0)
    flags = ["--method", "opd", "--opd-top-k", str(K), "--lr", "0.0005",
             "--rollout-batch-size", str(BATCH), "--num-rollout", str(STEPS),
             "--dtype", "float32"]  # fmt: skip
    async with System(tmp_path, model, *flags) as system:
        turns = await asyncio.gather(
            *(converse(system, n, CORRECTION) for n in range(BATCH * STEPS))
        )
        await system.until(lambda: system.outcomes().trained == BATCH * STEPS)

        # Policy against base, which is what served before the first step.
        up, down = [], []
        journal = system.journal()
        async with aiohttp.ClientSession() as http:
            policy, base = system.engine("policy", http), system.engine("teacher", http)
            for turn_id in turns:
                turn = journal.turn(turn_id)
                assert len(turn.topk.ids) == len(turn.output_ids)
                assert turn.verdict.hint == CORRECTION
                ids, start = [*turn.prompt_ids, *turn.output_ids], len(turn.prompt_ids)
                old_scores, new_scores = await asyncio.gather(
                    base.score(ids, start, 100), policy.score(ids, start, 100)
                )
                teacher = turn.verdict.teacher_topk
                assert (len(teacher.ids), teacher.width) == (len(turn.output_ids), K)
                lists = (old_scores.top, new_scores.top)
                rows = zip(teacher.ids, teacher.log_probs, *lists, strict=True)
                for own, values, old, new in rows:
                    was, now = ({i: v for v, i in one} for one in (old, new))
                    for token, value in zip(own, values, strict=True):
                        if token < 0 or token not in was or token not in now:
                            continue
                        if abs(value - was[token]) > 0.3:
                            side = up if value > was[token] else down
                            side.append(now[token] - was[token])
        journal.close()
        assert min(len(up), len(down)) > 20
        assert statistics.fmean(up) > statistics.fmean(down) + 0.02
        assert "topk_missing" not in system.outcomes().counters
        assert system.outcomes().balanced()
