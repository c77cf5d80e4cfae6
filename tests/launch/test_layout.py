"""The division of the GPUs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.config import SlimeConfig
from openclaw_rl.errors import ConfigError
from openclaw_rl.slime import layout
from openclaw_rl.slime.plan import option


def split(frozen=None, **given):
    return layout.split(SlimeConfig(**given), "/base", frozen or {})


def shares(found):
    return {engine.name: engine.gpus for engine in found.engines}


def test_default_is_half_and_half_and_the_policy_keeps_half_of_the_rollout():
    found = split({"prm": "/prm"})
    assert (found.actor_gpus, shares(found)) == (4, {"policy": 2, "prm": 2})
    three = {"prm": "/prm", "judge": "/judge", "teacher": "/base"}
    assert shares(split(three)) == {"policy": 1, "prm": 1, "judge": 1, "teacher": 1}
    assert shares(split()) == {"policy": 4}


def test_roles_with_the_same_model_share_one_engine_of_the_larger_share():
    found = split({"prm": "/m", "judge": "/m", "teacher": "/b"}, prm_gpus=1, judge_gpus=2)
    assert shares(found) == {"policy": 1, "prm": 2, "teacher": 1}
    assert found.engine_of("judge") == "prm"
    assert found.engine_of("teacher") == "teacher"
    assert split().engine_of("prm") is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"actor_gpus": 6, "rollout_gpus": 4}, "are 10 GPUs, but there are 8"),
        ({"actor_gpus": 8}, "each side needs at least one"),
        ({"num_gpus": 1}, "each side needs at least one"),
        ({"num_gpus": 99999999999}, "is more than 100000 GPUs"),
        ({"frozen": {"prm": "/p"}, "prm_gpus": 4}, "PRM_GPUS=4 leave 0 of ROLLOUT_GPUS=4"),
        ({"frozen": {"judge": "/p"}, "judge_gpus": 9}, "JUDGE_GPUS=9 leave 0 of ROLLOUT_GPUS=4"),
        (
            {"rollout_gpus": 3, "rollout_gpus_per_engine": 2},
            "multiple of ROLLOUT_GPUS_PER_ENGINE=2",
        ),
        (
            {"rollout_gpus": 1, "rollout_gpus_per_engine": 2},
            "^the policy's 1 GPUs are not a multiple of ROLLOUT_GPUS_PER_ENGINE=2",
        ),
        (
            {"frozen": {"prm": "/p"}, "prm_gpus": 3, "prm_gpus_per_engine": 2},
            "not a multiple of PRM_GPUS_PER_ENGINE=2",
        ),
        ({"num_nodes": 2, "actor_gpus": 12}, "whole machines of 8 GPUs"),
        (
            {"num_nodes": 2, "actor_gpus": 7, "rollout_gpus": 8, "rollout_gpus_per_engine": 4},
            "across",
        ),
    ],
)
def test_case_35_shares_that_do_not_fit_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        split(**given)


@pytest.mark.parametrize(
    ("nodes", "per_engine", "flags"), [(2, 8, ("1", "8", "8")), (4, 16, ("2", "8", "16"))]
)
def test_several_machines(nodes, per_engine, flags):
    given = split(num_nodes=nodes, rollout_gpus_per_engine=per_engine).flags()
    names = ("--actor-num-nodes", "--actor-num-gpus-per-node", "--rollout-num-gpus")
    assert tuple(option(given, name) for name in names) == flags


@given(
    slime=st.builds(
        SlimeConfig,
        num_nodes=st.integers(1, 4),
        num_gpus=st.integers(1, 8),
        actor_gpus=st.integers(0, 16),
        rollout_gpus=st.integers(0, 16),
        rollout_gpus_per_engine=st.sampled_from([1, 2, 4, 8]),
        **{f"{role}_gpus": st.integers(0, 6) for role in ("prm", "judge", "teacher")},
        **{
            f"{role}_gpus_per_engine": st.sampled_from([0, 1, 2])
            for role in ("prm", "judge", "teacher")
        },
    ),
    frozen=st.dictionaries(
        st.sampled_from(["prm", "judge", "teacher"]), st.sampled_from(["/base", "/a", "/b"])
    ),
)
def test_what_is_accepted_fits(slime, frozen):
    try:
        found = layout.split(slime, "/base", frozen)
    except ConfigError:
        return
    rollout = sum(shares(found).values())
    assert found.actor_gpus == slime.actor_gpus or not slime.actor_gpus
    assert rollout == slime.rollout_gpus or not slime.rollout_gpus
    assert found.actor_gpus + rollout <= slime.num_nodes * slime.num_gpus
    assert all(item.gpus and item.gpus % item.per_engine == 0 for item in found.engines)
    assert {role for item in found.engines for role in item.roles} == {"policy", *frozen}
    first = found.actor_gpus
    for item in found.engines:
        for start in range(first, first + item.gpus, item.per_engine):
            machines = {gpu // slime.num_gpus for gpu in range(start, start + item.per_engine)}
            assert len(machines) == max(1, item.per_engine // slime.num_gpus)
        first += item.gpus


def test_engine_file_has_one_trained_model_first_and_shares_that_add_up():
    found = split({"prm": "/prm", "teacher": "/base"})
    content = found.sglang_config(32768, {"/prm": 8192, "/base": 40960})["sglang"]
    assert [model["name"] for model in content] == ["policy", "prm", "teacher"]
    assert [model["update_weights"] for model in content] == [True, False, False]
    groups = [group for model in content for group in model["server_groups"]]
    assert sum(group["num_gpus"] for group in groups) == sum(shares(found).values())
    assert [group.get("overrides") for group in groups] == [None, {"context_length": 8192}, None]


def test_picture_names_every_gpu():
    lines = split({"prm": "/prm"}, rollout_gpus=3, actor_gpus=4).picture()
    assert lines[0].split() == ["GPU", "0-3", "trainer"]
    assert lines[1].startswith("GPU 4-5")
    assert "trained /base, 2 engines of 1" in lines[1]
    assert lines[2].startswith("GPU 6 ")
    assert "frozen /prm" in lines[2]
    assert lines[3] == "1 GPU left idle"
