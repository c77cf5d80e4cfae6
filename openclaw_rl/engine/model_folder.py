"""The folder of a model, told apart from another of the same shape without reading it whole."""

from __future__ import annotations

import hashlib
from pathlib import Path

from openclaw_rl.errors import ConfigError

_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
_SAMPLES, _SAMPLE_BYTES = 16, 1024
"""Of each weight file, spread evenly: two models of one shape have equal names, sizes and headers,
and a tuned one may share whole tensors with its base."""


def model_fingerprint(folder: str | Path) -> str:
    """16 hexadecimal digits for the model in `folder` (Hugging Face format), wherever it lies.

    Covers `config.json`, `tokenizer.json`, and of each weight file its name, its size and 16 KiB:
    milliseconds for any size. Raises ConfigError where there is no readable model.
    """
    folder = Path(folder).expanduser()
    digest = hashlib.sha256()
    try:
        for path in (folder / "config.json", folder / "tokenizer.json"):
            text = path.read_bytes() if path.name == "config.json" or path.exists() else b""
            digest.update(hashlib.sha256(text).digest())
        for path in sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS):
            size = path.stat().st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            with path.open("rb") as file:
                for number in range(1, _SAMPLES + 1):
                    file.seek(max(0, size * number // _SAMPLES - _SAMPLE_BYTES))
                    digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        name = Path(error.filename or folder).name
        raise ConfigError(f"no model in {folder}: {name}: {error.strerror}") from error
    return digest.hexdigest()[:16]
