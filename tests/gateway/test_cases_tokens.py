"""CASES 21 to 25 over HTTP: what is recorded is what was sampled."""

import pytest
from openai import InternalServerError

from openclaw_rl.types import State
from tests.fakes.engine import EOS_ID, Fault, logprob_of
from tests.gateway.conftest import whole_text, world

TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {}}}]


def assert_exact(turn, ids):
    """Ids as sampled, log-probs one to one, nothing added."""
    assert list(turn.output_ids) == ids
    start = len(turn.prompt_ids)
    assert list(turn.output_logprobs) == [logprob_of(t, start + i) for i, t in enumerate(ids)]
    assert len(turn.output_versions) == len(ids)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "raw",
    [
        '<tool_call>{"name":"run","arguments":{"a":[1,2],"b":{"c":null}}}</tool_call>',
        "  odd \n\n\t white  space \n ",
        "<think>never closed, and then it went on",
        '<tool_call>\n{"name": "run", "arguments": {broken}\n</tool_call>',
        "Grüße, 世界 👋",
    ],
)
async def test_case_21_the_recorded_ids_are_the_sampled_ids(served, stream, raw):
    ids = served.engine.say(raw)
    answer = await served.chat("go", stream=stream, tools=TOOLS)
    assert_exact(served.only_turn(), ids)
    assert answer.finish_reason == ("tool_calls" if answer.message.tool_calls else "stop")
    if raw.startswith("<think>"):
        assert answer.text == ""
        assert answer.reasoning == raw.removeprefix("<think>")


async def test_case_21_the_next_prompt_holds_the_sampled_ids_again(served):
    raw = '<tool_call>\n{"name":"run","arguments":{"a":[1,2]}}\n</tool_call>'
    # The same text in other tokens than the tokenizer would choose: one character each.
    ids = [i for c in raw.split("run") for i in served.tokenizer.encode(c)]
    pieces = raw.replace("<tool_call>", "").replace("</tool_call>", "")
    ids = [
        *served.tokenizer.encode("<tool_call>"),
        *(i for char in pieces for i in served.tokenizer.encode(char)),
        *served.tokenizer.encode("</tool_call>"),
        EOS_ID,
    ]
    assert ids != [*served.tokenizer.encode(raw), EOS_ID]
    served.engine.replies.append(ids)
    first = await served.chat("go", tools=TOOLS)
    (call,) = first.message.tool_calls
    await served.chat(
        [
            {"role": "user", "content": "go"},
            first.replay(),
            {"role": "tool", "tool_call_id": call.id, "content": "ok"},
        ],
        tools=TOOLS,
    )
    parent, child = served.turns()
    assert child.shares_tokens
    assert list(child.prompt_ids)[len(parent.prompt_ids) :][: len(ids)] == ids


@pytest.mark.parametrize("stream", [True, False])
async def test_case_22_a_reply_cut_by_length_is_marked_and_gets_no_end_token(served, stream):
    ids = served.engine.say("a very long reply indeed")
    answer = await served.chat("go", stream=stream, max_tokens=4)
    assert answer.finish_reason == "length"
    turn = served.only_turn()
    assert_exact(turn, ids[:4])
    assert turn.truncated
    assert EOS_ID not in turn.output_ids
    assert turn.finish_reason == "length"


async def test_case_23_what_the_template_adds_after_a_reply_is_not_in_it(served):
    ids = served.engine.say("short", end=False)  # ends without an end token
    served.engine.say("second")
    first = await served.chat("go")
    await served.chat(
        [{"role": "user", "content": "go"}, first.replay(), {"role": "user", "content": "on"}]
    )
    parent, child = served.turns()
    assert_exact(parent, ids)
    # The next prompt has the template's end of turn and newline; they belong to nobody's output.
    rest = list(child.prompt_ids)[len(parent.prompt_ids) + len(ids) :]
    assert child.shares_tokens
    assert whole_text(served, rest).startswith("<|im_end|>\n<|im_start|>user")


async def test_case_24_a_token_that_the_model_lacks_is_of_another_model(served):
    """The trainer could not look it up, and the whole batch would fail with it."""
    lacking = served.tokenizer.vocab_size
    assert lacking
    served.engine.replies.append([lacking - 1, lacking, EOS_ID])
    with pytest.raises(InternalServerError, match="a token that the model lacks"):
        await served.client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}]
        )
    assert served.turns() == []


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("lie", ["missing", "fewer", "none", "shifted"])
async def test_case_24_without_every_log_prob_the_turn_is_served_and_dropped(served, stream, lie):
    served.engine.say("hello there")
    served.engine.faults.append(Fault(logprobs=lie))
    answer = await served.chat("hi", stream=stream)
    assert answer.text == "hello there"
    turn = served.only_turn()
    assert turn.state is State.DROPPED
    assert turn.drop_reason == "logprobs_missing"
    assert served.journal.outcomes().dropped == {"logprobs_missing": 1}
    assert len(turn.output_logprobs) < len(turn.output_ids)  # nothing padded


async def test_case_25_where_the_template_drops_reasoning_a_new_segment_begins(
    tmp_path, qwen_model
):
    async with world(tmp_path, qwen_model) as served:
        served.engine.say("<think>\nhm\n</think>\n\nHello.")
        first = await served.chat("hi")
        served.engine.say("<think>\nso\n</think>\n\nBye.")
        await served.chat(
            [{"role": "user", "content": "hi"}, first.replay(), {"role": "user", "content": "bye"}]
        )
        parent, child = served.turns()
        assert child.parent_id == parent.turn_id
        assert not child.shares_tokens
        assert "hm" not in whole_text(served, list(child.prompt_ids))
        whole = [*parent.prompt_ids, *parent.output_ids]
        assert list(child.prompt_ids)[: len(whole)] != whole
