"""Checkpoints: whole or not there, read by peft itself, the last few kept."""

from __future__ import annotations

import json

import pytest
import torch

from openclaw_rl.errors import ConfigError
from openclaw_rl.local import checkpoint
from openclaw_rl.local.checkpoint import Checkpoints, TrainState
from tests.local.tiny import peft_model

pytestmark = pytest.mark.slow

MODEL = {"base": "b1", "lora_rank": 4, "lora_alpha": 8.0, "target_modules": "all-linear"}


def at(root, keep=3, **changes):
    """The checkpoints in `root`, of the model that `changes` say."""
    return Checkpoints(root, {**MODEL, **changes}, keep)


def optimizer_of(model):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return optimizer


def step(model, optimizer):
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.randn_like(p)
    optimizer.step()


def adapter(model):
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def test_round_trip_with_the_optimisers_state(tmp_path):
    model = peft_model(dtype=torch.float32)
    optimizer = optimizer_of(model)
    step(model, optimizer)
    state = TrainState(7, 9, {"masked": ["a"]})
    at(tmp_path).save(state, model, optimizer)
    other = peft_model(seed=1, dtype=torch.float32)
    other_optimizer = optimizer_of(other)
    assert at(tmp_path).load_newest(other, other_optimizer) == state
    assert torch.equal(adapter(other), adapter(model))
    mine, theirs = optimizer.state_dict()["state"], other_optimizer.state_dict()["state"]
    assert torch.equal(mine[0]["exp_avg"], theirs[0]["exp_avg"])


def test_case_47_a_new_learning_rate_takes_effect_on_resume(tmp_path):
    model = peft_model(dtype=torch.float32)
    optimizer = optimizer_of(model)
    step(model, optimizer)
    at(tmp_path).save(TrainState(1, 1), model, optimizer)
    given = {"lr": 3e-5, "weight_decay": 0.25, "betas": (0.5, 0.75), "eps": 1e-6}
    changed = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **given)
    at(tmp_path).load_newest(model, changed)
    assert {name: changed.param_groups[0][name] for name in given} == given
    assert changed.state_dict()["state"][0]["step"] == 1


def test_only_their_owner_reads_them(tmp_path):
    model = peft_model(dtype=torch.float32)
    root = tmp_path / "checkpoints"
    at(root).save(TrainState(1, 0), model, optimizer_of(model))
    assert root.stat().st_mode & 0o077 == 0


def test_only_their_owner_reads_them_in_a_folder_that_was_there_before(tmp_path):
    model = peft_model(dtype=torch.float32)
    root = tmp_path / "checkpoints"
    root.mkdir()
    root.chmod(0o755)
    folder = at(root).save(TrainState(1, 0), model, optimizer_of(model))
    assert folder.stat().st_mode & 0o077 == 0
    assert root.stat().st_mode & 0o777 == 0o755, "not ours to change"


def test_peft_itself_loads_it(tmp_path):
    from peft import PeftModel

    model = peft_model(dtype=torch.float32)
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        expected = model(ids).logits
    folder = at(tmp_path).save(TrainState(1, 0), model, optimizer_of(model))
    base = peft_model(dtype=torch.float32).unload()
    loaded = PeftModel.from_pretrained(base, str(folder))
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, expected)


def test_only_the_last_few_are_kept(tmp_path):
    model = peft_model(dtype=torch.float32)
    for version in range(6):
        at(tmp_path, 2).save(TrainState(version, version), model, optimizer_of(model))
    names = [p.name for p in checkpoint.folders(tmp_path)]
    assert names == ["version_00000005", "version_00000004"]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(names)  # nothing half written


@pytest.mark.parametrize("torn", ["state.json", "optimizer.pt", "adapter_model.safetensors"])
def test_a_torn_checkpoint_gives_way_to_an_older_one(tmp_path, torn, caplog):
    model = peft_model(dtype=torch.float32)
    optimizer = optimizer_of(model)
    at(tmp_path).save(TrainState(1, 1), model, optimizer)
    folder = at(tmp_path).save(TrainState(2, 2), model, optimizer)
    file = folder / torn
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert at(tmp_path).load_newest(model, optimizer).version == 1
    assert f"{folder.name} cannot be read" in caplog.text
    (folder / torn).unlink()
    assert at(tmp_path).load_newest(model, optimizer).version == 1


def test_a_failed_write_is_no_checkpoint_and_goes_with_the_next(tmp_path, monkeypatch):
    model = peft_model(dtype=torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", lambda *a: (_ for _ in ()).throw(OSError(28)))
        with pytest.raises(OSError, match="28"):
            at(tmp_path).save(TrainState(1, 1), model, optimizer_of(model))
    assert checkpoint.folders(tmp_path) == []
    at(tmp_path).save(TrainState(2, 2), model, optimizer_of(model))
    assert [path.name for path in tmp_path.iterdir()] == ["version_00000002"]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"base": "b2"}, "base b1 there, b2 now"),
        ({"lora_rank": 8}, "lora_rank 4 there, 8 now"),
        ({"lora_alpha": 16.0}, "lora_alpha 8.0 there, 16.0 now"),
        ({"target_modules": "q_proj"}, "target_modules all-linear there, q_proj now"),
    ],
)
def test_case_47_a_checkpoint_of_another_model_is_one_line(tmp_path, changes, word):
    model = peft_model(dtype=torch.float32)
    at(tmp_path).save(TrainState(1, 1), model, optimizer_of(model))
    at(tmp_path).check()
    for refused in (
        at(tmp_path, **changes).check,
        lambda: at(tmp_path, **changes).load_newest(model, optimizer_of(model)),
    ):
        with pytest.raises(ConfigError, match=word) as caught:
            refused()
        assert "another --data" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_case_47_a_checkpoint_without_a_fingerprint_is_refused(tmp_path):
    model = peft_model(dtype=torch.float32)
    folder = at(tmp_path).save(TrainState(1, 1), model, optimizer_of(model))
    state = json.loads((folder / "state.json").read_text())
    assert state.pop("fingerprint") == MODEL
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match="base unknown there, b1 now"):
        at(tmp_path).check()


def test_an_empty_folder_has_none(tmp_path):
    model = peft_model(dtype=torch.float32)
    assert at(tmp_path / "none").load_newest(model, optimizer_of(model)) is None
