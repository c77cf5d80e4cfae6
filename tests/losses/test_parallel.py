"""Loss and gradients are the same under every kind of parallelism, over real gloo processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from tests.losses.parallel import (
    CASES,
    MICRO_BATCHES,
    SAMPLES,
    Shape,
    alone,
    gradient,
    rank_main,
    settings,
)
from tests.losses.slime_dir import SLIME_DIR, needs_slime

SHAPES = [
    Shape(),
    Shape(tp=2),
    Shape(cp=2),
    Shape(tp=2, cp=2),
    Shape(cp=2, allgather=True),
    Shape(tp=2, cp=2, allgather=True),
]
MORE = [Shape(dp=2), Shape(dp=2, cp=2), Shape(tp=2, pp=2)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equal_loss_and_gradients(shape, tmp_path):
    check(shape, tmp_path, slime_dir="")


@needs_slime
@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES + MORE, ids=str)
def test_equal_loss_and_gradients_through_real_slime(shape, tmp_path):
    check(shape, tmp_path, slime_dir=SLIME_DIR)


def check(shape: Shape, folder: Path, slime_dir: str) -> None:
    mp.spawn(rank_main, args=(shape, str(folder), slime_dir), nprocs=shape.world)
    ranks = [torch.load(folder / f"rank{r}.pt") for r in shape.last_stage]
    copy = shape.tp * shape.cp  # ranks that hold the micro-batch once; data parallel ones repeat it
    number = 0
    for name, changes in CASES:
        args = settings(changes)
        for which in MICRO_BATCHES:
            loss, metrics, grad = alone(name, args, which)
            totals = [sum(SAMPLES[i]) for i in which]
            for first in range(0, len(ranks), copy):
                results = [rank[number] for rank in ranks[first : first + copy]]
                # tensor parallel ranks compute the same loss, context parallel ones a part each
                parts = results[:: shape.tp]
                close(sum(r[0] for r in parts), loss)
                for key, value in metrics.items():
                    close(sum(r[1][key] for r in parts), value)
                for r, result in enumerate(results):
                    close(result[0], parts[r // shape.tp][0])
                close(gradient([r[2] for r in results], totals, shape), grad)
            assert grad.abs().max() > 1e-3
            number += 1


def close(got, expected):
    torch.testing.assert_close(torch.as_tensor(got), expected, rtol=1e-5, atol=1e-6)
