"""A stand-in for slime's loss module under tensor and context parallelism.

Written from what slime documents and does, not from its text: positions are worked out one by one,
the whole vocabulary is gathered before the softmax. What the losses use of slime is here under
slime's names; `tests/losses/test_real_slime.py` runs the same checks against slime itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def zigzag(total: int, cp: int, cp_rank: int) -> list[int]:
    """Positions of a sample that a rank holds: chunks r and 2 cp - 1 - r; the last ones pad."""
    if cp == 1:
        return list(range(total))
    size = -(-total // (2 * cp))
    chunks = (cp_rank, 2 * cp - 1 - cp_rank)
    return [c * size + i for c in chunks for i in range(size)]


class Mpu:
    """Rank = cp_rank * tp + tp_rank, as Megatron orders them."""

    def __init__(self, tp: int, cp: int) -> None:
        rank = dist.get_rank()
        self.tp, self.cp = tp, cp
        self.tp_rank, self.cp_rank = rank % tp, rank // tp
        tp_groups = [dist.new_group([c * tp + t for t in range(tp)]) for c in range(cp)]
        cp_groups = [dist.new_group([c * tp + t for c in range(cp)]) for t in range(tp)]
        self.tp_group, self.cp_group = tp_groups[self.cp_rank], cp_groups[self.tp_rank]

    def model_parallel_is_initialized(self) -> bool:
        return True

    def get_tensor_model_parallel_group(self) -> Any:
        return self.tp_group

    def get_context_parallel_group(self) -> Any:
        return self.cp_group

    def get_context_parallel_world_size(self) -> int:
        return self.cp


class Standin:
    """What a loss sees as `slime.backends.megatron_utils.loss`."""

    def __init__(self, tp: int, cp: int, allgather: bool) -> None:
        self.mpu = Mpu(tp, cp)
        self.allgather = allgather and cp > 1

    # -- where the tokens are ----------------------------------------------------------------------

    def cut(self, total: int, response: int) -> list[int]:
        """Response tokens, from 0, whose per-token values this rank holds."""
        prompt = total - response
        return [
            p - prompt + 1
            for p in zigzag(total, self.mpu.cp, self.mpu.cp_rank)
            if prompt - 1 <= p < total - 1 and response
        ]

    def rows(self, length: int, totals: Sequence[int], responses: Sequence[int]) -> list[Any]:
        """Per sample `(rows of the local logits, the positions they stand at)` of its response."""
        found, begin = [], 0
        for total, response in zip(totals, responses, strict=True):
            wanted = range(total - response - 1, total - 1)
            if self.allgather:
                start = self.mpu.cp_rank * length
                pairs = [(begin + p - start, p) for p in wanted if 0 <= begin + p - start < length]
                begin += total
            else:
                held = zigzag(total, self.mpu.cp, self.mpu.cp_rank)
                pairs = [(begin + i, p) for i, p in enumerate(held) if p in wanted]
                begin += len(held)
            found.append(([r for r, _ in pairs], [p for _, p in pairs]))
        return found

    # -- what a loss calls -------------------------------------------------------------------------

    def get_responses(
        self, logits: Tensor, *, args: Any, unconcat_tokens: Any, total_lengths: Any,
        response_lengths: Any, apply_temperature: bool = True,
    ) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
        assert logits.dtype == torch.float32
        assert not apply_temperature
        layout = self.rows(logits.size(1), total_lengths, response_lengths)
        for tokens, (rows, positions) in zip(unconcat_tokens, layout, strict=True):
            yield logits[0][rows], tokens[[p + 1 for p in positions]]

    def get_log_probs_and_entropy(
        self, logits: Tensor, *, args: Any, unconcat_tokens: Any, total_lengths: Any,
        response_lengths: Any, with_entropy: bool = False,
    ) -> tuple[Tensor, dict[str, list[Tensor]]]:  # fmt: skip
        full = self._whole_vocabulary(logits[0]) / args.rollout_temperature
        log_p = full.log_softmax(-1)
        found: dict[str, list[Tensor]] = {"log_probs": []}
        if with_entropy:
            found["entropy"] = []
        layout = self.rows(logits.size(1), total_lengths, response_lengths)
        for tokens, (rows, positions) in zip(unconcat_tokens, layout, strict=True):
            own = log_p[rows]
            target = tokens[[p + 1 for p in positions]]
            found["log_probs"].append(own.gather(1, target[:, None])[:, 0])
            if with_entropy:
                entropy = -(own.exp() * own).sum(-1)
                found["entropy"].append(entropy if args.entropy_coef else entropy.detach())
        if self.allgather:
            for key, values in found.items():
                found[key] = [
                    self._to_zigzag(value, positions, total, response)
                    for value, (_, positions), total, response in zip(
                        values, layout, total_lengths, response_lengths, strict=True
                    )
                ]
        return logits.new_empty(0), found

    def all_gather_with_cp(self, tensor: Tensor, total: int, response: int) -> Tensor:
        if self.mpu.cp == 1:
            return tensor
        whole = tensor.new_zeros(response, *tensor.shape[1:])
        whole = whole.index_copy(0, torch.tensor(self.cut(total, response)).long(), tensor)
        return _sum(whole, self.mpu.cp_group)

    def slice_log_prob_with_cp(self, values: Tensor, total: int, response: int) -> Tensor:
        return values[self.cut(total, response)]

    def reducer(self, batch: Any, per_token: bool) -> Any:
        """The sum over samples of masked means (or sums), over the part of this rank."""
        spans = list(zip(batch["total_lengths"], batch["response_lengths"], strict=True))
        masks = [
            self.slice_log_prob_with_cp(mask, *span)
            for mask, span in zip(batch["loss_masks"], spans, strict=True)
        ]

        def reduce(values: Tensor) -> Tensor:
            parts = values.split([m.numel() for m in masks])
            sums = [(v * m).sum() for v, m in zip(parts, masks, strict=True)]
            if per_token:
                return sum(sums)
            return sum(s / d for s, d in zip(sums, batch["rollout_mask_sums"], strict=True))

        return reduce

    def _to_zigzag(self, value: Tensor, positions: list[int], total: int, response: int) -> Tensor:
        place = torch.tensor([p - (total - response - 1) for p in positions]).long()
        whole = value.new_zeros(response).index_copy(0, place, value)
        return self.slice_log_prob_with_cp(_sum(whole, self.mpu.cp_group), total, response)

    def _whole_vocabulary(self, logits: Tensor) -> Tensor:
        """All slices side by side; only this rank's own carries a gradient."""
        slices = [torch.empty_like(logits) for _ in range(self.mpu.tp)]
        dist.all_gather(slices, logits.detach(), group=self.mpu.tp_group)
        slices[self.mpu.tp_rank] = logits
        return torch.cat(slices, dim=-1)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = tensor.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def _sum(tensor: Tensor, group: Any) -> Tensor:
    return _Sum.apply(tensor, group)
