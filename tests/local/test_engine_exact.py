"""The engine computes what transformers computes: whoever shares the step, whatever is reused."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from openclaw_rl.local.engine import EngineCore
from openclaw_rl.local.model import LoadedModel, LoraSpec
from tests.fakes.model import tiny_model
from tests.local.engine_kit import Caller, random_adapter, reference

pytestmark = pytest.mark.slow

CLOSE = 1e-4  # float32; the promise is 1e-3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tiny_model(tmp_path_factory.mktemp("model"), scale=3.0)
    return LoadedModel.load(path, lora=LoraSpec(rank=4, alpha=8))


@pytest.fixture(scope="module")
def plain(model):
    return model.bare_model().eval()


@pytest.fixture(scope="module")
def adapted(model):
    """The trainer's tree with the same random adapter that the engine serves as version 1."""
    from peft import set_peft_model_state_dict

    net = model.trainer_model().eval()
    set_peft_model_state_dict(net, random_adapter(model))
    return net


@pytest.fixture
def caller(model):
    core = EngineCore(model, prefill_tokens=32, threads=1, seed=1).start()
    yield Caller(core)
    core.stop()


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(7, 260) for _ in range(draw.randrange(1, 150))] for _ in range(count)]


def worst(got: list[float], want: list[float]) -> float:
    assert len(got) == len(want)
    return float(np.abs(np.array(got) - np.array(want)).max())


def test_batched_requests_of_mixed_lengths_match_transformers(caller, plain):
    asked = prompts(12)
    answers = [caller.send(p, max_new_tokens=5 + i, temperature=0.7) for i, p in enumerate(asked)]
    for i, (prompt, answer) in enumerate(zip(asked, answers, strict=True)):
        answer.wait()
        assert answer.finish == {"type": "length", "length": 5 + i}
        assert worst(answer.logprobs, reference(plain, prompt, answer.ids, 0.7)) < CLOSE


def test_policy_and_base_rows_in_one_step_use_their_own_weights(caller, model, plain, adapted):
    caller.core.publish(1, random_adapter(model)).result()
    asked = prompts(8, seed=1)
    answers = [caller.send(p, policy=i % 2 == 0) for i, p in enumerate(asked)]
    for i, (prompt, answer) in enumerate(zip(asked, answers, strict=True)):
        answer.wait()
        net, other = (adapted, plain) if i % 2 == 0 else (plain, adapted)
        assert worst(answer.logprobs, reference(net, prompt, answer.ids)) < CLOSE
        assert worst(answer.logprobs, reference(other, prompt, answer.ids)) > 0.01
        assert set(answer.versions) == {"1" if i % 2 == 0 else "base"}


def test_the_next_turn_reuses_the_prefix_and_stays_exact(caller, plain):
    prompt = prompts(1, seed=2)[0] * 3
    first = caller.send(prompt).wait()
    assert first.cached == 0
    following = [*prompt, *first.ids, 17, 18, 19]
    second = caller.send(following).wait()
    assert second.cached == len(prompt) + len(first.ids) - 1
    assert worst(second.logprobs, reference(plain, following, second.ids)) < CLOSE
    # Another continuation of the same history: only the common part is taken.
    other = caller.send([*prompt[:-5], 33, 34]).wait()
    assert other.cached == len(prompt) - 5
    assert worst(other.logprobs, reference(plain, [*prompt[:-5], 33, 34], other.ids)) < CLOSE


def test_policy_and_base_never_share_a_prefix(caller, model, plain):
    caller.core.publish(1, random_adapter(model)).result()
    prompt = prompts(1, seed=3)[0] * 3
    caller.send(prompt).wait()
    answer = caller.send(prompt, policy=False).wait()
    assert answer.cached == 0
    assert worst(answer.logprobs, reference(plain, prompt, answer.ids)) < CLOSE


def test_scoring_equals_generation_and_transformers(caller, plain):
    prompt = prompts(1, seed=4)[0] * 2
    answer = caller.send(prompt, max_new_tokens=20).wait()
    whole = prompt + answer.ids
    for start in (0, 3, len(prompt) - 1, len(whole) - 2):
        scored = caller.score(whole, start)
        assert scored.ids == []
        assert [s.token for s in scored.prompt] == whole[start + 1 :]
        got = [s.logprob for s in scored.prompt]
        assert worst(got, reference(plain, whole[: start + 1], whole[start + 1 :])) < CLOSE
    scored = caller.score(whole, len(prompt) - 1)
    assert worst([s.logprob for s in scored.prompt], answer.logprobs) < CLOSE
    assert caller.score(whole, len(whole) - 1).prompt == []


def test_scores_are_not_temperature_scaled(caller, plain):
    ids = prompts(1, seed=5)[0] * 2
    scored = caller.score(ids, 0, temperature=0.3)
    assert worst([s.logprob for s in scored.prompt], reference(plain, ids[:1], ids[1:])) < CLOSE


def test_a_request_resumed_after_an_abort_stays_exact(caller, plain):
    prompt = prompts(1, seed=6)[0] * 2
    first = caller.send(prompt, max_new_tokens=2000, rid="first")
    first.wait_tokens(10)
    caller.core.abort("first")
    first.wait()
    assert first.finish["type"] == "abort"
    second = caller.send(prompt + first.ids, max_new_tokens=10).wait()
    got = first.logprobs + second.logprobs
    assert worst(got, reference(plain, prompt, first.ids + second.ids)) < CLOSE


def test_alternatives(caller, plain):
    prompt = prompts(1, seed=7)[0] * 2
    answer = caller.send(prompt, top_logprobs_num=3, logprob_start_len=0).wait()
    with torch.no_grad():
        logits = plain(torch.tensor([prompt + answer.ids])).logits[0].log_softmax(-1)
    entries = answer.prompt + answer.scores
    for row, entry in zip(logits, entries, strict=False):
        values, ids = row.topk(3)
        assert [i for _, i in entry.top] == ids.tolist()
        assert worst([v for v, _ in entry.top], values.tolist()) < CLOSE


def test_a_cache_too_small_for_all_gives_the_same_answers(model, plain):
    core = EngineCore(model, kv_tokens=512, prefill_tokens=32, threads=1).start()
    assert core.context_length == 512
    caller = Caller(core)
    asked = [p[:100] for p in prompts(10, seed=8)]
    answers = [caller.send(p, max_new_tokens=150) for p in asked]
    for prompt, answer in zip(asked, answers, strict=True):
        answer.wait()
        assert len(answer.ids) == 150
        assert worst(answer.logprobs, reference(plain, prompt, answer.ids)) < CLOSE
        assert core.pool.allocated <= 512
    core.stop()


def test_votes_on_one_prompt_compute_it_once(caller, plain):
    prompt = prompts(1, seed=9)[0] * 3
    answers = [caller.send(prompt).wait() if i == 9 else caller.send(prompt) for i in range(4)]
    for answer in answers:
        answer.wait()
        assert worst(answer.logprobs, reference(plain, prompt, answer.ids)) < CLOSE
    assert sum(a.cached == 0 for a in answers) == 1


def test_the_trees_share_the_base_and_nothing_else(model):
    engine = dict(model.model.named_parameters())
    trainer = model.trainer_model()
    shared = 0
    for name, parameter in trainer.named_parameters():
        bare = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if "lora_" in name:
            assert parameter.requires_grad
            continue
        assert parameter.data_ptr() == engine[bare].data_ptr()
        assert not parameter.requires_grad
        shared += 1
    assert shared == len(engine)
