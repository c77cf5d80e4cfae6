"""Which model a folder holds."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from openclaw_rl.engine import model_fingerprint
from openclaw_rl.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 8}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(200_000))
    return folder


def test_a_copy_elsewhere_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    fingerprint = model_fingerprint(folder)
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "README.md").write_text("a note")
    assert model_fingerprint(tmp_path / "copy") == fingerprint
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert model_fingerprint(str(link)) == fingerprint


@pytest.mark.parametrize("at", [0.49, 0.999])
def test_case_47_a_tuned_model_of_the_same_shape_is_another(folder: Path, at: float) -> None:
    fingerprint = model_fingerprint(folder)
    weights = bytearray(200_000)
    start = int(at * len(weights))
    weights[start:] = b"\1" * (len(weights) - start)
    (folder / "model.safetensors").write_bytes(weights)
    assert model_fingerprint(folder) != fingerprint


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_case_47_another_configuration_or_tokenizer_is_another_model(
    folder: Path, name: str
) -> None:
    fingerprint = model_fingerprint(folder)
    (folder / name).write_text('{"other": 1}')
    assert model_fingerprint(folder) != fingerprint


def test_a_folder_without_a_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model in .*config\.json") as caught:
        model_fingerprint(tmp_path)
    assert "\n" not in str(caught.value)
