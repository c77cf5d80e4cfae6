"""The top-K distillation term: closed forms, gradients, the tail, missing teachers, its place."""

from __future__ import annotations

import math
from argparse import Namespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openclaw_rl.errors import ConfigError
from openclaw_rl.losses import combined_loss, grpo_loss, opd_loss, topk_opd_loss
from openclaw_rl.losses.logprobs import log_probs_at
from openclaw_rl.losses.signals import TokenSignals
from openclaw_rl.losses.terms import subset_reverse_kl
from tests.losses.naive import naive_loss, sample_mean
from tests.losses.test_losses import VOCAB, make, run

pytestmark = pytest.mark.slow

NAN = math.nan


def with_topk(shape, seed=0, k=3, share=0.6, weights=False):
    """A batch whose tokens have K distinct ids and teacher log-probs, each token with `share`."""
    batch, logits, masks = make(shape, seed, teacher="none")
    g = torch.Generator().manual_seed(seed + 1)
    values = []
    for tokens in batch["response_lengths"]:
        ids = torch.stack([torch.randperm(VOCAB, generator=g)[:k] for _ in range(tokens)])
        teacher = torch.randn(tokens, VOCAB, generator=g, dtype=torch.float64).log_softmax(-1)
        teacher = teacher.gather(1, ids)
        ids[:, -1:][torch.rand(tokens, 1, generator=g) < 0.3] = -1
        teacher[ids < 0] = NAN
        none = torch.rand(tokens, generator=g) >= share
        ids[none], teacher[none] = -1, NAN
        draw = torch.rand(tokens, generator=g, dtype=torch.float64)
        weight = 0.5 + draw if weights else torch.ones_like(draw)
        values.append(TokenSignals(weight, None, ids, teacher))
    batch["values"] = values
    return batch, logits, masks


def random_pair(n=4, k=VOCAB, seed=0):
    g = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(n, VOCAB, generator=g, dtype=torch.float64)  # noqa: E731
    return draw().requires_grad_(), draw().log_softmax(-1)[:, :k]


# --- closed forms ---------------------------------------------------------------------------------


def test_over_the_whole_vocabulary_it_is_the_reverse_kl_and_its_gradient():
    logits, teacher = random_pair()
    kl, has, mass = subset_reverse_kl(logits.log_softmax(-1), teacher)
    log_p = logits.log_softmax(-1)
    exact = (log_p.exp() * (log_p - teacher)).sum(-1)
    torch.testing.assert_close(kl, exact)
    (ours,) = torch.autograd.grad(kl.sum(), logits, retain_graph=True)
    (true,) = torch.autograd.grad(exact.sum(), logits)
    torch.testing.assert_close(ours, true)
    assert has.tolist() == [1.0] * 4
    torch.testing.assert_close(mass, torch.ones(4, dtype=torch.float64))


def test_with_the_tail_it_is_the_reverse_kl_of_the_lumped_distributions():
    logits, teacher = random_pair(k=3)
    kl, _, _ = subset_reverse_kl(logits.log_softmax(-1)[:, :3], teacher, tail=True)
    p, q = logits.softmax(-1)[:, :3], teacher.exp()
    lump = lambda x: torch.cat([x, 1 - x.sum(-1, keepdim=True)], dim=-1)  # noqa: E731
    exact = (lump(p) * (lump(p) / lump(q)).log()).sum(-1)
    torch.testing.assert_close(kl, exact)
    (ours,) = torch.autograd.grad(kl.sum(), logits, retain_graph=True)
    (true,) = torch.autograd.grad(exact.sum(), logits)
    torch.testing.assert_close(ours, true)


def test_without_the_tail_its_gradient_is_the_subsets_part_of_the_exact_one():
    logits, teacher = random_pair()
    kl, _, _ = subset_reverse_kl(logits.log_softmax(-1)[:, :3], teacher[:, :3])
    (ours,) = torch.autograd.grad(kl.sum(), logits, retain_graph=True)
    log_p = logits.log_softmax(-1)
    gap = (teacher - log_p).detach()
    score = torch.eye(VOCAB, dtype=torch.float64) - log_p.exp()[:, None, :]  # d log p_k / dz
    expected = -(log_p.exp()[:, :3, None] * gap[:, :3, None] * score[:, :3]).sum(1)
    torch.testing.assert_close(ours, expected)


def test_truncated_weights_leave_the_term_over_candidates_alone():
    """It is an expectation over candidates, not an estimate from the sampled token."""
    batch, logits, masks = with_topk([(2, 4)])
    batch["rollout_log_probs"] = [old - 1.0 for old in batch["log_probs"]]
    batch["advantages"] = [torch.zeros_like(a) for a in batch["advantages"]]
    plain, grad, _ = run(combined_loss, Namespace(opd_top_k=3), batch, logits, masks)
    args = Namespace(opd_top_k=3, use_tis=True, tis_clip=2.0)
    loss, weighed, metrics = run(combined_loss, args, batch, logits, masks)
    assert metrics["tis"].item() > 1
    assert loss.item() == pytest.approx(plain.item())
    torch.testing.assert_close(weighed, grad)


@pytest.mark.parametrize("tail", [False, True])
def test_the_clip_bounds_the_difference_of_each_id(tail):
    student = torch.tensor([[0.5, 0.25, 0.125]], dtype=torch.float64).log()
    teacher = torch.tensor([[0.5, 0.25 * math.e**5, 0.125 * math.e**-5]], dtype=torch.float64)
    teacher = (teacher / teacher.sum() * 0.9).log()
    kl, _, _ = subset_reverse_kl(student, teacher, clip=1.0, tail=tail)
    p = [0.5, 0.25, 0.125] + ([0.125] if tail else [])
    q = [*teacher.exp()[0].tolist()] + ([0.1] if tail else [])
    bounded = [max(-1.0, min(1.0, math.log(b / a))) for a, b in zip(p, q, strict=True)]
    expected = -sum(a * d for a, d in zip(p, bounded, strict=True))
    assert kl.item() == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_tail_is_finite_where_nothing_is_left_of_it(dtype):
    """Rounding can make the K probabilities sum to 1 or more, on either side."""
    logits = torch.tensor([[30.0, 20.0, -30.0, -30.0]], dtype=dtype, requires_grad=True)
    teacher = torch.tensor([[0.7, 0.3000001]], dtype=dtype).log()
    kl, _, mass = subset_reverse_kl(logits.log_softmax(-1)[:, :2], teacher, tail=True)
    kl.sum().backward()
    assert mass.item() == pytest.approx(1.0)
    assert kl.isfinite().all()
    assert logits.grad.isfinite().all()
    bare, _, _ = subset_reverse_kl(logits.detach().log_softmax(-1)[:, :2], teacher)
    assert kl.item() == pytest.approx(bare.item(), abs=1e-5)


def test_an_id_that_the_policy_cannot_give_is_no_nan():
    logits = torch.tensor([[0.0, 1.0, -math.inf]], dtype=torch.float64, requires_grad=True)
    student = log_probs_at(logits, torch.tensor([0]), torch.tensor([[0, 2]]))
    kl, has, _ = subset_reverse_kl(student, torch.tensor([[-1.0, -1.0]]).double(), tail=True)
    kl.sum().backward()
    assert has.tolist() == [1.0]
    assert kl.isfinite().all()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("tail", [False, True])
def test_finite_differences_of_the_loss_the_gradient_belongs_to(tail):
    """The gradient is that of sum_k p_k d_k with d held, which central differences must give."""
    logits, teacher = random_pair(n=2, k=3)
    with torch.no_grad():
        held = (teacher - logits.log_softmax(-1)[:, :3]).clamp(-1, 1)
        rest = (1 - teacher.exp().sum(-1)).log() - (1 - logits.softmax(-1)[:, :3].sum(-1)).log()
        rest = rest.clamp(-1, 1)

    def value(x):
        p = x.softmax(-1)[:, :3]
        total = -(p * held).sum()
        return total - ((1 - p.sum(-1)) * rest).sum() if tail else total

    rows = torch.arange(2)
    ids = torch.arange(3).expand(2, 3)
    kl, _, _ = subset_reverse_kl(log_probs_at(logits, rows, ids), teacher, 1.0, tail)
    (ours,) = torch.autograd.grad(kl.sum(), logits)
    step = 1e-6
    for i in range(logits.numel()):
        d = torch.zeros_like(logits)
        d.view(-1)[i] = step
        slope = (value(logits.detach() + d) - value(logits.detach() - d)) / (2 * step)
        assert ours.view(-1)[i].item() == pytest.approx(slope.item(), abs=1e-8)


def test_log_probs_at_by_finite_differences():
    logits = torch.randn(5, VOCAB, dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([4, 0, 2])
    ids = torch.tensor([[1, 1, -1], [-1, -1, -1], [6, 0, 3]])
    assert torch.autograd.gradcheck(lambda x: log_probs_at(x, rows, ids, chunk=2), (logits,))
    found = log_probs_at(logits, rows, ids)
    expected = logits.log_softmax(-1)[rows].gather(1, ids.clamp_min(0))
    torch.testing.assert_close(found, torch.where(ids >= 0, expected, torch.zeros_like(expected)))


# --- direction ------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_fn", [topk_opd_loss, combined_loss])
@pytest.mark.parametrize("tail", [False, True])
def test_descending_nears_the_teacher(loss_fn, tail):
    batch, logits, masks = with_topk([(3, 6), (2, 4)], share=1.1)
    batch["advantages"] = [torch.zeros(r) for r in batch["response_lengths"]]
    masks = [torch.ones_like(m) for m in masks]
    args = Namespace(opd_top_k=3, opd_tail=tail)
    _, grad, before = run(loss_fn, args, batch, logits, masks)
    moved = (logits.detach() - 0.1 * grad).requires_grad_()
    _, _, after = run(loss_fn, args, batch, moved, masks)
    if tail:
        assert after["opd_kl"] < before["opd_kl"]
    assert _distance(moved, batch) < _distance(logits, batch)


def _distance(logits, batch) -> float:
    """Mean |log pi_T - log pi| over the ids, weighted by the policy's probability."""
    total, row = 0.0, 0
    for signals, length, response in zip(
        batch["values"], batch["total_lengths"], batch["response_lengths"], strict=True
    ):
        rows = torch.arange(row + length - response - 1, row + length - 1)
        log_p = logits.detach()[0].log_softmax(-1)[rows].gather(1, signals.topk_ids.clamp_min(0))
        gap = (signals.topk_log_probs - log_p).abs() * log_p.exp()
        total += gap.nan_to_num(0.0).sum().item()
        row += length
    return total


# --- teacher there and not there ------------------------------------------------------------------


@pytest.mark.parametrize("absent", ["no signals", "none", "all nan", "no ids"])
@pytest.mark.parametrize("tail", [False, True])
def test_case_31_no_topk_is_an_exactly_zero_term(absent, tail):
    batch, logits, masks = make([(3, 6), (2, 3)], teacher="none")
    loss_rl, grad_rl, _ = run(grpo_loss, Namespace(), batch, logits, masks)
    if absent != "no signals":
        batch["values"] = []
        for r in batch["response_lengths"]:
            ids, values = torch.zeros(r, 2).long(), torch.full((r, 2), NAN).double()
            if absent == "no ids":
                ids = ids - 1
            topk = () if absent == "none" else (ids, values)
            batch["values"].append(TokenSignals(torch.ones(r).double(), None, *topk))
    args = Namespace(opd_top_k=2, opd_tail=tail)
    loss, grad, metrics = run(combined_loss, args, batch, logits, masks)
    assert torch.equal(loss, loss_rl)
    assert torch.equal(grad, grad_rl)
    assert metrics["opd_share"].item() == metrics["opd_kl"].item() == 0
    loss, grad, _ = run(topk_opd_loss, args, batch, logits, masks)
    assert loss.item() == 0
    assert not grad.any()


def test_case_31_only_tokens_with_topk_are_touched():
    batch, logits, _ = with_topk([(3, 6), (2, 3)], seed=3)
    masks = [torch.ones(r).double() for r in batch["response_lengths"]]
    _, grad_rl, _ = run(grpo_loss, Namespace(), batch, logits, masks)
    _, grad, metrics = run(combined_loss, Namespace(opd_top_k=3), batch, logits, masks)
    changed = (grad != grad_rl).any(dim=-1)[0]
    has = [(s.topk_ids >= 0).any(-1) for s in batch["values"]]
    expected = torch.zeros(14, dtype=torch.bool)
    expected[2:8], expected[10:13] = has[0], has[1]
    assert changed.tolist() == expected.tolist()
    assert 0 < sum(h.sum() for h in has) < 9
    shares = [h.double().mean() for h in has]
    assert metrics["opd_share"].item() == pytest.approx(sum(shares).item())


def test_samples_with_and_without_and_of_another_k_share_a_micro_batch():
    batch, logits, masks = with_topk([(3, 4), (2, 3), (1, 2)], share=1.1)
    _, two, none = batch["values"]
    batch["values"][1] = TokenSignals(
        two.weights, None, two.topk_ids[:, :2], two.topk_log_probs[:, :2]
    )
    batch["values"][2] = TokenSignals(none.weights)
    _, grad, _ = run(topk_opd_loss, Namespace(), batch, logits, masks)
    separate = torch.zeros_like(grad)
    start = 0
    for i, total in enumerate(batch["total_lengths"]):
        one = {key: values[i : i + 1] for key, values in batch.items()}
        part = logits.detach()[:, start : start + total].requires_grad_()
        _, separate[:, start : start + total], _ = run(
            topk_opd_loss, Namespace(), one, part, masks[i : i + 1]
        )
        start += total
    torch.testing.assert_close(grad, separate)
    assert not grad[:, 12:].any()


# --- against the second rendering -----------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=3),
    seed=st.integers(0, 10_000),
    rl=st.booleans(),
    kl=st.booleans(),
    entropy=st.sampled_from([0.0, 0.05]),
    temperature=st.sampled_from([1.0, 0.6]),
    clip=st.sampled_from([None, 0.3]),
    tail=st.booleans(),
    weights=st.booleans(),
    chunk=st.sampled_from([-1, 2]),
)
def test_equals_the_naive_rendering(
    shape, seed, rl, kl, entropy, temperature, clip, tail, weights, chunk
):
    batch, logits, masks = with_topk(shape, seed, weights=weights)
    args = Namespace(
        w_rl=0.7, w_opd=1.3, use_kl_loss=kl, kl_loss_coef=0.2, kl_loss_type="k3",
        entropy_coef=entropy, rollout_temperature=temperature, opd_clip=clip, opd_tail=tail,
        opd_top_k=3, log_probs_chunk_size=chunk,
    )  # fmt: skip
    loss, grad, _ = run(combined_loss if rl else topk_opd_loss, args, batch, logits, masks)
    logits.grad = None
    expected = naive_loss(args, batch, logits, masks, rl=rl, opd=True)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(grad, logits.grad, rtol=1e-9, atol=1e-12)


# --- finite differences ---------------------------------------------------------------------------

WHOLE = [
    ("grpo", grpo_loss, {}),
    ("opd", opd_loss, {"opd_baseline": "old"}),
    ("combined", combined_loss, {"opd_baseline": "old"}),
    ("topk", topk_opd_loss, {"opd_tail": True}),
    ("combined topk", combined_loss, {"opd_tail": True, "opd_top_k": 3}),
]


@pytest.mark.parametrize(("loss_fn", "changes"), [w[1:] for w in WHOLE], ids=[w[0] for w in WHOLE])
def test_every_loss_by_finite_differences(loss_fn, changes):
    """With what is held constant (`opd_baseline` old), or where holding changes nothing (tail)."""
    batch, logits, masks = with_topk([(2, 4), (1, 3)], seed=7, weights=True)
    teacher = [torch.tensor([-1.0, NAN, -2.0, -0.5]), torch.tensor([NAN, -3.0, -1.5])]
    batch["values"] = [
        TokenSignals(s.weights, t, s.topk_ids, s.topk_log_probs)
        for s, t in zip(batch["values"], teacher, strict=True)
    ]
    args = Namespace(
        use_kl_loss=True, kl_loss_coef=0.3, entropy_coef=0.1, rollout_temperature=0.7, w_opd=0.8,
        **changes,
    )  # fmt: skip
    reduce = sample_mean([4, 3], masks)
    assert torch.autograd.gradcheck(lambda x: loss_fn(args, batch, x, reduce)[0], (logits,))


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["grpo", "opd", "topk", "combined", "combined topk"])
def test_a_weight_multiplies_every_term_and_metric_of_its_token(which):
    batch, logits, _ = with_topk([(3, 5)])
    teacher = torch.tensor([NAN, -1.0, -2.0, NAN, -0.5]).double()
    loss_fn = {"grpo": grpo_loss, "opd": opd_loss, "topk": topk_opd_loss}.get(which, combined_loss)
    args = Namespace(
        use_kl_loss=True, kl_loss_coef=0.3, entropy_coef=0.1,
        opd_top_k=3 if "topk" in which else 0 if "combined" in which else None,
    )  # fmt: skip
    topk = batch["values"][0].topk_ids, batch["values"][0].topk_log_probs

    def once(weights, mask):
        batch["values"] = [TokenSignals(weights, teacher, *topk)]
        batch["teacher_log_probs"] = [torch.full((5,), 7.0)]  # the signals' own one is taken
        total = lambda values: (values * mask).sum()  # noqa: E731
        logits.grad = None
        loss, metrics = loss_fn(args, batch, logits, total)
        loss.backward()
        return loss, logits.grad.clone(), metrics

    weights = torch.tensor([1.0, 0.25, 3.0, 0.0, 1.5]).double()
    mask = torch.tensor([1.0, 1, 0, 1, 1]).double()
    loss, grad, metrics = once(weights, mask)
    same, same_grad, same_metrics = once(torch.ones(5).double(), weights * mask)
    torch.testing.assert_close(loss, same)
    torch.testing.assert_close(grad, same_grad)
    assert set(metrics) == set(same_metrics)
    for name, value in metrics.items():
        torch.testing.assert_close(value, same_metrics[name])


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("loss_fn", [combined_loss, topk_opd_loss])
def test_turns_in_one_sample_have_the_gradient_of_separate_ones(loss_fn, per_token):
    """Weight D / n_i for the tokens of turn i, D being the sample's denominator."""
    batch, logits, _ = with_topk([(3, 9)], seed=4)
    mask = torch.tensor([1.0, 1, 0, 0, 0, 1, 1, 1, 1]).double()  # turn, next state, turn
    turns = [(0, 2), (5, 9)]
    args = Namespace(opd_top_k=3, opd_tail=True, use_kl_loss=True, kl_loss_coef=0.3)
    signals = batch["values"][0]
    batch["values"] = [_weighed(signals, _merged_weights(turns, mask, per_token))]
    denominator = 1.0 if per_token else mask.sum()
    logits.grad = None
    loss, _ = loss_fn(args, batch, logits, lambda x: (x * mask).sum() / denominator)
    loss.backward()
    merged = logits.grad.clone()

    separate = torch.zeros_like(merged)
    for start, end in turns:
        one = {key: values[:] for key, values in batch.items()}
        one["unconcat_tokens"] = [batch["unconcat_tokens"][0][: 3 + end]]
        one["total_lengths"], one["response_lengths"] = [3 + end], [end - start]
        for key in ("advantages", "log_probs", "ref_log_probs", "rollout_log_probs"):
            one[key] = [batch[key][0][start:end]]
        topk = signals.topk_ids[start:end], signals.topk_log_probs[start:end]
        one["values"] = [TokenSignals(torch.ones(end - start).double(), None, *topk)]
        logits.grad = None
        n = 1.0 if per_token else end - start
        loss_fn(args, one, logits, lambda x, n=n: x.sum() / n)[0].backward()
        separate += logits.grad
    torch.testing.assert_close(merged, separate)


def _merged_weights(turns, mask, per_token):
    weights = torch.ones_like(mask)
    for start, end in () if per_token else turns:
        weights[start:end] = mask.sum() / (end - start)
    return weights


def _weighed(s, weights):
    return TokenSignals(weights, s.teacher_log_probs, s.topk_ids, s.topk_log_probs)


# --- arguments, empty micro-batches ---------------------------------------------------------------


@pytest.mark.parametrize("shape", [[], [(3, 0)]])
def test_empty_micro_batch_still_reaches_the_logits(shape):
    args = Namespace(use_kl_loss=True, kl_loss_coef=0.1, opd_top_k=3)
    full, flogits, masks = with_topk([(2, 3)])
    _, _, full_metrics = run(topk_opd_loss, args, full, flogits, masks)
    batch, _, _ = make(shape, teacher="none")
    batch["values"] = [
        TokenSignals(torch.ones(0), None, torch.zeros(0, 3).long(), torch.zeros(0, 3))
        for _ in shape
    ]
    logits = torch.full((1, 4, VOCAB), math.inf, requires_grad=True)  # padding may hold anything
    loss, metrics = topk_opd_loss(args, batch, logits, lambda x: sum([]))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))
    assert set(metrics) == set(full_metrics)


def test_topk_needs_a_k():
    batch, logits, masks = with_topk([(2, 3)])
    with pytest.raises(ConfigError, match="opd_top_k"):
        topk_opd_loss(Namespace(opd_top_k=0), batch, logits, sample_mean([3], masks))


def test_a_batch_of_signals_and_none_is_an_error():
    batch, logits, masks = with_topk([(2, 3), (1, 2)])
    batch["values"][1] = torch.zeros(2)
    with pytest.raises(ValueError, match="1 of 2"):
        grpo_loss(Namespace(), batch, logits, sample_mean([3, 2], masks))
    batch["values"][0] = torch.zeros(3)  # a critic's values
    grpo_loss(Namespace(), batch, logits, sample_mean([3, 2], masks))


def test_signals_of_another_length_are_an_error():
    batch, logits, masks = with_topk([(2, 3)])
    batch["values"] = [TokenSignals(torch.ones(2))]
    with pytest.raises(ValueError, match="2 values for a response of 3"):
        grpo_loss(Namespace(), batch, logits, sample_mean([3], masks))
