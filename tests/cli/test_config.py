"""The configuration: precedence, and one clear line for every mistake."""

import argparse

import pytest

from openclaw_rl.config import Config, add_flags, hook_args, load_config, render_config
from openclaw_rl.errors import ConfigError


def flags(*words: str) -> dict[str, str | None]:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return {k: v for k, v in vars(parser.parse_args(words)).items() if "." in k}


def test_flag_beats_environment_beats_file(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('[gateway]\nport = 1111\nhost = "127.0.0.2"\n[train]\nw_rl = 2\nlr = 1e-3\n')
    config = load_config(flags("--lr", "0.5"), {"PORT": "2222", "W_RL": "3"}, str(file))
    assert (config.gateway.host, config.gateway.port) == ("127.0.0.2", 2222)
    assert (config.train.w_rl, config.train.lr) == (3.0, 0.5)


def test_defaults_follow_the_method():
    assert load_config({}, {}).loss_path == "openclaw_rl.losses.combined_loss"
    config = load_config(flags("--method", "rl", "--custom-rm-path", "./mine.py"), {})
    assert config.loss_path == "openclaw_rl.losses.grpo_loss"
    assert config.reward_path == "./mine.py"


def test_the_top_k_form_is_one_switch():
    config = load_config(flags("--opd-top-k", "4", "--opd-tail", "on"), {})
    assert config.loss_path == "openclaw_rl.losses.combined_loss"
    args = hook_args(config)
    assert (args.opd_top_k, args.opd_subset, args.opd_tail) == (4, "student", True)
    assert args.opd_hints == 1
    for words, tail in (("on", True), ("True", True), ("off", False), ("false", False)):
        assert load_config(flags("--opd-tail", words), {}).train.opd_tail is tail
    config = load_config(flags("--opd-top-k", "4", "--method", "opd"), {})
    assert config.loss_path == "openclaw_rl.losses.topk_opd_loss"
    assert hook_args(load_config({}, {})).opd_top_k == 0


@pytest.mark.parametrize(
    ("words", "environ", "said"),
    [
        (("--port", "http"), {}, "--port: must be a valid integer, not 'http'"),
        (("--port", "70000"), {}, "--port: must be less than or equal to 65535, not '70000'"),
        (("--lr", "nan"), {}, "--lr: must be a finite number"),
        (("--session-share", "0"), {}, "--session-share: must be greater than 0"),
        ((), {"PRM_M": "many"}, "PRM_M: must be a valid integer, not 'many'"),
        ((), {"METHOD": "dpo"}, "METHOD: must be 'combined', 'rl' or 'opd', not 'dpo'"),
        (("--opd-top-k", "65"), {}, "--opd-top-k: must be less than or equal to 64"),
        (
            ("--opd-hints", "4", "--opd-top-k", "4"),
            {},
            "--opd-hints: must be less than or",
        ),
        (("--opd-subset", "both"), {}, "--opd-subset: must be 'student', 'teacher' or 'overlap'"),
        (("--opd-tail", "maybe"), {}, "--opd-tail: must be a valid boolean"),
        (("--judge-model", "m"), {}, "--judge-model is a name at --judge-url: set that"),
        (("--opd-hints", "2"), {}, "--opd-hints above 1 needs --opd-top-k"),
        (("--opd-top-k", "4", "--method", "rl"), {}, "--opd-top-k distils from hints"),
        ((), {"OPENCLAW_RL_API_KEY": "a b"}, "OPENCLAW_RL_API_KEY: must be printable"),
        ((), {"OPENCLAW_RL_API_KEY": "a:b"}, "OPENCLAW_RL_API_KEY must not contain ':'"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_setting(words, environ, said):
    with pytest.raises(ConfigError) as caught:
        load_config(flags(*words), environ)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[gatway]\nport = 1", "no section [gatway]; did you mean 'gateway'?"),
        ("[gateway]\nprot = 1", "[gateway] prot: no such setting; did you mean 'port'?"),
        ("[gateway]\nport = true", "[gateway] port: must be a valid integer, not 'True'"),
        ("[gateway]\nport = 1.5", "[gateway] port: must be a valid integer, not '1.5'"),
        ("[gateway]\nhost = 5", "[gateway] host: must be a valid string, not '5'"),
        ("gateway = 5", "[gateway] must be a section"),
        ("[gateway", "is not valid TOML"),
    ],
)
def test_a_mistake_in_the_file_names_the_file(tmp_path, text, said):
    file = tmp_path / "my settings.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config({}, {}, str(file))
    assert said in str(caught.value)
    assert "my settings.toml" in str(caught.value)


@pytest.mark.parametrize("value", ["9" * 5000, "٣", "-1", "0", "abc", "1e3"])
def test_case_35_a_share_that_is_no_number(value):
    with pytest.raises(ConfigError, match="NUM_GPUS: "):
        load_config({}, {"NUM_GPUS": value})


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        load_config({}, {}, str(tmp_path / "none.toml"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_case_37_an_open_address_needs_a_key(host):
    with pytest.raises(ConfigError, match="set OPENCLAW_RL_API_KEY"):
        load_config(flags("--host", host), {})
    assert load_config(flags("--host", host), {"OPENCLAW_RL_API_KEY": "k"}).gateway.host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_case_37_the_loopback_needs_none(host):
    assert load_config(flags("--host", host), {}).gateway.api_key == ""


def test_case_37_the_default_address_is_the_loopback():
    assert Config().gateway.host == "127.0.0.1"


def test_secrets_are_not_shown():
    config = load_config({}, {"OPENCLAW_RL_API_KEY": "hush", "PRM_API_KEY": "quiet"})
    assert "hush" not in repr(config)
    assert "quiet" not in repr(config)


def test_the_key_has_no_flag():
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert "api-key" not in parser.format_help()


def test_the_whole_tree_is_shown_with_where_each_value_comes_from(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("[train]\nlr = 1e-3\n")
    environ = {"PORT": "2222", "OPENCLAW_RL_API_KEY": "hush"}
    text = render_config(load_config(flags("--opd-tail", "on"), environ, str(file)))
    assert f"lr = 0.001  # file {file}" in text
    assert "port = 2222  # environment PORT" in text
    assert "opd_tail = true  # flag --opd-tail" in text
    assert "w_rl = 1.0  # default" in text
    assert "# api_key: set (environment OPENCLAW_RL_API_KEY)" in text
    assert "hush" not in text
    file.write_text(text)
    again = load_config({}, {}, str(file))
    assert (again.train.lr, again.gateway.port, again.train.opd_tail) == (1e-3, 2222, True)


def test_every_default_is_a_value_that_its_setting_takes(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text(render_config(Config()))
    assert load_config({}, {}, str(file)).model_dump() == Config().model_dump()


def test_hooks_and_the_loops_beside_slime_have_the_defaults_of_the_tree():
    args = hook_args(Config())
    assert (args.prm_m, args.judge_concurrency, args.session_share) == (3, 8, 0.25)
    assert args.max_sample_tokens == 0
    assert args.kl_loss_type == "low_var_kl"
