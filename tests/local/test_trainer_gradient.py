"""The gradient of a step: merging, micro-batches and pieces change its cost, never its value."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import get_peft_model_state_dict

from openclaw_rl.config import Config, RolloutConfig, TrainConfig, hook_args
from openclaw_rl.errors import ConfigError, HookError
from openclaw_rl.journal import Journal
from openclaw_rl.local.forward import PolicyForward, mix_precision
from openclaw_rl.local.learner import Learner
from openclaw_rl.rollout import generate_rollout
from openclaw_rl.rollout.train_data import convert, flatten, turn_ranges
from tests.journal.build import judged, record
from tests.local.tiny import conversation, peft_model, train_args
from tests.losses.naive import naive_loss

pytestmark = pytest.mark.slow


@functools.cache
def shared() -> Any:
    """One model for the file (a fixture would be printed with every failing example)."""
    return peft_model()


@pytest.fixture
def model():
    return shared()


def gradient(model: Any, samples: list[Any], **changes: Any):
    """The gradient that one step would apply (no step is taken)."""
    unlimited = {"clip_grad": 0.0, "max_grad_norm_skip": 0.0, "max_logprob_diff": 0.0}
    args = train_args(**(unlimited | changes))
    learner = Learner(args, model)
    caught: list[torch.Tensor] = []

    def step() -> None:
        caught.extend(p.grad.clone().flatten() for p in learner.parameters)

    learner.optimizer.step = step  # type: ignore[method-assign]
    reports = learner.learn(convert(args, samples))
    return (torch.cat(caught) if caught else None), reports[0]


COMBINED = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3", "entropy_coef": 0.02}


@settings(max_examples=15, deadline=None)
@given(
    seeds=st.lists(st.integers(0, 1000), min_size=1, max_size=3, unique=True),
    turns=st.integers(1, 4),
    budget=st.sampled_from([1, 40, 10_000]),
    chunk=st.sampled_from([2, 5, 10_000]),
    temperature=st.sampled_from([1.0, 0.7]),
    top_k=st.sampled_from([0, 3]),
)
def test_merged_segments_have_the_gradient_of_separate_turns(
    seeds, turns, budget, chunk, temperature, top_k
):
    model = shared()
    merged, single = [], []
    for seed in seeds:
        one, many = conversation(seed, turns, top_k=top_k)
        merged.append(one)
        single.append(many)
    same = {"rollout_temperature": temperature, "opd_top_k": top_k, **COMBINED}
    separate, a = gradient(model, single, **same, max_tokens_per_gpu=64, loss_chunk_tokens=10_000)
    together, b = gradient(
        model, merged, **same, max_tokens_per_gpu=budget, loss_chunk_tokens=chunk
    )
    # Llama's norm rounds to float32 on the way, whatever the dtype of the model
    torch.testing.assert_close(together, separate, rtol=0, atol=1e-6)
    assert a.turns == b.turns == turns * len(seeds)
    assert a.loss == pytest.approx(b.loss, rel=1e-6, abs=1e-6)
    assert a.trained_tokens == b.trained_tokens
    assert a.logprob_diff == pytest.approx(b.logprob_diff, rel=1e-5)
    assert a.metrics.keys() == b.metrics.keys()
    for name, value in a.metrics.items():
        assert b.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize("top_k", [0, 3])
def test_case_46_a_batch_of_two_temperatures_has_the_gradients_of_both_added(model, top_k):
    """Each turn is learnt at the temperature it was sampled at, also inside a merged segment."""
    merged, single = conversation(11, 4, top_k=top_k)
    temperatures = [0.6, 1.3, 1.3, 0.6]
    for turn, temperature in zip(merged.metadata["turns"], temperatures, strict=True):
        turn["temperature"] = temperature
    same = {"opd_top_k": top_k, **COMBINED}
    together, report = gradient(model, [merged], **same)
    total, difference = torch.zeros_like(together), 0.0
    for wanted in set(temperatures):
        own = [s for s, t in zip(single, temperatures, strict=True) if t == wanted]
        part, alone = gradient(model, own, rollout_temperature=wanted, **same)
        total += part * len(own)
        difference += alone.logprob_diff * alone.compared_tokens
    torch.testing.assert_close(together, total / 4, rtol=0, atol=1e-6)
    assert report.logprob_diff * report.compared_tokens == pytest.approx(difference)


def test_merging_in_float32_agrees_to_one_millionth():
    model = peft_model(dtype=torch.float32)
    one, many = conversation(5, 4)
    together, _ = gradient(model, [one], **COMBINED)
    separate, _ = gradient(model, many, **COMBINED)
    torch.testing.assert_close(together, separate, rtol=1e-4, atol=1e-6)


def test_gradient_is_that_of_plain_autograd_over_the_whole_model(model):
    """The naive loss over the model's own logits, one turn after another, no tricks."""
    one, many = conversation(3, 3)
    got, report = gradient(model, [one], **COMBINED)
    args = train_args(**COMBINED)
    loss = torch.zeros((), dtype=torch.float64)
    for sample in many:
        ids = torch.tensor([sample.tokens])
        n = sample.response_length
        logits = model(ids).logits
        with torch.no_grad(), model.disable_adapter():
            base = torch.log_softmax(model(ids).logits[0, -n - 1 : -1], -1)
        batch = {
            "unconcat_tokens": [ids[0]],
            "total_lengths": [ids.numel()],
            "response_lengths": [n],
            "advantages": [torch.full((n,), sample.reward)],
            "teacher_log_probs": [torch.tensor(sample.teacher_log_probs)],
            "ref_log_probs": [base.gather(1, ids[0, -n:, None])[:, 0]],
        }
        loss = loss + naive_loss(args, batch, logits, [torch.ones(n)], rl=True, opd=True)
    model.zero_grad()
    (loss / 3).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    # teacher values travel as float32
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert report.loss == pytest.approx(loss.item() / 3, rel=1e-6)


def test_checkpointing_changes_memory_not_the_gradient():
    one, _ = conversation(8, 3)
    plain, _ = gradient(peft_model(), [one])
    recomputed, _ = gradient(peft_model(), [one], gradient_checkpointing="on")
    torch.testing.assert_close(recomputed, plain, rtol=0, atol=1e-6)


def test_several_steps_train_on_the_old_policys_log_probs(model):
    """With two steps a rollout the second one sees the weights of the rollout's start as old."""
    _, many = conversation(4, 4)
    for sample in many:
        sample.metadata["turns"][0]["reward"] = 1.0
    seen: list[Any] = []
    args = train_args(num_steps_per_rollout=2, max_logprob_diff=100.0)
    learner = Learner(args, peft_model())
    own = learner.loss_hook

    def spy(args, batch, logits, reduce):
        loss, metrics = own(args, batch, logits, reduce)
        seen.append(float(metrics["ppo_kl"].abs()))
        return loss, metrics

    learner.loss_hook = spy
    reports = learner.learn(convert(args, many))
    assert [r.turn_ids for r in reports] == [["t4.0", "t4.1"], ["t4.2", "t4.3"]]
    assert seen[0] == pytest.approx(0, abs=1e-6)
    assert seen[-1] > 1e-4


def test_merging_does_not_change_which_turns_share_a_step(tmp_path):
    """Four turns of one session, out of a real journal: two steps of two turns each."""
    path = tmp_path / "journal.db"
    train = TrainConfig(num_steps_per_rollout=2, max_logprob_diff=0)
    args = hook_args(Config(train=train, rollout=RolloutConfig(batch_size=4, session_share=1)))
    args.journal_path = str(path)
    tokens = [1]
    with Journal.open(path) as journal:
        for n in range(4):
            prompt, output = [*tokens, 3 + n, 4 + n], [20 + n, 30 + n, 2]
            parent = {"parent_id": f"t{n - 1}", "shares_tokens": True} if n else {}
            judged(journal, record(f"t{n}", prompt_ids=prompt, output_ids=output, **parent))
            tokens = prompt + output
        samples = flatten(generate_rollout(args, 0, None).samples)
    assert len(samples) == 2, "one segment a step"
    reports = Learner(args, peft_model()).learn(convert(args, samples))
    assert [report.turns for report in reports] == [2, 2]


def test_a_limit_skips_the_step_and_zero_turns_it_off(model):
    one, many = conversation(3, 3)
    assert gradient(model, [one])[1].skipped is None
    for limit, reason in (
        ("max_grad_norm_skip", "grad_norm"),
        ("max_logprob_diff", "logprob_diff"),
    ):
        got, report = gradient(model, [one], **{limit: 1e-9})
        assert (got, report.skipped) == (None, reason)
    many[0].rollout_log_probs[0] = -float("inf")
    assert gradient(model, many, max_logprob_diff=1e9)[1].skipped == "logprob_diff"


def test_advantage_hook_gets_the_rollout_and_decides(model, tmp_path):
    hook = tmp_path / "adv.py"
    hook.write_text(
        "import torch\n"
        "def advantages(args, data):\n"
        "    assert [v.numel() for v in data['log_probs']] == data['response_lengths']\n"
        "    assert set(data) >= {'rollout_log_probs', 'teacher_log_probs', 'rewards',\n"
        "                         'loss_masks', 'sample_indices', 'turns'}\n"
        "    data['advantages'] = [torch.zeros_like(m) for m in data['loss_masks']]\n"
        "    data['returns'] = data['advantages']\n"
    )
    one, _ = conversation(3, 3, teacher=False)
    loss = {"custom_loss_function_path": "openclaw_rl.losses.grpo_loss"}
    _, report = gradient(model, [one], custom_advantage_function_path=str(hook), **loss)
    assert (report.skipped, report.loss) == ("no_gradient", 0)
    bad = tmp_path / "bad.py"
    bad.write_text("def advantages(args, data):\n    data['advantages'] = []\n")
    with pytest.raises(HookError, match="one value a response token"):
        gradient(model, [one], custom_advantage_function_path=str(bad), **loss)
    broken = tmp_path / "broken.py"
    broken.write_text("def advantages(args, data):\n    raise KeyError('a secret sentence')\n")
    with pytest.raises(HookError, match="KeyError") as caught:
        gradient(model, [one], custom_advantage_function_path=str(broken), **loss)
    assert "secret" not in str(caught.value)


def test_loss_hook_sees_slimes_contract(model, tmp_path):
    """Shapes, keys and dtypes of a custom loss's arguments."""
    hook = tmp_path / "loss.py"
    hook.write_text(
        "import torch\n"
        "def custom_loss(args, batch, logits, sum_of_sample_mean):\n"
        "    n = len(batch['unconcat_tokens'])\n"
        "    total, resp = batch['total_lengths'], batch['response_lengths']\n"
        "    assert logits.dim() == 3 and logits.shape[:2] == (1, sum(total))\n"
        "    assert [t.numel() for t in batch['unconcat_tokens']] == total\n"
        "    for key in ('loss_masks', 'log_probs', 'ref_log_probs', 'advantages', 'returns',\n"
        "                'rollout_log_probs', 'teacher_log_probs'):\n"
        "        assert [v.numel() for v in batch[key]] == resp, key\n"
        "    assert len(batch['rollout_mask_sums']) == n\n"
        "    ones = torch.ones(sum(resp), dtype=logits.dtype)\n"
        "    return sum_of_sample_mean(ones) + 0 * logits.sum(), {'n': torch.tensor(float(n))}\n"
    )
    one, _ = conversation(3, 3)
    _, report = gradient(
        model, [one], custom_loss_function_path=str(hook), use_kl_loss=True, loss_chunk_tokens=6
    )
    assert report.loss == pytest.approx(1.0)  # the mean over turns of the mean over tokens of 1


def test_without_turns_a_sample_is_a_part_of_its_rollout():
    """What a conversion hook without `turns` gets: slime's denominators."""
    _, many = conversation(6, 3)
    for sample in many:
        sample.metadata = {}
        sample.rollout_id = 0  # siblings share one denominator
    turns = turn_ranges(convert(train_args(), many))
    assert sum(turn.share for turn in turns) == pytest.approx(1)
    assert {turn.tokens for turn in turns} == {sum(s.response_length for s in many)}


def test_a_rollout_that_is_spread_over_steps_is_learnt_in_each():
    _, many = conversation(6, 4)
    for sample in many:
        sample.metadata, sample.rollout_id = {}, 0
    args = train_args(num_steps_per_rollout=4, max_logprob_diff=0.0)
    reports = Learner(args, peft_model()).learn(convert(args, many))
    assert [(report.skipped, report.turns) for report in reports] == [(None, 1)] * 4


def test_padding_on_the_right_leaves_real_tokens_alone(model):
    forward = PolicyForward(model)
    a, b = torch.arange(1, 12), torch.arange(5, 9)
    with torch.no_grad():
        both = forward.hidden([a, b])
        torch.testing.assert_close(both[1, :4], forward.hidden([b])[0], rtol=0, atol=1e-6)


def test_a_model_with_unknown_last_steps_is_refused(model):
    forward = PolicyForward(model)
    forward.scale = 2.0
    with pytest.raises(ConfigError, match="cannot be trained"):
        forward.check()


def test_a_float32_adapter_computes_in_the_bases_sixteen_bits():
    """Mixed precision: cheaper, the same gradient, and weights that still learn in float32."""
    one, _ = conversation(9, 3)
    wide = peft_model(dtype=torch.bfloat16)
    low = peft_model(dtype=torch.bfloat16)
    names = list(get_peft_model_state_dict(low))
    for model in (wide, low):
        for p in model.parameters():
            if p.requires_grad:
                p.data = p.data.float()
    seen = []
    mix_precision(low)
    assert list(get_peft_model_state_dict(low)) == names
    layer = low.get_base_model().model.layers[0].mlp.up_proj
    layer.lora_A["default"].register_forward_hook(
        lambda m, i, o: seen.append((i[0].dtype, o.dtype))
    )
    ids = torch.tensor([one.tokens])
    grads = []
    for model in (wide, low):
        torch.log_softmax(model(ids).logits.float(), -1)[..., 3].mean().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]))
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    assert grads[1].dtype == torch.float32
    assert torch.cosine_similarity(grads[0], grads[1], dim=0) > 0.99
    with torch.no_grad(), low.disable_adapter(), wide.disable_adapter():
        assert torch.equal(low(ids).logits, wide(ids).logits)
    exact = peft_model(dtype=torch.float32)
    mix_precision(exact)  # nothing to mix
    assert all(type(m).__name__ != "_MixedLinear" for m in exact.modules())
