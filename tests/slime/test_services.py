from __future__ import annotations

import json
import threading
from argparse import Namespace
from pathlib import Path

import pytest

from openclaw_rl.config import load_config
from openclaw_rl.errors import ConfigError
from openclaw_rl.journal import Journal
from openclaw_rl.slime.services import Services, _ask, command, gateway_url
from tests.e2e.system import free_port
from tests.fakes.model import tiny_tokenizer


def arguments(tmp_path: Path, **given) -> Namespace:
    fields = {
        "journal_path": str(tmp_path / "data" / "journal.db"),
        "hf_checkpoint": "/models/policy",
        "custom_rm_path": "./my rewards/file.py",
        "reward_key": None,
        "rollout_temperature": 0.7,
        "host": "slime's own",
        "port": 1,
    }
    return Namespace(**{**fields, **given})


def flags(words: list[str]) -> dict[str, str]:
    at = words.index("--supervised") + 1
    return dict(zip(words[at::2], words[at + 1 :: 2], strict=True))


def test_slimes_settings_reach_gateway_and_judge(tmp_path: Path):
    args = arguments(
        tmp_path, gateway_port=31234, gateway_host="127.0.0.1", prm_m=5, judge_url="http://j/v1",
        judge_timeout=9.5, w_rl=0.0, w_opd=1.0, reward_key="quality",
    )  # fmt: skip
    data = str(tmp_path / "data")
    assert flags(command(args, "serve")) == {
        "--model": "/models/policy", "--data": data, "--temperature": "0.7",
        "--host": "127.0.0.1", "--port": "31234",
    }  # fmt: skip
    assert flags(command(args, "judge")) == {
        "--model": "/models/policy", "--data": data, "--custom-rm-path": "./my rewards/file.py",
        "--judge-url": "http://j/v1", "--prm-m": "5", "--judge-timeout": "9.5",
        "--reward-key": "quality", "--w-rl": "0.0", "--w-opd": "1.0",
    }  # fmt: skip


def test_past_conversations_are_read_as_the_gateway_reads_live_ones(tmp_path: Path):
    args = arguments(tmp_path, gateway_reply_format="glm", gateway_context_length=4096, prm_m=5)
    assert flags(command(args, "replay")) == {
        "--model": "/models/policy", "--data": str(tmp_path / "data"),
        "--reply-format": "glm", "--context-length": "4096",
    }  # fmt: skip


@pytest.mark.slow
def test_past_conversations_in_the_data_folder_are_learnt_from_once(tmp_path: Path):
    model = tiny_tokenizer(tmp_path / "model")
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    talk.append({"role": "user", "content": "thanks"})
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "past.jsonl").write_text(json.dumps(talk) + "\n")
    args = arguments(tmp_path, hf_checkpoint=str(model), start_services=["replay"])
    services = Services(args)
    services.ensure()
    services.ensure()
    pause = threading.Event()
    try:
        with Journal.open(args.journal_path) as journal:
            for _ in range(600):
                if journal.fates().judging:
                    break
                pause.wait(0.1)
            assert journal.fates().by_source["replay"].bound == 1
        services.check()
    finally:
        services.close()


def test_both_services_know_of_a_distillation_over_the_top_k(tmp_path: Path):
    args = arguments(tmp_path, opd_top_k=4, opd_hints=3, opd_tail=True)
    assert flags(command(args, "serve"))["--opd-top-k"] == "4"
    own = {"--opd-top-k": "4", "--opd-hints": "3", "--opd-tail": "True"}
    assert own.items() <= flags(command(args, "judge")).items()
    assert load_config({"train.opd_tail": "True"}, {}).train.opd_tail


def test_the_command_line_takes_every_flag(tmp_path: Path):
    from openclaw_rl.cli import build_parser

    args = arguments(tmp_path, gateway_max_inflight=3, prm_m=5, judge_concurrency=2, w_opd=0.5)
    for name in ("serve", "judge", "replay"):
        options = build_parser().parse_args(command(args, name)[3:])
        assert options.command == name


def test_a_journal_that_the_services_would_not_find_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"must be called journal\.db, not turns\.db"):
        Services(arguments(tmp_path, journal_path=str(tmp_path / "turns.db")))
    Services(arguments(tmp_path, journal_path=str(tmp_path / "turns.db"), start_services=[]))


def test_the_gateway_of_all_addresses_is_asked_on_the_loopback():
    assert gateway_url(Namespace(gateway_host="0.0.0.0", gateway_port=5)) == "http://127.0.0.1:5"
    assert gateway_url(Namespace(gateway_host="::", gateway_port=5)) == "http://[::1]:5"
    assert gateway_url(Namespace(gateway_host="::1", gateway_port=5)) == "http://[::1]:5"
    assert gateway_url(Namespace()) == "http://127.0.0.1:30000"


def test_a_misconfigured_service_says_so_in_its_own_words(tmp_path: Path):
    args = arguments(tmp_path, hf_checkpoint=str(tmp_path / "nowhere"), start_services=["judge"])
    services = Services(args)
    services.ensure()
    services._children["judge"]._thread.join(60)
    with pytest.raises(ConfigError, match=r"judge cannot run: .*there is no folder .*nowhere"):
        services.check()
    services.close()


@pytest.mark.slow
def test_a_gateway_is_started_once_and_ended_with_its_owner(tmp_path: Path):
    model = tiny_tokenizer(tmp_path / "model")
    args = arguments(
        tmp_path, hf_checkpoint=str(model), gateway_port=free_port(), start_services=["serve"]
    )
    services, others = Services(args), Services(args)
    url = gateway_url(args) + "/healthz"
    try:
        services.ensure()
        pause = threading.Event()
        for _ in range(600):
            if _ask(url):
                break
            pause.wait(0.1)
        assert _ask(url)["engine"]["state"] == "unknown"
        others.ensure()  # it answers: it is left alone
        assert others._children == {}
        others.close()
        assert _ask(url)
    finally:
        services.close()
    assert _ask(url) == {}
