"""Checkpoints: whole or not there, read by peft itself, the last few kept."""

from __future__ import annotations

import pytest
import torch

from openclaw_rl.errors import ConfigError
from openclaw_rl.local import checkpoint
from openclaw_rl.local.checkpoint import TrainState
from tests.local.tiny import peft_model


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
    checkpoint.save(tmp_path, state, model, optimizer, keep=3)
    other = peft_model(seed=1, dtype=torch.float32)
    other_optimizer = optimizer_of(other)
    found, folder, bad = checkpoint.load_newest(tmp_path, other, other_optimizer)
    assert (found, folder, bad) == (state, tmp_path / "version_00000007", [])
    assert torch.equal(adapter(other), adapter(model))
    mine, theirs = optimizer.state_dict()["state"], other_optimizer.state_dict()["state"]
    assert torch.equal(mine[0]["exp_avg"], theirs[0]["exp_avg"])


def test_case_47_a_new_learning_rate_takes_effect_on_resume(tmp_path):
    model = peft_model(dtype=torch.float32)
    optimizer = optimizer_of(model)
    step(model, optimizer)
    checkpoint.save(tmp_path, TrainState(1, 1), model, optimizer, keep=3)
    given = {"lr": 3e-5, "weight_decay": 0.25, "betas": (0.5, 0.75), "eps": 1e-6}
    changed = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **given)
    checkpoint.load_newest(tmp_path, model, changed)
    assert {name: changed.param_groups[0][name] for name in given} == given
    assert changed.state_dict()["state"][0]["step"] == 1


def test_only_their_owner_reads_them(tmp_path):
    model = peft_model(dtype=torch.float32)
    root = tmp_path / "checkpoints"
    checkpoint.save(root, TrainState(1, 0), model, optimizer_of(model), keep=3)
    assert root.stat().st_mode & 0o077 == 0


def test_only_their_owner_reads_them_in_a_folder_that_was_there_before(tmp_path):
    model = peft_model(dtype=torch.float32)
    root = tmp_path / "checkpoints"
    root.mkdir()
    root.chmod(0o755)
    folder = checkpoint.save(root, TrainState(1, 0), model, optimizer_of(model), keep=3)
    assert folder.stat().st_mode & 0o077 == 0
    assert root.stat().st_mode & 0o777 == 0o755, "not ours to change"


def test_peft_itself_loads_it(tmp_path):
    from peft import PeftModel

    model = peft_model(dtype=torch.float32)
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        expected = model(ids).logits
    folder = checkpoint.save(tmp_path, TrainState(1, 0), model, optimizer_of(model), keep=3)
    base = peft_model(dtype=torch.float32).unload()
    loaded = PeftModel.from_pretrained(base, str(folder))
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, expected)


def test_only_the_last_few_are_kept(tmp_path):
    model = peft_model(dtype=torch.float32)
    for version in range(6):
        checkpoint.save(tmp_path, TrainState(version, version), model, optimizer_of(model), keep=2)
    names = [p.name for p in checkpoint.folders(tmp_path)]
    assert names == ["version_00000005", "version_00000004"]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(names)  # nothing half written


@pytest.mark.parametrize("torn", ["state.json", "optimizer.pt", "adapter_model.safetensors"])
def test_a_torn_checkpoint_gives_way_to_an_older_one(tmp_path, torn):
    model = peft_model(dtype=torch.float32)
    optimizer = optimizer_of(model)
    checkpoint.save(tmp_path, TrainState(1, 1), model, optimizer, keep=3)
    folder = checkpoint.save(tmp_path, TrainState(2, 2), model, optimizer, keep=3)
    file = folder / torn
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    state, found, bad = checkpoint.load_newest(tmp_path, model, optimizer)
    assert (state.version, bad) == (1, [folder])
    assert found is not None
    (folder / torn).unlink()
    assert checkpoint.load_newest(tmp_path, model, optimizer)[0].version == 1


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    model = peft_model(dtype=torch.float32)
    monkeypatch.setattr(checkpoint.torch, "save", lambda *a: (_ for _ in ()).throw(OSError(28)))
    with pytest.raises(OSError, match="28"):
        checkpoint.save(tmp_path, TrainState(1, 1), model, optimizer_of(model), keep=3)
    assert list(tmp_path.iterdir()) == []


def test_another_adapters_checkpoint_is_an_error_not_a_fresh_start(tmp_path):
    model = peft_model(dtype=torch.float32, rank=4)
    checkpoint.save(tmp_path, TrainState(1, 1), model, optimizer_of(model), keep=3)
    other = peft_model(dtype=torch.float32, rank=8)
    with pytest.raises(ConfigError, match="lora-rank"):
        checkpoint.load_newest(tmp_path, other, optimizer_of(other))


def test_an_empty_folder_is_version_zero(tmp_path):
    model = peft_model(dtype=torch.float32)
    state, folder, bad = checkpoint.load_newest(tmp_path / "none", model, optimizer_of(model))
    assert (state, folder, bad) == (TrainState(), None, [])


def test_a_run_has_a_name_of_its_own_that_it_keeps(tmp_path):
    first = checkpoint.run_of(tmp_path / "one")
    assert checkpoint.run_of(tmp_path / "one") == first
    assert checkpoint.run_of(tmp_path / "two") != first
    assert checkpoint.folders(tmp_path / "one") == []
