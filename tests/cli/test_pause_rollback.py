"""`pause`, `resume`, `rollback`: rows that the trainer acts on, and what is said of them."""

import json
import re

import pytest

from openclaw_rl.cli import main
from openclaw_rl.journal import Journal, Version
from openclaw_rl.local.checkpoint import name_of


@pytest.fixture
def data(tmp_path):
    with Journal.open(tmp_path / "journal.db"):
        return tmp_path


def run(data, capsys, command, *words, status=0):
    assert main([command, "--data", str(data), *words]) == status
    said = capsys.readouterr()
    return said.err if status else said.out


def asked(data):
    with Journal.open(data / "journal.db") as journal:
        return journal.asked()


def keep(data, *versions):
    for version in versions:
        (data / "checkpoints" / name_of(version)).mkdir(parents=True)


def record(data, *versions):
    with Journal.open(data / "journal.db") as journal:
        for version in versions:
            journal.record_version(version)


def test_pause_and_resume_are_one_clear_line_each(data, capsys):
    assert run(data, capsys, "resume") == "training was not paused\n"
    said = run(data, capsys, "pause", "on holiday")
    assert said.startswith("training is paused (on holiday); serving and judging go on")
    assert said.count("\n") == 1
    assert asked(data) == {"pause": "on holiday"}
    assert run(data, capsys, "resume") == "training goes on (it was paused: on holiday)\n"
    assert asked(data) == {}


def test_a_pause_by_a_guard_keeps_its_reason(data, capsys):
    with Journal.open(data / "journal.db") as journal:
        journal.ask("pause", "version 7: repetition 0.8 above 0.3", 1.0)
    said = run(data, capsys, "pause")
    assert "paused already (version 7: repetition 0.8 above 0.3)" in said
    assert asked(data) == {"pause": "version 7: repetition 0.8 above 0.3"}


def test_without_a_journal_nothing_is_made(tmp_path, capsys):
    for command in ("pause", "resume", "rollback"):
        assert "no journal at" in run(tmp_path, capsys, command, status=2)
    assert list(tmp_path.iterdir()) == []


def test_rollback_asks_for_a_version_that_has_a_checkpoint(data, capsys):
    keep(data, 4, 6, 12)
    said = run(data, capsys, "rollback", "6")
    assert said.startswith("version 6 is served again as soon as")
    assert asked(data) == {"rollback": "6"}
    assert "asked    version 6 again" in run(data, capsys, "status")
    with Journal.open(data / "journal.db") as journal:
        journal.answered("rollback", "6")
    assert "asked" not in run(data, capsys, "status")


def test_rollback_to_a_version_without_a_checkpoint_names_those_that_are_there(data, capsys):
    keep(data, 4, 6, 12)
    said = run(data, capsys, "rollback", "5", status=2)
    assert re.search(r"no checkpoint of version 5 in .*checkpoints; there are 12, 6, 4\n$", said)
    assert "give the VERSION" in run(data, capsys, "rollback", status=2)
    assert asked(data) == {}


def test_rollback_where_there_are_no_checkpoints_of_ours_says_for_whom_it_is(data, capsys):
    said = run(data, capsys, "rollback", "5", status=2)
    assert "it is for hosts of our own: on slime" in said
    assert said.count("\n") == 1
    assert asked(data) == {}


def test_rollback_lists_versions_and_which_can_be_served_again(data, capsys):
    keep(data, 6)
    record(
        data,
        Version(version=5, state="served", figures={"kl": 0.01234, "sound": 1}),
        Version(version=6, state="served"),
        Version(version=7, state="refused", reason="repetition 0.8 above 0.3"),
        Version(version=7, state="served", reason="rollback", restored=5),
    )
    assert run(data, capsys, "rollback", "--list").splitlines() == [
        "served   version 7 · restored from 5 · rollback",
        "refused  version 7 · repetition 0.8 above 0.3",
        "served   version 6 · can be served again",
        "served   version 5 · kl 0.0123",
    ]


def test_inspect_shows_all_that_a_version_number_was_given_to(data, capsys):
    record(
        data,
        Version(version=6, state="served"),
        Version(version=7, state="refused", reason="empty 1 above 0.2", rollout=8),
        Version(version=7, state="served", rollout=9, figures={"sound": 0.75, "length": 31.5}),
    )
    first, second = run(data, capsys, "inspect", "--version", "7").splitlines()
    assert first.endswith("refused  version 7 · empty 1 above 0.2 · rollout 8")
    assert second.endswith("served   version 7 · sound 0.75, length 31.5 · rollout 9")
    assert "no version 9" in run(data, capsys, "inspect", "--version", "9", status=2)


def test_status_tells_of_a_pause_and_of_the_last_versions(data, capsys):
    record(
        data,
        Version(version=6, state="refused", reason="too long"),
        Version(version=6, state="served", reason="rollback", restored=4, figures={"kl": 0.5}),
        Version(version=7, state="refused", reason="repetition 0.8 above 0.3"),
    )
    run(data, capsys, "pause", "on holiday")
    said = run(data, capsys, "status")
    assert "served   version 6 · restored from 4 · rollback · kl 0.5\n" in said
    assert "refused  version 7 · repetition 0.8 above 0.3\n" in said
    assert "warning  training is paused (on holiday)" in said
    status = json.loads(run(data, capsys, "status", "--json"))
    assert status["paused"] == "on holiday"
    assert status["last_served"]["restored"] == 4
    assert status["last_refused"]["reason"] == "repetition 0.8 above 0.3"


@pytest.mark.parametrize(("refused", "told"), [(2, False), (3, True)])
def test_status_warns_where_nothing_that_is_learnt_is_served(data, capsys, refused, told):
    record(data, *[Version(version=6, state="refused")] * 4, Version(version=6, state="served"))
    record(data, *[Version(version=7, state="refused", reason="harm")] * refused)
    said = run(data, capsys, "status")
    assert ("versions were refused" in said) == told
