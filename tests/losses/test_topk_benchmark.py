"""What docs/performance.md says of the top-K term's memory and gradient."""

from __future__ import annotations

import pytest

from benchmarks.topk import gradients, measure

pytestmark = pytest.mark.slow


def test_fifty_ids_take_a_tenth_of_the_memory_of_a_loop_of_clones():
    one, loop = (measure(form, 50, 128, 16384) for form in ("one pass", "loop of clones"))
    assert one["loss"] == pytest.approx(loop["loss"], rel=1e-4, abs=1e-7)
    assert loop["mib"] >= 10 * one["mib"]


def test_the_difference_is_held_for_a_reason():
    apart, agreeing = gradients(1.0, steps=60), gradients(0.0, steps=60)
    for form in ("held", "held, tail"):
        assert apart[form]["cosine"] > 0.9 > apart["sampled"]["cosine"] + 0.2
        assert apart[form]["kl"] < 0.5
        assert agreeing[form]["kl"] < 1e-12
    assert apart["differentiated"]["kl"] > 1.5  # away from the teacher
    assert apart["differentiated"]["mass"] < 5 * apart["differentiated"]["target"]
    assert agreeing["differentiated"]["kl"] > 0.1  # even where there is nothing to learn
