"""Settings of the engine: the embedded one, or one outside."""

from __future__ import annotations

from dataclasses import dataclass

from openclaw_rl.setting import setting as _setting


@dataclass(frozen=True)
class EngineConfig:
    """The engine that samples: the embedded one, or one at an address."""

    url: str = _setting(
        "",
        "address of an engine outside (default: the embedded one)",
        flag="--engine-url",
        address=True,
    )
    kind: str = _setting(
        "auto",
        "what is at --engine-url: vllm or sglang, which gets our weights as adapters (auto: up and "
        "train ask it; serve by itself takes it for an engine or router that speaks SGLang's "
        "/generate, and whose weights are somebody else's)",
        flag="--engine",
        choices=("auto", "vllm", "sglang"),
    )
    command: str = _setting(
        "",
        "command line that starts the engine at --engine-url, and is kept up",
        flag="--engine-cmd",
    )
    api_key: str = _setting(
        "", "key of the engine (environment or file only)", env="ENGINE_API_KEY", secret=True
    )
    adapter_dir: str = _setting(
        "",
        "folder into which adapters are copied for the engine (default: it reads the checkpoints)",
        flag="--adapter-dir",
    )
    adapter_dir_at_engine: str = _setting(
        "",
        "the same folder as the engine sees it (default: under the same path)",
        flag="--adapter-dir-at-engine",
    )
    port: int = _setting(
        30100, "port of the embedded engine (loopback)", flag="--engine-port", low=0, high=65535
    )
    max_streams: int = _setting(24, "sequences decoded together", flag="--max-streams", low=1)
    kv_tokens: int = _setting(
        0,
        "tokens of the embedded engine's KV cache; no request can be longer (0: as many as fit in "
        "about a third of the GPU memory that the weights leave, or in 1 GiB on a CPU)",
        flag="--kv-tokens",
        low=0,
    )
    threads: int = _setting(
        0, "CPU threads of the engine (0: half of the cores)", flag="--engine-threads", low=0
    )
