"""The gate in the training loop: refused versions, milder ones, pause and rollback, over stops."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from openclaw_rl.guards import Probes
from openclaw_rl.journal import Journal
from openclaw_rl.local import checkpoint
from openclaw_rl.local.checkpoint import Checkpoints
from tests.fakes.model import tiny_model
from tests.local.test_trainer_host import Running, arguments, generate, play, until
from tests.local.test_trainer_loop import Crash, make, weights, world
from tests.local.tiny import Books, peft_model

pytestmark = pytest.mark.slow

NONE = {f"max_{name}": 0.0 for name in (
    "kl", "harm", "drift", "vague", "empty", "cut", "repetition", "similarity", "fall"
)}  # fmt: skip
"""No limit at all: what a random model says to the probes means nothing."""


def decode(ids: Sequence[int]) -> str:
    return " ".join(f"w{n}" for n in ids)


PROBES = Probes([[3, 4], [5, 6, 7], [8]], [[9, 10], [11]], decode, {2})


def guarded(tmp_path: Any, books: Books, rollout: Any, **changes: Any) -> Any:
    """A trainer whose gate has only the limits that are given."""
    return make(tmp_path, books, rollout, probes=PROBES, probe_tokens=8,
                **{**NONE, **changes})  # fmt: skip


def states(books: Books) -> list[tuple[int, str]]:
    return [(one.version, one.state) for one in books.made[::-1]]


def test_a_huge_step_ends_in_a_refused_version_and_the_old_one_stays_served(tmp_path, caplog):
    books, rollout = world(turn_count=4)
    t = guarded(tmp_path, books, rollout, lr=5.0, max_kl=1.0)
    t.resume()
    before = weights(t.model).clone()
    t.run()
    assert torch.equal(weights(t.model), before)
    assert not t.learner.optimizer.state  # as in the checkpoint
    assert t.published == []
    assert [folder.name for folder in checkpoint.folders(tmp_path)] == ["version_00000000"]
    assert states(books) == [(0, "served"), (1, "refused"), (1, "refused")]
    refused = books.made[0]
    assert refused.reason.startswith("kl ")
    assert refused.figures["kl"] > 1
    assert (refused.rollout, refused.figures["scale"]) == (1, 1.0)
    assert sorted(books.dropped["version_refused"]) == ["t0.0", "t1.0", "t2.0", "t3.0"]
    assert books.counters == {"version_refused": 2}
    assert not books.trained
    assert not books.leased
    assert "version 1 is refused: kl" in caplog.text


def test_a_version_within_the_limits_is_served_with_its_figures(tmp_path):
    books, rollout = world(turn_count=2)
    t = guarded(tmp_path, books, rollout, lr=1e-4, max_kl=100.0)
    t.resume()
    t.run()
    assert [version for version, _ in t.published] == [1]
    assert states(books) == [(0, "served"), (1, "served")]
    assert books.made[0].figures["scale"] == 1.0
    assert books.made[0].figures["kl"] < 100
    assert books.trained == {"t0.0": ["1"], "t1.0": ["1"]}


def test_half_of_a_step_is_served_where_the_whole_is_beyond_a_limit(tmp_path, monkeypatch):
    """How much the base's replies lose grows with the step: a limit between the two."""
    books, rollout = world(turn_count=2)
    t = guarded(tmp_path, books, rollout, lr=0.05)
    t.resume()
    before = [p.detach().clone() for p in t.learner.parameters]
    t.run()
    whole = [p.detach().clone() for p in t.learner.parameters]
    harm = books.made[0].figures["harm"]
    assert harm < 0

    books, rollout = world(turn_count=2)
    t = guarded(tmp_path / "again", books, rollout, lr=0.05, max_harm=-harm - 1e-6)
    t.resume()
    t.run()
    assert books.made[0].state == "served"
    assert books.made[0].figures["scale"] == 0.5
    for old, new, p in zip(before, whole, t.learner.parameters, strict=True):
        torch.testing.assert_close(p, (old + new) / 2)


def test_three_refusals_in_a_row_pause_training(tmp_path):
    books, rollout = world(turn_count=10)
    t = guarded(tmp_path, books, rollout, lr=5.0, max_kl=1.0)
    t.resume()
    calls: list[dict[str, str]] = []
    asked = books.asked

    def look() -> dict[str, str]:
        if calls and calls[-1]:  # after a look at the pause somebody ends it
            books.answered("pause", calls[-1]["pause"])
        calls.append(asked())
        return calls[-1]

    books.asked = look  # type: ignore[method-assign]
    t.run()
    pauses = [found["pause"] for found in calls if found]
    assert len(pauses) == 1  # after the fourth and fifth batch: a new count
    assert pauses[0].startswith("3 versions in a row were refused: kl ")
    assert books.counters == {"version_refused": 5, "training_paused": 1}


def test_a_step_that_changes_no_weight_is_no_version(tmp_path):
    books, rollout = world(turn_count=2)
    t = guarded(tmp_path, books, rollout, lr=0.0)
    t.resume()
    t.run()
    assert t.published == []
    assert states(books) == [(0, "served")]
    assert books.counters == {"version_unchanged": 1}
    assert books.dropped == {"version_unchanged": ["t0.0", "t1.0"]}


def test_a_batch_of_one_session_is_not_learnt_where_that_is_a_limit(tmp_path):
    books, rollout = world(turn_count=2)
    t = guarded(tmp_path, books, rollout, max_batch_session=0.5)
    t.resume()
    before = weights(t.model).clone()
    t.run()
    assert torch.equal(weights(t.model), before)
    assert books.dropped == {"batch_refused": ["t0.0", "t1.0"]}
    assert books.counters == {"batch_refused_one_session": 1}


# -- stops ---------------------------------------------------------------------------------------


def test_a_kill_between_step_and_checkpoint_gives_the_turns_back(tmp_path):
    books, rollout = world(turn_count=4)
    t = guarded(tmp_path, books, rollout, max_kl=100.0)
    t.resume()
    before = weights(t.model).clone()

    def killed() -> Any:
        raise Crash

    t.guard.examine = killed
    with pytest.raises(Crash):
        t.run()
    again = guarded(tmp_path, books, rollout, max_kl=100.0)
    assert again.resume().version == 0
    assert torch.equal(weights(again.model), before)
    assert sorted(books.ready) == ["t0.0", "t1.0", "t2.0", "t3.0"]
    again.run()
    assert states(books) == [(0, "served"), (1, "served"), (2, "served")]
    assert all(len(versions) == 1 for versions in books.trained.values())


def test_a_kill_between_checkpoint_and_record_loses_neither(tmp_path):
    books, rollout = world(turn_count=2)
    t = guarded(tmp_path, books, rollout, max_kl=100.0)
    t.resume()

    def killed(*_: object) -> None:
        raise Crash

    t.publish = killed
    with pytest.raises(Crash):
        t.run()
    assert states(books) == [(0, "served")]
    again = guarded(tmp_path, books, rollout, max_kl=100.0)
    again.resume()
    assert states(books) == [(0, "served"), (1, "served")]
    assert books.made[0].figures["kl"] == t.state.figures["kl"]
    assert [version for version, _ in again.published] == [1]
    assert sorted(books.trained) == ["t0.0", "t1.0"]


def test_probes_that_fail_leave_the_batch_for_another_try(tmp_path, monkeypatch):
    monkeypatch.setattr("openclaw_rl.local.trainer.FIRST_PAUSE", 0.0)
    books, rollout = world(turn_count=2)
    t = guarded(tmp_path, books, rollout, max_kl=100.0)
    t.resume()
    real, calls = t.guard.examine, []

    def examine() -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError
        return real()

    t.guard.examine = examine
    t.run()
    assert books.counters == {"train_failures": 1}
    assert states(books) == [(0, "served"), (1, "served")]
    assert all(s["step"] == 1 for s in t.learner.optimizer.state.values())


# -- rollback ------------------------------------------------------------------------------------


def trained(tmp_path: Any, versions: int, **changes: Any) -> tuple[Books, Any, Any]:
    """A trainer that has made so many versions, and its rollout."""
    books, rollout = world(turn_count=2 * versions + 2)
    t = make(tmp_path, books, rollout, num_rollout=versions, **changes)
    t.resume()
    t.run()
    assert t.state.version == versions
    t.args.num_rollout = 0
    return books, rollout, t


def test_a_rollback_serves_an_earlier_version_again_as_a_new_one(tmp_path):
    books, _, t = trained(tmp_path, 3)
    books.ask("rollback", "1", 0.0)
    t.run()
    first = dict(t.published[0][1])
    version, again = t.published[3]
    assert version == 4
    assert all(torch.equal(again[name], first[name]) for name in first)
    four = next(one for one in books.made if one.version == 4)
    assert (four.state, four.restored, four.reason) == ("served", 1, "rollback")
    assert books.requests == {}
    # The last batch was learnt from there, with Adam's moments of then.
    assert [one.version for one in books.made[::-1]] == [0, 1, 2, 3, 4, 5]
    assert all(s["step"] == 2 for s in t.learner.optimizer.state.values())


def test_a_rollback_is_heard_while_a_batch_is_waited_for(tmp_path):
    books, rollout, t = trained(tmp_path, 2)

    def waiting(args: Any, *a: Any, **k: Any) -> Any:
        if not books.counters.get("waited"):
            books.count("waited")
            books.ask("rollback", "1", 0.0)
            args.while_waiting()
        return rollout(args, *a, **k)

    t.rollout = waiting
    t.run()
    assert [one.restored for one in books.made if one.version == 3] == [1]
    assert "train_failures" not in books.counters


@pytest.mark.parametrize("wanted", ["17", "-1", "one"])
def test_a_rollback_to_what_is_not_there_is_answered_and_said(tmp_path, wanted, caplog):
    books, _, t = trained(tmp_path, 1)
    before = weights(t.model).clone()
    books.ask("rollback", wanted, 0.0)
    t.args.num_rollout = 2
    t.rollout = lambda args, *a, **k: args.stop_event.set()
    t.run()
    assert torch.equal(weights(t.model), before)
    assert books.requests == {}
    assert books.counters == {"rollback_unknown": 1}
    assert f"no checkpoint of version {wanted}" in caplog.text


def test_a_kill_before_the_answer_rolls_back_once(tmp_path):
    books, rollout, t = trained(tmp_path, 2)
    books.ask("rollback", "1", 0.0)

    def killed(*_: object) -> None:
        raise Crash

    t.publish = killed
    with pytest.raises(Crash):
        t.run()
    again = make(tmp_path, books, rollout)
    assert again.resume().restored == 1
    again.rollout = lambda args, *a, **k: args.stop_event.set()
    again.run()
    assert [(one.version, one.restored) for one in books.made[::-1]][-2:] == [(2, None), (3, 1)]
    assert books.requests == {}


def test_the_best_version_so_far_is_kept_among_the_checkpoints(tmp_path):
    model = peft_model(dtype=torch.float32)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    kept = Checkpoints(Path(tmp_path), {}, 2)
    for version in range(1, 6):
        kept.save(checkpoint.TrainState(version, version), model, optimizer, best=2)
    assert [folder.name[-1] for folder in checkpoint.folders(tmp_path)] == ["5", "4", "2"]
    state = kept.load(2, model, optimizer)
    assert state is not None
    assert state.version == 2
    assert kept.load(3, model, optimizer) is None


def test_a_trainer_names_the_best_version_to_its_checkpoints(tmp_path):
    books, rollout = world(turn_count=12)
    t = guarded(tmp_path, books, rollout, max_kl=1000.0)
    t.resume()
    real, n = t.guard.examine, iter([0.2, 0.9, 0.3, 0.4, 0.5, 0.6])

    def examine() -> Any:
        why, figures = real()
        return why, {**figures, "sound": next(n)}

    t.guard.examine = examine
    t.run()
    kept = [int(folder.name[-8:]) for folder in checkpoint.folders(tmp_path)]
    assert kept == [6, 5, 4, 3, 2]


# -- the host whole ------------------------------------------------------------------------------


def test_a_refused_version_is_never_served(tmp_path_factory, tmp_path):
    """Over HTTP: the tiny model learns at a rate that must break it."""
    args = arguments(
        tiny_model(tmp_path_factory.mktemp("model")), tmp_path, lr=5.0, guards=True,
        probe_tokens=8, **NONE | {"max_kl": 1.0},
    )  # fmt: skip
    with Journal.open(args.journal_path) as journal, Running(args):
        before = generate(journal.endpoint("policy"), [1, 2, 3], temperature=0.0)
        for n in range(args.rollout_batch_size):
            play(journal, f"t{n}", [1, 2 + n], 1.0 if n % 2 else -1.0)
        until(lambda: journal.versions()[0].state == "refused")
        until(lambda: journal.outcomes().dropped == {"version_refused": args.rollout_batch_size})
        refused, served = journal.versions()
        assert (refused.version, served.version, served.state) == (1, 0, "served")
        assert refused.reason.startswith("kl ")
        after = generate(journal.endpoint("policy"), [1, 2, 3], temperature=0.0)
        assert after["meta_info"]["weight_version"] == "0"
        assert after["output_ids"] == before["output_ids"]


def test_nothing_is_learnt_during_a_pause_and_serving_goes_on(tmp_path_factory, tmp_path, caplog):
    args = arguments(tiny_model(tmp_path_factory.mktemp("model")), tmp_path)
    with Journal.open(args.journal_path) as journal, caplog.at_level("INFO"):
        journal.ask("pause", "holiday", 0.0)
        with Running(args):
            for n in range(args.rollout_batch_size):
                play(journal, f"t{n}", [1, 2 + n], 1.0)
            until(lambda: "training is paused (holiday)" in caplog.text)
            assert journal.outcomes().ready == args.rollout_batch_size
            journal.answered("pause", "holiday")
            until(lambda: journal.outcomes().trained == args.rollout_batch_size)
