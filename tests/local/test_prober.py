"""The prober against the plain model: the same replies, the same log-probs, and nothing left."""

from __future__ import annotations

import pytest
import torch

from openclaw_rl.local.forward import PolicyForward
from openclaw_rl.local.prober import LocalProber
from tests.local.tiny import VOCAB, peft_model

PROMPTS = [[3, 9, 4], [5], [7, 8, 9, 10, 11, 12], [5, 6]] + [[n, n + 1] for n in range(10, 26)]
TOKENS = 9


@pytest.fixture(scope="module")
def forward() -> PolicyForward:
    return PolicyForward(peft_model())


def alone(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    """Greedy decoding of one prompt, without cache and padding."""
    ids = list(prompt)
    for _ in range(TOKENS):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("base", [False, True])
def test_replies_are_those_of_each_prompt_alone(forward, base):
    prober = LocalProber(forward, set(), lambda: None)
    found = prober.reply(PROMPTS, TOKENS, base=base)
    if base:
        with forward.model.disable_adapter():
            assert found == [alone(forward.model, prompt) for prompt in PROMPTS]
    else:
        assert found == [alone(forward.model, prompt) for prompt in PROMPTS]


def test_candidate_and_base_differ(forward):
    prober = LocalProber(forward, set(), lambda: None)
    assert prober.reply(PROMPTS, TOKENS) != prober.reply(PROMPTS, TOKENS, base=True)


def test_a_reply_ends_before_its_end_token(forward):
    whole = LocalProber(forward, set(), lambda: None).reply(PROMPTS, TOKENS)
    ends = {whole[0][3], whole[2][5]}
    expected = [
        reply[: next((at for at, token in enumerate(reply) if token in ends), TOKENS)]
        for reply in whole
    ]
    assert LocalProber(forward, ends, lambda: None).reply(PROMPTS, TOKENS) == expected
    every = LocalProber(forward, range(VOCAB), lambda: None)
    assert every.reply(PROMPTS, TOKENS) == [[]] * len(PROMPTS)


@pytest.mark.parametrize("base", [False, True])
def test_scores_are_the_models_own_log_probs(forward, base):
    prober = LocalProber(forward, set(), lambda: None)
    replies = [prompt[::-1] for prompt in PROMPTS]
    replies[1] = []
    found = prober.score(PROMPTS, replies, base=base)
    assert found[1] == []
    for prompt, reply, values in zip(PROMPTS, replies, found, strict=True):
        ids = torch.tensor([prompt + reply])
        with torch.no_grad():
            if base:
                with forward.model.disable_adapter():
                    logits = forward.model(ids).logits[0]
            else:
                logits = forward.model(ids).logits[0]
        rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        own = rows.gather(1, torch.tensor(reply, dtype=torch.long)[:, None])[:, 0]
        assert values == pytest.approx(own.tolist(), abs=1e-5)


def test_the_model_is_left_as_it_was(forward):
    """Also while activations are recomputed, which takes the training mode, without a cache."""
    model = forward.model
    forward.recompute_activations()
    assert model.training
    before = [(p.requires_grad, p.detach().clone()) for p in model.parameters()]
    passes = []
    prober = LocalProber(forward, set(), lambda: passes.append(1))
    assert prober.reply(PROMPTS[:2], TOKENS) == [alone(model, p) for p in PROMPTS[:2]]
    prober.score(PROMPTS, PROMPTS, base=True)
    assert model.training
    assert len(passes) == TOKENS + 2
    for p, (needed, value) in zip(model.parameters(), before, strict=True):
        assert p.requires_grad is needed
        assert p.grad is None
        assert torch.equal(p, value)
