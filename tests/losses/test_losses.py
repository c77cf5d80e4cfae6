"""Closed forms, gradient signs, masks, missing teachers, and a second rendering to agree with."""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from openclaw_rl.errors import ConfigError
from openclaw_rl.losses import combined_loss, grpo_loss, opd_loss
from openclaw_rl.losses.logprobs import get_log_probs_and_entropy
from openclaw_rl.losses.terms import approx_kl, clipped_surrogate, distillation_advantage
from tests.losses.naive import naive_loss, sample_mean

NAN = math.nan
VOCAB = 7


def make(
    shape: list[tuple[int, int]], seed: int = 0, teacher: str = "some"
) -> tuple[dict[str, Any], Tensor, list[Tensor]]:
    """A batch of samples (prompt, response lengths) in float64, with masks of both kinds."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randn(n, generator=g, dtype=torch.float64)  # noqa: E731
    totals = [p + r for p, r in shape]
    responses = [r for _, r in shape]
    logits = torch.randn(1, sum(totals), VOCAB, generator=g, dtype=torch.float64)
    batch: dict[str, Any] = {
        "unconcat_tokens": [torch.randint(VOCAB, (n,), generator=g) for n in totals],
        "total_lengths": totals,
        "response_lengths": responses,
        "advantages": [torch.sign(draw(1)).expand(r).clone() for r in responses],
        "log_probs": [-2 + 0.3 * draw(r) for r in responses],
        "ref_log_probs": [-2 + 0.3 * draw(r) for r in responses],
        "rollout_log_probs": [-2 + 0.3 * draw(r) for r in responses],
    }
    masks = [(torch.rand(r, generator=g) < 0.8).double() for r in responses]
    if teacher != "none":
        values = [-1.5 + 0.3 * draw(r) for r in responses]
        if teacher == "some":
            for v in values:
                v[torch.rand(v.numel(), generator=g) < 0.4] = NAN
        batch["teacher_log_probs"] = values
    return batch, logits.requires_grad_(), masks


def run(loss_fn, args, batch, logits, masks):
    logits.grad = None
    loss, metrics = loss_fn(args, batch, logits, sample_mean(batch["response_lengths"], masks))
    loss.backward()
    return loss.detach(), logits.grad.clone(), metrics


def one_token(advantage: float, old_shift: float = 0.0, teacher: float | None = None):
    """One prompt token, one response token; the policy's log-prob of it is log(1/VOCAB)."""
    logits = torch.zeros(1, 2, VOCAB, dtype=torch.float64, requires_grad=True)
    lp = -math.log(VOCAB)
    batch = {
        "unconcat_tokens": [torch.tensor([0, 3])],
        "total_lengths": [2],
        "response_lengths": [1],
        "advantages": [torch.tensor([advantage])],
        "log_probs": [torch.tensor([lp + old_shift], dtype=torch.float64)],
    }
    if teacher is not None:
        batch["teacher_log_probs"] = [torch.tensor([teacher], dtype=torch.float64)]
    return batch, logits, [torch.ones(1, dtype=torch.float64)]


# --- closed forms ---------------------------------------------------------------------------------


def test_on_policy_gradient_is_the_score_function():
    batch, logits, masks = one_token(advantage=1.0)
    loss, grad, _ = run(grpo_loss, Namespace(), batch, logits, masks)
    assert loss.item() == pytest.approx(-1.0)
    expected = torch.full((VOCAB,), 1 / VOCAB, dtype=torch.float64)
    expected[3] -= 1.0  # -(e_y - p)
    torch.testing.assert_close(grad[0, 0], expected)
    assert torch.equal(grad[0, 1], torch.zeros(VOCAB, dtype=torch.float64))


def test_opd_advantage_is_the_log_ratio_to_the_teacher():
    lp = -math.log(VOCAB)
    batch, logits, masks = one_token(advantage=5.0, teacher=lp + 0.7)
    loss, grad, metrics = run(opd_loss, Namespace(), batch, logits, masks)
    assert loss.item() == pytest.approx(-0.7)
    assert grad[0, 0, 3].item() == pytest.approx(-0.7 * (1 - 1 / VOCAB))
    assert metrics["opd_share"].item() == 1.0
    assert metrics["opd_advantage"].item() == pytest.approx(0.7)


def test_combined_adds_both_terms_by_their_weights():
    lp = -math.log(VOCAB)
    batch, logits, masks = one_token(advantage=-1.0, teacher=lp - 0.25)
    loss, _, _ = run(combined_loss, Namespace(w_rl=2.0, w_opd=3.0), batch, logits, masks)
    assert loss.item() == pytest.approx(2.0 + 3 * 0.25)
    default, _, _ = run(combined_loss, Namespace(), batch, logits, masks)
    assert default.item() == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("advantage", "shift", "clipped"),
    [(1.0, -0.3, True), (1.0, 0.3, False), (-1.0, 0.3, True), (-1.0, -0.3, False)],
)
def test_clip_takes_the_gradient_only_on_the_far_side(advantage, shift, clipped):
    # log rho = -shift: rho is 1.35 for shift -0.3 and 0.74 for 0.3
    batch, logits, masks = one_token(advantage, old_shift=shift)
    loss, grad, metrics = run(grpo_loss, Namespace(), batch, logits, masks)
    bound = 1.28 if advantage > 0 else 0.8
    assert loss.item() == pytest.approx(-advantage * (bound if clipped else math.exp(-shift)))
    assert (grad.abs().max().item() == 0) is clipped
    assert metrics["pg_clipfrac"].item() == float(clipped)
    assert metrics["ppo_kl"].item() == pytest.approx(shift)


def test_opd_clip_bounds_the_distillation_term_only():
    batch, logits, masks = one_token(advantage=1.0, teacher=-math.log(VOCAB) - 9.0)
    loss, _, _ = run(combined_loss, Namespace(opd_clip=2.0), batch, logits, masks)
    assert loss.item() == pytest.approx(1.0)


def test_kl_estimators_match_their_formulas():
    lp, ref = torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -2.5])
    d = lp - ref
    torch.testing.assert_close(approx_kl(lp, ref, "k1"), d)
    torch.testing.assert_close(approx_kl(lp, ref, "k2"), d**2 / 2)
    torch.testing.assert_close(approx_kl(lp, ref, "k3"), (-d).exp() - 1 + d)
    far = approx_kl(torch.tensor([-30.0]), torch.tensor([0.0]), "low_var_kl")
    assert far.item() == 10
    with pytest.raises(ValueError, match="k4"):
        approx_kl(lp, ref, "k4")


def test_kl_pulls_towards_the_reference():
    batch, logits, masks = one_token(advantage=0.0)
    batch["ref_log_probs"] = [torch.tensor([-math.log(VOCAB) + 1.0])]
    args = Namespace(use_kl_loss=True, kl_loss_coef=0.5)
    loss, grad, metrics = run(grpo_loss, args, batch, logits, masks)
    assert loss.item() == pytest.approx(0.5 * (math.e - 2))
    assert metrics["kl_loss"].item() == pytest.approx(math.e - 2)
    assert grad[0, 0, 3].item() < 0  # descending raises the token the reference prefers


def test_dual_clip_bounds_a_punished_runaway():
    log_ratio = torch.tensor([3.0])
    loss, _ = clipped_surrogate(log_ratio, torch.tensor([-1.0]), 0.2, 0.28, 3.0)
    assert loss.item() == 3.0
    with pytest.raises(ValueError, match="greater than 1"):
        clipped_surrogate(log_ratio, torch.tensor([-1.0]), 0.2, 0.28, 0.5)


# --- gradient signs -------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_fn", [grpo_loss, combined_loss])
@pytest.mark.parametrize("reward", [1.0, -1.0])
def test_descending_raises_rewarded_and_lowers_punished_replies(loss_fn, reward):
    batch, logits, masks = make([(3, 5), (2, 4)], teacher="none")
    batch["advantages"] = [torch.full((r,), reward) for r in batch["response_lengths"]]
    del batch["log_probs"]
    masks = [torch.ones_like(m) for m in masks]
    _, grad, _ = run(loss_fn, Namespace(), batch, logits, masks)
    before, after = (_mean_log_prob(x, batch) for x in (logits, logits - 0.1 * grad))
    assert (after - before) * reward > 0


@pytest.mark.parametrize("loss_fn", [opd_loss, combined_loss])
@pytest.mark.parametrize("gap", [1.0, -1.0])
def test_descending_moves_towards_the_teacher(loss_fn, gap):
    batch, logits, _ = make([(3, 5)], teacher="none")
    batch["advantages"] = [torch.zeros(5)]
    del batch["log_probs"]
    current = _log_probs(logits, batch)
    batch["teacher_log_probs"] = [x.detach() + gap for x in current]
    _, grad, _ = run(loss_fn, Namespace(), batch, logits, [torch.ones(5)])
    assert (_mean_log_prob(logits - 0.1 * grad, batch) - _mean_log_prob(logits, batch)) * gap > 0


def _log_probs(logits, batch):
    keys = ("unconcat_tokens", "total_lengths", "response_lengths")
    _, out = get_log_probs_and_entropy(logits, args=Namespace(), **{k: batch[k] for k in keys})
    return out["log_probs"]


def _mean_log_prob(logits, batch) -> float:
    return torch.cat(_log_probs(logits.detach(), batch)).mean().item()


# --- teacher there and not there ------------------------------------------------------------------


@pytest.mark.parametrize("absent", ["no key", "none", "list of none", "all nan", "floats"])
def test_case_31_no_teacher_is_an_exactly_zero_term(absent):
    batch, logits, masks = make([(3, 6), (2, 3)], teacher="none")
    loss_rl, grad_rl, _ = run(grpo_loss, Namespace(), batch, logits, masks)
    if absent == "none":
        batch["teacher_log_probs"] = None
    elif absent == "list of none":
        batch["teacher_log_probs"] = [None, None]
    elif absent == "all nan":
        batch["teacher_log_probs"] = [torch.full((r,), NAN) for r in batch["response_lengths"]]
    elif absent == "floats":
        batch["teacher_log_probs"] = [[NAN] * 6, [NAN] * 3]
    loss, grad, metrics = run(combined_loss, Namespace(), batch, logits, masks)
    assert torch.equal(loss, loss_rl)
    assert torch.equal(grad, grad_rl)
    assert metrics["opd_advantage"].item() == 0
    assert metrics["opd_share"].item() == 0
    loss, grad, _ = run(opd_loss, Namespace(), batch, logits, masks)
    assert loss.item() == 0
    assert not grad.any()


def test_case_31_mixed_batch_touches_only_tokens_with_a_teacher():
    batch, logits, masks = make([(3, 6), (2, 3)], teacher="none")
    masks = [torch.ones_like(m) for m in masks]
    _, grad_rl, _ = run(grpo_loss, Namespace(), batch, logits, masks)
    teacher = [torch.full((r,), NAN) for r in batch["response_lengths"]]
    teacher[0][2] = -0.1
    batch["teacher_log_probs"] = teacher
    _, grad, _ = run(combined_loss, Namespace(), batch, logits, masks)
    changed = (grad != grad_rl).any(dim=-1)[0].nonzero().flatten().tolist()
    assert changed == [3 + 2 - 1]
    assert grad.isfinite().all()


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_no_value_gives_no_gap_and_no_nan(value):
    student = torch.tensor([-1.0, -2.0], requires_grad=True)
    gap, has = distillation_advantage(torch.tensor([value, -1.5]), student)
    assert gap.tolist() == [0.0, 0.5]
    assert has.tolist() == [0.0, 1.0]
    assert not gap.requires_grad


def test_a_runaway_ratio_without_a_signal_is_zero_not_nan():
    log_ratio = torch.tensor([500.0, -500.0], requires_grad=True)
    loss, _ = clipped_surrogate(log_ratio, torch.zeros(2), 0.2, 0.28)
    loss.sum().backward()
    assert loss.tolist() == [0.0, 0.0]
    assert log_ratio.grad.tolist() == [0.0, 0.0]


# --- masks and empty micro-batches ----------------------------------------------------------------


@pytest.mark.parametrize("loss_fn", [grpo_loss, opd_loss, combined_loss])
def test_masked_tokens_have_no_gradient(loss_fn):
    batch, logits, _ = make([(3, 6)], teacher="all")
    mask = torch.tensor([1.0, 0, 1, 0, 0, 1])
    args = Namespace(use_kl_loss=True, kl_loss_coef=0.1, entropy_coef=0.01)
    _, grad, _ = run(loss_fn, args, batch, logits, [mask])
    touched = grad[0].abs().sum(dim=-1) > 0
    assert touched[2:8].tolist() == [bool(m) for m in mask]
    assert not touched[:2].any()
    assert not touched[8]


@pytest.mark.parametrize("loss_fn", [grpo_loss, opd_loss, combined_loss])
@pytest.mark.parametrize("shape", [[], [(3, 0)]])
def test_empty_micro_batch_still_reaches_the_logits(loss_fn, shape):
    batch, _, _ = make(shape)
    logits = torch.full((1, 4, VOCAB), math.inf, requires_grad=True)  # padding may hold anything
    args = Namespace(use_kl_loss=True, kl_loss_coef=0.1)
    loss, metrics = loss_fn(args, batch, logits, lambda x: sum([]))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))
    full, flogits, masks = make([(2, 3)])
    _, _, full_metrics = run(loss_fn, args, full, flogits, masks)
    assert set(metrics) == set(full_metrics)


def test_metrics_are_detached_scalars():
    batch, logits, masks = make([(2, 3), (1, 4)])
    loss, metrics = combined_loss(
        Namespace(use_kl_loss=True), batch, logits, sample_mean([3, 4], masks)
    )
    assert loss.requires_grad
    for name, value in metrics.items():
        assert value.dim() == 0, name
        assert not value.requires_grad, name
    diff = [
        (o - r).abs() for o, r in zip(batch["log_probs"], batch["rollout_log_probs"], strict=True)
    ]
    expected = sample_mean([3, 4], masks)(torch.cat(diff))
    torch.testing.assert_close(metrics["train_rollout_logprob_abs_diff"], expected)


# --- against the second rendering -----------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=3),
    seed=st.integers(0, 10_000),
    teacher=st.sampled_from(["none", "some", "all"]),
    which=st.sampled_from(["grpo", "opd", "combined"]),
    kl=st.booleans(),
    entropy=st.sampled_from([0.0, 0.05]),
    temperature=st.sampled_from([1.0, 0.6]),
    clip=st.sampled_from([None, 0.3]),
    on_policy=st.booleans(),
    chunk=st.sampled_from([-1, 1, 3]),
)
def test_equals_the_naive_rendering(
    shape, seed, teacher, which, kl, entropy, temperature, clip, on_policy, chunk
):
    batch, logits, masks = make(shape, seed, teacher)
    if on_policy:
        del batch["log_probs"]
    args = Namespace(
        w_rl=0.7, w_opd=1.3, use_kl_loss=kl, kl_loss_coef=0.2, kl_loss_type="k3",
        entropy_coef=entropy, rollout_temperature=temperature, opd_clip=clip,
        eps_clip=0.2, eps_clip_high=0.28, log_probs_chunk_size=chunk,
    )  # fmt: skip
    loss_fn = {"grpo": grpo_loss, "opd": opd_loss, "combined": combined_loss}[which]
    loss, grad, _ = run(loss_fn, args, batch, logits, masks)
    logits.grad = None
    expected = naive_loss(args, batch, logits, masks, rl=which != "opd", opd=which != "grpo")
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(grad, logits.grad, rtol=1e-9, atol=1e-12)


def test_a_teacher_that_agrees_has_no_term_at_any_temperature():
    """Engines score at temperature 1: the gap must not come from the temperature."""
    batch, logits, masks = make([(2, 4)], teacher="none")
    with torch.no_grad():
        plain = torch.log_softmax(logits[0, 1:5], -1)
        batch["teacher_log_probs"] = [plain.gather(-1, batch["unconcat_tokens"][0][2:, None])[:, 0]]
    _, grad, _ = run(opd_loss, Namespace(rollout_temperature=0.6), batch, logits, masks)
    assert grad.abs().max() < 1e-12


# --- arguments ------------------------------------------------------------------------------------


def test_rollout_logprobs_as_the_old_policy():
    batch, logits, masks = one_token(advantage=1.0, old_shift=5.0)
    batch["rollout_log_probs"] = [torch.tensor([-math.log(VOCAB) - 0.1], dtype=torch.float64)]
    loss, _, metrics = run(grpo_loss, Namespace(use_rollout_logprobs=True), batch, logits, masks)
    assert loss.item() == pytest.approx(-math.exp(0.1))
    assert metrics["train_rollout_logprob_abs_diff"].item() == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("source", "gap"), [("current", 0.5), ("old", 0.4), ("rollout", 0.3), (None, 0.5)]
)
def test_baseline_of_the_distillation_term(source, gap):
    lp = -math.log(VOCAB)
    batch, logits, masks = one_token(advantage=0.0, old_shift=0.1, teacher=lp + 0.5)
    batch["rollout_log_probs"] = [torch.tensor([lp + 0.2], dtype=torch.float64)]
    _, _, metrics = run(opd_loss, Namespace(opd_baseline=source), batch, logits, masks)
    assert metrics["opd_advantage"].item() == pytest.approx(gap)


@pytest.mark.parametrize(
    ("gap", "weight", "cut"), [(0.0, 1.0, 0.0), (math.log(1.5), 1.5, 0.0), (3.0, 2.0, 1.0)]
)
def test_truncated_weights_correct_for_an_engine_of_another_make(gap, weight, cut):
    """`gap`: how much likelier the trainer finds the token than the engine that sampled it."""
    batch, logits, masks = one_token(advantage=1.0)
    batch["rollout_log_probs"] = [batch["log_probs"][0] - gap]
    plain, plain_grad, _ = run(grpo_loss, Namespace(), batch, logits, masks)
    loss, grad, metrics = run(
        grpo_loss, Namespace(use_tis=True, tis_clip=2.0), batch, logits, masks
    )
    assert loss.item() == pytest.approx(weight * plain.item())
    torch.testing.assert_close(grad, weight * plain_grad)
    assert metrics["tis"].item() == pytest.approx(weight)
    assert metrics["tis_clipfrac"].item() == cut


@pytest.mark.parametrize(("gap", "weight", "cut"), [(-3.0, 0.5, 1.0), (0.0, 1.0, 0.0)])
def test_truncated_weights_have_a_lower_bound_where_one_is_given(gap, weight, cut):
    batch, logits, masks = one_token(advantage=1.0)
    batch["rollout_log_probs"] = [batch["log_probs"][0] - gap]
    args = Namespace(use_tis=True, tis_clip=2.0, tis_clip_low=0.5)
    _, _, metrics = run(grpo_loss, args, batch, logits, masks)
    assert (metrics["tis"].item(), metrics["tis_clipfrac"].item()) == (pytest.approx(weight), cut)


def test_truncated_weights_are_of_the_policy_before_the_step():
    """What the step itself has moved is the ratio's business, which is clipped in its own way."""
    batch, logits, masks = one_token(advantage=1.0, old_shift=0.3)
    batch["rollout_log_probs"] = [batch["log_probs"][0] - math.log(1.25)]
    _, _, metrics = run(grpo_loss, Namespace(use_tis=True), batch, logits, masks)
    assert metrics["tis"].item() == pytest.approx(1.25)


def test_tokens_that_no_engine_sampled_have_a_weight_of_one():
    batch, logits, masks = one_token(advantage=1.0)
    batch["rollout_log_probs"] = [torch.tensor([math.nan], dtype=torch.float64)]
    _, _, metrics = run(grpo_loss, Namespace(use_tis=True), batch, logits, masks)
    assert metrics["tis"].item() == 1.0


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (Namespace(use_opsm=True), "use_opsm"),
        (Namespace(use_tis=True), "use_tis"),
        (Namespace(get_mismatch_metrics=True), "get_mismatch_metrics"),
        (Namespace(custom_pg_loss_reducer_function_path="x.y"), "reducer"),
        (Namespace(use_opd=True), "use_opd"),
        (Namespace(use_unbiased_kl=True), "use_unbiased_kl"),
        (Namespace(rollout_top_p=0.9), "rollout_top_p"),
        (Namespace(advantage_estimator="gspo"), "gspo"),
        (Namespace(use_kl_loss=True), "ref_log_probs"),
        (Namespace(use_rollout_logprobs=True), "rollout_log_probs"),
        (Namespace(opd_baseline="mine"), "mine"),
    ],
)
def test_what_is_not_done_is_refused(args, word):
    batch, logits, masks = make([(2, 3)])
    del batch["ref_log_probs"], batch["rollout_log_probs"]
    with pytest.raises(ConfigError, match=word):
        combined_loss(args, batch, logits, sample_mean([3], masks))


def test_missing_advantages_are_an_error_not_a_zero():
    batch, logits, masks = make([(2, 3)])
    del batch["advantages"]
    with pytest.raises(ConfigError, match="advantages"):
        grpo_loss(Namespace(), batch, logits, sample_mean([3], masks))
    opd_loss(Namespace(), batch, logits, sample_mean([3], masks))


# --- the log-prob backend -------------------------------------------------------------------------


def test_wrong_shapes_are_refused():
    batch, logits, _ = make([(2, 3)])
    keys = {k: batch[k] for k in ("unconcat_tokens", "total_lengths", "response_lengths")}
    with pytest.raises(ValueError, match="T, V"):
        get_log_probs_and_entropy(logits[0], args=Namespace(), **keys)
    with pytest.raises(ValueError, match="positions"):
        get_log_probs_and_entropy(logits[:, :3], args=Namespace(), **keys)
    with pytest.raises(ValueError, match="prompt"):
        get_log_probs_and_entropy(logits, args=Namespace(), **keys | {"response_lengths": [5]})


def test_impossible_tokens_do_not_poison_the_entropy():
    logits = torch.tensor([[[0.0, 0.0, -math.inf], [0.0, 0.0, 0.0]]], requires_grad=True)
    _, out = get_log_probs_and_entropy(
        logits, args=Namespace(entropy_coef=0.1), unconcat_tokens=[torch.tensor([0, 1])],
        total_lengths=[2], response_lengths=[1], with_entropy=True,
    )  # fmt: skip
    assert out["entropy"][0].item() == pytest.approx(math.log(2))
    (out["log_probs"][0].sum() + out["entropy"][0].sum()).backward()
    assert logits.grad.isfinite().all()


def test_gradients_by_finite_differences():
    batch, logits, _ = make([(2, 3), (1, 2)])

    def f(x: Tensor) -> Tensor:
        _, out = get_log_probs_and_entropy(
            x, args=Namespace(entropy_coef=1.0, rollout_temperature=0.7, log_probs_chunk_size=2),
            unconcat_tokens=batch["unconcat_tokens"], total_lengths=batch["total_lengths"],
            response_lengths=batch["response_lengths"], with_entropy=True,
        )  # fmt: skip
        return torch.cat(out["log_probs"] + out["entropy"])

    assert torch.autograd.gradcheck(f, (logits,))


def test_bf16_logits_are_read_in_float32():
    batch, logits, _ = make([(2, 3)])
    low = logits.detach().bfloat16()
    keys = {k: batch[k] for k in ("unconcat_tokens", "total_lengths", "response_lengths")}
    _, a = get_log_probs_and_entropy(low, args=Namespace(), **keys)
    _, b = get_log_probs_and_entropy(low.float(), args=Namespace(), **keys)
    assert a["log_probs"][0].dtype == torch.float32
    assert torch.equal(a["log_probs"][0], b["log_probs"][0])


def test_no_second_copy_of_the_logits():
    """Forward makes chunks only; backward makes the gradient of the logits and chunks."""
    rows, vocab, chunk = 64, 512, 4
    logits = torch.randn(1, rows, vocab, requires_grad=True)
    whole = logits.numel() * 4
    keys = {
        "unconcat_tokens": [torch.randint(vocab, (rows,))],
        "total_lengths": [rows],
        "response_lengths": [rows - 1],
    }
    largest = []
    with torch.profiler.profile(profile_memory=True) as prof:
        _, out = get_log_probs_and_entropy(
            logits, args=Namespace(log_probs_chunk_size=chunk, entropy_coef=0.1),
            with_entropy=True, **keys,
        )  # fmt: skip
    largest = _largest_allocation(prof)
    assert largest <= whole // 8
    loss = out["log_probs"][0].sum() + out["entropy"][0].sum()
    with torch.profiler.profile(profile_memory=True) as prof:
        loss.backward()
    allocations = sorted(_allocations(prof), reverse=True)
    assert allocations[0] <= whole
    assert sum(a >= whole // 2 for a in allocations) <= 1


def _allocations(prof) -> list[int]:
    return [e.self_cpu_memory_usage for e in prof.events() if e.name == "[memory]"] or [
        e.self_cpu_memory_usage for e in prof.events() if e.self_cpu_memory_usage > 0
    ]


def _largest_allocation(prof) -> int:
    return max(_allocations(prof))


def test_slimes_own_backend_is_taken_inside_its_trainer(monkeypatch):
    """For the teacher's side too, at temperature 1: there engines score the whole softmax."""
    calls = []

    def backend(logits, **kwargs):
        calls.append(kwargs["args"].rollout_temperature)
        return get_log_probs_and_entropy(logits, **kwargs)

    mpu = SimpleNamespace(model_parallel_is_initialized=lambda: True)
    name = "slime.backends.megatron_utils.loss"
    module = SimpleNamespace(mpu=mpu, get_log_probs_and_entropy=backend)
    monkeypatch.setitem(sys.modules, name, module)
    batch, logits, masks = make([(2, 3)], teacher="all")
    args = Namespace(rollout_temperature=0.8)
    run(opd_loss, args, batch, logits, masks)
    assert (calls, args.rollout_temperature) == ([0.8, 1.0], 0.8)
    mpu.model_parallel_is_initialized = lambda: False
    run(opd_loss, args, batch, logits, masks)
    assert len(calls) == 2


def test_the_choice_of_baseline_rests_on_a_measurement():
    """README.md: the engine's log-probs turn the distillation gradient, the current ones do not."""
    from benchmarks.opd_baseline import measure

    first = {name: row.tolist() for name, row in measure(noise=0.5, progress=0.0).items()}
    cosine, size, lost = first["ratio recomputed, gap to current"]
    assert (round(cosine, 6), round(size, 6), lost) == (1.0, 1.0, 0.0)
    assert first["ratio recomputed, gap to engine"][0] < 0.9
    assert first["ratio engine, gap to engine"][0] < 0.8
    assert first["ratio engine, gap to engine"][2] > 0.4  # the clip took the teacher's side
