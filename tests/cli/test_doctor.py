"""`openclaw-rl connect` and `doctor` against a real gateway: what they say, and the exit status."""

import asyncio
import json
import os
import socket

import pytest

from openclaw_rl.cli import main
from openclaw_rl.cli.doctor import Finding, examine, window
from openclaw_rl.config import load_config
from openclaw_rl.journal import Outcomes
from openclaw_rl.openclaw.connect import OpenClaw, Served
from tests.fakes.model import tiny_tokenizer
from tests.gateway.conftest import world

KEY = "our-secret"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_tokenizer(tmp_path_factory.mktemp("doctor"))
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def openclaw(tmp_path, monkeypatch):
    """An OpenClaw that has a configuration, and whose command is not on the PATH."""
    state = tmp_path / "state"
    state.mkdir()
    (state / "openclaw.json").write_text('{"meta": {"lastTouchedVersion": "2026.9.6"}}')
    for name in ("HOME", "OPENCLAW_STATE_DIR"):
        monkeypatch.setenv(name, str(state))
    monkeypatch.delenv("OPENCLAW_CONFIG_PATH", raising=False)
    monkeypatch.setenv("PATH", "")
    return state / "openclaw.json"


@pytest.fixture
async def served(tmp_path, model, monkeypatch):
    async with world(tmp_path / "data", model, api_key=KEY, context_length=32000,
                     max_tokens=4000) as made:  # fmt: skip
        monkeypatch.setenv("OPENCLAW_RL_API_KEY", KEY)
        monkeypatch.setenv("PORT", made.url.rpartition(":")[2])
        monkeypatch.setenv("DATA_PATH", str(tmp_path / "data"))
        monkeypatch.setenv("MODEL_PATH", str(model))
        yield made


async def run(capsys, *words: str) -> tuple[int, str]:
    status = await asyncio.to_thread(main, list(words))
    captured = capsys.readouterr()
    assert KEY not in captured.out + captured.err
    return status, captured.out + captured.err


async def test_connect_asks_the_gateway_shows_and_only_then_does_it(capsys, openclaw, served):
    before = openclaw.read_text()
    status, said = await run(capsys, "connect")
    assert status == 0
    assert "contextWindow: 32000" in said
    assert "maxTokens: 4000" in said
    assert "add --yes" in said
    assert openclaw.read_text() == before
    assert (await run(capsys, "connect", "--yes"))[0] == 0
    entry = json.loads(openclaw.read_text())["models"]["providers"]["openclaw-rl"]
    assert (entry["apiKey"], entry["baseUrl"]) == (KEY, f"{served.url}/v1")
    assert await run(capsys, "connect", "--yes") == (0, "nothing to change\n")
    assert (await run(capsys, "connect", "--undo", "--yes"))[0] == 0
    assert json.loads(openclaw.read_text()) == json.loads(before)


@pytest.mark.parametrize(
    ("version", "context", "level", "words"),
    [
        ("2026.3.23-2", 8192, "fail", "refuses a model with a context of 8192 tokens"),
        ("2026.3.23-2", 16_000, None, ""),
        ("2026.9.6", 3999, "fail", "refuses a model with a context of 3999 tokens"),
        ("2026.9.6", 8192, "warn", "8192 tokens of context are few"),
        ("2026.9.6", 16_000, None, ""),
    ],
)
def test_a_context_that_openclaw_refuses_is_told(openclaw, version, context, level, words):
    served = Served("http://127.0.0.1:1/v1", "tiny", context, context, "")
    found = list(window(OpenClaw.find(os.environ, version), served))
    assert [finding.level for finding in found] == ([level] if level else [])
    assert words in "".join(map(str, found))


async def test_connect_says_that_openclaw_will_refuse_the_model(capsys, openclaw, tmp_path):
    openclaw.write_text('{"meta": {"lastTouchedVersion": "2026.3.23-2"}}')
    words = ["connect", "--url", "http://127.0.0.1:9/v1", "--served-name", "m"]
    for context, told in (("8000", 1), ("32000", 0)):
        status, said = await run(capsys, *words, "--context-length", context)
        assert status == 0
        assert said.count("note     OpenClaw 2026.3.23-2 refuses") == told


async def test_connect_without_a_gateway_needs_to_be_told(capsys, openclaw, tmp_path, monkeypatch):
    monkeypatch.setenv("MODEL_PATH", "")
    monkeypatch.delenv("OPENCLAW_RL_API_KEY", raising=False)
    words = ["connect", "--url", "http://127.0.0.1:9/v1"]
    status, said = await run(capsys, *words)
    assert (status, said.count("\n")) == (2, 1)
    assert "no openclaw-rl gateway answers" in said
    told = ["--served-name", "qwen", "--context-length", "16384", "--keep-model"]
    status, said = await run(capsys, *words, *told)
    assert status == 0
    for part in ('baseUrl: "http://127.0.0.1:9/v1"', "maxTokens: 8192", 'id: "qwen"'):
        assert part in said
    assert "primary" not in said


async def test_doctor_is_content_with_what_works(capsys, openclaw, served):
    await run(capsys, "connect", "--yes")
    await served.chat("hi", extra_headers={"X-Session-Id": "s", "X-Turn-Type": "main"})
    status, said = await run(capsys, "doctor")
    assert status == 0, said
    assert "fail" not in said
    for line in ("serves tiny", "2026.9.6", "as they should be",
                 "session recognised by header:x-session-id, taken as a side turn"):  # fmt: skip
        assert line in said
    assert served.turns()[-1].kind == "side"  # its probe is never trained


async def test_doctor_needs_no_model_where_a_gateway_serves_one(
    capsys, openclaw, served, monkeypatch
):
    await run(capsys, "connect", "--yes")
    monkeypatch.setenv("MODEL_PATH", "")
    status, said = await run(capsys, "doctor")
    assert status == 0, said
    assert "no model" not in said


async def findings(**changes: str) -> list[Finding]:
    """What doctor finds, under this environment and these changes of it."""
    environ = {**os.environ, **changes}
    return await asyncio.to_thread(lambda: list(examine(load_config({}, environ), environ)))


async def test_doctor_looks_at_everything_on_its_list(capsys, openclaw, served):
    await run(capsys, "connect", "--yes")
    await served.chat("hi", extra_headers={"X-Session-Id": "s", "X-Turn-Type": "main"})
    found = await findings()
    assert [finding.name for finding in found] == [
        *("model", "gateway", "journal", "openclaw", "connected", "probe"),
    ]
    assert {finding.level for finding in found} == {"ok"}


async def test_doctor_says_for_each_problem_how_to_mend_it(capsys, openclaw, served, tmp_path):
    await run(capsys, "connect", "--yes")
    connected = openclaw.read_text()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        taken = str(other.getsockname()[1])
        nothing = {"MODEL_PATH": "", "DATA_PATH": str(tmp_path / "none")}
        found = await findings(**nothing, PORT=taken)
    assert {"model", "port", "journal"} <= {one.name for one in found if one.level != "ok"}
    found += await findings(OPENCLAW_RL_API_KEY="wrong")
    for old, new in (
        ("{", "{{"),  # no JSON
        ('"models"', '"others"'),  # not connected
        ("2026.9.6", "unknown"),
        ("2026.9.6", "2026.5.1"),
        ('"plugins": {', '"plugins": {"enabled": false, '),
        ("32000", "64000"),  # another context than the gateway's
        ("openclaw-rl/tiny", "other/big"),  # another default model
    ):
        assert old in connected
        openclaw.write_text(connected.replace(old, new))
        problems = [one for one in await findings() if one.level != "ok"]
        assert problems, new
        found += problems
    told = [one for one in found if one.level != "ok" and not one.fix]
    assert {one.name for one in told} <= {"journal"}  # whose warnings say it themselves


async def test_doctor_finds_the_gateway_by_its_journal(capsys, openclaw, served, monkeypatch):
    monkeypatch.delenv("PORT")
    served.journal.publish("gateway", served.url, {}, 1.0)
    assert f"{served.url} serves" in (await run(capsys, "doctor"))[1]
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = str(other.getsockname()[1])
        status, said = await run(capsys, "doctor", "--port", port)
    assert (status, f"--port {port}: " in said) == (1, True)


async def test_doctor_says_what_is_wrong_and_how_to_mend_it(capsys, openclaw, served, monkeypatch):
    status, said = await run(capsys, "doctor")
    assert "not connected" in said
    assert "-> openclaw-rl connect" in said
    await run(capsys, "connect", "--yes")
    openclaw.write_text(openclaw.read_text().replace("32000", "1000000"))
    status, said = await run(capsys, "doctor")
    assert status == 1
    assert "not as they should be" in said
    monkeypatch.setenv("OPENCLAW_RL_API_KEY", "another")
    status, said = await run(capsys, "doctor")
    assert status == 1
    assert "refuses this key" in said
    openclaw.write_text("{")
    status, said = await run(capsys, "doctor")
    assert status == 1
    assert "is not JSON5" in said


async def test_doctor_tells_a_dead_engine_from_a_dead_gateway(capsys, openclaw, served):
    served.engine.healthy = False
    status, said = await run(capsys, "doctor")
    assert status == 1
    assert "the engine does not answer" in said


async def test_doctor_where_nothing_runs(capsys, openclaw, model, tmp_path, monkeypatch):
    monkeypatch.delenv("OPENCLAW_RL_API_KEY", raising=False)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = str(other.getsockname()[1])
        words = ["doctor", "--port", port, "--data", str(tmp_path / "none")]
        status, said = await run(capsys, *words)
        assert status == 1
        assert "no model" in said
    status, said = await run(capsys, *words, "--model", str(model))
    assert status == 1
    assert "start it: openclaw-rl up" in said
    assert not (tmp_path / "none").exists()


async def test_status_tells_by_source_what_is_bound(capsys, served):
    named = {"X-Session-Id": "s"}
    await served.chat("one", extra_headers=named)
    await served.chat("aside", extra_headers={**named, "X-Turn-Type": "side"})
    first = await served.chat("two", extra_headers={"User-Agent": "other"})
    talk = [{"role": "user", "content": "two"}, first.replay(), {"role": "user", "content": "3"}]
    await served.chat(talk, extra_headers={"User-Agent": "other"})
    await served.chat("never followed", extra_headers={"User-Agent": "other"})
    assert served.journal.outcomes().by_source == {
        "header:x-session-id": {"bound": 1, "side": 1, "unbound": 0},
        "history": {"bound": 1, "side": 0, "unbound": 0},
        "new": {"bound": 1, "side": 0, "unbound": 1},
    }
    _, said = await run(capsys, "status")
    assert "sessions header:x-session-id: 1 bound + 1 side\n" in said
    assert "sessions new: 1 bound + 1 unbound\n" in said


async def test_a_warning_rises_when_nothing_binds(capsys, served):
    for number in range(20):
        await served.chat(f"question {number}")
    _, said = await run(capsys, "status")
    assert "no turn could be bound to a conversation" in said
    assert any("bound" in words for words in (await served_health(served))["warnings"])
    assert served.journal.outcomes().unbound == 20
    assert Outcomes().unbound == 0


async def served_health(served):
    async with served.http.get(served.url + "/healthz") as response:
        return await response.json()
