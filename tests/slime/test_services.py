from __future__ import annotations

import threading
from argparse import Namespace
from pathlib import Path

import pytest

from openclaw_rl.errors import ConfigError
from openclaw_rl.slime.services import Services, ask, services_config
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


def test_slimes_settings_reach_gateway_and_judge(tmp_path: Path):
    args = arguments(
        tmp_path, gateway_port=31234, gateway_host="127.0.0.1", prm_m=5, judge_url="http://j/v1",
        judge_timeout=9.5, w_rl=0.0, w_opd=1.0, reward_key="quality",
    )  # fmt: skip
    config = services_config(args, {"PRM_API_KEY": "k"})
    assert config.journal_path == tmp_path / "data" / "journal.db"
    assert (config.model.path, config.gateway.temperature) == ("/models/policy", 0.7)
    assert (config.gateway.port, config.judge.judge_url) == (31234, "http://j/v1")
    assert config.reward_path == "./my rewards/file.py"
    judge, train = config.judge, config.train
    assert (judge.prm_m, judge.timeout_seconds, judge.reward_key) == (5, 9.5, "quality")
    assert (train.w_rl, train.w_opd, judge.prm_api_key) == (0.0, 1.0, "k")


def test_the_services_know_of_a_distillation_over_the_top_k(tmp_path: Path):
    train = services_config(arguments(tmp_path, opd_top_k=4, opd_hints=3, opd_tail=True), {}).train
    assert (train.opd_top_k, train.opd_hints, train.opd_tail) == (4, 3, True)


def test_a_journal_that_the_services_would_not_find_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"must be called journal\.db, not turns\.db"):
        Services(arguments(tmp_path, journal_path=str(tmp_path / "turns.db")))
    Services(arguments(tmp_path, journal_path=str(tmp_path / "turns.db"), start_services=[]))


def test_a_misconfigured_service_says_so_in_its_own_words(tmp_path: Path):
    args = arguments(tmp_path, hf_checkpoint=str(tmp_path / "nowhere"), start_services=["judge"])
    services = Services(args)
    services.ensure()
    assert services.child is not None
    services.child.wait(60)
    with pytest.raises(ConfigError, match=r"cannot run: .*there is no folder .*nowhere"):
        services.check()


@pytest.mark.slow
def test_a_gateway_is_started_once_and_ended_with_its_owner(tmp_path: Path):
    model = tiny_tokenizer(tmp_path / "model")
    args = arguments(
        tmp_path, hf_checkpoint=str(model), gateway_port=free_port(), start_services=["serve"]
    )
    services, others = Services(args), Services(args)
    url = services.config.gateway.url + "/healthz"
    try:
        services.ensure()
        pause = threading.Event()
        for _ in range(600):
            if ask(url):
                break
            pause.wait(0.1)
        assert ask(url)["engine"]["state"] == "unknown"
        others.ensure()  # it answers: it is left alone
        others.close()
        assert ask(url)
    finally:
        services.close()
    assert ask(url) == {}
