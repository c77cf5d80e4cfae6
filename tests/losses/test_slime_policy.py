"""`grpo_loss` is slime's `policy_loss`: beside a plain rendering of it, and beside slime itself."""

from __future__ import annotations

import itertools
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from openclaw_rl.losses import grpo_loss
from tests.losses.parallel import import_slime, pick, samples, settings
from tests.losses.slime_dir import SLIME_DIR, needs_slime

CASES: list[dict[str, Any]] = [
    {},
    {"rollout_temperature": 0.6, "entropy_coef": 0.05},
    {"eps_clip": 0.1, "eps_clip_high": 0.4, "eps_clip_c": 1.3},
    {"use_kl_loss": True, "kl_loss_type": "k1"},
    {"use_kl_loss": True, "kl_loss_type": "k2"},
    {"use_kl_loss": True, "kl_loss_type": "k3", "entropy_coef": 0.01},
    {"use_kl_loss": True, "kl_loss_type": "low_var_kl"},
    {"use_rollout_logprobs": True, "calculate_per_token_loss": True},
    {"without": "log_probs"},
]


def inputs(case: dict[str, Any]) -> tuple[Namespace, dict[str, Any], Tensor]:
    args = settings(
        {"w_rl": 1.0, "allgather_cp": False, "use_opsm": False, "get_mismatch_metrics": False,
         "use_tis": False, "advantage_estimator": "grpo"} | case
    )  # fmt: skip
    batch, logits = samples(seed=5)
    batch = {key: values for key, values in batch.items() if key not in ("values", "teacher")}
    batch.pop(case.get("without", ""), None)
    return args, batch, logits[None].requires_grad_()


def reducer(args: Namespace, batch: dict[str, Any]) -> Any:
    def reduce(values: Tensor) -> Tensor:
        parts = values.split(batch["response_lengths"])
        masked = [(v * m).sum() for v, m in zip(parts, batch["loss_masks"], strict=True)]
        denominators = batch["rollout_mask_sums"]
        if args.calculate_per_token_loss:
            denominators = [1.0] * len(masked)
        return sum(x / d for x, d in zip(masked, denominators, strict=True))

    return reduce


def plain_policy_loss(args: Any, batch: Any, logits: Tensor, reduce: Any) -> tuple[Tensor, Any]:
    """PPO's surrogate, KL and entropy as slime's `policy_loss` puts them together."""
    rows, targets = [], []
    ends = itertools.accumulate(batch["total_lengths"])
    for end, tokens, r in zip(
        ends, batch["unconcat_tokens"], batch["response_lengths"], strict=True
    ):
        rows.append(torch.arange(end - r - 1, end - 1))
        targets.append(tokens[-r:])
    log_p = (logits[0][torch.cat(rows)] / args.rollout_temperature).log_softmax(-1)
    new = log_p.gather(1, torch.cat(targets)[:, None])[:, 0]
    key = "rollout_log_probs" if args.use_rollout_logprobs else "log_probs"
    old = torch.cat(batch[key]) if key in batch else new.detach()
    ratio, advantage = (new - old).exp(), torch.cat(batch["advantages"])
    bounded = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high)
    pg = torch.maximum(-ratio * advantage, -bounded * advantage)
    if args.eps_clip_c is not None:
        dual = torch.minimum(pg, -args.eps_clip_c * advantage)
        pg = torch.where(advantage < 0, dual, pg)
    entropy = reduce(-(log_p.exp() * log_p).sum(-1))
    metrics = {
        "pg_loss": reduce(pg),
        "entropy_loss": entropy,
        "pg_clipfrac": reduce((-bounded * advantage > -ratio * advantage).float()),
        "ppo_kl": reduce(old - new),
        "train_rollout_logprob_abs_diff": reduce(
            ((new if args.use_rollout_logprobs else old) - torch.cat(batch["rollout_log_probs"]))
            .abs()
        ),
    }  # fmt: skip
    loss = metrics["pg_loss"] - args.entropy_coef * entropy
    if args.use_kl_loss:
        d = new - torch.cat(batch["ref_log_probs"])
        kl = {"k1": d, "k2": d**2 / 2}.get(args.kl_loss_type, (-d).exp() - 1 + d)
        if args.kl_loss_type == "low_var_kl":
            kl = kl.clamp(-10, 10)
        metrics["kl_loss"] = reduce(kl)
        loss = loss + args.kl_loss_coef * metrics["kl_loss"]
    return loss, metrics | {"loss": loss}


def outcome(loss_fn: Any, case: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    args, batch, logits = inputs(case)
    loss, metrics = loss_fn(args, batch, logits, reducer(args, batch))
    loss.backward()
    return {name: value.detach() for name, value in metrics.items()}, logits.grad


def same(ours: tuple[dict[str, Tensor], Tensor], other: tuple[dict[str, Tensor], Tensor]) -> None:
    assert set(other[0]) <= set(ours[0])
    for name, value in other[0].items():
        torch.testing.assert_close(ours[0][name], value, rtol=0, atol=1e-6, msg=name)
    torch.testing.assert_close(ours[1], other[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_grpo_loss_is_the_plain_rendering_of_slimes_policy_loss(case):
    same(outcome(grpo_loss, case), outcome(plain_policy_loss, case))


def test_a_sample_of_one_token_too():
    args, batch, logits = inputs({})
    one = pick(batch, [1])
    loss, _ = grpo_loss(args, one, logits[:, 9:23], reducer(args, one))
    expected, _ = plain_policy_loss(args, one, logits[:, 9:23], reducer(args, one))
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)


def beside_slime(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    slime = import_slime(SLIME_DIR)
    slime.mpu.initialize_model_parallel()
    results = [(outcome(slime.policy_loss_function, c), outcome(grpo_loss, c)) for c in CASES]
    torch.save(results, Path(folder) / "results.pt")
    dist.destroy_process_group()


@needs_slime
@pytest.mark.slow
def test_grpo_loss_is_slimes_own_policy_loss(tmp_path):
    # a process of its own: with slime loaded, every loss in the process takes slime's log-probs
    mp.spawn(beside_slime, args=(str(tmp_path),), nprocs=1)
    for case, (slimes, ours) in zip(CASES, torch.load(tmp_path / "results.pt"), strict=True):
        same(ours, slimes)
        plain = outcome(plain_policy_loss, case)
        same(slimes, ({name: plain[0][name] for name in slimes[0]}, plain[1]))
        assert slimes[1].abs().max() > 1e-3
