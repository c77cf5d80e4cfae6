from __future__ import annotations

import inspect
import pickle
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest

from openclaw_rl.errors import ConfigError, HookError, JournalError
from openclaw_rl.hooks import Sample
from openclaw_rl.journal import Journal
from openclaw_rl.slime import generate_rollout
from openclaw_rl.slime.rollout import HOST, Run, saved_rollout, trained_through
from openclaw_rl.slime.samples import Shape, fill
from tests.journal.build import chain, judged, record
from tests.slime.kit import Router, conversations, fill_journal, slime_args

pytestmark = pytest.mark.slow


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest.fixture
def router():
    with Router() as router:
        yield router


class Runs:
    """Makes slime's `args` of a run; `end` is the end of their process."""

    def __init__(self, path: Path, router: Router) -> None:
        self.path, self.router = path, router
        self.begun: list[Namespace] = []

    def __call__(self, turns: int, **given) -> Namespace:
        fields = {"sglang_router_port": self.router.port, **given}
        self.begun.append(slime_args(self.path, turns, **fields))
        return self.begun[-1]

    def end(self) -> None:
        for args in self.begun:
            if hasattr(args, "openclaw_rl_run"):
                args.openclaw_rl_run.close()
        self.begun.clear()


@pytest.fixture
def run(path: Path, router: Router):
    runs = Runs(path, router)
    yield runs
    runs.end()


def ready(path: Path, count: int, prefix: str = "t") -> None:
    with Journal.open(path) as journal:
        for n in range(count):
            judged(journal, record(f"{prefix}{n}", session_id=f"{prefix}{n}", created=100.0 + n))


def states(path: Path) -> dict[str, int]:
    with Journal.open(path) as journal:
        outcomes = journal.outcomes()
        assert outcomes.balanced()
        names = ("ready", "leased", "trained")
        return {name: getattr(outcomes, name) for name in names if getattr(outcomes, name)}


def flat(output) -> list[Sample]:
    return [sample for group in output.samples for sample in group]


def test_it_has_the_signature_of_slimes_rollout_functions():
    parameters = inspect.signature(generate_rollout).parameters
    assert tuple(parameters) == ("args", "rollout_id", "data_source", "evaluation")
    assert parameters["evaluation"].default is False


@pytest.mark.parametrize("seed", range(8))
def test_each_step_has_as_many_rollouts_as_slime_counts(run, path: Path, seed: int):
    ids = fill_journal(path, conversations(seed, sessions=5))
    steps, group, gpus = seed % 3 + 1, seed % 2 + 1, 1 + 7 * (seed % 2)
    turns = len(ids) // (steps * group) * steps * group
    if not turns:
        pytest.skip("too few turns for so many steps")
    args = run(
        turns // group, n_samples_per_prompt=group, global_batch_size=turns // steps,
        actor_num_gpus_per_node=gpus,
    )  # fmt: skip
    output = generate_rollout(args, 3, None)
    samples, size = flat(output), turns // steps
    rollouts = list(dict.fromkeys(sample.rollout_id for sample in samples))
    assert rollouts == list(range(3 * turns, 4 * turns))
    for step in range(steps):
        own = set(rollouts[step * size : (step + 1) * size])
        members = [sample for sample in samples if sample.rollout_id in own]
        assert len(members) >= gpus
        trained = [turn for s in members for turn in s.metadata["turns"]]
        assert len(trained) == size
    for sample in samples:
        sample.validate()
        if sample.metadata.get("filler"):
            assert not any(sample.loss_mask)
            assert len(sample.tokens) == 2
    if gpus <= size:
        assert [len(one) for one in output.samples] == [group] * (turns // group)
    seen = Counter(turn["turn_id"] for s in samples for turn in s.metadata["turns"])
    assert set(seen.values()) == {1}
    assert output.metrics["rollout/fillers"] == sum("filler" in s.metadata for s in samples)
    assert output.metrics["rollout/outcomes/leased"] == turns


def test_a_short_lease_that_is_taken_up_again_is_spread_over_the_steps(run, path: Path):
    ready(path, 3)
    with Journal.open(path) as journal:
        assert journal.lease(0, HOST, ["t0", "t1", "t2"])
    args = run(4, global_batch_size=2)
    Run.of(args).start = (0, "1")  # not the first call: the lease is this run's own
    samples = flat(generate_rollout(args, 0, None))
    trained = [len(sample.metadata["turns"]) for sample in samples]
    assert trained == [1, 1, 1, 0]


def test_rewards_are_looked_up_by_slime_under_the_reward_key(run, path: Path):
    ready(path, 2)
    samples = flat(generate_rollout(run(2, reward_key="quality"), 0, None))
    assert [sample.reward for sample in samples] == [{"quality": 1.0}] * 2


def test_the_engines_of_all_roles_are_published(run, path: Path, router: Router):
    ready(path, 1)
    routers = {"policy": ("127.0.0.1", router.port), "prm": ("127.0.0.1", 1)}
    args = run(1, sglang_model_routers=routers, judge_engine="prm", teacher_engine="policy")
    generate_rollout(args, 0, None)
    with Journal.open(path) as journal:
        policy = journal.endpoint("policy")
        assert policy.url == f"http://127.0.0.1:{router.port}"
        assert policy.info == {"engine": "sglang", "model_path": "m", "weight_version": "1"}
        assert journal.endpoint("prm").url == journal.endpoint("judge").url == "http://127.0.0.1:1"
        assert journal.endpoint("teacher").url == policy.url


def test_an_engine_that_is_not_served_is_refused(run):
    with pytest.raises(ConfigError, match="serves no 'mentor', only policy"):
        generate_rollout(run(1, teacher_engine="mentor"), 0, None)


# -- what becomes of leases ------------------------------------------------------------------------


@pytest.mark.parametrize("driver", ["sync", "async"])
def test_a_lease_is_trained_once_the_served_weights_hold_it(
    run, path: Path, router: Router, driver: str
):
    """slime's two drivers: `train.py` updates the weights before the next rollout begins,
    `train_async.py` begins it first."""
    ready(path, 10)
    args = run(2)
    expected = {
        # after each call: leased, trained
        "sync": [(2, 0), (2, 2), (2, 4), (2, 6)],
        "async": [(2, 0), (4, 0), (4, 2), (4, 4)],
    }[driver]
    for rollout_id, (leased, trained) in enumerate(expected):
        generate_rollout(args, rollout_id, None)
        found = states(path)
        assert (found["leased"], found.get("trained", 0)) == (leased, trained)
        if driver == "sync" or rollout_id >= 1:  # the update after the training of a rollout
            router.version = str(int(router.version) + 1)


def test_with_checkpoints_a_lease_is_trained_once_one_holds_it(
    run, path: Path, router: Router, tmp_path: Path
):
    ready(path, 10)
    args = run(2, save=str(tmp_path / "ckpt"), save_interval=2)
    generate_rollout(args, 0, None)
    router.version = "2"
    generate_rollout(args, 1, None)
    assert states(path) == {"ready": 6, "leased": 4}  # served, not saved
    router.version = "3"
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("1\n")
    generate_rollout(args, 2, None)
    assert states(path) == {"ready": 4, "leased": 2, "trained": 4}


def test_case_33_a_run_that_starts_again_settles_by_the_checkpoint_it_loaded(
    run, path: Path, router: Router, tmp_path: Path
):
    ready(path, 10)
    args = run(2, save=str(tmp_path / "ckpt"), save_interval=20)
    for rollout_id in range(4):
        generate_rollout(args, rollout_id, None)
        router.version = str(int(router.version) + 1)
    assert states(path) == {"ready": 2, "leased": 8}
    run.end()  # the process dies
    router.version = "1"  # slime counts anew
    args = run(2, save=str(tmp_path / "ckpt"), save_interval=20)
    samples = flat(generate_rollout(args, 2, None))  # the checkpoint held rollouts 0 and 1
    assert states(path) == {"ready": 4, "leased": 2, "trained": 4}
    assert [t["turn_id"] for s in samples for t in s.metadata["turns"]] == ["t4", "t5"]


def test_a_fresh_start_learns_anew_what_no_checkpoint_holds(run, path: Path):
    ready(path, 4)
    generate_rollout(run(2), 0, None)
    run.end()
    generate_rollout(run(2), 0, None)
    assert states(path) == {"ready": 2, "leased": 2}


def test_an_unknown_version_proves_nothing(run, path: Path, router: Router):
    ready(path, 4)
    router.version = "default"
    args = run(2)
    generate_rollout(args, 0, None)
    router.version = "2"
    generate_rollout(args, 1, None)
    assert states(path) == {"leased": 4}


@pytest.mark.parametrize(
    ("start", "version", "saved", "through"),
    [
        ((5, "1"), "1", None, 4),
        ((5, "1"), "3", None, 6),
        ((5, "1"), "3", 5, 5),
        ((5, "1"), "3", -1, -1),
        ((5, "9"), "1", None, 4),  # an engine that counts anew proves nothing
        ((5, None), "3", None, 4),
        ((5, "1"), None, 9, 4),
    ],
)
def test_what_the_served_weights_hold(start, version, saved, through):
    assert trained_through(start, version, saved) == through


def test_the_newest_checkpoint_is_megatrons_note(tmp_path: Path):
    note = tmp_path / "latest_checkpointed_iteration.txt"
    args = Namespace(save=str(tmp_path), save_interval=1)
    assert saved_rollout(args) == -1
    note.write_text("release\n")
    assert saved_rollout(args) == -1
    note.write_text("17")
    assert saved_rollout(args) == 17
    assert saved_rollout(Namespace(save=str(tmp_path), save_interval=None)) is None


def test_two_runs_on_one_journal_are_refused(run, path: Path):
    ready(path, 2)
    generate_rollout(run(1), 0, None)
    with pytest.raises(ConfigError, match="another trainer"):
        generate_rollout(run(1), 0, None)


def test_args_can_still_be_sent_to_other_processes(run, path: Path):
    """slime pickles them when it starts an engine anew."""
    ready(path, 1)
    args = run(1)
    generate_rollout(args, 0, None)
    assert pickle.loads(pickle.dumps(args)).openclaw_rl_run is None


# -- misuse ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"journal_path": None}, "journal_path is not set"),
        ({"custom_advantage_function_path": None}, "--custom-advantage-function-path openclaw_rl"),
        ({"custom_convert_samples_to_train_data_path": None}, "--custom-convert-samples-to-train"),
        ({"loss_type": "policy_loss"}, "--loss-type custom_loss"),
        ({"rollout_top_p": 0.9}, "--rollout-top-p"),
        ({"kl_coef": 0.1}, "--kl-coef"),
        ({"use_critic": True}, "--use-critic"),
        ({"global_batch_size": 3}, "not a multiple of --global-batch-size 3"),
        ({"start_services": ["gateway"]}, "start_services"),
        ({"sglang_router_ip": None}, "no router for the policy"),
    ],
)
def test_misuse_is_one_clear_line_before_anything_starts(run, path: Path, given, message):
    with pytest.raises(ConfigError, match=message) as error:
        generate_rollout(run(4, **given), 0, None)
    assert "\n" not in str(error.value)


def test_without_args_and_outside_slime_it_says_so(path: Path):
    with pytest.raises(ConfigError, match="slime's args"):
        generate_rollout(None, 0, None)


def test_one_long_session_is_one_sample_and_fillers(run, path: Path):
    with Journal.open(path) as journal:
        for turn in chain(4):
            judged(journal, turn)
    samples = flat(generate_rollout(run(4), 0, None))
    assert [len(sample.metadata["turns"]) for sample in samples] == [4, 0, 0, 0]
    assert samples[0].weight_versions == ["1"] * 4
    assert samples[0].status is Sample.Status.COMPLETED


def test_a_loss_of_step_numbers_would_be_noticed(run, path: Path):
    many = [Sample(tokens=[1, 2], response_length=1, metadata={"step": 0})] * 3
    with pytest.raises(HookError, match="3 samples for 2 rollouts"):
        fill(many, 0, Shape(2, 1, 1, 1))


def test_case_47_a_journal_of_another_model_is_one_line(run, path: Path, tmp_path: Path):
    Run.of(run(4)).close()
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(JournalError, match="belongs to another model") as error:
        Run.of(run(4, hf_checkpoint=str(other)))
    assert "\n" not in str(error.value)
