"""A real vLLM: one that runs (VLLM_URL), or one that we start (VLLM, its program); and adapters.

VLLM_LOGPROBS_MODE says in which mode it is started, or was: processed_logprobs (default) or
raw_logprobs.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from openclaw_rl.engine.client import EngineClient

START_SECONDS = 600


@pytest.fixture(scope="session")
def model_path() -> Path:
    path = os.environ.get("VLLM_MODEL")
    if not path:
        pytest.skip("no real vLLM: run make test-vllm, or set VLLM_URL and VLLM_MODEL")
    return Path(path)


@pytest.fixture(scope="session")
def mode() -> str:
    """Where vLLM takes its log-probs."""
    return os.environ.get("VLLM_LOGPROBS_MODE", "processed_logprobs")


@pytest.fixture(scope="session")
def url(model_path: Path, mode: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    given, program = os.environ.get("VLLM_URL"), os.environ.get("VLLM")
    if given:
        yield given.rstrip("/")
        return
    if not program:
        pytest.skip("no real vLLM: run make test-vllm, or set VLLM_URL and VLLM_MODEL")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("vllm") / "log"
    # More slots than the tests load adapters: see docs/engines.md on the last one's in CPU builds.
    options = "--enable-lora --max-loras 16 --max-lora-rank 16 --dtype float32 --max-model-len 2048"
    targets = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"  # see docs/engines.md
    with log.open("wb") as out:
        server = subprocess.Popen(
            [program, "serve", str(model_path), "--host", "127.0.0.1", "--port", str(port),
             *options.split(), "--lora-target-modules", *targets.split(),
             "--logprobs-mode", mode, "--enforce-eager", "--max-num-seqs", "32"],
            env={
                **os.environ,
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
                "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
                "VLLM_NO_USAGE_STATS": "1",
            },
            stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        address = f"http://127.0.0.1:{port}"
        _wait(address, server, log)
        yield address
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


def _wait(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    began = time.monotonic()
    while time.monotonic() - began < START_SECONDS:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    print(f"vLLM up in {time.monotonic() - began:.0f} s")
                    return
        except OSError:
            time.sleep(1)
    raise AssertionError("vLLM did not come up:\n" + log.read_text(errors="replace")[-4000:])


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


@pytest.fixture
async def engine(url: str, http: aiohttp.ClientSession) -> AsyncIterator[EngineClient]:
    client = EngineClient("vllm", url, http, wait_seconds=120)
    yield client
    await client.close()


def write_adapter(folder: Path, model: Path, seed: int, rank: int = 16) -> Path:
    """A random PEFT adapter on the query and value projections, strong enough to change words."""
    from safetensors.numpy import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    sizes = {"q_proj": heads * head, "v_proj": config["num_key_value_heads"] * head}
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, out in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for half, shape in (("A", (rank, hidden)), ("B", (out, rank))):
                values = random.normal(0, 0.03, shape).astype(np.float32)
                tensors[f"{prefix}.lora_{half}.weight"] = values
    folder.mkdir(parents=True)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    about = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank,
        "target_modules": sorted(sizes), "bias": "none", "lora_dropout": 0.0,
        "base_model_name_or_path": str(model),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder
