"""Versions of the weights in the journal, and requests to the trainer."""

import math
from pathlib import Path

from openclaw_rl.journal import Journal, Version
from tests.journal.build import chain, record


def test_versions_come_back_newest_first_also_where_a_number_comes_twice(tmp_path: Path):
    made = [
        Version(version=1, state="served", rollout=0, created=10.0, figures={"kl": 0.25}),
        Version(version=2, state="refused", reason="kl 1.4 above 1", rollout=1, created=11.0),
        Version(version=2, state="served", rollout=2, created=12.0),
        Version(version=3, state="served", reason="rollback", restored=1, created=13.0),
    ]
    with Journal.open(tmp_path / "j.db") as journal:
        for one in made:
            journal.record_version(one)
    with Journal.open(tmp_path / "j.db", create=False) as journal:
        assert journal.versions() == made[::-1]
        assert journal.versions(limit=2) == [made[3], made[2]]


def test_a_figure_that_is_no_number_is_left_out(tmp_path: Path):
    with Journal.open(tmp_path / "j.db") as journal:
        figures = {"kl": math.nan, "harm": math.inf, "empty": 0.5}
        journal.record_version(Version(version=1, state="served", figures=figures))
        assert journal.versions()[0].figures == {"empty": 0.5}


def test_a_request_stands_until_it_is_answered(tmp_path: Path):
    with Journal.open(tmp_path / "j.db") as journal, Journal.open(tmp_path / "j.db") as other:
        other.ask("pause", "going on holiday", 10.0)
        other.ask("rollback", "3", 11.0)
        assert journal.asked() == {"pause": "going on holiday", "rollback": "3"}
        other.ask("rollback", "5", 12.0)
        journal.answered("rollback", "3")  # it was carried out while somebody asked for another
        assert other.asked() == {"pause": "going on holiday", "rollback": "5"}
        journal.answered("rollback", "5")
        other.answered("pause", journal.asked()["pause"])
        assert journal.asked() == {}


def test_first_prompts_are_those_that_served_sessions_began_with(tmp_path: Path):
    with Journal.open(tmp_path / "j.db") as journal:
        first, second = chain(2)
        journal.record_turn(first)
        journal.record_turn(second)
        for n, given in enumerate(
            (
                {"prompt_ids": [1, 2]},
                {"prompt_ids": [3, 4]},
                {"prompt_ids": [1, 2]},  # again: it is the newest now, and comes once
                {"prompt_ids": [5] * 9},
                {"prompt_ids": [6], "tools": ({"type": "function"},)},
                {"prompt_ids": [7], "kind": "side"},
                {"prompt_ids": [8], "off_policy": True, "output_logprobs": (),
                 "output_versions": ()},
            )
        ):  # fmt: skip
            journal.record_turn(record(f"t{n}", session_id=f"one{n}", **given))
        expected = [[1, 2], [3, 4], list(first.prompt_ids)]
        assert journal.first_prompts(9, 8) == expected
        assert journal.first_prompts(1, 8) == expected[:1]
