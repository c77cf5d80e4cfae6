"""`status` warns where nothing can be learnt."""

import json
import socket
import threading
from argparse import Namespace
from pathlib import Path

import pytest

from openclaw_rl.cli import main
from openclaw_rl.cli.status import read_status, render_status
from openclaw_rl.config import Config, DataConfig
from openclaw_rl.journal import Journal
from openclaw_rl.rollout import generate_rollout
from openclaw_rl.types import TopK
from tests.journal.build import judged, record


@pytest.mark.parametrize("blind", [10, 20])
def test_an_engine_without_candidates_is_told(tmp_path: Path, blind: int):
    config = Config(data=DataConfig(path=str(tmp_path)))
    with Journal.open(config.journal_path) as journal:
        for n in range(25):
            rows = 0 if n < blind else 3
            journal.record_turn(record(f"t{n}", topk=TopK([[5]] * rows, [[-1.0]] * rows)))
    told = [words for words in read_status(config)["warnings"] if "candidates" in words]
    assert [words.split()[0] for words in told] == (["20"] if blind == 20 else [])


@pytest.mark.parametrize(("votes", "verdicts", "told"), [(30, 0, 1), (5, 0, 0), (30, 1, 0)])
def test_a_judge_that_never_answers_in_time_is_told(
    tmp_path: Path, votes: int, verdicts: int, told: int
):
    config = Config(data=DataConfig(path=str(tmp_path)))
    with Journal.open(config.journal_path) as journal:
        journal.count("judge_timeout", votes)
        for n in range(verdicts):
            judged(journal, record(f"t{n}"))
    warnings = read_status(config)["warnings"]
    assert sum("no judge answered in time" in words for words in warnings) == told


@pytest.mark.parametrize(("top_p", "told"), [(0.9, True), (1.0, False)])
def test_case_46_turns_that_are_sampled_otherwise_than_trained_are_told_in_words(
    tmp_path: Path, top_p: float, told: bool
):
    config = Config(data=DataConfig(path=str(tmp_path)))
    with Journal.open(config.journal_path) as journal:
        for n in range(20):
            judged(journal, record(f"t{n}", sampling={"top_p": top_p}))
            if told:
                assert journal.drop(f"t{n}", "sampling", 300.0)
    status = read_status(config)
    assert status["usable"] == (0 if told else 16)
    assert ("20 turns were sampled with parameters" in render_status(status)) == told


def test_the_batch_that_is_waited_for_is_shown_whatever_this_command_was_given(tmp_path: Path):
    config = Config(data=DataConfig(path=str(tmp_path)))
    args = Namespace(journal_path=str(config.journal_path), rollout_batch_size=4)
    args.stop_event = threading.Event()
    args.stop_event.set()
    generate_rollout(args, 0, None)
    assert "0/4 ready" in render_status(read_status(config))


def test_an_address_where_nobody_listens_any_more_is_not_shown_as_alive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = Config(data=DataConfig(path=str(tmp_path)))
    with socket.socket() as alive, socket.socket() as gone:
        urls = []
        for endpoint in (alive, gone):
            endpoint.bind(("127.0.0.1", 0))
            urls.append(f"http://127.0.0.1:{endpoint.getsockname()[1]}")
        alive.listen()
        with Journal.open(config.journal_path) as journal:
            journal.publish("gateway", urls[0], {}, 1.0)
            journal.publish("policy", urls[1], {}, 1.0)
        assert main(["status", "--data", str(tmp_path)]) == 0
        said = capsys.readouterr().out
        assert main(["status", "--data", str(tmp_path), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["answering"] == {"gateway": True, "engine": False}
    assert f"{urls[1]} (last seen there; does not answer)" in said
    assert f"{urls[0]} ·" in said


@pytest.mark.parametrize(
    ("cut", "words"), [(0.125, " · 12.5 % of the weights truncated"), (None, "")]
)
def test_how_far_engine_and_trainer_are_apart_is_shown(
    tmp_path: Path, cut: float | None, words: str
):
    config = Config(data=DataConfig(path=str(tmp_path)))
    about = {"rollout": 3, "mean": 0.0123, "max": 0.5, "tokens": 640, "skipped": None}
    with Journal.open(config.journal_path) as journal:
        journal.publish("trainer", "", {**about, "truncated": cut}, 1.0)
    said = render_status(read_status(config))
    assert f"mean 0.0123, max 0.50 over 640 tokens of rollout 3{words}\n" in said


def test_a_version_that_the_engine_refused_is_told(tmp_path: Path):
    config = Config(data=DataConfig(path=str(tmp_path)))
    with Journal.open(config.journal_path) as journal:
        info = {"weight_version": "3", "refused": "version 4: rank 64 is too large"}
        journal.publish("policy", "http://127.0.0.1:9", info, 1.0)
    said = render_status(read_status(config))
    assert "weight version 3" in said
    assert "an older one is served: version 4: rank 64 is too large" in said
