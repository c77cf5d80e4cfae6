"""The division of the GPUs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openclaw_rl.errors import ConfigError
from openclaw_rl.slime.layout import Frozen, split

BASE = {
    "nodes": 1,
    "gpus_per_node": 8,
    "actor_gpus": 0,
    "rollout_gpus": 0,
    "policy_path": "/base",
    "policy_per_engine": 1,
    "frozen": (),
}


def shares(layout):
    return {engine.name: engine.gpus for engine in layout.engines}


def test_default_is_half_and_half_and_the_policy_keeps_half_of_the_rollout():
    layout = split(**BASE | {"frozen": [Frozen("prm", "/prm")]})
    assert (layout.actor_gpus, layout.rollout_gpus) == (4, 4)
    assert shares(layout) == {"policy": 2, "prm": 2}
    three = [Frozen("prm", "/prm"), Frozen("judge", "/judge"), Frozen("teacher", "/base")]
    assert shares(split(**BASE | {"frozen": three})) == {
        "policy": 1,
        "prm": 1,
        "judge": 1,
        "teacher": 1,
    }
    assert shares(split(**BASE)) == {"policy": 4}


def test_roles_with_the_same_model_share_one_engine_of_the_larger_share():
    frozen = [Frozen("prm", "/m", gpus=1), Frozen("judge", "/m", gpus=2), Frozen("teacher", "/b")]
    layout = split(**BASE | {"frozen": frozen})
    assert shares(layout) == {"policy": 1, "prm": 2, "teacher": 1}
    assert layout.engine_of("judge") == "prm"
    assert layout.engine_of("teacher") == "teacher"
    assert split(**BASE).engine_of("prm") is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"actor_gpus": 6, "rollout_gpus": 4}, "are 10 GPUs, but there are 8"),
        ({"actor_gpus": 8}, "each side needs at least one"),
        ({"gpus_per_node": 1}, "each side needs at least one"),
        ({"frozen": [Frozen("prm", "/p", gpus=4)]}, "PRM_GPUS=4 leave 0 of ROLLOUT_GPUS=4"),
        ({"frozen": [Frozen("judge", "/p", gpus=9)]}, "JUDGE_GPUS=9 leave 0 of ROLLOUT_GPUS=4"),
        (
            {"rollout_gpus": 3, "policy_per_engine": 2},
            "multiple of ROLLOUT_GPUS_PER_ENGINE=2",
        ),
        ({"frozen": [Frozen("prm", "/p", 3, 2)]}, "not a multiple of PRM_GPUS_PER_ENGINE=2"),
        ({"nodes": 2, "actor_gpus": 12}, "whole machines of 8 GPUs"),
        ({"nodes": 2, "actor_gpus": 7, "rollout_gpus": 8, "policy_per_engine": 4}, "across"),
    ],
)
def test_case_35_shares_that_do_not_fit_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        split(**BASE | given)


def test_several_machines():
    layout = split(**BASE | {"nodes": 2, "policy_per_engine": 8})
    assert (layout.actor_nodes, layout.actor_per_node, layout.rollout_gpus) == (1, 8, 8)
    layout = split(**BASE | {"nodes": 4, "policy_per_engine": 16})
    assert (layout.actor_nodes, layout.actor_per_node) == (2, 8)
    assert shares(layout) == {"policy": 16}


@settings(deadline=None)  # machines that run tests are busy
@given(
    nodes=st.integers(1, 4),
    per_node=st.integers(1, 8),
    actor=st.integers(0, 16),
    rollout=st.integers(0, 16),
    engine=st.sampled_from([1, 2, 4, 8]),
    frozen=st.lists(
        st.builds(
            Frozen,
            role=st.sampled_from(["prm", "judge", "teacher"]),
            path=st.sampled_from(["/base", "/a", "/b"]),
            gpus=st.integers(0, 6),
            per_engine=st.sampled_from([0, 1, 2]),
        ),
        unique_by=lambda item: item.role,
        max_size=3,
    ),
)
def test_what_is_accepted_fits(nodes, per_node, actor, rollout, engine, frozen):
    try:
        layout = split(
            nodes=nodes,
            gpus_per_node=per_node,
            actor_gpus=actor,
            rollout_gpus=rollout,
            policy_path="/base",
            policy_per_engine=engine,
            frozen=frozen,
        )
    except ConfigError:
        return
    assert layout.actor_gpus == actor or not actor
    assert layout.rollout_gpus == rollout or not rollout
    assert layout.actor_gpus + layout.rollout_gpus <= nodes * per_node
    assert all(item.gpus and item.gpus % item.per_engine == 0 for item in layout.engines)
    assert {role for item in layout.engines for role in item.roles} == {
        "policy",
        *(item.role for item in frozen),
    }
    first = layout.actor_gpus
    for item in layout.engines:
        for start in range(first, first + item.gpus, item.per_engine):
            machines = {gpu // per_node for gpu in range(start, start + item.per_engine)}
            assert len(machines) == max(1, item.per_engine // per_node)
        first += item.gpus


def test_engine_file_has_one_trained_model_first_and_shares_that_add_up():
    layout = split(**BASE | {"frozen": [Frozen("prm", "/prm"), Frozen("teacher", "/base")]})
    content = layout.sglang_config(32768, {"/prm": 8192, "/base": 40960})["sglang"]
    assert [model["name"] for model in content] == ["policy", "prm", "teacher"]
    assert [model["update_weights"] for model in content] == [True, False, False]
    groups = [group for model in content for group in model["server_groups"]]
    assert sum(group["num_gpus"] for group in groups) == layout.rollout_gpus
    assert [group.get("overrides") for group in groups] == [None, {"context_length": 8192}, None]


def test_picture_names_every_gpu():
    layout = split(**BASE | {"rollout_gpus": 3, "actor_gpus": 4, "frozen": [Frozen("prm", "/prm")]})
    lines = layout.picture()
    assert lines[0].split() == ["GPU", "0-3", "trainer"]
    assert lines[1].startswith("GPU 4-5")
    assert "trained /base, 2 engines of 1" in lines[1]
    assert lines[2].startswith("GPU 6 ")
    assert "frozen /prm" in lines[2]
    assert lines[3] == "1 GPU left idle"
