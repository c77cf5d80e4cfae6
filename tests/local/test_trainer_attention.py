"""The short-sequence attention is the fused one's equal; what it does not know it hands on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from openclaw_rl.local import train_attention as ta
from tests.local.tiny import peft_model


def inputs(length: int, dtype: torch.dtype):
    g = torch.Generator().manual_seed(length)
    shapes = [(2, 6, length, 16), (2, 2, length, 16), (2, 2, length, 16)]
    return [torch.randn(s, generator=g).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("length", [1, 7, 64])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_equals_exact_attention(length, scaling):
    module = SimpleNamespace(is_causal=True, num_key_value_groups=3, training=False)
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        q, k, v = inputs(length, torch.bfloat16)
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
        out, _ = ta.train_attention(module, q, k, v, None, scaling=scaling)
        assert out.shape == (2, length, 6, 16)
        out.double().square().sum().backward()
        results.append([x.double() for x in (out, q.grad, k.grad, v.grad)])
    for low, exact in zip(*results, strict=True):
        assert float((low - exact).abs().max()) <= 0.03 * max(1.0, float(exact.abs().max()))


def test_long_masked_or_odd_calls_go_to_the_fused_one(monkeypatch):
    from transformers.integrations import sdpa_attention

    calls = []

    def spy(module, q, k, v, mask, **kwargs):
        calls.append(mask)
        return q.transpose(1, 2), None

    monkeypatch.setattr(sdpa_attention, "sdpa_attention_forward", spy)
    module = SimpleNamespace(is_causal=True, num_key_value_groups=3, training=False)
    q, k, v = inputs(8, torch.bfloat16)
    ta.train_attention(module, q, k, v, None)
    assert not calls
    ta.train_attention(module, q, k, v, torch.zeros(2, 1, 8, 8))
    ta.train_attention(module, q, k, v, None, dropout=0.1)
    ta.train_attention(module, q, k, v, None, softcap=30.0)
    ta.train_attention(SimpleNamespace(is_causal=False), q, k, v, None)
    ta.train_attention(module, *inputs(ta.SHORT + 1, torch.bfloat16), None)
    ta.train_attention(module, *inputs(8, torch.float32), None)
    assert len(calls) == 6


def test_a_model_gives_the_same_logits_and_looks_backward_only():
    model = peft_model(dtype=torch.bfloat16)
    ids = torch.arange(1, 30)[None]
    with torch.no_grad():
        before = model(ids).logits.float()
        ta.use(model.get_base_model())
        after = model(ids).logits.float()
        assert float((after - before).abs().mean()) < 0.02
        changed = ids.clone()
        changed[0, 20:] = 7
        torch.testing.assert_close(model(changed).logits.float()[:, :20], after[:, :20])
