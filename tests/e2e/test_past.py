"""Conversations that lie in the data folder, through `openclaw-rl up` in real processes."""

import json

import pytest

from openclaw_rl.cli import main
from openclaw_rl.types import State
from tests.e2e.system import System
from tests.fakes.model import tiny_model


def conversation(number: int, words: str) -> str:
    said = [("user", f"Question {number}?"), ("assistant", f"Answer {number}."), ("user", words)]
    return json.dumps({"messages": [{"role": role, "content": text} for role, text in said]})


@pytest.mark.slow
async def test_they_are_judged_and_trained_once_and_a_later_start_adds_nothing(tmp_path, capsys):
    model, data = tiny_model(tmp_path / "tiny"), tmp_path / "data"
    data.mkdir()
    past = data / "past.jsonl"
    past.write_text(f"{conversation(0, 'Perfect.')}\n{conversation(1, 'That is wrong.')}\n")
    flags = ["--method", "rl", "--rollout-batch-size", "2",
             "--dtype", "float32"]  # fmt: skip
    async with System(tmp_path, model, *flags) as system:
        await system.until_line(r"\[replay\] .* 2 of 2 replies added")
        await system.until(lambda: system.outcomes().trained == 2)
        with system.journal() as journal:
            turns = [journal.turn(turn_id) for turn_id in journal.turn_ids()]
        assert [turn.verdict.score for turn in turns] == [1.0, -1.0]
        assert [turn.off_policy for turn in turns] == [True, True]
        assert {turn.state for turn in turns} == {State.TRAINED}
    assert main(["export", "--data", str(data), str(data / "exported.jsonl")]) == 0
    capsys.readouterr()
    async with System(tmp_path, model, *flags) as system:
        await system.until_line(r"\[replay\] .* 0 of 2 replies added, 2 known")
        assert not [line for line in system.lines if line.startswith("[up] replay ended")]
        outcomes = system.outcomes()
        assert (outcomes.seen, outcomes.trained) == (2, 2)
        assert outcomes.balanced()
