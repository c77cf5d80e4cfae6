"""The scheduler: versions, ends, failures, threads, other architectures."""

from __future__ import annotations

import json
import math
import threading

import pytest
import torch

from openclaw_rl.errors import ConfigError, EngineRefused, EngineUnavailable
from openclaw_rl.local.engine import EngineCore
from openclaw_rl.local.model import LoadedModel, LoraSpec
from tests.fakes.model import tiny_model
from tests.local.engine_kit import Caller, random_adapter, reference

pytestmark = pytest.mark.slow

PROMPT = list(range(7, 107))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), scale=3.0)


@pytest.fixture(scope="module")
def model(path):
    return LoadedModel.load(path, lora=LoraSpec(rank=4, alpha=8))


@pytest.fixture
def caller(model):
    core = EngineCore(model, prefill_tokens=32, threads=1, seed=1).start()
    yield Caller(core)
    core.stop()


def test_publish_takes_effect_between_two_tokens_and_drops_nobody(caller, model):
    answers = [caller.send([*PROMPT, i], max_new_tokens=400) for i in range(4)]
    for answer in answers:
        answer.wait_tokens(5)
    caller.core.publish(7, random_adapter(model)).result()
    for answer in answers:
        answer.wait()
        assert len(answer.ids) == 400
        switch = answer.versions.index("7")
        assert answer.versions == ["0"] * switch + ["7"] * (400 - switch)
        assert switch >= 5
    assert caller.core.version == "7"


def test_prefixes_of_the_policy_do_not_outlive_their_version(caller, model):
    base = caller.send(PROMPT, policy=False).wait()
    caller.send(PROMPT).wait()
    assert caller.send(PROMPT).wait().cached == len(PROMPT) - 1
    crossing = caller.send([9, *PROMPT], max_new_tokens=400)
    crossing.wait_tokens(3)
    caller.core.publish(1, random_adapter(model)).result()
    assert caller.send(PROMPT).wait().cached == 0
    crossing.wait()
    assert caller.send([9, *PROMPT]).wait().cached == 0
    assert caller.send([*PROMPT, *base.ids], policy=False).wait().cached >= len(PROMPT)


def test_other_weights_under_the_same_version_reuse_nothing(caller, model):
    caller.core.publish(1, random_adapter(model, seed=1)).result()
    caller.send(PROMPT).wait()
    caller.core.publish(1, random_adapter(model, seed=2)).result()
    assert caller.send(PROMPT).wait().cached == 0


def test_an_adapter_that_does_not_fit_is_refused_and_the_old_one_stays(caller, model):
    state = random_adapter(model)
    for broken in (
        {"base_model.model.model.nowhere.lora_A.weight": torch.zeros(4, 4)},
        {"base_model.model.lm_head.weight": torch.zeros(4, 4)},
        dict(list(state.items())[:1]),
    ):
        with pytest.raises(ConfigError):
            caller.core.publish(1, broken)
    assert caller.core.version == "0"


def test_eos_stop_ids_and_ignore_eos(caller, model):
    first = caller.send(PROMPT, max_new_tokens=12, temperature=0).wait()
    token = first.ids[4]
    at = first.ids.index(token)
    stopped = caller.send(PROMPT, max_new_tokens=12, temperature=0, stop_token_ids=(token,)).wait()
    assert stopped.ids == first.ids[: at + 1]
    assert stopped.finish == {"type": "stop", "matched": token}
    model.eos_ids, kept = frozenset({token}), model.eos_ids
    try:
        asked = {"max_new_tokens": 12, "temperature": 0}
        assert caller.send(PROMPT, ignore_eos=False, **asked).wait().ids == stopped.ids
        assert caller.send(PROMPT, ignore_eos=True, **asked).wait().ids == first.ids
    finally:
        model.eos_ids = kept


def test_a_temperature_of_nearly_nothing_is_greedy(caller):
    cold = caller.send(PROMPT, temperature=1e-300).wait()
    assert cold.ids == caller.send(PROMPT, temperature=0).wait().ids
    assert all(map(math.isfinite, cold.logprobs))


def test_a_stop_string_may_span_tokens(caller, model):
    text = "Paris is nice"
    ids = model.tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > 2
    # Greedy under a model that says one thing: its logits are replaced for this test.
    queue = list(ids)
    plain, lock = model.forward, threading.Lock()

    def scripted(batch, positions, plan, keep):
        logits = plain(batch, positions, plan, keep)
        with lock:
            logits[-1, queue.pop(0)] += 1e6
        return logits

    model.forward = scripted
    try:
        answer = caller.send([9], temperature=0, max_new_tokens=len(ids), stop=("is ni",)).wait()
    finally:
        del model.forward
    assert answer.finish == {"type": "stop", "matched": "is ni"}
    assert "is ni" in model.tokenizer.decode(answer.ids)
    assert "is ni" not in model.tokenizer.decode(answer.ids[:-1])


def test_a_presence_penalty_keeps_tokens_from_coming_back(caller):
    answer = caller.send(PROMPT, presence_penalty=2.0, temperature=0, max_new_tokens=40)
    free = caller.send(PROMPT, temperature=0, max_new_tokens=40)
    assert len(set(answer.wait().ids)) > len(set(free.wait().ids))


def test_a_failing_step_aborts_its_requests_and_serving_goes_on(caller, model):
    def broken(*_):
        raise RuntimeError("out of memory")

    model.forward = broken
    try:
        answer = caller.send(PROMPT).wait()
    finally:
        del model.forward
    assert answer.finish["type"] == "abort"
    assert answer.finish["status_code"] == 500
    assert len(caller.send(PROMPT).wait().ids) == 8


def test_an_aborted_request_that_waits_ends_too(model):
    core = EngineCore(model, max_running=1, threads=1).start()
    caller = Caller(core)
    running = caller.send(PROMPT, max_new_tokens=3000)
    running.wait_tokens(1)
    waiting = caller.send(PROMPT, rid="w")
    core.abort("w")
    assert waiting.wait().finish["type"] == "abort"
    assert waiting.ids == []
    assert not running.done.is_set()
    core.stop()


def test_stopping_aborts_what_is_under_way(model):
    core = EngineCore(model, threads=1).start()
    caller = Caller(core)
    answer = caller.send(PROMPT, max_new_tokens=3000)
    answer.wait_tokens(2)
    core.stop()
    assert answer.wait().finish["type"] == "abort"
    with pytest.raises(EngineUnavailable):
        caller.send(PROMPT)


def test_a_prompt_beyond_the_context_is_refused(caller):
    with pytest.raises(EngineRefused, match=r"The input \(5000 tokens\) is longer than"):
        caller.send([9] * 5000)


def test_a_long_prompt_does_not_stall_the_others(caller):
    going = caller.send(PROMPT, max_new_tokens=3000, rid="going")
    going.wait_tokens(1)
    before = len(going.ids)
    long = caller.send([9] * 3200, max_new_tokens=1)
    long.wait()
    # 3200 tokens in pieces of 32: the other got a token with each piece.
    assert len(going.ids) - before >= 3200 // 32 - 1
    caller.core.abort("going")
    going.wait()


def test_more_requests_than_places(model):
    core = EngineCore(model, max_running=2, threads=1).start()
    caller = Caller(core)
    answers = [caller.send([*PROMPT, i]) for i in range(7)]
    assert [len(a.wait().ids) for a in answers] == [8] * 7
    core.stop()


def test_the_thread_count_is_the_engine_threads_own(model):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    seen, forward = [], model.forward
    model.forward = lambda *given: seen.append(torch.get_num_threads()) or forward(*given)
    core = EngineCore(model, threads=1).start()
    Caller(core).send(PROMPT).wait()
    core.stop()
    del model.forward
    assert set(seen) == {1}
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def _other(tmp_path, name, **values):
    import transformers

    config = getattr(transformers, f"{name}Config")(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=None,
        **values,
    )
    torch.manual_seed(0)
    net = getattr(transformers, f"{name}ForCausalLM")(config).float()
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.2)
    net.save_pretrained(tmp_path)
    return LoadedModel.load(tmp_path, dtype="float32", lora=LoraSpec(rank=2))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Qwen3", {}),
        ("Mistral", {"sliding_window": 24}),
        ("Gemma3", {"sliding_window": 16}),
        ("Phi3", {}),
    ],
)
def test_other_architectures_match_transformers(tmp_path, name, values):
    if name == "Gemma3":
        name = "Gemma3Text"
        import transformers

        transformers.Gemma3TextForCausalLM = transformers.Gemma3ForCausalLM
    model = _other(tmp_path, name, **values)
    plain = model.bare_model().eval()
    core = EngineCore(model, prefill_tokens=20, threads=1).start()
    caller = Caller(core)
    answers = [(p, caller.send(p, max_new_tokens=30)) for p in (PROMPT, PROMPT[:50], [3, 4])]
    for prompt, answer in answers:
        want = reference(plain, prompt, answer.wait().ids)
        assert max(abs(a - b) for a, b in zip(answer.logprobs, want, strict=True)) < 1e-3
    core.stop()


def test_a_model_whose_attention_is_not_served_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="soft caps"):
        _other(tmp_path, "Gemma2")


def test_bfloat16_is_close_to_float32(path, model):
    half = LoadedModel.load(path, dtype="bfloat16", lora=LoraSpec(rank=4, alpha=8))
    core = EngineCore(half, threads=1).start()
    core.publish(1, random_adapter(half)).result()
    answers = [Caller(core).send(PROMPT[: 20 + i], max_new_tokens=20) for i in range(20)]
    from peft import set_peft_model_state_dict

    net = half.trainer_model().eval()
    set_peft_model_state_dict(net, random_adapter(half))
    for i, answer in enumerate(answers):
        want = reference(net, PROMPT[: 20 + i], answer.wait().ids)
        gaps = [abs(a - b) for a, b in zip(answer.logprobs, want, strict=True)]
        assert sum(gaps) / len(gaps) < 0.1
    core.stop()


def test_a_directory_without_a_model_is_a_clear_error(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nonsense"}))
    with pytest.raises(ConfigError, match="cannot load the model"):
        LoadedModel.load(tmp_path)
