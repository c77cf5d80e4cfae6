"""One rollout's data into optimiser steps, through the loss and advantage hooks.

Guarantees: a step is taken whole or not at all (a loss or gradient that is not finite, a gradient
norm or a train/rollout log-prob difference beyond its limit leave weights and optimiser as they
were, and are told); the loss of a step is the mean over its turns, whatever the micro-batches,
segments and pieces they came in.

Memory: one micro-batch of activations, and `loss_chunk_tokens` rows of logits with their gradient.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from openclaw_rl.errors import HookError, OpenClawRLError
from openclaw_rl.local import data as d
from openclaw_rl.local.forward import (
    PolicyForward,
    enable_checkpointing,
    mix_precision,
    silence_dropout,
)
from openclaw_rl.local.train_args import hook
from openclaw_rl.losses.logprobs import get_log_probs_and_entropy


@dataclass(slots=True)
class StepReport:
    """What one optimiser step did. `skipped` is None where it was taken, else why not:
    masked, loss_not_finite, grad_not_finite, no_gradient, grad_norm, logprob_diff."""

    samples: list[int]
    skipped: str | None = None
    turns: int = 0
    trained_tokens: int = 0
    compared_tokens: int = 0
    forward_tokens: int = 0
    micro_batches: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0
    logprob_diff: float = 0.0
    """Mean of |log pi of the trainer - of the engine| over the `compared_tokens`, those trained
    tokens that the engine sampled; 0 without any."""
    logprob_diff_max: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


class Learner:
    """Owns the optimiser. `give_way` is called between pieces of work, to let requests pass."""

    def __init__(
        self, args: Namespace, model: Any, give_way: Callable[[], None] = lambda: None
    ) -> None:
        loss_hook = hook(args, "custom_loss_function_path", "custom_loss")
        if loss_hook is None:
            raise HookError("--custom-loss-function-path: no loss is named")
        self.args, self.model, self.give_way = args, model, give_way
        self.loss_hook = loss_hook
        self.advantage_hook = hook(args, "custom_advantage_function_path", "advantages")
        model.eval()
        silence_dropout(model)
        mix_precision(model)
        if args.gradient_checkpointing:
            enable_checkpointing(model)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        for p in self.parameters:
            if p.dtype in (torch.bfloat16, torch.float16):
                p.data = p.data.float()  # updates of 1e-4 vanish in eight bits
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=args.lr,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_eps,
            weight_decay=args.weight_decay,
        )
        self.forward = PolicyForward(model)
        self.forward.check()

    def learn(self, data: d.RolloutData) -> list[StepReport]:
        """Train on one rollout: `args.num_steps_per_rollout` steps. Raises `HookError`."""
        steps = d.steps_of(data, self.args.num_steps_per_rollout)
        if self.advantage_hook is not None or len(steps) > 1:
            self._prepare(data)
        if self.advantage_hook is None:
            d.default_advantages(data)
        else:
            _call(self.advantage_hook, "--custom-advantage-function-path", self.args, data)
            _check_advantages(data)
        return [self._step(data, samples) for samples in steps]

    # -- one step ----------------------------------------------------------------------------------

    def _step(self, data: d.RolloutData, samples: list[int]) -> StepReport:
        report = StepReport(samples)
        units, report.turns = d.units_of(data, samples, max(1, self.args.loss_chunk_tokens - 1))
        if not units:
            report.skipped = "masked"
            return report
        self.optimizer.zero_grad(set_to_none=True)
        for group in self._micro_batches(data, sorted({u.sample for u in units})):
            self.give_way()
            self._micro_batch(data, group, [u for u in units if u.sample in group], report)
            if not math.isfinite(report.loss):
                report.skipped = "loss_not_finite"
                break
        report.logprob_diff /= max(1, report.compared_tokens)
        if report.skipped is None:
            self._update(report)
        self.optimizer.zero_grad(set_to_none=True)
        return report

    def _update(self, report: StepReport) -> None:
        args = self.args
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, args.clip_grad or math.inf)
        report.grad_norm = float(norm)
        if not math.isfinite(report.grad_norm):
            report.skipped = "grad_not_finite"
        elif report.grad_norm == 0:
            report.skipped = "no_gradient"  # Adam's momentum would move the weights all the same
        elif report.grad_norm > (args.max_grad_norm_skip or math.inf):
            report.skipped = "grad_norm"
        elif not report.logprob_diff <= (args.max_logprob_diff or math.inf):
            report.skipped = "logprob_diff"
        else:
            self.optimizer.step()

    def _micro_batch(
        self, data: d.RolloutData, samples: list[int], units: list[d.Unit], report: StepReport
    ) -> None:
        """Forward once, project and differentiate a few rows at a time, then backward once."""
        reference = None
        if self.args.use_kl_loss and data.get("ref_log_probs") is None:
            with self.forward.reference():
                reference = self._log_probs(data, samples, units)
        sequences = [data["tokens"][i] for i in samples]
        hidden = self.forward.hidden(sequences)
        selected = _rows(data, samples, units, hidden)
        leaf = selected.detach().requires_grad_()
        begin = 0
        for k, group in enumerate(d.loss_groups(units, self.args.loss_chunk_tokens)):
            if k:
                self.give_way()
            end = begin + sum(u.rows for u in group)
            logits = self.forward.logits(leaf[begin:end])
            batch = d.loss_batch(data, group)
            if reference is not None:
                batch["ref_log_probs"] = [reference[u] for u in group]
            self._loss(batch, logits, group, report)
            begin = end
            if not math.isfinite(report.loss):
                return
        if leaf.grad is not None:
            selected.backward(leaf.grad)  # type: ignore[no-untyped-call]
        report.micro_batches += 1
        report.forward_tokens += hidden.shape[0] * hidden.shape[1]

    def _loss(
        self, batch: dict[str, Any], logits: Tensor, units: list[d.Unit], report: StepReport
    ) -> None:
        masks = batch["loss_masks"]
        with torch.no_grad():
            current = _current(self.args, batch, logits)
        # One step a batch: the old policy is the current one, and needs no forward of its own.
        batch.setdefault("log_probs", current)
        for i, mask in enumerate(masks):
            report.trained_tokens += int(mask.sum())
            if "rollout_log_probs" in batch:
                known = (mask > 0) & ~batch["rollout_log_probs"][i].isnan()
                gap = (current[i] - batch["rollout_log_probs"][i]).abs()
                report.logprob_diff += float(gap[known].sum())
                report.logprob_diff_max = max(
                    report.logprob_diff_max, float(gap[known].max()) if known.any() else 0.0
                )
                report.compared_tokens += int(known.sum())
        reduce = d.reducer(units, masks)
        loss, metrics = _call(
            self.loss_hook, "--custom-loss-function-path", self.args, batch, logits, reduce
        )
        share = loss / report.turns
        report.loss += float(share.detach())
        for name, value in metrics.items():
            report.metrics[name] = report.metrics.get(name, 0.0) + float(value) / report.turns
        if share.requires_grad and math.isfinite(report.loss):
            share.backward()

    # -- passes without a gradient -----------------------------------------------------------------

    def _prepare(self, data: d.RolloutData) -> None:
        """Log-probs of whole responses under the weights before the first step (and the base's)."""
        everything = list(range(len(data["tokens"])))
        data["log_probs"] = self._score(data, everything)
        if self.args.use_kl_loss:
            with self.forward.reference():
                data["ref_log_probs"] = self._score(data, everything)

    def _score(self, data: d.RolloutData, samples: list[int]) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for group in self._micro_batches(data, samples):
            self.give_way()
            pieces: list[d.Unit] = []
            for i in group:
                pieces.extend(_whole(i, data["response_lengths"][i], self.args.loss_chunk_tokens))
            values = self._log_probs(data, group, pieces)
            for i in group:
                parts = [values[u] for u in pieces if u.sample == i]
                found[i] = torch.cat(parts) if parts else torch.empty(0, device=self.forward.device)
        return [found[i] for i in samples]

    @torch.no_grad()
    def _log_probs(
        self, data: d.RolloutData, samples: list[int], units: list[d.Unit]
    ) -> dict[d.Unit, Tensor]:
        hidden = self.forward.hidden([data["tokens"][i] for i in samples])
        rows = _rows(data, samples, units, hidden)
        values: dict[d.Unit, Tensor] = {}
        begin = 0
        for group in d.loss_groups(units, self.args.loss_chunk_tokens):
            end = begin + sum(u.rows for u in group)
            logits = self.forward.logits(rows[begin:end])
            parts = _current(self.args, d.loss_batch(data, group), logits)
            values.update(zip(group, parts, strict=True))
            begin = end
        return values

    def _micro_batches(self, data: d.RolloutData, samples: Sequence[int]) -> list[list[int]]:
        lengths = [data["total_lengths"][i] for i in samples]
        groups = d.micro_batches(lengths, self.args.max_tokens_per_gpu)
        return [[samples[k] for k in group] for group in groups]


def _rows(data: d.RolloutData, samples: list[int], units: list[d.Unit], hidden: Tensor) -> Tensor:
    """Hidden rows `[sum of unit.rows, H]`: from the token before each unit to its last."""
    place = {sample: row for row, sample in enumerate(samples)}
    batch_index: list[Tensor] = []
    position: list[Tensor] = []
    for u in units:
        prompt = data["total_lengths"][u.sample] - data["response_lengths"][u.sample]
        span = torch.arange(prompt + u.start - 1, prompt + u.end, device=hidden.device)
        position.append(span)
        batch_index.append(torch.full_like(span, place[u.sample]))
    if not units:
        return hidden[0, :0]
    return hidden[torch.cat(batch_index), torch.cat(position)]


def _whole(sample: int, length: int, chunk: int) -> list[d.Unit]:
    piece = max(1, chunk - 1)
    return [
        d.Unit(sample, a, min(a + piece, length), float(length)) for a in range(0, length, piece)
    ]


def _current(args: Namespace, batch: dict[str, Any], logits: Tensor) -> list[Tensor]:
    _, out = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
    )
    return out["log_probs"]


def _call(function: Callable[..., Any], flag: str, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except (OpenClawRLError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # The type and place, not the text: a hook's message may quote a conversation.
        raise HookError(f"{flag}: the hook raised {type(error).__name__}") from error


def _check_advantages(data: d.RolloutData) -> None:
    values = data.get("advantages")
    lengths = data["response_lengths"]
    if values is None or [v.numel() for v in values] != lengths:
        raise HookError(
            "--custom-advantage-function-path: rollout_data['advantages'] must have one 1-D tensor "
            "a sample with one value a response token"
        )
    data.setdefault("returns", [v.clone() for v in values])
