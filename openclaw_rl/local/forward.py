"""The trainer's view of a model: hidden states of padded sequences, logits of chosen rows only.

Guarantees: right padding under causal attention leaves every real token as it would be alone;
only asked rows go through the output layer; backbone plus output layer give the model's own logits,
or it is refused; no dropout; a float32 adapter over a 16-bit base computes in 16 bits, as served.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from openclaw_rl.errors import ConfigError


class PolicyForward:
    """Hidden states and logits of a PEFT causal LM. Not thread-safe; one per trainer. Raises
    `ConfigError` for a model that cannot be trained."""

    def __init__(self, model: Any) -> None:
        model.eval()
        _silence_dropout(model)
        mix_precision(model)
        self.model, self.causal = model, model.get_base_model()
        self.backbone: nn.Module = self.causal.get_decoder()
        self.head: nn.Module = self.causal.get_output_embeddings()
        text = self.causal.config.get_text_config()
        self.softcap = getattr(text, "final_logit_softcapping", None)
        # Cohere multiplies its logits, Granite divides them.
        self.scale = getattr(text, "logit_scale", None) or 1.0
        self.scale /= getattr(text, "logits_scaling", None) or 1.0
        self.device = next(self.causal.parameters()).device
        self.check()

    def hidden(self, sequences: Sequence[Tensor]) -> Tensor:
        """`[B, L, H]` of `B` sequences, right-padded to the longest."""
        ids = nn.utils.rnn.pad_sequence(list(sequences), batch_first=True).to(self.device)
        out = self.backbone(input_ids=ids, use_cache=False)
        return out[0]  # type: ignore[no-any-return]

    def logits(self, rows: Tensor) -> Tensor:
        """`[1, N, V]` float32 (float64 for a float64 model) of hidden rows `[N, H]`."""
        logits = self.head(rows)
        if logits.dtype != torch.float64:
            logits = logits.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits[None]  # type: ignore[no-any-return]

    def recompute_activations(self) -> None:
        """Compute activations anew in the backward pass, in place of keeping them."""
        # The name before and from transformers 5 on.
        enable = getattr(self.causal, "activation_checkpointing_enable", None)
        (enable or self.causal.gradient_checkpointing_enable)({"use_reentrant": False})
        self.model.train()  # it does so only in training mode; there is no dropout

    @torch.no_grad()
    def check(self) -> None:
        """Raise `ConfigError` unless `logits(hidden(x))` are the model's own logits."""
        ids = torch.arange(1, 9, device=self.device)
        own = self.causal(input_ids=ids[None], use_cache=False).logits[0].float()
        ours = self.logits(self.hidden([ids, ids[:3]])[0])[0].float()
        spread = float((own - ours).abs().max())
        # bf16 keeps 8 bits: a batch of two may round otherwise than one alone
        limit = 1e-3 if self.head.weight.dtype in (torch.float32, torch.float64) else 0.05
        if not spread <= limit * max(1.0, float(own.abs().max())):
            kind = type(self.causal).__name__
            raise ConfigError(
                f"{kind} does more between its last layer and its logits than the trainer knows "
                f"(difference {spread:.3g}); this model cannot be trained by the embedded host"
            )


class _MixedLinear(nn.Linear):
    """A linear layer that keeps float32 weights and computes in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.weight.to(x.dtype), bias)


def mix_precision(model: nn.Module) -> None:
    """Let a float32 adapter over a 16-bit base compute in 16 bits, as the engine does with many
    rows. PEFT would widen every layer's input instead (forward and backward of SmolLM2-135M on
    a CPU: 2.3 s against 1.4 s). Weights, gradients and updates stay float32."""
    module: Any
    for module in model.modules():
        base = getattr(module, "base_layer", None)
        if base is None or not hasattr(module, "cast_input_dtype_enabled"):
            continue
        if base.weight.dtype not in (torch.bfloat16, torch.float16):
            continue
        module.cast_input_dtype_enabled = False
        for part in (*module.lora_A.values(), *module.lora_B.values()):
            if type(part) is nn.Linear:
                part.__class__ = _MixedLinear


def _silence_dropout(model: nn.Module) -> None:
    """Set every dropout to 0: the log-probs trained on must be those that are served."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout_p", "dropout", "attn_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
