"""Random conversations through the real gateway, journal and rollout: each sampled token is trained
at most once, with its own log-prob and version, under the very prefix that it was sampled with."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openclaw_rl.hooks import Sample
from openclaw_rl.rollout import generate_rollout
from openclaw_rl.types import State, Turn, Verdict
from tests.fakes.engine import Request
from tests.fakes.model import tiny_tokenizer
from tests.fakes.templates import CHATML, QWEN3_LIKE
from tests.gateway.conftest import World, world
from tests.rollout.test_rollout import arguments, samples_of

STEP = st.fixed_dictionaries(
    {
        "who": st.integers(0, 2),
        "act": st.sampled_from(["say", "say", "say", "branch", "edit", "retry", "restart"]),
        "at": st.integers(0, 5),
        "think": st.booleans(),
        "bump": st.booleans(),
    }
)

SPEAKERS: list[dict[str, str]] = [{"X-Session-Id": "s"}, {"Authorization": "Bearer other"}, {}]
"""A named session, another key, and nobody in particular."""


class Walk:
    def __init__(self, served: World) -> None:
        self.served = served
        self.talks: list[list[dict[str, Any]]] = [[] for _ in SPEAKERS]
        self.count = 0

    async def step(self, step: dict[str, Any]) -> None:
        who, at, talk = step["who"], step["at"], self.talks[step["who"]]
        self.count += 1
        if step["act"] == "restart":
            talk = []
        elif step["act"] == "branch":  # back to after some reply
            talk = talk[: 2 * (at % (len(talk) // 2 + 1))]
        elif step["act"] == "edit" and talk:
            message = talk[at % len(talk)]
            talk[at % len(talk)] = {**message, "content": f"edited {self.count}"}
        if step["act"] == "retry" and talk:
            asked = talk[:-1]
        else:
            asked = [*talk, {"role": "user", "content": f"question {self.count} of {who}"}]
        if step["bump"]:
            self.served.engine.version = str(int(self.served.engine.version) + 1)
        thought = "<think>\nhm\n</think>\n\n" if step["think"] else ""
        self.served.engine.say(f"{thought}reply {self.count}")
        answer = await self.served.chat(asked, extra_headers=SPEAKERS[who])
        self.talks[who] = [*asked, answer.replay()]


def ready(served: World) -> dict[str, Turn]:
    """All turns that have a next state, judged."""
    while claimed := served.journal.claim("w", 64, 1e12, 60.0):
        for turn in claimed:
            verdict = Verdict(score=1.0)
            assert served.journal.write_verdict(turn.turn_id, "w", verdict) is State.READY
    return {turn.turn_id: turn for turn in served.turns() if turn.state is State.READY}


def check(samples: list[Sample], turns: dict[str, Turn], sampled: dict[str, Request]) -> None:
    trained = []
    for sample in samples:
        assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
        at = len(sample.tokens) - sample.response_length
        kept = 0
        for member in sample.metadata["turns"]:
            turn = turns[member["turn_id"]]
            start, end = member["start"], member["end"]
            request = sampled[turn.turn_id]
            assert sample.tokens[: at + end] == [*request.ids, *request.sent]
            assert sample.rollout_log_probs[start:end] == list(turn.output_logprobs)
            assert all(sample.loss_mask[start:end])
            assert len(turn.output_versions) == len(turn.output_logprobs) == end - start
            assert set(member["versions"]) == set(turn.output_versions)
            trained.append(turn.turn_id)
            kept += end - start
        assert sum(sample.loss_mask) == kept
        assert len({turns[turn["turn_id"]].session_id for turn in sample.metadata["turns"]}) == 1
    assert sorted(trained) == sorted(turns)


async def walk(folder: Path, model: Path, steps: list[dict[str, Any]]) -> None:
    async with world(folder, model) as served:
        going = Walk(served)
        for step in steps:
            await going.step(step)
        sampled = {request.rid: request for request in served.engine.requests}
        for turn in served.turns():
            assert list(turn.prompt_ids) == sampled[turn.turn_id].ids
            assert list(turn.output_ids) == sampled[turn.turn_id].sent
        turns = ready(served)
        assert served.journal.outcomes().balanced()
        if turns:
            args = arguments(served.config.journal_path, len(turns), max_staleness=10_000)
            output = await asyncio.to_thread(generate_rollout, args, 0, None)
            check(samples_of(output), turns, sampled)


@pytest.mark.slow
@pytest.mark.parametrize("template", [CHATML, QWEN3_LIKE], ids=["keeps", "rewrites"])
def test_each_sampled_token_is_trained_once_under_its_own_prefix(template, tmp_path):
    model = tiny_tokenizer(tmp_path / "model", template=template)

    @given(st.lists(STEP, min_size=4, max_size=16))
    @settings(max_examples=6, deadline=None)
    def walks(steps: list[dict[str, Any]]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(walk(Path(folder), model, steps))

    walks()
