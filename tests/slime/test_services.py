from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from openclaw_rl.errors import ConfigError
from openclaw_rl.slime.rollout import Run
from openclaw_rl.slime.services import Services, ask, services_config
from tests.e2e.system import free_port
from tests.fakes.model import tiny_tokenizer
from tests.slime.kit import Router, slime_args, until


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


def test_slimes_settings_and_the_file_reach_gateway_and_judge(tmp_path: Path):
    file = tmp_path / "openclaw_rl.toml"
    file.write_text(
        "[gateway]\nport = 31234\ntemperature = 0.1\n[judge]\nprm_m = 5\n[train]\nopd_top_k = 4\n"
    )
    args = arguments(
        tmp_path, openclaw_rl_config=str(file), reward_key="quality", sglang_context_length=4096
    )
    config = services_config(args, {"PRM_API_KEY": "k", "PORT": "1"})
    assert config.journal_path == tmp_path / "data" / "journal.db"
    assert (config.model.path, config.gateway.temperature) == ("/models/policy", 0.7)
    assert (config.gateway.port, config.gateway.context_length) == (31234, 4096)
    assert config.reward_path == "./my rewards/file.py"
    assert (config.judge.prm_m, config.judge.reward_key) == (5, "quality")
    assert (config.train.opd_top_k, config.judge.prm_api_key) == (4, "k")


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
    with pytest.raises(ConfigError, match=r"cannot run: .*no such folder: .*nowhere"):
        services.ensure()


@pytest.mark.slow
def test_case_33_services_that_die_while_a_batch_is_waited_for_come_back(tmp_path: Path):
    model = tiny_tokenizer(tmp_path / "model")
    file = tmp_path / "openclaw_rl.toml"
    file.write_text(f"[gateway]\nport = {free_port()}\n")
    with Router() as router:
        args = slime_args(
            tmp_path / "data" / "journal.db", 4, hf_checkpoint=str(model), start_services=None,
            openclaw_rl_config=str(file), sglang_router_port=router.port,
        )  # fmt: skip
        run = Run.of(args)
        url = run.services.config.gateway.url + "/healthz"
        try:
            run.begin(0)
            first = run.services.child
            assert first is not None
            until(lambda: ask(url))
            first.kill()
            first.wait(60)

            def is_back() -> bool:
                run.view(args).while_waiting()
                return run.services.child is not first and bool(ask(url))

            until(is_back)
        finally:
            run.close()


@pytest.mark.slow
def test_a_gateway_is_started_once_and_ended_with_its_owner(tmp_path: Path):
    model = tiny_tokenizer(tmp_path / "model")
    file = tmp_path / "openclaw_rl.toml"
    file.write_text(f"[gateway]\nport = {free_port()}\n")
    args = arguments(
        tmp_path, hf_checkpoint=str(model), openclaw_rl_config=str(file), start_services=["serve"]
    )
    services, others = Services(args), Services(args)
    url = services.config.gateway.url + "/healthz"
    try:
        services.ensure()
        until(lambda: ask(url))
        assert ask(url)["engine"]["state"] == "unknown"
        others.ensure()  # it answers: it is left alone
        others.close()
        assert ask(url)
    finally:
        services.close()
    assert ask(url) == {}
