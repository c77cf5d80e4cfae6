"""The host whole: a tiny real model serves over HTTP, is trained, and is started again."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from openclaw_rl.config import Config, hook_args
from openclaw_rl.errors import ConfigError, OpenClawRLError
from openclaw_rl.journal import Journal
from openclaw_rl.journal.store import Endpoint
from openclaw_rl.local import checkpoint
from openclaw_rl.local.cache import KVShape
from openclaw_rl.local.host import Host, kv_tokens
from openclaw_rl.local.model import LoadedModel
from openclaw_rl.types import State, Verdict
from tests.fakes.model import tiny_model
from tests.journal.build import record

pytestmark = pytest.mark.slow

GOOD, BAD = 20, 30  # replies that contain the one please, the other displease


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: Any) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def arguments(model_dir: Path, tmp_path: Path, **changes: Any) -> Namespace:
    fields: dict[str, Any] = {
        "hf_checkpoint": str(model_dir), "device": "cpu", "dtype": "float32",
        "journal_path": str(tmp_path / "journal.db"), "save": str(tmp_path / "checkpoints"),
        "host_name": "h", "rollout_batch_size": 4, "session_share": 1.0, "lr": 3e-3,
        "rollout_poll_seconds": 0.01, "rollout_temperature": 1.0, "lora_rank": 4,
        "engine_threads": 1, "engine_port": 0, "train_threads": 1, "kv_tokens": 4096,
        "custom_loss_function_path": "openclaw_rl.losses.combined_loss",
        "guards": False,  # what a random model says to the probes means nothing
    }  # fmt: skip
    return Namespace(**(vars(hook_args(Config())) | fields | changes))


class Running:
    """A host in a thread of this process."""

    def __init__(self, args: Namespace) -> None:
        self.host = Host(args)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            asyncio.run(self.host.run())
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Host:
        self.thread.start()
        assert self.host.started.wait(60), self.error
        return self.host

    def __exit__(self, *_: object) -> None:
        self.host.stop.set()
        self.thread.join(60)
        assert not self.thread.is_alive()
        assert self.error is None


def generate(engine: Endpoint, ids: list[int], n: int = 12, **params: Any) -> dict[str, Any]:
    sampling = {"temperature": 1.0, "max_new_tokens": n, **params}
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
    request = urllib.request.Request(
        f"{engine.url}/generate",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {engine.info['key']}"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def log_probs(reply: dict[str, Any]) -> torch.Tensor:
    return torch.tensor([p for p, *_ in reply["meta_info"]["output_token_logprobs"]])


def play(
    journal: Journal, name: str, prompt: list[int], score: float, temperature: float = 1.0
) -> str:
    """One turn through the served engine into the journal, judged."""
    reply = generate(journal.endpoint("policy"), prompt, temperature=temperature)
    meta = reply["meta_info"]
    versions = [meta["weight_version"]] * len(reply["output_ids"])
    rec = record(
        name, session_id=name, prompt_ids=prompt, output_ids=reply["output_ids"],
        output_logprobs=[p for p, _ in meta["output_token_logprobs"]],
        output_versions=versions, node_hash=name, created=time.time(),
        sampling={"temperature": temperature},
    )  # fmt: skip
    journal.record_turn(rec)
    journal.set_next_state(name, ({"role": "user", "content": "ok"},))
    (turn,) = journal.claim("w", 1, time.time(), 60)
    assert journal.write_verdict(turn.turn_id, "w", Verdict(score=score)) is (State.READY)
    return name


def until(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


def test_serves_trains_publishes_and_starts_again(model_dir, tmp_path):
    args = arguments(model_dir, tmp_path)
    prompt = [1, 40, 41, 42, 43]
    with Journal.open(args.journal_path) as journal:
        with Running(args) as host:
            policy, judge = journal.endpoint("policy"), journal.endpoint("judge")
            assert policy.info["weight_version"] == "0"
            assert judge.url == f"{policy.url}/base" == journal.endpoint("teacher").url
            before, key = generate(policy, prompt, temperature=0.0), policy.info["key"]
            for i in range(8):
                play(journal, f"t{i}", [*prompt, 50 + i], 1.0 if i % 2 else -1.0)
            until(lambda: journal.outcomes().trained == 8)
            assert journal.endpoint("policy").info["weight_version"] == "2"
            after = generate(policy, prompt)
            assert after["meta_info"]["weight_version"] == "2"
            base = generate(judge, prompt, temperature=0.0)
            torch.testing.assert_close(log_probs(base), log_probs(before))
            assert base["output_ids"] == before["output_ids"]
            _trainer_agrees_with_engine(host, policy)
            scored = generate(policy, prompt, temperature=0.0)
        assert journal.leases("h") == {}
        assert journal.outcomes().balanced()

        with Running(args) as host:
            policy = journal.endpoint("policy")
            assert policy.info["weight_version"] == "2" == host.serving.core.version
            assert policy.info["key"] == key, "a client of before the restart is not refused"
            again = generate(policy, prompt, temperature=0.0)
            assert again["output_ids"] == scored["output_ids"]
            torch.testing.assert_close(log_probs(again), log_probs(scored))


def test_case_46_turns_are_trained_at_the_temperature_they_were_sampled_at(model_dir, tmp_path):
    args = arguments(model_dir, tmp_path)
    with Journal.open(args.journal_path) as journal, Running(args):
        for n, temperature in enumerate((1.0, 0.6, 0.6, 1.4)):
            play(journal, f"t{n}", [1, 50 + n], 1.0 if n % 2 else -1.0, temperature)
        until(lambda: journal.endpoint("trainer"))
        gap = journal.endpoint("trainer").info
        assert gap["skipped"] is None
        assert gap["tokens"] > 0
        assert gap["max"] <= 1e-3  # the promise for one temperature holds for several


def _trainer_agrees_with_engine(host: Host, engine: Endpoint) -> None:
    """The promise: mean difference of the log-probs of the same tokens at most 1e-3."""
    gaps = []
    for k in range(4):
        ids = [1, 60 + k, 61, 62]
        reply = generate(engine, ids, n=24)
        got = log_probs(reply)
        whole = torch.tensor([*ids, *reply["output_ids"]])
        with torch.no_grad():
            logits = host.trainer.model(whole[None]).logits[0]
        n = len(reply["output_ids"])
        mine = torch.log_softmax(logits[-n - 1 : -1], -1).gather(1, whole[-n:, None])[:, 0]
        gaps.append((mine - got).abs())
    assert float(torch.cat(gaps).mean()) <= 1e-3
    assert float(torch.cat(gaps).max()) <= 1e-3


def test_requests_pass_while_the_trainer_works(model_dir, tmp_path):
    """A stream that runs across weight updates is not broken, and each token has its version."""
    args = arguments(model_dir, tmp_path, rollout_batch_size=2)
    with Journal.open(args.journal_path) as journal, Running(args):
        engine = journal.endpoint("policy")
        replies: list[dict[str, Any]] = []
        stop = threading.Event()

        def talk() -> None:
            while not stop.is_set():
                replies.append(generate(engine, [1, 2, 3], n=40, ignore_eos=True))

        talker = threading.Thread(target=talk)
        talker.start()
        for i in range(6):
            play(journal, f"t{i}", [1, 50 + i], 1.0 if i % 2 else -1.0)
        until(lambda: journal.outcomes().trained == 6)
        stop.set()
        talker.join(60)
        assert all(r["meta_info"]["finish_reason"]["type"] == "length" for r in replies)
        assert all(len(r["output_ids"]) == 40 for r in replies)


def test_case_06_serving_goes_on_without_the_trainer(model_dir, tmp_path):
    hook = tmp_path / "loss.py"
    hook.write_text("def custom_loss(*a):\n    raise ValueError\n")
    args = arguments(model_dir, tmp_path, custom_loss_function_path=str(hook), rollout_batch_size=1)
    with Journal.open(args.journal_path) as journal, Running(args):
        play(journal, "t0", [1, 2], 1.0)
        until(lambda: journal.outcomes().counters.get("training_stopped") == 1)
        assert generate(journal.endpoint("policy"), [1, 2])["output_ids"]
        assert journal.outcomes().ready == 1


def test_misuse_is_said_before_anything_is_served(model_dir, tmp_path):
    with pytest.raises(ConfigError, match="cuda"):
        Host(arguments(model_dir, tmp_path, device="cuda:99"))
    with pytest.raises(ConfigError, match="holds 128 tokens: give --kv-tokens 256"):
        Host(arguments(model_dir, tmp_path, kv_tokens=128, context_length=200))
    with pytest.raises(ConfigError, match="no model in"):
        Host(arguments(tmp_path / "nothing", tmp_path))


def test_case_47_another_model_than_the_journals_or_checkpoints_starts_nothing(
    model_dir, tmp_path, monkeypatch
):
    """The same shape, other weights; another alpha; another rank."""
    other = tiny_model(tmp_path / "other", seed=1)
    given = arguments(model_dir, tmp_path, lora_alpha=8.0)
    with Running(given):
        pass
    monkeypatch.setattr(LoadedModel, "load", None)  # nothing is loaded to find it out
    elsewhere = {"journal_path": str(tmp_path / "new.db")}, {"save": str(tmp_path / "new")}
    for changes, word in (
        ({"hf_checkpoint": str(other)}, "base"),
        ({"lora_alpha": 16.0}, "lora_alpha 8.0"),
        ({"lora_rank": 8}, "lora_rank 4"),
    ):
        for place in elsewhere:
            with pytest.raises(
                OpenClawRLError, match=f"belongs to another model .*{word}"
            ) as caught:
                Host(Namespace(**{**vars(given), **changes, **place}))
            assert "\n" not in str(caught.value)


def test_the_cache_takes_its_share_of_what_a_card_has_left(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7_000_000_000, 16_000_000_000))
    shape = KVShape(layers=36, heads=8, key_dim=128, value_dim=128)  # Qwen3-4B's
    loaded = Namespace(kv_shape=shape, dtype=torch.bfloat16, device=torch.device("cuda"))
    a_token = shape.bytes_per_token(torch.bfloat16)
    assert 16_000 < kv_tokens(loaded) < 17_000
    loaded.device = torch.device("cpu")
    assert kv_tokens(loaded) == (1 << 30) // a_token


def test_case_55_a_second_trainer_of_the_same_journal_does_not_start(model_dir, tmp_path):
    args = arguments(model_dir, tmp_path)
    with Running(args):
        with pytest.raises(ConfigError, match="another trainer is already running"):
            Host(args)
        lock = tmp_path / "journal.trainer.lock"
        assert (lock.stat().st_size, lock.stat().st_mode & 0o777) == (0, 0o600)
    with Running(args):  # free again, although the file is still there
        assert lock.exists()


SCRIPT = """
import json, logging, sys
from argparse import Namespace
from openclaw_rl.local.host import run_host
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
run_host(Namespace(**json.loads(sys.argv[1])))
"""


def _start(args: Namespace, **how: Any) -> subprocess.Popen[bytes]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", SCRIPT, json.dumps(vars(args))], env=env, **how)


def _until_alive(journal: Journal, process: subprocess.Popen[bytes]) -> None:
    def up() -> bool:
        assert process.poll() is None, "the host ended"
        policy = journal.endpoint("policy")
        return policy is not None and policy.info["pid"] == process.pid

    until(up, 120)


def test_an_engine_that_is_waited_for_does_not_hold_up_a_stop(model_dir, tmp_path):
    args = arguments(model_dir, tmp_path, engine_url="http://127.0.0.1:1", engine_kind="vllm")
    with _start(args, stderr=subprocess.PIPE) as process:
        try:
            assert any(b"waiting for the engine" in line for line in process.stderr)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


@pytest.mark.slow
def test_case_33_kill_9_of_the_host_loses_and_repeats_nothing(model_dir, tmp_path):
    """Real processes, killed while they train; then SIGTERM ends the last one cleanly."""
    args = arguments(model_dir, tmp_path, rollout_batch_size=2)
    process = None
    n = 0
    try:
        with Journal.open(args.journal_path) as journal:
            for round_number in range(3):
                process = _start(args)
                _until_alive(journal, process)
                for _ in range(6):
                    play(journal, f"t{n}", [1, 2 + n], 1.0 if n % 2 else -1.0)
                    n += 1
                if round_number < 2:
                    seen = journal.outcomes().trained
                    until(lambda seen=seen: journal.outcomes().trained > seen)
                    process.send_signal(signal.SIGKILL)
                    process.wait(30)
            until(lambda: journal.outcomes().trained == n)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            outcomes = journal.outcomes()
            assert outcomes.balanced()
            assert (outcomes.trained, outcomes.leased, sum(outcomes.dropped.values())) == (n, 0, 0)
            newest = checkpoint.folders(Path(args.save))[0]
            state = Namespace(**json.loads((newest / checkpoint.STATE).read_text()))
            # every version learnt exactly one batch of two
            assert state.version * args.rollout_batch_size == n
            versions = [journal.turn(f"t{i}").trained_version for i in range(n)]
            assert sorted(map(int, versions)) == [1 + i // 2 for i in range(n)]
            assert math.isfinite(state.version)
    finally:
        if process is not None and process.poll() is None:
            process.kill()
            process.wait(30)
