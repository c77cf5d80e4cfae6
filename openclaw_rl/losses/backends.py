"""Where a loss gets its log-probs: from slime inside slime's trainer, else from plain tensors.

A micro-batch lies in the logits end to end (plain, `[1, T, V]`), or cut by tensor and context
parallelism (slime, `[1, T, V / TP]` on this rank). `batch` has slime's keys; lists hold one entry a
sample, R_i its response tokens here.

Guarantees: every rank of a parallel group makes the same collective calls for the same
micro-batch; per-token results lie as slime cuts every per-token tensor of a batch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

from openclaw_rl.losses.logprobs import (
    get_log_probs_and_entropy,
    log_probs_at,
    packed,
    response_rows,
    rows_at_a_time,
)

Batch = Mapping[str, Any]


def sampled(
    args: Any, batch: Batch, logits: Tensor, with_entropy: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probs of the sampled tokens at `args.rollout_temperature` and entropies, `[R_i]`.

    Inside slime's trainer by its own function, so that a loss sees what slime's losses see.
    """
    slime = _slime()
    function = get_log_probs_and_entropy if slime is None else slime.get_log_probs_and_entropy
    _, found = function(logits, args=args, with_entropy=with_entropy, **_lengths(batch))
    return list(found["log_probs"]), list(found.get("entropy", []))


def at(args: Any, batch: Batch, logits: Tensor, ids: Sequence[Tensor]) -> Tensor:
    """Log-probs at temperature 1 of `ids` (`[R_i, K]`, -1: none, gives 0), `[sum R_i, K]`."""
    slime, flat, chunk = _slime(), packed(logits), rows_at_a_time(args)
    if slime is None:
        rows = response_rows(flat, batch["total_lengths"], batch["response_lengths"])
        return log_probs_at(flat, torch.cat(rows), torch.cat(list(ids)), chunk)
    mpu = slime.mpu
    group = mpu.get_tensor_model_parallel_group()
    rows, places = _layout(slime, args, batch, flat)
    if mpu.get_context_parallel_world_size() == 1 or not args.allgather_cp:
        # `ids` lie like the rows
        return log_probs_at(flat, torch.cat(rows), torch.cat(list(ids)), chunk, group)

    # All-gather layout: this rank's logits are a contiguous piece of the packed samples, while
    # per-token tensors are cut in zigzag. So the ids are brought to the logits, and the results,
    # by a sum over ranks of which each token has one holder, back to the zigzag.
    spans = list(zip(batch["total_lengths"], batch["response_lengths"], strict=True))
    with torch.no_grad():
        whole = [  # as float64: exact, and slime's gathering wants floats
            slime.all_gather_with_cp(own.double(), *span).long()
            for own, span in zip(ids, spans, strict=True)
        ]
    here = [own[place] for own, place in zip(whole, places, strict=True)]
    found = log_probs_at(flat, torch.cat(rows), torch.cat(here), chunk, group)
    parts = [
        values.new_zeros(own.shape).index_copy(0, place, values)
        for values, place, own in zip(
            torch.split(found, [len(p) for p in places]), places, whole, strict=True
        )
    ]
    cp_group = mpu.get_context_parallel_group()
    joined = all_reduce(torch.cat(parts), group=cp_group)  # type: ignore[no-untyped-call]
    fulls = torch.split(joined, list(batch["response_lengths"]))
    return torch.cat(
        [slime.slice_log_prob_with_cp(full, *span) for full, span in zip(fulls, spans, strict=True)]
    )


def _slime() -> Any:
    """`slime.backends.megatron_utils.loss` inside slime's training process, else None.

    There it is always loaded, because it is what calls the loss; it is never imported from here.
    """
    module = sys.modules.get("slime.backends.megatron_utils.loss")
    mpu = getattr(module, "mpu", None)
    return module if mpu is not None and mpu.model_parallel_is_initialized() else None


def _layout(slime: Any, args: Any, batch: Batch, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Per sample: the rows of `flat` of its response tokens here, and which tokens those are.

    Rows and places are both `[R_i]`; a place counts from the first response token. slime is asked,
    by cutting the row numbers as it cuts logits: this holds for all its layouts.
    """
    lengths = _lengths(batch)
    totals = lengths["total_lengths"]
    # slime wants float32 logits; row numbers are exact in it up to 2 ** 24
    numbers = torch.arange(flat.size(0), dtype=torch.float32, device=flat.device)
    lengths["unconcat_tokens"] = [torch.arange(n, device=flat.device) for n in totals]
    cut = slime.get_responses(numbers.view(1, -1, 1), args=args, apply_temperature=False, **lengths)
    rows, places = [], []
    for (row, token), total, response in zip(cut, totals, lengths["response_lengths"], strict=True):
        rows.append(row[:, 0].long())
        places.append(token[: row.size(0)] - (total - response))
    return rows, places


def _lengths(batch: Batch) -> dict[str, Any]:
    return {key: batch[key] for key in ("unconcat_tokens", "total_lengths", "response_lengths")}
