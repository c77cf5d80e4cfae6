"""Looking into the journal by hand: what is shown, taken out, deleted, and what is not."""

import json

import pytest

from openclaw_rl.cli import main
from openclaw_rl.journal import Journal
from openclaw_rl.replay.files import read
from tests.journal.build import chain, judged, record


@pytest.fixture
def data(tmp_path):
    with Journal.open(tmp_path / "journal.db") as journal:
        first, second = chain(2, "s1")
        judged(journal, first, score=1.0)
        journal.record_turn(second)
        journal.record_turn(record("x", session_id="s2", owner="bob", created=200.0))
        journal.drop("x", "stale", 300.0)
    return tmp_path


def run(data, capsys, command, *words):
    assert main([command, "--data", str(data), *words]) == 0
    return capsys.readouterr().out


def test_inspect_lists_sessions_the_newest_first(data, capsys):
    first, second = run(data, capsys, "inspect").splitlines()
    assert "s2 · owner bob · 1 dropped" in first
    assert "s1 · 1 ready, 1 waiting" in second


@pytest.mark.parametrize("reply_id", ["s1-0", "chatcmpl-s1-0", "msg_s1-0"])
def test_inspect_takes_the_id_that_a_client_saw(data, capsys, reply_id):
    shown = run(data, capsys, "inspect", reply_id)
    assert shown.count("turn s1-") == 1
    assert "turn s1-0" in shown


def test_inspect_shows_a_turns_fate_reward_and_next_state_but_no_text(data, capsys):
    shown = run(data, capsys, "inspect", "s1-0")
    assert "turn s1-0" in shown
    assert "ready" in shown
    assert "reward +1" in shown
    assert "next state: user" in shown
    assert "question" not in shown
    assert "question 0 of s1" in run(data, capsys, "inspect", "s1-0", "--text")


def test_what_was_said_cannot_command_the_terminal(data, capsys):
    said = {"role": "user", "content": "clear\x1b[2J\x9b\r gone\x07 \ud83d\n\té"}
    with Journal.open(data / "journal.db") as journal:
        journal.record_turn(record("evil", messages=[said]))
    shown = run(data, capsys, "inspect", "evil", "--text")
    assert r"clear\x1b[2J\x9b\r gone\x07 \ud83d" in shown
    assert "\té" in shown
    assert not set("\x1b\x9b\r\x07") & set(shown)


def test_inspect_shows_a_whole_session(data, capsys):
    shown = run(data, capsys, "inspect", "s1")
    assert shown.count("turn s1-") == 2
    assert "next state: none yet" in shown
    assert "dropped (stale)" in run(data, capsys, "inspect", "s2")


def test_inspect_of_what_is_not_there(data, capsys):
    assert main(["inspect", "--data", str(data), "nope"]) == 2
    assert "neither a turn nor a session" in capsys.readouterr().err


def test_an_exported_line_is_a_turn_and_a_conversation_that_replay_reads(data, capsys, tmp_path):
    path = tmp_path / "out.jsonl"
    run(data, capsys, "export", str(path), "--session", "s1")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["turn_id"] for line in lines] == ["s1-0", "s1-1"]
    first = lines[0]
    assert (first["score"], first["state"]) == (1.0, "ready")
    assert first["messages"][first["reply_index"]]["content"] == "answer 0"
    assert len(first["output_ids"]) == len(first["output_logprobs"])
    assert [past.session_id for past in read(path)] == ["s1", "s1"]
    assert main(["export", "--data", str(data), str(path)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_purge_only_counts_without_yes(data, capsys):
    assert "2 turns would be deleted" in run(data, capsys, "purge", "--session", "s1")
    assert "1 turns would be deleted" in run(data, capsys, "purge", "--owner", "bob")
    assert "3 turns would" in run(data, capsys, "purge", "--older-than-days", "1")
    assert "2 turns deleted" in run(data, capsys, "purge", "--session", "s1", "--yes")
    with Journal.open(data / "journal.db") as journal:
        assert journal.turn_ids() == ["x"]
        assert journal.outcomes().balanced()
    assert "1 turns deleted" in run(data, capsys, "purge", "--older-than-days", "1", "--yes")


def test_purge_must_be_told_what(data, capsys):
    assert main(["purge", "--data", str(data), "--yes"]) == 2
    assert "say what" in capsys.readouterr().err
