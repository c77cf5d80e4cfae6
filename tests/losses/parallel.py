"""One rank of a run over several processes, and the single process it must agree with.

The host is the stand-in, or real slime where its folder is given.

Every rank builds the same samples from a seed, holds its part of the logits as a leaf, calls each
loss per micro-batch, and goes backward at once, so that a collective call that some rank leaves
out hangs the run instead of passing. `gradient` puts the ranks' parts together again.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from openclaw_rl import losses
from openclaw_rl.losses.signals import TokenSignals
from openclaw_rl.slime import compute_advantages
from openclaw_rl.slime.signals import SampleSignals
from tests.losses.standin import Standin, zigzag

VOCAB, K = 16, 3
# (prompt, response): at cp 2 the second leaves one rank without a single response token
SAMPLES = [(3, 6), (13, 1), (5, 4), (2, 9)]
MICRO_BATCHES = [[0, 2], [1], [3]]
_BASE: dict[str, Any] = {
    "rollout_temperature": 1.0, "entropy_coef": 0.0, "use_kl_loss": False, "kl_loss_coef": 0.2,
    "kl_loss_type": "k3", "use_unbiased_kl": False, "eps_clip": 0.2, "eps_clip_high": 0.28,
    "eps_clip_c": None, "w_rl": 0.7, "w_opd": 1.3, "opd_top_k": 0, "opd_clip": None,
    "opd_tail": False, "log_probs_chunk_size": -1, "rollout_top_p": 1.0,
    "use_rollout_logprobs": False, "calculate_per_token_loss": False,
}  # fmt: skip
CASES: list[tuple[str, dict[str, Any]]] = [
    ("grpo_loss", {"use_kl_loss": True, "entropy_coef": 0.05}),
    ("opd_loss", {"rollout_temperature": 0.7, "calculate_per_token_loss": True}),
    ("topk_opd_loss", {"opd_top_k": K, "opd_tail": True, "rollout_temperature": 0.7}),
    ("combined_loss", {"opd_clip": 0.5, "log_probs_chunk_size": 2, "use_kl_loss": True}),
    ("combined_loss", {"opd_top_k": K, "opd_clip": 0.5, "entropy_coef": 0.05,
                       "eps_clip_c": 1.5, "calculate_per_token_loss": True}),
]  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Sizes of the parallel groups. Ranks count tp first, then cp, dp and pp."""

    tp: int = 1
    cp: int = 1
    allgather: bool = False
    dp: int = 1
    pp: int = 1

    def __str__(self) -> str:
        layout = "_allgather" if self.allgather else ""
        return f"tp{self.tp}_cp{self.cp}{layout}_dp{self.dp}_pp{self.pp}"

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def last_stage(self) -> range:
        return range(self.world - self.tp * self.cp * self.dp, self.world)


def settings(changes: dict[str, Any]) -> Namespace:
    return Namespace(**(_BASE | changes))


def samples(seed: int = 0) -> tuple[dict[str, list[Any]], Tensor]:
    """A batch that is not cut, and its packed logits `[sum of lengths, V]`."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    batch: dict[str, list[Any]] = {key: [] for key in (
        "unconcat_tokens", "total_lengths", "response_lengths", "loss_masks", "rollout_mask_sums",
        "advantages", "log_probs", "ref_log_probs", "rollout_log_probs", "values",
    )}  # fmt: skip
    for number, (prompt, response) in enumerate(SAMPLES):
        ids = torch.stack([torch.randperm(VOCAB, generator=g)[:K] for _ in range(response)])
        values = draw(response, VOCAB).log_softmax(-1).gather(1, ids)
        teacher = -2.5 + 0.3 * draw(response)
        without = torch.rand(response, generator=g) < 0.4
        ids[without], values[without], teacher[without] = -1, torch.nan, torch.nan
        topk = (ids, values) if number != 2 else (None, None)  # one sample without any
        mask = (torch.rand(response, generator=g) < 0.8).float()
        mask[0] = 1.0
        new = {
            "unconcat_tokens": torch.randint(VOCAB, (prompt + response,), generator=g),
            "total_lengths": prompt + response,
            "response_lengths": response,
            "loss_masks": mask,
            "rollout_mask_sums": mask.sum() + number,  # siblings elsewhere
            "advantages": draw(1).sign().expand(response).clone(),
            "log_probs": -2.5 + 0.3 * draw(response),
            "ref_log_probs": -2.5 + 0.3 * draw(response),
            "rollout_log_probs": -2.5 + 0.3 * draw(response),
            "values": TokenSignals(torch.rand(response, generator=g) + 0.5, teacher, *topk),
        }
        for key, value in new.items():
            batch[key].append(value)
    return batch, draw(sum(batch["total_lengths"]), VOCAB)


def pick(batch: dict[str, list[Any]], which: list[int]) -> dict[str, list[Any]]:
    return {key: [values[i] for i in which] for key, values in batch.items()}


def cut(slime: Any, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Per-token tensors as slime cuts them; masks stay whole, as in slime's batches. Advantages
    and signals are cut by our own advantage hook."""
    out = {key: list(values) for key, values in batch.items()}
    for i, (total, response) in enumerate(
        zip(batch["total_lengths"], batch["response_lengths"], strict=True)
    ):
        place = slime.slice_log_prob_with_cp(torch.arange(response), total, response)
        for key in ("log_probs", "ref_log_probs", "rollout_log_probs"):
            out[key][i] = batch[key][i][place]
    signals = [
        SampleSignals(rewards, v.weights, v.teacher_log_probs, v.topk_ids, v.topk_log_probs)
        for rewards, v in zip(batch["advantages"], batch["values"], strict=True)
    ]
    rollout_data = batch | {"source_names": signals}
    compute_advantages(Namespace(), rollout_data)
    return out | {key: rollout_data[key] for key in ("advantages", "values")}


class StandinHost:
    def __init__(self, shape: Shape) -> None:
        self.slime = Standin(shape.tp, shape.cp, shape.allgather)
        for name in ("loss", "cp_utils"):
            sys.modules[f"slime.backends.megatron_utils.{name}"] = self.slime  # type: ignore[assignment]

    def loss(self, name: str, args: Namespace, batch: Any, logits: Tensor) -> tuple[Tensor, Any]:
        reduce = self.slime.reducer(batch, args.calculate_per_token_loss)
        return getattr(losses, name)(args, batch, logits, reduce)


class SlimeHost:
    """slime's own `loss_function` with our hook, its scaling for Megatron taken out again."""

    def __init__(self, shape: Shape, folder: str) -> None:
        self.slime = import_slime(folder)
        self.slime.mpu.initialize_model_parallel(
            tensor_model_parallel_size=shape.tp, pipeline_model_parallel_size=shape.pp,
            context_parallel_size=shape.cp,
        )  # fmt: skip
        self.shape = shape

    def loss(self, name: str, args: Namespace, batch: Any, logits: Tensor) -> tuple[Tensor, Any]:
        args.loss_type, args.recompute_loss_function = "custom_loss", args.eps_clip_c is not None
        args.custom_loss_function_path = f"openclaw_rl.losses.{name}"
        loss, _, log = self.slime.loss_function(args, batch, 3, 5, logits)
        scale = self.shape.cp if args.calculate_per_token_loss else (
            3 / 5 * self.shape.dp * self.shape.cp
        )  # fmt: skip
        return loss / scale, dict(zip(log["keys"], log["values"][1:], strict=True))


def import_slime(folder: str) -> Any:
    """`slime.backends.megatron_utils.loss` of the slime in `folder`, its compiled parts eager."""
    import importlib

    torch._dynamo.config.disable = True  # no compiler needed, and exact against plain torch
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module("slime.backends.megatron_utils.loss")


def rank_main(rank: int, shape: Shape, folder: str, slime_dir: str) -> None:
    """Run every case on this rank over gloo; the last stage saves losses, metrics, gradients."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=shape.world
    )
    host = SlimeHost(shape, slime_dir) if slime_dir else StandinHost(shape)
    whole, logits = samples()
    cuts = logits.split(whole["total_lengths"])
    results = []
    for name, changes in CASES if rank in shape.last_stage else ():
        args = settings(changes | {"allgather_cp": shape.allgather})
        for which in MICRO_BATCHES:
            own = cut(host.slime, pick(whole, which))
            packed = torch.cat([cuts[i] for i in which])
            leaf = local_logits(packed, own["total_lengths"], shape, rank).requires_grad_()
            loss, metrics = host.loss(name, args, own, leaf)
            loss.backward()
            results.append((loss.detach(), metrics, leaf.grad))
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


def alone(name: str, args: Namespace, which: list[int]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """The same micro-batch in one process: loss, metrics, gradient `[sum of lengths, V]`."""
    whole, logits = samples()
    batch = pick(whole, which)
    leaf = torch.cat([logits.split(whole["total_lengths"])[i] for i in which])
    leaf = leaf[None].requires_grad_()

    def reduce(values: Tensor) -> Tensor:
        parts = values.split(batch["response_lengths"])
        sums = [(v * m).sum() for v, m in zip(parts, batch["loss_masks"], strict=True)]
        if args.calculate_per_token_loss:
            return sum(sums)
        return sum(s / d for s, d in zip(sums, batch["rollout_mask_sums"], strict=True))

    loss, metrics = getattr(losses, name)(args, batch, leaf, reduce)
    loss.backward()
    return loss.detach(), metrics, leaf.grad[0]


def layout(totals: list[int], shape: Shape, rank: int) -> list[int | None]:
    """Which packed position each local row of a rank holds, None for padding."""
    cp_rank = rank // shape.tp % shape.cp
    found: list[int | None] = []
    if shape.allgather:
        size = -(-sum(totals) // shape.cp)
        start = cp_rank * size
        return [p if p < sum(totals) else None for p in range(start, start + size)]
    begin = 0
    for total in totals:
        held = zigzag(total, shape.cp, cp_rank)
        found += [begin + p if p < total else None for p in held]
        begin += total
    return found


def _columns(shape: Shape, rank: int) -> slice:
    width = VOCAB // shape.tp
    return slice(rank % shape.tp * width, (rank % shape.tp + 1) * width)


def local_logits(logits: Tensor, totals: list[int], shape: Shape, rank: int) -> Tensor:
    """A rank's `[1, T, V / tp]` of the packed logits `[sum totals, V]`; padding is 0."""
    padding = torch.zeros(VOCAB)
    rows = [padding if p is None else logits[p] for p in layout(totals, shape, rank)]
    return torch.stack(rows)[None, :, _columns(shape, rank)].contiguous()


def gradient(parts: list[Tensor], totals: list[int], shape: Shape) -> Tensor:
    """`[sum totals, V]` from the ranks' `[1, T, V / tp]`; padding must have no gradient."""
    whole = torch.zeros(sum(totals), VOCAB)
    for rank, part in enumerate(parts):
        for row, place in zip(part[0], layout(totals, shape, rank), strict=True):
            if place is None:
                assert not row.any()
            else:
                whole[place, _columns(shape, rank)] += row
    return whole
