"""One copy of the base weights for everybody on this machine.

Guarantees: `LoadedModel` holds the base once. The engine's modules and the trainer's modules
(`trainer_model`) are two trees over the same parameter tensors, so neither thread ever switches
the other's adapter on or off. The engine's tree is base + serve adapter, applied to the leading
rows of a step only (policy); the rows behind them see the bare base (judge, teacher, reference).
The adapter is never merged into the base.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from openclaw_rl.errors import ConfigError
from openclaw_rl.local.cache import ATTENTION, KVShape, ShapeProbe, slot_attention
from openclaw_rl.local.checkpoint import TARGET_MODULES

Adapter = Mapping[str, tuple[Tensor, Tensor]]
"""An adapter to serve, by module name: A transposed [in, r] and scaled B transposed [r, out]."""
_FEW_ROWS = 32
"""In bfloat16 on a CPU, up to here W @ x.T beats x @ W.T (oneDNN packs its right-hand side at each
call; an output layer of 49 k tokens takes half), and the adapter is faster in float32 (its products
of few rows take several times as long in bfloat16, those of many a third)."""


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """The adapter's shape; the trainer's PEFT config is made from it."""

    rank: int = 16
    alpha: float = 32.0
    target_modules: str = TARGET_MODULES


@dataclass(slots=True)
class AdapterSwitch:
    """How many leading rows of the step under way get the adapter. Engine thread only."""

    rows: int = 0


class EngineLinear(nn.Module):
    """A linear layer that shares the weight of the one it replaces, plus the serve adapter."""

    def __init__(self, linear: nn.Linear, switch: AdapterSwitch) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.switch = switch
        self.lora: tuple[Tensor, Tensor] | None = None
        self.flip = self.weight.device.type == "cpu" and self.weight.dtype == torch.bfloat16

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        if self.flip and len(flat) <= _FEW_ROWS:
            y = torch.mm(self.weight, flat.t()).t().contiguous()
            if self.bias is not None:
                y += self.bias
        else:
            y = nn.functional.linear(flat, self.weight, self.bias)
        rows = self.switch.rows
        if rows and self.lora is not None:
            dtype = torch.float32 if rows <= _FEW_ROWS else x.dtype
            a, b = (matrix.to(dtype) for matrix in self.lora)
            y[:rows] += flat[:rows].to(dtype) @ a @ b
        return y.view(*x.shape[:-1], -1)


class LoadedModel:
    """A causal LM on a device, ready to serve and to train. Make it with `load`."""

    def __init__(self, model: Any, path: str, lora: LoraSpec) -> None:
        self.path = path
        self.lora = lora
        self.switch = AdapterSwitch()
        self.modules: dict[str, EngineLinear] = {}
        self.model = model
        self.config = model.config
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self.device: torch.device = next(model.parameters()).device
        self.eos_ids: set[int] = set()
        for config in (model.config, model.generation_config):
            value = getattr(config, "eos_token_id", None)
            self.eos_ids.update([value] if isinstance(value, int) else value or ())
        text = self.config.get_text_config()
        self.vocab_size: int = text.vocab_size
        self.context_length: int = getattr(text, "max_position_embeddings", None) or 32768
        self._plain_attention: str = model.config._attn_implementation
        model.requires_grad_(False).eval()
        AttentionInterface.register(ATTENTION, slot_attention)
        model.set_attn_implementation(ATTENTION)
        for name, module in list(model.named_modules()):
            if type(module) is nn.Linear:
                linear = EngineLinear(module, self.switch)
                model.set_submodule(name, linear)
                self.modules[name] = linear
        self.kv_shape = self._probe()

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: str = "auto",
        device: str | torch.device = "cpu",
        lora: LoraSpec = LoraSpec(),
    ) -> LoadedModel:
        """Reads a Hugging Face model directory. `dtype` "auto" is the stored one (float16 becomes
        bfloat16 on a CPU). Raises ConfigError where the model cannot be served."""
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot load the model at {path}: {error}") from error
        if torch.device(device).type == "cpu" and model.dtype == torch.float16:
            model = model.to(torch.bfloat16)
        return cls(model.to(device), str(path), lora)

    def _probe(self) -> KVShape:
        """The shape of keys and values, learnt by a dry run."""
        probe: ShapeProbe = {}
        one = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        try:
            with torch.inference_mode():
                self.forward(one, one, probe, one[0])
        except NotImplementedError as error:
            raise ConfigError(f"{type(self.model).__name__} cannot be served: {error}") from error
        shapes = set(probe.values())
        if len(shapes) != 1 or sorted(probe) != list(range(len(probe))):
            raise ConfigError(
                f"{type(self.model).__name__} cannot be served: its layers do not all have "
                "ordinary attention of one shape"
            )
        return KVShape(len(probe), *shapes.pop())

    def forward(self, ids: Tensor, positions: Tensor, plan: Any, keep: Tensor) -> Tensor:
        """Logits [K, V] at the flat positions `keep` [K] of one step; ids, positions [1, N]."""
        out = self.model(
            input_ids=ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=keep,
            slot_plan=plan,
        )
        return out.logits[0]  # type: ignore[no-any-return]

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer (for stop strings), or None where there is none."""
        try:
            return AutoTokenizer.from_pretrained(self.path)
        except (OSError, ValueError):
            return None

    def adapter(self, state: Mapping[str, Tensor]) -> Adapter:
        """A serve adapter from a PEFT state dict (`get_peft_model_state_dict`), copied. Raises
        ConfigError on anything but pairs of LoRA matrices of the model's linear layers."""
        scale = self.lora.alpha / self.lora.rank
        adapter: dict[str, tuple[Tensor, Tensor]] = {}
        for name in self.modules:
            a, b = (state.get(f"base_model.model.{name}.lora_{half}.weight") for half in "AB")
            if a is not None and b is not None:
                a, b = (matrix.detach().to(self.device, torch.float32).t() for matrix in (a, b))
                adapter[name] = torch.clone(a).contiguous(), (b * scale).contiguous()
        if 2 * len(adapter) != len(state):
            raise ConfigError("the adapter is not pairs of LoRA matrices of the model's layers")
        return adapter

    def set_adapter(self, adapter: Adapter) -> None:
        """Makes it the serve adapter. Engine thread only, between two steps."""
        for name, module in self.modules.items():
            module.lora = adapter.get(name)

    def bare_model(self) -> Any:
        """A second, ordinary tree (transformers' own attention) over the same parameter tensors."""
        config = copy.deepcopy(self.config)
        config._attn_implementation = self._plain_attention
        with torch.device("meta"):
            twin = type(self.model)(config)
        for name, module in twin.named_modules(remove_duplicate=False):
            own = self.model.get_submodule(name)
            for leaf, parameter in own.named_parameters(recurse=False):
                module.register_parameter(leaf, parameter)
            for leaf, buffer in own.named_buffers(recurse=False):
                module._buffers[leaf] = buffer.clone()
        twin.generation_config = copy.deepcopy(self.model.generation_config)
        return twin

    def trainer_model(self, seed: int = 0) -> Any:
        """A PeftModel with a fresh LoRA adapter (float32) over the shared base tensors. The
        adapter is the only thing in it that requires a gradient."""
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=self.lora.rank,
            lora_alpha=self.lora.alpha,  # type: ignore[arg-type]
            target_modules=self.lora.target_modules,
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return get_peft_model(self.bare_model(), config)
