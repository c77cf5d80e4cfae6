"""One rollout's data into optimiser steps, through the loss and advantage hooks.

    learn         a rollout: samples (segments), tokens [T_i], values of their responses [R_i]
    _step         the turns of one update
    _hidden       a micro-batch: the samples [B] that some of these turns are in, states [B, L, H]
    _loss_calls   turns of a micro-batch, of one temperature: logits [1, N, V], a few rows
    _loss         one call of the loss hook; its gradient is gathered at the states

Guarantees: a step is taken whole or not at all (what is beyond a limit leaves weights and optimiser
as they were, and is reported); the loss of a step is the mean over its turns, whatever the
micro-batches, segments and pieces they came in; every log-prob of a turn is taken at the
temperature that the turn was sampled at, which the loss hook reads as `args.rollout_temperature`.

Memory: one micro-batch of activations, and `loss_chunk_tokens` rows of logits with their gradient.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from openclaw_rl.errors import HookError, OpenClawRLError
from openclaw_rl.hooks import load_hook
from openclaw_rl.local import data as d
from openclaw_rl.local.forward import PolicyForward
from openclaw_rl.losses.backends import sampled
from openclaw_rl.rollout.train_data import TurnRange, turn_ranges

_LOSS_FLAG, _ADVANTAGE_FLAG = "--custom-loss-function-path", "--custom-advantage-function-path"


@dataclass(slots=True)
class StepReport:
    """What one optimiser step did. `skipped` is None where it was taken, else why not:
    masked, loss_not_finite, grad_not_finite, no_gradient, grad_norm, logprob_diff."""

    turn_ids: list[str]  # with at least one trained token
    turns: int  # shares of the loss: these turns, or rollouts where a hook named no turns
    reward: float = 0.0  # mean over the turns
    skipped: str | None = None
    trained_tokens: int = 0
    compared_tokens: int = 0  # those that the engine sampled
    loss: float = 0.0
    grad_norm: float = 0.0
    logprob_diff: float = 0.0  # mean |log pi of the trainer - of the engine| over compared_tokens
    logprob_diff_max: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LossCall:
    """What a loss hook is called with once. `turns` holds long ones in pieces."""

    args: Namespace  # with the temperature of these turns
    turns: list[TurnRange]
    batch: dict[str, Any]  # one entry a turn, see `data.loss_batch`
    logits: Tensor  # the turns end to end


class Learner:
    """Owns the optimiser. `give_way` is called between pieces of work, to let requests pass."""

    def __init__(
        self, args: Namespace, model: Any, give_way: Callable[[], None] = lambda: None
    ) -> None:
        self.args, self.model, self.give_way = args, model, give_way
        path = args.custom_loss_function_path
        self.loss_hook = load_hook(path, default_name="custom_loss", flag=_LOSS_FLAG)
        self.advantage_hook = None
        if path := args.custom_advantage_function_path:
            self.advantage_hook = load_hook(path, default_name="advantages", flag=_ADVANTAGE_FLAG)
        self.forward = PolicyForward(model)
        on_gpu = self.forward.device.type == "cuda"
        # Tokens of a micro-batch, padding included.
        self.budget: int = args.max_tokens_per_gpu or (4096 if on_gpu else 512)
        if args.gradient_checkpointing in (("on", "auto") if on_gpu else ("on",)):
            self.forward.recompute_activations()
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

    def learn(self, train_data: Mapping[str, Any]) -> list[StepReport]:
        """Train on one rollout, in `args.num_steps_per_rollout` steps. `train_data`: see
        `rollout.train_data.convert`. Raises `HookError`."""
        args = self.args
        data = d.to_tensors(train_data, self.forward.device)
        turns = turn_ranges(train_data, args.rollout_temperature)
        steps = d.steps_of(data, turns, args.num_steps_per_rollout)
        if args.use_kl_loss:
            with self.model.disable_adapter():  # the base
                data["ref_log_probs"] = self._score(data, turns)
        if self.advantage_hook is not None or len(steps) > 1:
            data["log_probs"] = self._score(data, turns)
        if self.advantage_hook is None:
            d.default_advantages(data, turns)
        else:
            _call(self.advantage_hook, _ADVANTAGE_FLAG, args, data)
            _check_advantages(data)
        return [self._step(data, turns) for turns in steps]

    def _step(self, data: d.RolloutData, turns: list[TurnRange]) -> StepReport:
        # At least 1: a rollout that is spread over steps may be less than half in one of them.
        count = max(1, round(sum(turn.share for turn in turns)))
        report = StepReport([turn.turn_id for turn in turns], count)
        if not turns:
            report.skipped = "masked"
            return report
        report.reward = sum(turn.reward for turn in turns) / len(turns)
        self.optimizer.zero_grad(set_to_none=True)
        for samples in d.micro_batches(data, turns, self.budget):
            hidden = self._hidden(data, samples)
            # The gradient is gathered here, from a few rows of logits at a time; then one backward.
            leaf = hidden.detach().requires_grad_()
            for call in self._loss_calls(data, turns, samples, leaf):
                self._loss(call, report)
            if not math.isfinite(report.loss):
                report.skipped = "loss_not_finite"
                break
            if leaf.grad is not None:
                hidden.backward(leaf.grad)  # type: ignore[no-untyped-call]
        report.logprob_diff /= max(1, report.compared_tokens)
        if report.skipped is None:
            self._update(report)
        self.optimizer.zero_grad(set_to_none=True)
        return report

    def _hidden(self, data: d.RolloutData, samples: list[int]) -> Tensor:
        self.give_way()
        return self.forward.hidden([data["tokens"][i] for i in samples])

    def _loss_calls(
        self, data: d.RolloutData, turns: list[TurnRange], samples: list[int], hidden: Tensor
    ) -> Iterator[LossCall]:
        """The calls of one micro-batch; `hidden` `[B, L, H]` are the states of its `samples`."""
        own = [turn for turn in turns if turn.sample in samples]
        for temperature, some in d.loss_calls(own, self.args.loss_chunk_tokens):
            self.give_way()
            args = Namespace(**vars(self.args) | {"rollout_temperature": temperature})
            rows = [hidden[samples.index(t.sample), d.token_span(data, t)] for t in some]
            logits = self.forward.logits(torch.cat(rows))
            yield LossCall(args, some, d.loss_batch(data, some), logits)

    def _loss(self, call: LossCall, report: StepReport) -> None:
        """Add the loss of the call's turns to the report, its gradient to that of the states."""
        args, batch, logits = call.args, call.batch, call.logits
        with torch.no_grad():
            current, _ = sampled(args, batch, logits)
        # One step a batch: the old policy is the current one, and needs no forward of its own.
        batch.setdefault("log_probs", current)
        masks = torch.cat(batch["loss_masks"]) > 0
        report.trained_tokens += int(masks.sum())
        if "rollout_log_probs" in batch:
            gap = (torch.cat(current) - torch.cat(batch["rollout_log_probs"])).abs()
            known = gap[masks & ~torch.cat(batch["rollout_log_probs"]).isnan()]
            report.logprob_diff += float(known.sum())
            report.compared_tokens += known.numel()
            if known.numel():
                report.logprob_diff_max = max(report.logprob_diff_max, float(known.max()))
        reduce = d.reducer(call.turns, batch["loss_masks"])
        loss, metrics = _call(self.loss_hook, _LOSS_FLAG, args, batch, logits, reduce)
        share = loss / report.turns
        report.loss += float(share.detach())
        for name, value in metrics.items():
            report.metrics[name] = report.metrics.get(name, 0.0) + float(value) / report.turns
        if share.requires_grad and math.isfinite(report.loss):
            share.backward()

    def _update(self, report: StepReport) -> None:
        """Take the step, unless a limit forbids it (a limit of 0 is none)."""
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

    @torch.no_grad()
    def _score(self, data: d.RolloutData, turns: list[TurnRange]) -> list[Tensor]:
        """Log-probs `[R]` of each sample's response under the present weights, on the tokens of
        `turns`; 0 elsewhere."""
        values = [torch.zeros_like(mask) for mask in data["loss_masks"]]
        for samples in d.micro_batches(data, turns, self.budget):
            for call in self._loss_calls(data, turns, samples, self._hidden(data, samples)):
                found, _ = sampled(call.args, call.batch, call.logits)
                for turn, part in zip(call.turns, found, strict=True):
                    values[turn.sample][turn.start : turn.end] = part
        return values


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
    if values is None or [v.numel() for v in values] != data["response_lengths"]:
        raise HookError(
            f"{_ADVANTAGE_FLAG}: rollout_data['advantages'] must have one 1-D tensor a sample "
            "with one value a response token"
        )
    data.setdefault("returns", [v.clone() for v in values])
