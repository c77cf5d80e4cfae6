"""`compute_advantages`: slime's advantage hook.

Guarantees: each turn's reward is the advantage of its own tokens, whatever shares its sample;
everything per token is cut for context parallelism exactly as slime cuts its own values.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from openclaw_rl.errors import ConfigError, HookError
from openclaw_rl.slime.convert import SampleSignals

if TYPE_CHECKING:
    from torch import Tensor


def compute_advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """Set `advantages`, `returns` (float32 tensors) and `values` (`TokenSignals`), one a sample.

    Runs on last-stage ranks, once a rollout. There is no group to normalise over, so the reward
    itself is the advantage; its weight `w_rl` is applied by the loss. Raises `HookError` where the
    batch was not converted by `convert_samples_to_train_data`.
    """
    from openclaw_rl.losses.signals import TokenSignals

    signals = rollout_data.get("source_names")
    if not signals or not all(isinstance(one, SampleSignals) for one in signals):
        raise HookError(
            "openclaw_rl.slime.compute_advantages needs "
            "--custom-convert-samples-to-train-data-path "
            "openclaw_rl.slime.convert_samples_to_train_data"
        )
    if getattr(args, "use_critic", False):
        raise ConfigError("a critic's values and the signals of openclaw_rl.losses share one key")
    device = rollout_data["loss_masks"][0].device
    advantages, values = [], []
    for one, total, response in zip(
        signals, rollout_data["total_lengths"], rollout_data["response_lengths"], strict=True
    ):
        kept = _kept(int(total), int(response))

        def cut(tensor: Tensor, kept: Tensor = kept) -> Tensor:
            return tensor[kept].to(device)

        tokens = one.tokens
        advantages.append(cut(one.rewards))
        values.append(
            TokenSignals(
                cut(tokens.weights),
                *(
                    None if tensor is None else cut(tensor)
                    for tensor in (tokens.teacher_log_probs, tokens.topk_ids, tokens.topk_log_probs)
                ),
            )
        )
    rollout_data["advantages"] = advantages
    rollout_data["returns"] = [advantage.clone() for advantage in advantages]
    rollout_data["values"] = values


def _kept(total: int, response: int) -> Tensor:
    """Which response tokens this context-parallel rank holds. slime's own function says so; in
    its training process that module is always loaded, elsewhere there is nothing to cut."""
    import torch

    everything = torch.arange(response)
    slime = sys.modules.get("slime.backends.megatron_utils.cp_utils")
    if slime is None or not slime.mpu.model_parallel_is_initialized():
        return everything
    kept: Tensor = slime.slice_log_prob_with_cp(everything, total, response)
    return kept
