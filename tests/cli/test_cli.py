"""The command line: help that teaches, and one line for each misuse before anything starts."""

import io
import socket

import pytest

from openclaw_rl.cli import main
from openclaw_rl.errors import ConfigError, EngineError, HookError, JournalError
from openclaw_rl.journal import Journal
from openclaw_rl.journal.lock import gateway_lock, trainer_lock


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "a model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def complaint(capsys, *words: str) -> str:
    assert main(list(words)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("openclaw-rl: ")
    return captured.err


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    words = capsys.readouterr().out
    for part in ("openclaw-rl up --model", "/v1", "serve", "judge", "train", "status"):
        assert part in words


@pytest.mark.parametrize("command", ["up", "serve", "judge", "train"])
def test_help_of_a_command_names_its_settings(capsys, command):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    words = capsys.readouterr().out
    for part in ("--custom-rm-path", "OPENCLAW_RL_API_KEY", "PRM_API_KEY", "JUDGE_API_KEY"):
        assert part in words


@pytest.mark.parametrize("command", ["status", "doctor", "inspect", "export", "purge"])
def test_help_of_a_command_that_looks_lists_only_what_it_looks_at(capsys, command):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    words = capsys.readouterr().out
    assert "--data" in words
    assert "--lr" not in words
    assert "[train]" not in words


@pytest.mark.parametrize(
    ("error", "status"), [(ConfigError, 2), (HookError, 2), (EngineError, 1), (JournalError, 1)]
)
def test_only_a_lasting_error_of_a_loop_ends_the_whole(monkeypatch, capsys, error, status):
    def fail(*_):
        raise error("it went wrong")

    monkeypatch.setattr("openclaw_rl.cli.train.run", fail)
    monkeypatch.setattr("openclaw_rl.cli.commands.stop_with_parent", lambda: None)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"{}\n")))
    assert main(["train", "--supervised"]) == status
    assert main(["train"]) == 2
    assert "openclaw-rl: it went wrong" in capsys.readouterr().err


def test_case_35_no_model(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("MODEL_PATH", raising=False)
    assert "MODEL_PATH" in complaint(capsys, "up", "--data", str(tmp_path / "d"))
    assert not (tmp_path / "d").exists()


def test_case_35_a_model_that_is_not_there(capsys, tmp_path):
    assert "no such folder" in complaint(capsys, "up", "--model", str(tmp_path / "none"))


def test_case_35_a_folder_that_is_no_model(capsys, tmp_path):
    assert "has no config.json" in complaint(capsys, "up", "--model", str(tmp_path))


def test_a_data_folder_that_cannot_be_made(capsys, tmp_path, model):
    (tmp_path / "file").write_text("")
    line = complaint(capsys, "up", "--model", str(model), "--data", str(tmp_path / "file" / "d"))
    assert "--data: cannot make" in line


def test_a_conversation_in_the_data_folder_that_cannot_be_read(capsys, tmp_path, model):
    data = tmp_path / "d"
    data.mkdir()
    (data / "past.jsonl").write_text('[{"role": "user", "content": "q"}]\n{"text": "secret"}\n')
    common = ["--model", str(model), "--data", str(data), "--port", "0"]
    line = complaint(capsys, "up", *common)
    assert f"{data / 'past.jsonl'}:2: must be" in line
    assert "--replay off" in line
    assert "secret" not in line
    assert not (data / "journal.db").exists()
    with socket.socket() as other:  # without it, the next check speaks
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        line = complaint(capsys, "up", *common, "--replay", "off", "--engine-port", port)
        assert "--engine-port" in line


def test_a_port_in_use(capsys, tmp_path, model):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        common = ["--model", str(model), "--data", str(tmp_path / "d")]
        assert f"--port {port}" in complaint(capsys, "up", *common, "--port", port)
        line = complaint(capsys, "up", *common, "--port", "0", "--engine-port", port)
        assert f"--engine-port {port}" in line


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--custom-rm-path", "./none.py", "no such file"),
        ("--custom-rm-path", "no_such_package.rm", "importing no_such_package failed"),
        ("--custom-loss-function-path", "openclaw_rl.losses.nothing", "has no function 'nothing'"),
        ("--rollout-function-path", "openclaw_rl.rollout.nothing", "has no function 'nothing'"),
    ],
)
def test_a_hook_that_does_not_load(capsys, tmp_path, model, flag, value, said):
    line = complaint(
        capsys, "up", "--model", str(model), "--data", str(tmp_path / "d"), flag, value
    )
    assert flag in line
    assert said in line


@pytest.fixture
def up(tmp_path, model):
    """A command line with nothing wrong in it."""
    return ["up", "--model", str(model), "--data", str(tmp_path / "d"), "--port", "0",
            "--engine-port", "0"]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "said"),
    [({"base": "another"}, "base another in the journal"), ({"lora_rank": 8}, "lora_rank 8 in")],
)
def test_case_47_the_journal_of_another_model_is_refused_before_anything_starts(
    capsys, tmp_path, up, given, said
):
    with Journal.open(tmp_path / "d" / "journal.db") as journal:
        journal.bind(given)
    line = complaint(capsys, *up)
    assert "belongs to another model" in line
    assert said in line


@pytest.mark.parametrize("lock", [gateway_lock, trainer_lock])
def test_a_journal_in_use_is_refused_before_anything_starts(capsys, tmp_path, up, lock):
    with lock(tmp_path / "d" / "journal.db"):
        assert "is already running on" in complaint(capsys, *up)


def test_a_loop_that_there_is_not(capsys, up):
    assert "'serv' is not one of train, judge, serve" in complaint(capsys, *up, "serv")


@pytest.mark.parametrize(
    ("word", "said"),
    [("--modle=x", "--modle=x; did you mean --model?"), ("--zzz", "--zzz; see up --help")],
)
def test_an_argument_that_there_is_not(capsys, word, said):
    assert complaint(capsys, "up", word) == f"openclaw-rl: up: no such argument {said}\n"


def test_status_of_a_journal_that_is_not_there(capsys, tmp_path):
    assert "no journal" in complaint(capsys, "status", "--data", str(tmp_path))
