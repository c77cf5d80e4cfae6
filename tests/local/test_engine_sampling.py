"""The draw follows the distribution it reports."""

from __future__ import annotations

import math
import random

import pytest
import torch

from openclaw_rl.local.sampling import SamplingParams, TokenScore, draw, penalise

pytestmark = pytest.mark.slow


def rows(
    logits: torch.Tensor, params: list[SamplingParams], numbers: list[float]
) -> list[TokenScore]:
    return draw(logits, params, numbers, [None] * len(params), [0] * len(params))


def ids_of(scores: list[TokenScore]) -> list[int]:
    return [score.token for score in scores]


def drawn_counts(logits: torch.Tensor, params: SamplingParams, n: int) -> torch.Tensor:
    """How often each token comes out of n independent draws (as n rows of one step)."""
    source = random.Random(7)
    drawn = rows(logits.expand(n, -1), [params] * n, [source.random() for _ in range(n)])
    return torch.bincount(torch.tensor(ids_of(drawn)), minlength=logits.shape[-1]).double()


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Statistic over degrees of freedom, in standard deviations from its mean."""
    seen = expected > 0
    assert counts[~seen].sum() == 0
    freedom = int(seen.sum()) - 1
    value = ((counts - expected)[seen] ** 2 / expected[seen]).sum().item()
    return (value - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("vocab", [7, 256, 300, 1000])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_chi_square_of_the_plain_draw(vocab, temperature):
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(vocab))
    n = 20000
    counts = drawn_counts(logits, SamplingParams(temperature=temperature), n)
    expected = (logits[0].double() / temperature).softmax(-1) * n
    assert chi_square(counts, expected) < 4


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.6, temperature=1.3),
        SamplingParams(min_p=0.2),
        SamplingParams(top_k=40, top_p=0.8, min_p=0.05, temperature=0.8),
        SamplingParams(top_p=0.999),
    ],
)
def test_chi_square_of_the_cut_draw(params):
    logits = torch.randn(1, 900, generator=torch.Generator().manual_seed(3)) * 2
    n = 20000
    probs, order = (logits[0].double() / params.temperature).softmax(-1).sort(descending=True)
    keep = (probs.cumsum(-1) - probs) <= params.top_p
    if params.top_k > 0:
        keep[params.top_k :] = False
    keep &= probs >= params.min_p * probs[0]
    assert 1 < keep.sum() < 900
    expected = torch.zeros(900, dtype=torch.double)
    expected[order] = torch.where(keep, probs, 0.0) / probs[keep].sum() * n
    # Cells of the tail are tiny; together they behave.
    counts = drawn_counts(logits, params, n)
    assert counts[expected == 0].sum() == 0
    big = expected > 5
    if not bool((~big & (expected > 0)).any()):
        assert chi_square(counts, expected) < 4
        return
    both = [torch.cat([x[big], x[~big & (expected > 0)].sum()[None]]) for x in (counts, expected)]
    assert chi_square(both[0], both[1]) < 4


def test_a_cut_beyond_the_shortlist_is_exact():
    logits = torch.zeros(1, 2000)  # uniform: top_p 0.5 keeps about 1000 tokens
    counts = drawn_counts(logits, SamplingParams(top_p=0.5), 5000)
    assert 950 < int((counts > 0).sum()) <= 1001


def test_logprobs_are_of_the_scaled_distribution_before_the_cut():
    logits = torch.randn(4, 700, generator=torch.Generator().manual_seed(5)) * 3
    params = [
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0, top_k=3),
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=1),
    ]
    got = rows(logits, params, [0.1, 0.5, 0.9, 0.9])
    scaled = logits / torch.tensor([0.5, 2.0, 1.0, 1.0])[:, None]
    want = scaled.double().log_softmax(-1).gather(-1, torch.tensor(ids_of(got))[:, None])[:, 0]
    assert [score.logprob for score in got] == pytest.approx(want.tolist(), abs=1e-5)
    assert ids_of(got)[2:] == logits[2:].argmax(-1).tolist()


def test_extreme_numbers_never_pick_what_has_no_weight():
    logits = torch.full((3, 600), -math.inf)
    logits[:, 255:258] = 0.0
    almost_one = math.nextafter(1.0, 0.0)
    for params in (SamplingParams(), SamplingParams(top_p=0.99)):
        ids = ids_of(rows(logits, [params] * 3, [0.0, almost_one, 0.5]))
        assert ids == [255, 257, 256]


def test_the_layout_and_type_of_the_logits_do_not_matter():
    logits = torch.randn(5, 513).bfloat16()
    params = [SamplingParams(temperature=0.9)] * 5
    numbers = [0.1, 0.3, 0.5, 0.7, 0.9]
    plain = rows(logits, params, numbers)
    turned = rows(logits.t().contiguous().t(), params, numbers)
    assert ids_of(plain) == ids_of(turned)


def test_penalties():
    row = torch.tensor([2.0, -2.0, 1.0])
    counts = torch.tensor([2.0, 1.0, 0.0])
    penalise(
        row,
        counts,
        SamplingParams(frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=2.0),
    )
    assert row.tolist() == [2.0 / 2 - 1.0 - 0.25, -2.0 * 2 - 0.5 - 0.25, 1.0]
