"""Weights as adapters at an engine outside: loaded, announced, used, unloaded; nothing pauses."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import threading
import time
from argparse import Namespace
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from openclaw_rl.engine.client import EngineClient
from openclaw_rl.engine.kinds import engine_api
from openclaw_rl.engine.types import Adapter, collect
from openclaw_rl.errors import ConfigError
from openclaw_rl.journal import Journal
from openclaw_rl.local import checkpoint, external
from openclaw_rl.local.external import ExternalEngine
from tests.fakes.engine import EOS_ID, FakeEngine
from tests.fakes.vllm import FakeVLLM

pytestmark = pytest.mark.slow

REPLY = [50, 51, 52, 53, EOS_ID]


class Stand:
    """What a trainer does, by hand: `save` a version, then `publish` it."""

    def __init__(self, folder: Path, fake: FakeEngine, **changes: Any) -> None:
        self.fake = fake
        self.journal = Journal.open(folder / "journal.db")
        self.root = folder / "checkpoints"
        self.args = Namespace(
            **{
                "engine_url": fake.url, "engine_kind": "auto", "engine_api_key": None,
                "save": str(self.root), "adapter_dir_at_engine": None,
                "rollout_temperature": 1.0, "w_opd": 1.0, "opd_top_k": 0,
                "stop_event": threading.Event(),
            }
            | changes
        )  # fmt: skip
        self.serving = self.host()

    def host(self, context_length: int = 0) -> ExternalEngine:
        return ExternalEngine(self.args, self.journal, context_length)

    def save(self, version: int, weights: bytes = b"") -> None:
        folder = self.root / checkpoint.name_of(version)
        folder.mkdir(parents=True)
        (folder / checkpoint.ADAPTER).write_bytes(weights or b"weights %d" % version)
        (folder / "adapter_config.json").write_text("{}")

    async def publish(self, version: int) -> None:
        self.save(version)
        self.serving.publish(version, {})
        await self.look()

    @property
    def load_path(self) -> str:
        return engine_api("vllm" if isinstance(self.fake, FakeVLLM) else "sglang").load_path

    def policy(self) -> dict[str, Any]:
        found = self.journal.endpoint("policy")
        assert found is not None
        return dict(found.info)

    def gateway_uses(self, adapter: str, in_use: list[str], url: str | None = None) -> None:
        """Said by a gateway that runs: somebody listens at its address (the engine will do)."""
        info = {"adapter": adapter, "in_use": in_use}
        self.journal.publish("gateway", url or self.fake.url, info, time.time())

    async def look(self) -> None:
        await self.serving.watch()


@pytest.fixture(autouse=True)
def sync_at_every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "_SYNC_SECONDS", 0.0)


@pytest.fixture(params=["sglang", "vllm"])
async def fake(request: pytest.FixtureRequest) -> AsyncIterator[FakeEngine]:
    kinds = {"sglang": FakeEngine, "vllm": FakeVLLM}
    async with kinds[request.param](default_reply=REPLY) as started:
        yield started


@pytest.fixture
async def stand(fake: FakeEngine, tmp_path: Path) -> AsyncIterator[Stand]:
    made = Stand(tmp_path, fake)
    yield made
    await made.serving.close()
    made.journal.close()


async def test_a_new_version_is_used_and_the_old_one_goes_with_its_last_request(
    stand: Stand,
) -> None:
    stand.save(0)
    await stand.serving.start(0)
    first = stand.policy()
    assert (first["weight_version"], [first["adapter"]]) == ("0", list(stand.fake.adapters))
    stand.gateway_uses(first["adapter"], [])
    await stand.publish(1)
    second = stand.policy()
    assert second["weight_version"] == "1"
    assert list(stand.fake.adapters) == [first["adapter"], second["adapter"]]
    await stand.look()
    assert stand.fake.unloaded == [], "the gateway has not gone over"
    stand.gateway_uses(second["adapter"], [first["adapter"]])
    await stand.look()
    assert stand.fake.unloaded == [], "a request with the old one is under way"
    stand.gateway_uses(second["adapter"], [second["adapter"]])
    await stand.look()
    assert stand.fake.unloaded == [first["adapter"]]
    assert list(stand.fake.adapters) == [second["adapter"]]


async def test_without_a_gateway_nobody_uses_the_old_ones(stand: Stand) -> None:
    stand.save(0)
    await stand.serving.start(0)
    first = stand.policy()["adapter"]
    await stand.publish(1)
    await stand.look()
    assert stand.fake.unloaded == [first], "there never was one"
    second = stand.policy()["adapter"]
    dead = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = dead.sockets[0].getsockname()[1]
    dead.close()
    stand.gateway_uses(second, [second], f"http://127.0.0.1:{port}")
    await stand.publish(2)
    await stand.look()
    assert stand.fake.unloaded == [first, second], "it is gone, and its requests with it"
    assert list(stand.fake.adapters) == [stand.policy()["adapter"]]


async def test_other_weights_of_the_same_version_are_not_taken_for_those_the_engine_has(
    stand: Stand,
) -> None:
    """A run that was begun anew in its folder counts from 0 again."""
    stand.save(0, b"those of before")
    await stand.serving.start(0)
    before = stand.policy()["adapter"]
    await stand.serving.close()
    shutil.rmtree(stand.root / checkpoint.name_of(0))
    stand.save(0, b"others")
    again = stand.host()
    await again.start(0)
    assert stand.policy()["adapter"] != before
    assert stand.policy()["adapter"] in stand.fake.adapters
    await again.close()


async def test_adapters_of_others_are_left_alone(stand: Stand) -> None:
    stand.fake.adapters["theirs"] = "/x"
    stand.save(0)
    await stand.serving.start(0)
    stand.gateway_uses(stand.policy()["adapter"], [])
    await stand.look()
    assert "theirs" in stand.fake.adapters


async def test_a_version_that_fails_to_load_is_told_and_not_used(
    stand: Stand, caplog: pytest.LogCaptureFixture
) -> None:
    stand.save(0)
    await stand.serving.start(0)
    before = stand.policy()
    stand.fake.load_error = "rank 64 is greater than max_lora_rank 16"
    await stand.publish(1)
    after = stand.policy()
    assert after["adapter"] == before["adapter"]
    assert "version 1" in after["refused"]
    assert "max_lora_rank 16" in after["refused"]
    assert "[host] version 1: " in caplog.text
    assert stand.journal.outcomes().counters["adapter_refused"] == 1
    await stand.look()
    assert stand.journal.outcomes().counters["adapter_refused"] == 1, "told once"
    await stand.publish(2)
    assert stand.policy()["weight_version"] == "2"
    assert "refused" not in stand.policy()


async def test_a_first_version_that_fails_to_load_ends_the_start(stand: Stand) -> None:
    stand.save(0)
    stand.fake.load_error = "LoRA is not enabled"
    with pytest.raises(ConfigError, match=r"refuses our adapter: .*LoRA is not enabled"):
        await stand.serving.start(0)
    assert stand.journal.endpoint("policy") is None
    assert stand.journal.outcomes().counters["adapter_refused"] == 1


async def test_what_the_engine_is_and_can_do_is_announced(stand: Stand) -> None:
    stand.save(0)
    await stand.serving.start(0)
    kind = "vllm" if isinstance(stand.fake, FakeVLLM) else "sglang"
    for role in ("policy", "judge", "teacher"):
        endpoint = stand.journal.endpoint(role)
        assert endpoint is not None
        assert endpoint.info["engine"] == kind
        assert endpoint.info["abilities"]["any_temperature"] is (kind == "sglang")
        ours = role == "policy"
        assert endpoint.info["weight_version"] == ("0" if ours else "base")
        assert ("adapter" in endpoint.info) is ours


async def test_another_engine_than_the_settings_say_ends_the_start(
    fake: FakeEngine, tmp_path: Path
) -> None:
    other = "sglang" if isinstance(fake, FakeVLLM) else "vllm"
    stand = Stand(tmp_path, fake, engine_kind=other)
    stand.save(0)
    with pytest.raises(ConfigError, match=f"--engine {other}: what answers at .* is"):
        await stand.serving.start(0)
    assert fake.adapters == {}
    await stand.serving.close()
    stand.journal.close()


async def test_a_temperature_that_the_engine_cannot_do_ends_the_start(tmp_path: Path) -> None:
    async with FakeVLLM(default_reply=REPLY) as fake:
        stand = Stand(tmp_path, fake, rollout_temperature=0.6)
        stand.save(0)
        with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
            await stand.serving.start(0)
        assert stand.journal.endpoint("policy") is None
        await stand.serving.close()
        fake.processed = True
        await stand.serving.start(0)
        assert stand.policy()["abilities"]["any_temperature"] is True
        await stand.serving.close()
        stand.journal.close()


async def test_an_engine_started_anew_in_another_way_is_seen_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeVLLM(default_reply=REPLY, processed=True) as fake:
        stand = Stand(tmp_path, fake, rollout_temperature=0.6)
        stand.save(0)
        await stand.serving.start(0)
        await fake.stop()
        fake.processed = False
        await fake.start()
        await stand.look()
        assert stand.policy()["abilities"]["any_temperature"] is False
        assert list(fake.adapters) == [stand.policy()["adapter"]], "it serves, and is not trained"
        assert "--logprobs-mode processed_logprobs" in caplog.text
        await stand.serving.close()
        stand.journal.close()


async def test_an_engine_started_anew_that_takes_no_adapters_is_told_with_its_mend(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeVLLM(default_reply=REPLY) as fake:
        stand = Stand(tmp_path, fake)
        stand.save(0)
        await stand.serving.start(0)
        await fake.stop()
        await stand.look()
        fake.updating = False
        await fake.start()
        for _ in range(3):
            await stand.look()
        assert caplog.text.count("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == 1
        fake.updating = True
        await stand.look()
        assert list(fake.adapters) == [stand.policy()["adapter"]]
        await stand.serving.close()
        stand.journal.close()


async def test_a_proxy_that_is_busy_for_a_moment_refuses_no_version(stand: Stand) -> None:
    stand.save(0)
    await stand.serving.start(0)
    stand.fake.load_error, stand.fake.load_status = "upstream timed out", 504
    await stand.publish(1)
    assert stand.policy()["weight_version"] == "0"
    await stand.look()
    assert stand.policy()["weight_version"] == "1"
    assert "adapter_refused" not in stand.journal.outcomes().counters


async def test_the_weights_of_a_refused_version_are_read_once(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand.save(0)
    await stand.serving.start(0)
    stand.fake.load_error = "rank 64 is greater than max_lora_rank 16"
    await stand.publish(1)
    monkeypatch.setattr(hashlib, "file_digest", None)
    for _ in range(3):
        await stand.look()
    assert stand.policy()["refused"].endswith("max_lora_rank 16")


async def test_a_smaller_context_at_the_engine_is_said_at_the_start(
    fake: FakeEngine, tmp_path: Path
) -> None:
    stand = Stand(tmp_path, fake)
    stand.serving = stand.host(fake.context_length + 1)
    stand.save(0)
    with pytest.raises(ConfigError, match=f"set --context-length {fake.context_length}"):
        await stand.serving.start(0)
    await stand.serving.close()
    stand.journal.close()


async def test_an_engine_started_anew_gets_the_present_version_back(stand: Stand) -> None:
    stand.save(0)
    await stand.serving.start(0)
    await stand.publish(1)
    name = stand.policy()["adapter"]
    await stand.fake.stop()
    await stand.look()  # away: nothing is raised
    await stand.fake.start()
    assert stand.fake.adapters == {}
    await stand.look()
    assert list(stand.fake.adapters) == [name]


async def test_training_goes_on_while_the_engine_is_away(stand: Stand) -> None:
    stand.save(0)
    await stand.serving.start(0)
    await stand.fake.stop()
    await stand.publish(1)
    assert stand.policy()["weight_version"] == "0"
    await stand.fake.start()
    await stand.look()
    assert stand.policy()["weight_version"] == "1"


async def test_the_start_waits_for_the_engine(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external, "_PAUSE", 0.01)
    stand.save(3)
    await stand.fake.stop()
    starting = asyncio.create_task(stand.serving.start(3))
    await asyncio.sleep(0.05)
    assert not starting.done()
    await stand.fake.start()
    await asyncio.wait_for(starting, 10)
    assert stand.policy()["weight_version"] == "3"


async def test_a_resumed_run_publishes_before_the_engine_is_asked(stand: Stand) -> None:
    stand.save(3)
    stand.serving.publish(3, {})
    await stand.serving.start(3)
    assert stand.policy()["weight_version"] == "3"


async def test_an_engine_elsewhere_reads_the_checkpoints_under_its_own_path(
    fake: FakeEngine, tmp_path: Path
) -> None:
    stand = Stand(tmp_path, fake, adapter_dir_at_engine="/mnt/checkpoints/")
    stand.save(3)
    await stand.serving.start(3)
    assert list(fake.adapters.values()) == [f"/mnt/checkpoints/{checkpoint.name_of(3)}"]
    await stand.serving.close()
    stand.journal.close()


async def test_a_version_that_can_no_longer_be_loaded_is_told_once_and_tried_again(
    stand: Stand, caplog: pytest.LogCaptureFixture
) -> None:
    stand.save(0)
    await stand.serving.start(0)
    await stand.fake.stop()
    await stand.fake.start()
    for _ in range(3):
        stand.fake.load_error = "no such folder"
        await stand.look()
    assert stand.policy()["refused"] == f"version 0: {stand.load_path}: no such folder"
    assert stand.journal.outcomes().counters["adapter_refused"] == 1
    await stand.look()
    assert list(stand.fake.adapters) == [stand.policy()["adapter"]]
    assert "refused" not in stand.policy()


async def test_an_adapter_that_stays_does_not_hold_the_others(stand: Stand) -> None:
    stand.save(0)
    await stand.serving.start(0)
    stand.gateway_uses("the first", [])
    await stand.publish(1)
    await stand.publish(2)
    first, second, third = stand.fake.adapters
    stand.gateway_uses(third, [])

    class Sticky(dict[str, str]):
        def pop(self, name: str, *default: Any) -> Any:
            return None if name == first else super().pop(name, *default)

    stand.fake.adapters = Sticky(stand.fake.adapters)
    await stand.look()
    assert stand.fake.unloaded == [second]
    assert set(stand.fake.adapters) == {first, third}


class Late(FakeVLLM):
    """Loads what it is told to, but says that it did so before: the answer was lost."""

    async def _load_adapter(self, http: web.Request) -> web.Response:
        answer = await super()._load_adapter(http)
        name = (await http.json())["lora_name"]
        if answer.status != 200:
            return answer
        error = f"The lora adapter '{name}' has already been loaded."
        return web.json_response({"error": {"message": error}}, status=400)


async def test_what_the_engine_loaded_while_its_answer_was_lost_is_used(tmp_path: Path) -> None:
    async with Late(default_reply=REPLY) as fake:
        stand = Stand(tmp_path, fake)
        stand.save(0)
        await stand.serving.start(0)
        await stand.publish(1)
        assert stand.policy()["weight_version"] == "1"
        assert "adapter_refused" not in stand.journal.outcomes().counters
        await stand.serving.close()
        stand.journal.close()


async def test_training_does_not_wait_for_an_engine_that_loads(stand: Stand) -> None:
    stand.save(0)
    await stand.serving.start(0)
    first = stand.policy()
    stand.fake.slow_load = True
    stand.save(1)
    stand.serving.publish(1, {})
    loading = asyncio.create_task(stand.look())
    await asyncio.sleep(0)
    assert stand.policy() == first
    stand.fake.slow_load = False
    await stand.fake._notify()
    await loading
    assert stand.policy()["weight_version"] == "1"
    assert stand.fake.unloaded == [first["adapter"]]


async def test_no_reply_fails_or_mixes_versions_while_versions_change(stand: Stand) -> None:
    """Sixteen streams at a time, six versions, the whole way through the journal."""
    stand.save(0)
    await stand.serving.start(0)
    stand.fake.delay = 0.001

    def present() -> Adapter:
        about = stand.policy()
        return Adapter(about["adapter"], about["weight_version"])

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        engine = EngineClient(stand.policy()["engine"], stand.fake.url, http, adapter=present)

        async def talk(n: int) -> list[str]:
            versions = []
            for k in range(6):
                sampling = {"max_new_tokens": 9, "temperature": 1.0}
                reply = await collect(engine.generate([n, k], sampling, rid=f"r{n:03d}{k:03d}"))
                assert reply.ids == REPLY
                assert len(set(reply.versions)) == 1, "no reply is cut by a swap"
                versions.append(reply.versions[0])
            return versions

        stand.gateway_uses(present().name, sorted(engine.in_use))
        talks = [asyncio.create_task(talk(n)) for n in range(16)]
        for version in range(1, 7):
            await stand.publish(version)
            stand.gateway_uses(present().name, sorted(engine.in_use))
            await stand.look()
        for versions in await asyncio.gather(*talks):
            assert versions == sorted(versions)
    assert stand.fake.aborts == []


def test_a_run_has_a_name_of_its_own_that_it_keeps(tmp_path: Path) -> None:
    first = external.run_of(tmp_path / "one")
    assert external.run_of(tmp_path / "one") == first
    assert external.run_of(tmp_path / "two") != first
    assert checkpoint.folders(tmp_path / "one") == []
