"""Connecting touches the provider entry, the plugin and the default model, and nothing else."""

import json
import stat
from pathlib import Path

import pytest

from openclaw_rl.errors import ConfigError
from openclaw_rl.openclaw.connect import PROVIDER, OpenClaw, Served, plan_connect, plan_undo

SERVED = Served("http://127.0.0.1:30000/v1", "tiny", 32768, 8192, "our-secret")
EXISTING = """\
{
  // written by hand
  meta: { lastTouchedVersion: "2026.3.23-2" },
  models: { providers: { other: { baseUrl: "https://example.com", apiKey: "their-secret" } } },
  agents: { defaults: { model: { primary: "other/big", fallbacks: ["other/small"] },
                        sandbox: { mode: "all" } } },
  plugins: { allow: ["memory-core"], entries: { "memory-core": { enabled: true } } },
}
"""


def found(tmp_path: Path, text: str | None = EXISTING, version: str | None = None) -> OpenClaw:
    state = tmp_path / "state"
    state.mkdir(exist_ok=True)
    if text is not None:
        (state / "openclaw.json").write_text(text)
    return OpenClaw.find({"OPENCLAW_STATE_DIR": str(state), "HOME": str(tmp_path)}, version)


def again(openclaw: OpenClaw) -> OpenClaw:
    return OpenClaw.find({"OPENCLAW_STATE_DIR": str(openclaw.state_dir)}, openclaw.version)


def test_what_is_connected_has_true_limits_a_key_and_the_plugin(tmp_path):
    openclaw = found(tmp_path)
    plan_connect(openclaw, SERVED).apply()
    config = again(openclaw).config
    entry = config["models"]["providers"][PROVIDER]
    assert (entry["baseUrl"], entry["apiKey"]) == (SERVED.base_url, "our-secret")
    (model,) = entry["models"]
    assert (model["id"], model["contextWindow"], model["maxTokens"]) == ("tiny", 32768, 8192)
    assert config["agents"]["defaults"]["model"]["primary"] == "openclaw-rl/tiny"
    assert config["plugins"]["entries"][PROVIDER]["enabled"] is True
    assert PROVIDER in config["plugins"]["allow"]
    folder = Path(config["plugins"]["load"]["paths"][0])
    manifest = json.loads((folder / "openclaw.plugin.json").read_text())
    assert manifest["providers"] == [PROVIDER]
    assert (folder / "index.js").is_file()


def test_nothing_else_is_touched(tmp_path):
    openclaw = found(tmp_path)
    plan_connect(openclaw, SERVED).apply()
    after = again(openclaw)
    before = openclaw.config
    assert after.config["models"]["providers"]["other"] == before["models"]["providers"]["other"]
    defaults = after.config["agents"]["defaults"]
    assert defaults["sandbox"] == {"mode": "all"}
    assert defaults["model"]["fallbacks"] == ["other/small"]
    assert after.config["plugins"]["entries"]["memory-core"] == {"enabled": True}


def test_the_version_decides_how_sessions_are_named(tmp_path):
    """2026.3 refuses keys that it does not know; 2026.9 shows a plugin no run without a grant."""
    for version, modern in (("2026.3.23-2", False), ("2026.9.6", True)):
        openclaw = found(tmp_path, version=version)
        config = plan_connect(openclaw, SERVED).config
        compat = config["models"]["providers"][PROVIDER]["models"][0]["compat"]
        assert compat.get("sendSessionAffinityHeaders", False) is modern
        assert compat["supportsUsageInStreaming"] is True
        assert ("hooks" in config["plugins"]["entries"][PROVIDER]) is modern


def test_showing_changes_nothing_and_hides_keys(tmp_path):
    openclaw = found(tmp_path)
    shown = plan_connect(openclaw, SERVED).shown()
    added = '+ models.providers.openclaw-rl.baseUrl: "http://127.0.0.1:30000/v1"'
    assert added in shown.splitlines()
    assert "Comments in it go" in shown
    assert "secret" not in shown
    assert list(openclaw.state_dir.iterdir()) == [openclaw.config_path]
    assert openclaw.config_path.read_text() == EXISTING


def test_a_second_time_there_is_nothing_to_change(tmp_path):
    openclaw = found(tmp_path)
    plan_connect(openclaw, SERVED).apply()
    second = plan_connect(again(openclaw), SERVED)
    assert second.empty
    assert second.shown() == ""


def test_another_model_or_an_older_plugin_is_brought_up_to_date_and_the_backup_stays(tmp_path):
    openclaw = found(tmp_path)
    plan_connect(openclaw, SERVED).apply()
    (openclaw.plugin_dir / "index.js").write_text("old")
    (openclaw.plugin_dir / "gone.js").write_text("older")
    newer = Served(SERVED.base_url, "larger", 65536, 8192, "our-secret")
    change = plan_connect(again(openclaw), newer)
    assert not change.empty
    assert "larger" in change.shown()
    change.apply()
    assert plan_connect(again(openclaw), newer).empty
    assert not (openclaw.plugin_dir / "gone.js").exists()
    assert openclaw.backup_path.read_text() == EXISTING


def test_undo_takes_exactly_ours_back(tmp_path):
    openclaw = found(tmp_path)
    plan_connect(openclaw, SERVED).apply()
    text = openclaw.config_path.read_text().replace('"mode": "all"', '"mode": "off"')  # meanwhile
    openclaw.config_path.write_text(text)
    plan_undo(again(openclaw)).apply()
    openclaw.config["agents"]["defaults"]["sandbox"]["mode"] = "off"
    assert again(openclaw).config == openclaw.config
    assert not openclaw.plugin_dir.parent.exists()
    assert plan_undo(again(openclaw)).empty


def test_undo_leaves_a_default_model_that_somebody_chose_since(tmp_path):
    openclaw = found(tmp_path)
    plan_connect(openclaw, SERVED).apply()
    text = openclaw.config_path.read_text().replace("openclaw-rl/tiny", "other/new")
    openclaw.config_path.write_text(text)
    plan_undo(again(openclaw)).apply()
    assert again(openclaw).config["agents"]["defaults"]["model"]["primary"] == "other/new"


def test_undo_of_a_connection_that_made_the_file(tmp_path):
    openclaw = found(tmp_path, None, "2026.9.6")
    plan_connect(openclaw, SERVED).apply()
    assert stat.S_IMODE(openclaw.config_path.stat().st_mode) == 0o600
    assert PROVIDER not in again(openclaw).config["plugins"].get("allow", [])  # none was there
    plan_undo(again(openclaw)).apply()
    assert again(openclaw).config == {}


def test_the_default_model_may_stay_and_may_be_a_plain_text(tmp_path):
    openclaw = found(tmp_path, '{"agents": {"defaults": {"model": "other/big"}}}', "2026.9.6")
    kept = plan_connect(openclaw, SERVED, default=False).config
    assert kept["agents"]["defaults"]["model"] == "other/big"
    plan_connect(openclaw, SERVED).apply()
    assert again(openclaw).config["agents"]["defaults"]["model"] == "openclaw-rl/tiny"
    plan_undo(again(openclaw)).apply()
    assert again(openclaw).config["agents"]["defaults"]["model"] == "other/big"


def test_mode_and_symlink_of_the_file_stay(tmp_path):
    openclaw = found(tmp_path)
    real = tmp_path / "real.json"
    openclaw.config_path.rename(real)
    real.chmod(0o640)
    openclaw.config_path.symlink_to(real)
    plan_connect(again(openclaw), SERVED).apply()
    assert openclaw.config_path.is_symlink()
    assert PROVIDER in real.read_text()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert stat.S_IMODE(openclaw.backup_path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"plugins": {"enabled": false}}', "plugins.enabled"),
        ('{"plugins": {"deny": ["openclaw-rl"]}}', "plugins.deny"),
        ('{"models": 3}', "models is not an object"),
    ],
)
def test_a_configuration_that_rules_us_out_is_one_clear_line(tmp_path, text, said):
    with pytest.raises(ConfigError, match=said):
        plan_connect(found(tmp_path, text, "2026.9.6"), SERVED)


def test_a_file_that_is_no_json5_is_named_without_its_content(tmp_path):
    with pytest.raises(ConfigError, match=r"openclaw.json is not JSON5: line 1") as caught:
        found(tmp_path, '{"key": secret')
    assert "secret" not in str(caught.value)


def test_where_it_is(tmp_path):
    def where(**environ: str) -> Path:
        return OpenClaw.find(environ, "2026.9.6").config_path

    home = str(tmp_path)
    assert where(HOME=home) == tmp_path / ".openclaw" / "openclaw.json"
    assert where(HOME="/nowhere", OPENCLAW_HOME=home) == tmp_path / ".openclaw" / "openclaw.json"
    assert where(HOME=home, OPENCLAW_STATE_DIR="~/s") == tmp_path / "s" / "openclaw.json"
    other = str(tmp_path / "other.json")
    assert where(HOME=home, OPENCLAW_CONFIG_PATH=other) == tmp_path / "other.json"


def test_the_version_is_that_of_the_command_then_that_of_the_file(tmp_path):
    package = tmp_path / "lib" / "node_modules" / "openclaw"
    package.mkdir(parents=True)
    (package / "package.json").write_text('{"name": "openclaw", "version": "2026.9.6"}')
    (package / "openclaw.mjs").write_text("")
    (package / "openclaw.mjs").chmod(0o755)
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "openclaw").symlink_to(package / "openclaw.mjs")
    state = found(tmp_path).state_dir
    environ = {"OPENCLAW_STATE_DIR": str(state), "PATH": str(bin_)}
    assert OpenClaw.find(environ).version == "2026.9.6"
    assert OpenClaw.find({**environ, "PATH": ""}).release == (2026, 3, 23)
    (state / "openclaw.json").write_text("{}")
    with pytest.raises(ConfigError, match="--openclaw-version"):
        _ = OpenClaw.find({**environ, "PATH": ""}).release


@pytest.mark.parametrize(
    "text",
    [
        '{\r\n  "a": 1, // Windows\r\n  "b": 2\r\n}\r\n',
        '\ufeff{"a":1}\n',
        '{plugins: {load: {paths: [\n  "/mine", // not yours\n],},},}\n',
        '{\n  plugins: {\n    allow: [ "x", /* y */ "z", ],\n  },\n}\n',
        '{"plugins":{"load":{"paths":[1,"x"]}},"models":{"providers":{}}}',
    ],
)
def test_undo_gives_an_untouched_file_back_byte_for_byte(tmp_path, text):
    openclaw = found(tmp_path, "", version="2026.9.6")
    openclaw.config_path.write_bytes(text.encode())
    openclaw = again(openclaw)
    plan_connect(openclaw, SERVED).apply()
    assert plan_connect(again(openclaw), SERVED).empty
    assert openclaw.backup_path.read_bytes() == text.encode()
    plan_undo(again(openclaw)).apply()
    assert openclaw.config_path.read_bytes() == text.encode()


@pytest.mark.parametrize(
    "provider",
    [
        '{"apiKeys":["SECRET1","SECRET2"]}',
        r'{"apiKey":"ab\"SECRET"}',
        '{"apiKey":/*x*/"SECRET"}',
        '{"apiKey":"x",/* apiKey: "SECRET" */}',
        '{"baseUrl":"http://u:SECRET@h/"}',
        '{"headers":{"X":"SECRET"}}',
        '{"pass":"SECRET"}',
        '{"apiKey":"SECRET","apiKey":"x"}',
    ],
)
def test_no_text_of_another_provider_is_shown(tmp_path, provider):
    openclaw = found(tmp_path, f'{{"models":{{"providers":{{"o":{provider}}}}}}}', "2026.9.6")
    assert "SECRET" not in plan_connect(openclaw, SERVED).shown()
    plan_connect(openclaw, SERVED).apply()
    shown = plan_undo(again(openclaw)).shown()
    assert shown
    assert "secret" not in shown.lower()


def test_a_backup_that_holds_nothing_or_cannot_be_read(tmp_path):
    openclaw = found(tmp_path, "\n", "2026.9.6")
    plan_connect(openclaw, SERVED).apply()
    plan_undo(again(openclaw)).apply()
    assert again(openclaw).config == {}
    plan_connect(again(openclaw), SERVED).apply()
    for content in (b"\xff", b"{"):
        openclaw.backup_path.write_bytes(content)
        with pytest.raises(ConfigError, match="before-openclaw-rl"):
            plan_undo(again(openclaw))


def test_a_default_model_that_was_ours_without_a_provider_does_not_outlive_the_undo(tmp_path):
    text = '{"agents":{"defaults":{"model":{"primary":"openclaw-rl/old"}}}}'
    openclaw = found(tmp_path, text, "2026.9.6")
    plan_connect(openclaw, SERVED).apply()
    plan_undo(again(openclaw)).apply()
    assert "openclaw-rl" not in openclaw.config_path.read_text()


def test_a_home_with_a_backslash(tmp_path):
    environ = {"OPENCLAW_HOME": "~/x", "OPENCLAW_STATE_DIR": "~/y", "HOME": f"{tmp_path}/a\\1"}
    assert OpenClaw.find(environ).state_dir == tmp_path / "a\\1" / "x" / "y"
