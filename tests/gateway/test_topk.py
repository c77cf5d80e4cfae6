"""The candidates of each sampled token: kept for main turns where a distillation needs them."""

import pytest

from openclaw_rl.types import State
from tests.fakes.engine import Fault, candidates_of
from tests.gateway.conftest import world


@pytest.fixture
async def keeping(tmp_path, model):
    async with world(tmp_path, model, top_k=3) as made:
        yield made


def expected(engine, turn, k):
    start = len(turn.prompt_ids)
    return [candidates_of(None, t, start + at, k) for at, t in enumerate(turn.output_ids)]


def kept(turn):
    rows = zip(turn.topk.ids, turn.topk.log_probs, strict=True)
    return [list(zip(values, ids, strict=True)) for ids, values in rows]


@pytest.mark.parametrize("stream", [True, False])
async def test_main_turns_keep_k_candidates_a_token(keeping, stream):
    keeping.engine.say("a few words")
    answer = await keeping.chat("go", stream=stream)
    turn = keeping.only_turn()
    assert kept(turn) == expected(keeping.engine, turn, 3)
    assert keeping.engine.requests[0].body["top_logprobs_num"] == 3
    assert all(choice.logprobs is None for chunk in answer.chunks for choice in chunk.choices)


async def test_side_turns_and_other_systems_ask_for_none(keeping, tmp_path, model):
    await keeping.chat("go", extra_headers={"x-turn-type": "side"})
    turn = keeping.only_turn()
    assert (turn.state, turn.topk) == (State.SIDE, None)
    assert "top_logprobs_num" not in keeping.engine.requests[0].body
    async with world(tmp_path / "other", model) as plain:
        await plain.chat("go")
        assert plain.only_turn().topk is None
        assert "top_logprobs_num" not in plain.engine.requests[0].body


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("asked", [0, 1, 3, 5])
async def test_a_client_gets_as_many_as_it_asked_for(keeping, stream, asked):
    keeping.engine.say("yes")
    answer = await keeping.chat("really?", stream=stream, logprobs=True, top_logprobs=asked)
    entries = [
        entry
        for chunk in answer.chunks
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content or []
    ]
    turn = keeping.only_turn()
    assert [len(entry.top_logprobs) for entry in entries] == [asked] * len(turn.output_ids)
    assert keeping.engine.requests[0].body["top_logprobs_num"] == max(3, asked)
    assert [entry.logprob for entry in entries] == turn.output_logprobs
    assert kept(turn) == expected(keeping.engine, turn, 3)


async def test_a_turn_of_an_engine_that_gives_none_is_kept_and_counted(keeping):
    keeping.engine.candidates = None
    await keeping.chat("go")
    turn = keeping.only_turn()
    assert (turn.state, turn.topk) == (State.WAITING, None)
    assert keeping.journal.outcomes().counters == {"topk_missing": 1}


async def test_case_07_candidates_survive_an_abort_and_its_resume(keeping):
    keeping.engine.say("some more words than one")
    keeping.engine.faults += [Fault(abort_after=3), Fault(kill_after=2)]
    await keeping.chat("go", stream=True)
    turn = keeping.only_turn()
    assert len(keeping.engine.requests) == 3
    assert kept(turn) == expected(keeping.engine, turn, 3)
