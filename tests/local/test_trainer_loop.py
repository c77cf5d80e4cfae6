"""The loop: order of its acts, limits, crashes at every point, several starts."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openclaw_rl.errors import HookError, JournalError
from openclaw_rl.guards import Probes
from openclaw_rl.local import checkpoint, trainer
from openclaw_rl.local.checkpoint import Checkpoints
from openclaw_rl.local.trainer import Trainer
from openclaw_rl.types import TopK
from tests.local.tiny import Books, conversation, peft_model, train_args

pytestmark = pytest.mark.slow


class Crash(BaseException):
    """The process dies here: nothing after it runs (not an Exception, so nobody handles it)."""


def world(turn_count: int = 8, per_batch: int = 2) -> tuple[Books, Any]:
    """Books with ready turns, and a rollout function that leases them as ours does."""
    books = Books()
    samples = {}
    for seed in range(turn_count):
        _, (sample,) = conversation(seed, 1)
        turn = sample.metadata["turns"][0]
        turn["reward"] = sample.reward = 1.0 if seed % 2 else -1.0
        samples[turn["turn_id"]] = sample
        books.ready.append(turn["turn_id"])

    def rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
        assert data_source is None
        assert not evaluation
        if (leased := books.leases(args.host_name).get(rollout_id)) is not None:
            return SimpleNamespace(samples=[[samples[t]] for t in leased])
        if len(books.ready) < per_batch:
            args.stop_event.set()
            return SimpleNamespace(samples=[])
        ids = books.ready[:per_batch]
        books.lease(rollout_id, args.host_name, ids)
        return SimpleNamespace(samples=[[samples[t]] for t in ids])

    return books, rollout


def make(
    tmp_path: Any, books: Books, rollout: Any, probes: Probes | None = None, **changes: Any
) -> Any:
    args = train_args(tmp_path, max_logprob_diff=100.0, stop_event=threading.Event(), **changes)
    published: list[tuple[int, dict[str, torch.Tensor]]] = []
    made = Trainer(
        args, peft_model(dtype=torch.float32), books, Checkpoints(Path(args.save), {}, 4),
        lambda v, w: published.append((v, w)), probes=probes,
    )  # fmt: skip
    made.rollout = rollout
    made.published = published
    return made


def weights(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def test_every_batch_is_stepped_saved_published_and_marked(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    books, rollout = world(turn_count=6)
    t = make(tmp_path, books, rollout)
    t.resume()
    before = weights(t.model).clone()
    t.run()
    assert [v for v, _ in t.published] == [1, 2, 3]
    assert sorted(v for vs in books.trained.values() for v in vs) == ["1", "1", "2", "2", "3", "3"]
    assert not books.leased
    assert not torch.equal(weights(t.model), before)
    lines = [r.getMessage() for r in caplog.records if "[train] rollout" in r.getMessage()]
    assert len(lines) == 3
    for word in ("version 3", "2 turns", "reward", "tokens a turn", "grad", "rollout", "train"):
        assert word in lines[-1]


def test_num_rollout_ends_training_over_all_starts(tmp_path):
    books, rollout = world(turn_count=8)
    t = make(tmp_path, books, rollout, num_rollout=2)
    t.resume()
    t.run()
    assert t.state.version == 2
    again = make(tmp_path, books, rollout, num_rollout=3)
    again.resume()
    again.run()
    assert again.state.version == 3
    assert len(books.ready) == 2


@pytest.mark.parametrize("loss", ["combined_loss", "grpo_loss", "opd_loss"])
def test_rewarded_replies_rise_and_punished_ones_fall(tmp_path, loss):
    books, rollout = world(turn_count=8, per_batch=8)
    t = make(tmp_path, books, rollout, custom_loss_function_path=f"openclaw_rl.losses.{loss}")
    t.resume()
    samples = [g[0] for g in rollout(t.args, 0, None).samples]
    for s in samples:  # a teacher that agrees with the reward
        s.teacher_log_probs = [0.0 if s.reward > 0 else -9.0] * s.response_length

    def log_prob(s: Any) -> float:
        ids = torch.tensor([s.tokens])
        with torch.no_grad():
            lp = torch.log_softmax(t.model(ids).logits[0], -1)
        n = s.response_length
        return float(lp[-n - 1 : -1].gather(1, ids[0, -n:, None]).mean())

    before = [log_prob(s) for s in samples]
    t.train(samples, 0)
    change = [b - a for a, b in zip(before, map(log_prob, samples), strict=True)]
    up = [c for c, s in zip(change, samples, strict=True) if s.reward > 0]
    down = [c for c, s in zip(change, samples, strict=True) if s.reward < 0]
    assert sum(up) / len(up) > sum(down) / len(down)
    assert sum(up) > 0 > sum(down)


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("loss", ["topk_opd_loss", "combined_loss"])
def test_candidates_that_the_teacher_favours_become_likelier(tmp_path, loss, tail):
    """Over the policy's own likeliest tokens, sampled or not: the teacher doubles the second and
    halves the first of each place."""
    books, rollout = world(turn_count=8, per_batch=8)
    t = make(
        tmp_path, books, rollout, custom_loss_function_path=f"openclaw_rl.losses.{loss}",
        opd_top_k=3, opd_tail=tail, w_rl=0.0,
    )  # fmt: skip
    t.resume()
    samples = [g[0] for g in rollout(t.args, 0, None).samples]

    def log_probs(s: Any) -> torch.Tensor:
        with torch.no_grad():
            logits = t.model(torch.tensor([s.tokens])).logits[0]
        return torch.log_softmax(logits, -1)[-s.response_length - 1 : -1]

    step = math.log(2)
    for s in samples:
        best = log_probs(s).topk(3)
        teacher = best.values + torch.tensor([-step, step, 0.0])
        s.metadata["topk"] = TopK(best.indices.tolist(), teacher.tolist())
        s.teacher_log_probs = None

    def mean(rank: int) -> float:
        places = [torch.tensor(s.metadata["topk"].ids)[:, rank, None] for s in samples]
        found = [log_probs(s).gather(1, at) for s, at in zip(samples, places, strict=True)]
        return float(torch.cat(found).mean())

    before = [mean(0), mean(1)]
    [report] = t.train(samples, 0)
    assert report.skipped is None
    assert mean(0) < before[0]
    assert mean(1) > before[1]


# --- limits ---------------------------------------------------------------------------------------


def test_case_30_a_fully_masked_batch_takes_no_step(tmp_path):
    books, rollout = world(turn_count=2)
    t = make(tmp_path, books, rollout)
    t.resume()

    def masked(*a: Any, **k: Any) -> Any:
        out = rollout(*a, **k)
        for group in out.samples:
            group[0].loss_mask = [0] * group[0].response_length
        return out

    t.rollout = masked
    before = weights(t.model).clone()
    t.run()
    assert torch.equal(weights(t.model), before)
    assert t.published == []
    assert sorted(books.dropped["masked"]) == ["t0.0", "t1.0"]
    assert books.counters == {"step_skipped_masked": 1}
    assert not books.leased
    assert not books.trained


def test_a_masked_turn_beside_others_is_dropped_not_called_trained(tmp_path):
    books, rollout = world(turn_count=2)
    t = make(tmp_path, books, rollout)
    t.resume()
    samples = [g[0] for g in rollout(t.args, 0, None).samples]
    samples[0].remove_sample = True
    t.train(samples, 0)
    assert books.dropped == {"masked": ["t0.0"]}
    assert books.trained == {"t1.0": ["1"]}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_grad_norm_skip": 1e-6}, "grad_norm"),
        ({"custom_loss_function_path": "nan"}, "loss_not_finite"),
        ({"custom_loss_function_path": "nan_gradient"}, "grad_not_finite"),
        ({"custom_loss_function_path": "zero"}, "no_gradient"),
    ],
)
def test_a_step_beyond_its_limits_is_left_out_and_said(tmp_path, caplog, changes, reason):
    caplog.set_level(logging.INFO)
    hooks = {
        "nan": "return logits.sum() * float('nan'), {}",
        "nan_gradient": "return (logits * 0).sum().sqrt(), {}",
        "zero": "return 0 * logits.sum(), {}",
    }
    name = changes.get("custom_loss_function_path")
    if name:
        path = tmp_path / f"{name}.py"
        path.write_text(f"def custom_loss(args, batch, logits, reduce):\n    {hooks[name]}\n")
        changes = {"custom_loss_function_path": str(path)}
    books, rollout = world(turn_count=4)
    t = make(tmp_path / "save", books, rollout, **changes)
    t.resume()
    before = weights(t.model).clone()
    t.run()
    assert torch.equal(weights(t.model), before)
    assert not t.learner.optimizer.state
    assert sorted(books.dropped["step_skipped"]) == ["t0.0", "t1.0", "t2.0", "t3.0"]
    assert books.counters == {f"step_skipped_{reason}": 2}
    assert f"SKIPPED ({reason})" in caplog.text


def test_a_step_far_from_the_engines_log_probs_is_left_out(tmp_path):
    books, rollout = world(turn_count=2)
    t = make(tmp_path, books, rollout)
    t.args.max_logprob_diff = 0.01
    t.resume()
    t.run()
    assert books.counters == {"step_skipped_logprob_diff": 1}


# --- crashes --------------------------------------------------------------------------------------

POINTS = ["before step", "after step", "in checkpoint", "after checkpoint", "after publish",
          "after mark_trained"]  # fmt: skip


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("rollout_number", [0, 1])
def test_case_33_a_crash_anywhere_trains_every_turn_once(
    tmp_path, monkeypatch, point, rollout_number
):
    books, rollout = world(turn_count=8)
    t = make(tmp_path, books, rollout)
    _crash_at(t, point, rollout_number, monkeypatch)
    t.resume()
    with pytest.raises(Crash):
        t.run()
    monkeypatch.undo()

    again = make(tmp_path, books, rollout)
    state = again.resume()
    # What is served after the restart is what was saved, and the books agree with it.
    marked = {int(v) for vs in books.trained.values() for v in vs}
    assert marked == set(range(1, state.version + 1))
    again.run()
    assert sorted(books.trained) == sorted(f"t{i}.0" for i in range(8))
    assert all(len(v) == 1 for v in books.trained.values())
    assert again.state.version == 4

    # Equal weights to a run without a crash: no batch was stepped twice, none was left out.
    books, rollout = world(turn_count=8)
    whole = make(tmp_path / "whole", books, rollout)
    whole.resume()
    whole.run()
    torch.testing.assert_close(weights(again.model), weights(whole.model), rtol=1e-5, atol=1e-6)


def _crash_at(t: Trainer, point: str, number: int, monkeypatch: Any) -> None:
    def crash(when: str, function: Any, *, after: bool) -> Any:
        calls = [0]

        def wrapped(*a: Any, **k: Any) -> Any:
            calls[0] += 1
            hit = point == when and calls[0] == number + 1
            if hit and not after:
                raise Crash
            result = function(*a, **k)
            if hit:
                raise Crash
            return result

        return wrapped

    optimizer = t.learner.optimizer
    optimizer.step = crash(
        point if "step" in point else "-", optimizer.step, after=point == "after step"
    )
    real = Checkpoints.save
    renames = [0]

    def save(self: Checkpoints, state: Any, *rest: Any) -> Any:
        if state.version == 0:
            return real(self, state, *rest)
        if point == "in checkpoint" and renames[0] == number:
            (self.root / ".writing_torn").mkdir()
            (self.root / ".writing_torn" / "state.json").write_text("{")
            raise Crash
        renames[0] += 1
        folder = real(self, state, *rest)
        if point == "after checkpoint" and renames[0] == number + 1:
            raise Crash
        return folder

    monkeypatch.setattr(Checkpoints, "save", save)
    t.publish = crash("after publish", t.publish, after=True)
    t.journal.mark_trained = crash(  # type: ignore[method-assign]
        "after mark_trained", t.journal.mark_trained, after=True
    )


def test_case_33_the_adapters_random_start_survives_too(tmp_path):
    books, rollout = world()
    first = make(tmp_path, books, rollout)
    first.resume()
    with torch.no_grad():
        for p in first.learner.parameters:
            p.add_(1.0)
    saved = weights(peft_model(dtype=torch.float32))
    second = make(tmp_path, books, rollout)
    with torch.no_grad():
        for p in second.learner.parameters:
            p.zero_()
    assert second.resume().version == 0
    assert torch.equal(weights(second.model), saved)


def test_stop_in_a_step_gives_the_batch_back(tmp_path):
    books, rollout = world(turn_count=4)
    # Several micro-batches: the second one sees the stop.
    t = make(tmp_path, books, rollout, max_tokens_per_gpu=1)
    t.resume()
    t.give_way = lambda: t.stop.set()
    before = weights(t.model).clone()
    t.run()
    assert torch.equal(weights(t.model), before)
    assert sorted(books.ready) == ["t0.0", "t1.0", "t2.0", "t3.0"]
    assert not books.leased
    assert not books.trained


# --- failures -------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(trainer, "FIRST_PAUSE", 0.0)


def test_a_failing_batch_is_tried_again_then_dropped(tmp_path, quick, caplog):
    books, rollout = world(turn_count=4)
    t = make(tmp_path, books, rollout)
    t.resume()
    real, calls = t.learner.learn, []

    def learn(data: Any) -> Any:
        calls.append(1)
        if len(calls) <= 3:
            with torch.no_grad():
                t.learner.parameters[0].add_(5.0)  # half a step is undone
            raise RuntimeError("what the user said")
        return real(data)

    t.learner.learn = learn
    t.run()
    assert len(calls) == 4
    assert books.dropped == {"train_failed": ["t0.0", "t1.0"]}
    assert books.trained == {"t2.0": ["1"], "t3.0": ["1"]}
    assert books.counters == {"train_failures": 3}
    assert float(t.learner.parameters[0].abs().max()) < 2
    assert "what the user said" not in caplog.text


def test_a_journal_that_fails_while_a_failure_is_counted_does_not_end_training(tmp_path, quick):
    books, rollout = world(turn_count=2)
    t = make(tmp_path, books, rollout)
    t.resume()
    real, calls = t.rollout, []

    def rollout_of_a_locked_journal(*a: Any, **k: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise JournalError("locked")
        return real(*a, **k)

    def count(name: str, n: int = 1) -> None:
        raise JournalError("still locked")

    t.rollout, books.count = rollout_of_a_locked_journal, count
    t.run()
    assert books.trained == {"t0.0": ["1"], "t1.0": ["1"]}


def test_a_publish_that_fails_does_not_train_the_batch_again(tmp_path, quick):
    books, rollout = world(turn_count=4)
    t = make(tmp_path, books, rollout)
    t.resume()
    real, calls = t.publish, []

    def publish(version: int, w: Any) -> None:
        calls.append(version)
        if len(calls) == 1:
            raise RuntimeError
        real(version, w)

    t.publish = publish
    t.run()
    assert calls == [1, 2]
    assert books.trained == {"t0.0": ["1"], "t1.0": ["1"], "t2.0": ["2"], "t3.0": ["2"]}


def test_a_full_disk_leaves_weights_and_books_as_saved(tmp_path, quick, monkeypatch):
    books, rollout = world(turn_count=2)
    t = make(tmp_path, books, rollout)
    t.resume()
    real, calls = Checkpoints.save, []

    def save(*a: Any) -> Any:
        calls.append(1)
        if len(calls) <= 5:  # more often than a batch may fail to be learnt
            raise OSError(28, "No space left on device")
        return real(*a)

    monkeypatch.setattr(Checkpoints, "save", save)
    t.run()
    assert books.trained == {"t0.0": ["1"], "t1.0": ["1"]}
    assert t.state.version == 1
    assert not books.dropped
    assert all(s["step"] == 1 for s in t.learner.optimizer.state.values())


def test_a_broken_hook_stops_training_and_keeps_the_turns(tmp_path):
    path = tmp_path / "loss.py"
    path.write_text("def custom_loss(*a):\n    raise KeyError('secret words')\n")
    books, rollout = world(turn_count=2)
    t = make(tmp_path / "s", books, rollout, custom_loss_function_path=str(path))
    t.resume()
    with pytest.raises(HookError, match="KeyError") as caught:
        t.run()
    assert "secret" not in str(caught.value)
    assert books.ready == ["t0.0", "t1.0"]
    assert not books.leased


def test_old_rollout_functions_may_return_bare_samples(tmp_path):
    books, rollout = world(turn_count=2)
    t = make(tmp_path, books, rollout)
    t.resume()
    t.rollout = lambda *a, **k: rollout(*a, **k).samples
    t.run()
    assert t.state.version == 1


def test_state_file_names_what_decides_after_a_crash(tmp_path):
    books, rollout = world(turn_count=2)
    t = make(tmp_path, books, rollout)
    t.resume()
    t.run()
    state = json.loads((checkpoint.folders(tmp_path)[0] / "state.json").read_text())
    assert (state["version"], state["rollout_id"]) == (1, 0)
    assert math.isfinite(weights(t.model).sum())


def test_memory_between_steps_goes_back_to_the_system():
    """Blocks as torch frees them: many, with long-lived ones between."""
    program = """
import resource
from openclaw_rl.local.trainer import release_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() >> 20

before = resident()
blocks = [bytearray(64 << 10) for _ in range(4000)]
kept = blocks[::100]
del blocks
held = resident() - before
release_memory()
print(held, resident() - before)
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
    held, left = map(int, out.split())
    if held < 200:
        pytest.skip("this C library gives freed memory back by itself")
    assert left < 50
