"""CASES 12 to 15, 17 to 20 over HTTP, asserted on the journal."""

import asyncio

import pytest

from openclaw_rl.types import State
from tests.gateway.conftest import world

MAIN = {"X-Session-Id": "s1"}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


async def said(served, reply, messages, **options):
    """One exchange; the conversation afterwards."""
    served.engine.say(reply)
    answer = await served.chat(messages, **options)
    assert answer.text == reply
    return [*messages, answer.replay()]


@pytest.mark.parametrize("stream", [True, False])
async def test_case_12_a_conversation_is_recognised_by_its_history(served, stream):
    talk = await said(served, "Paris.", [user("Capital of France?")], stream=stream)
    talk = await said(served, "Rome.", [*talk, user("And of Italy?")], stream=stream)
    await said(served, "Thanks.", [*talk, user("Good.")], stream=stream)
    first, second, third = served.turns()
    assert first.session_id == second.session_id == third.session_id
    assert (first.parent_id, second.parent_id, third.parent_id) == (
        None, first.turn_id, second.turn_id,
    )  # fmt: skip
    assert first.state is second.state is State.JUDGING
    assert [m["content"] for m in first.next_state] == ["And of Italy?"]
    assert [m["content"] for m in second.next_state] == ["Good."]
    assert third.next_state is None
    # Token for token: each prompt begins with the one before and its reply.
    for parent, child in ((first, second), (second, third)):
        whole = [*parent.prompt_ids, *parent.output_ids]
        assert child.shares_tokens
        assert list(child.prompt_ids)[: len(whole)] == whole


async def test_case_12_two_users_with_the_same_first_message_stay_apart(served):
    one = await said(served, "Hello, one.", [user("hi")])
    two = await said(served, "Hello, two.", [user("hi")])
    await said(served, "A.", [*two, user("from two")])
    await said(served, "B.", [*one, user("from one")])
    turns = served.turns()
    assert turns[0].session_id != turns[1].session_id
    assert turns[2].session_id == turns[1].session_id
    assert turns[3].session_id == turns[0].session_id
    assert [m["content"] for m in turns[0].next_state] == ["from one"]
    assert [m["content"] for m in turns[1].next_state] == ["from two"]


async def test_case_12_one_users_message_is_no_feedback_on_anothers_reply(tmp_path, model):
    async with world(tmp_path, model) as served:
        keys = [{"Authorization": f"Bearer {name}"} for name in ("ann", "bob")]
        talk = await said(served, "Hello.", [user("hi")], extra_headers=keys[0])
        await said(served, "What?", [*talk, user("terrible")], extra_headers=keys[1])
        anns, bobs = served.turns()
        assert anns.state is State.WAITING
        assert bobs.parent_id is None
        assert bobs.session_id != anns.session_id


async def test_case_13_the_same_request_twice_with_a_retry_header_is_one_turn(served):
    await said(served, "First.", [user("hi")])
    await said(served, "Second.", [user("hi")], extra_headers={"x-stainless-retry-count": "1"})
    old, new = served.turns()
    assert (old.state, old.drop_reason) == (State.DROPPED, "retried")
    assert new.state is State.WAITING
    assert old.next_state is None
    assert new.session_id == old.session_id


async def test_case_13_the_same_request_twice_in_a_named_session_is_one_turn(served):
    talk = await said(served, "Well.", [user("hi")], extra_headers=MAIN)
    again = [*talk, user("more")]
    await said(served, "First.", again, extra_headers=MAIN)
    await said(served, "Second.", again, extra_headers=MAIN)
    root, old, new = served.turns()
    assert root.state is State.JUDGING
    assert [m["content"] for m in root.next_state] == ["more"]
    assert (old.state, old.drop_reason) == (State.DROPPED, "retried")
    assert new.state is State.WAITING
    outcomes = served.journal.outcomes()
    assert outcomes.dropped == {"retried": 1}
    assert outcomes.balanced()


async def test_case_13_the_same_request_twice_at_once_keeps_the_one_that_is_continued(served):
    served.engine.gated = True
    for reply in ("One.", "Two."):
        served.engine.say(reply)
    asking = [asyncio.ensure_future(served.chat([user("hi")], extra_headers=MAIN)) for _ in "12"]
    await served.engine.arrived(2)
    await served.engine.open_gate()
    answers = {answer.text: answer for answer in await asyncio.gather(*asking)}
    assert set(answers) == {"One.", "Two."}  # both clients are served
    await said(served, "Ok.", [user("hi"), answers["Two."].replay(), user("x")], extra_headers=MAIN)
    states = {turn.reply["content"]: (turn.state, turn.drop_reason) for turn in served.turns()}
    assert states == {
        "One.": (State.DROPPED, "retried"),
        "Two.": (State.JUDGING, None),
        "Ok.": (State.WAITING, None),
    }
    assert served.journal.outcomes().balanced()


async def test_case_13_a_reply_with_a_thumb_is_judged_although_it_is_asked_for_again(served):
    await said(served, "First.", [user("hi")], extra_headers=MAIN)
    turn_id = served.only_turn().turn_id
    thumb = {"turn_id": turn_id, "thumb": "down"}
    assert (await served.post(thumb, "/v1/feedback"))[0] == 200
    talk = await said(served, "Second.", [user("hi")], extra_headers=MAIN)
    await said(served, "Third.", [*talk, user("better")], extra_headers=MAIN)
    assert [turn.state for turn in served.turns()] == [State.JUDGING, State.JUDGING, State.WAITING]


async def test_case_14_two_tool_results_are_both_in_the_next_state(served):
    tools = [{"type": "function", "function": {"name": "run", "parameters": {}}}]
    served.engine.say(
        '<tool_call>\n{"name": "run", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "run", "arguments": {"a": 2}}\n</tool_call>'
    )
    first = await served.chat([user("go")], tools=tools, extra_headers=MAIN)
    ids = [call.id for call in first.message.tool_calls]
    results = [
        {"role": "tool", "tool_call_id": ids[0], "content": "error: no such file"},
        {"role": "tool", "tool_call_id": ids[1], "content": "fine"},
    ]
    talk = [user("go"), first.replay(), *results]
    await said(served, "Done.", talk, tools=tools, extra_headers=MAIN)
    turn = served.turns()[0]
    assert [m["content"] for m in turn.next_state] == ["error: no such file", "fine"]
    assert served.turns()[1].parent_id == turn.turn_id
    assert served.turns()[1].shares_tokens


async def test_case_15_after_a_compaction_a_new_trajectory_begins(served):
    talk = await said(served, "Hello.", [user("hi")], extra_headers=MAIN)
    talk = await said(served, "Sure.", [*talk, user("help me")], extra_headers=MAIN)
    summary = user("Summary of the conversation so far: greetings were exchanged.")
    await said(served, "Going on.", [summary, user("go on")], extra_headers=MAIN)
    turns = served.turns()
    assert turns[1].state is State.WAITING
    assert turns[1].next_state is None
    assert turns[2].parent_id is None
    assert not turns[2].shares_tokens
    assert turns[2].session_id == turns[1].session_id


async def test_case_16_a_replay_in_another_form_is_the_same_conversation(tmp_path, qwen_model):
    tools = [{"type": "function", "function": {"name": "run", "parameters": {}}}]
    async with world(tmp_path, qwen_model) as served:
        raw = '<think>\nhm\n</think>\n\n<tool_call>\n{"name":"run","arguments":{"b":1,"a":2}}'
        ids = served.engine.say(raw + "\n</tool_call>")
        first = await served.chat([user("go")], tools=tools)
        call = first.replay()["tool_calls"][0]
        call["function"]["arguments"] = '{"a": 2, "b": 1}'  # re-serialised; reasoning is gone
        replayed = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "ok"}
        await said(served, "Done.", [user("go"), replayed, result], tools=tools)
        parent, child = served.turns()
        assert child.parent_id == parent.turn_id
        # Served again as it was written, not as it was sent back.
        assert child.shares_tokens
        assert list(child.prompt_ids)[len(parent.prompt_ids) :][: len(ids)] == ids


async def test_case_17_two_requests_at_once_are_two_branches(served):
    talk = await said(served, "Hello.", [user("hi")], extra_headers=MAIN)
    served.engine.gated = True
    asked = []
    for number, text in enumerate(("left", "right")):
        served.engine.say(f"You went {text}.")
        asked.append(
            asyncio.ensure_future(served.chat([*talk, user(text)], extra_headers=MAIN, stream=True))
        )
        await served.engine.arrived(2 + number)
    await served.engine.open_gate()
    answers = await asyncio.gather(*asked)
    assert [answer.text for answer in answers] == ["You went left.", "You went right."]
    root, *branches = served.turns()
    assert {branch.parent_id for branch in branches} == {root.turn_id}
    assert [m["content"] for m in root.next_state] == ["left"]  # the first one stays
    for branch, answer in zip(("left", "right"), answers, strict=True):
        messages = [*talk, user(branch), answer.replay(), user(f"back from {branch}")]
        await said(served, "Welcome.", messages, extra_headers=MAIN)
    ends = served.turns()[3:]
    assert {end.parent_id for end in ends} == {branch.turn_id for branch in branches}
    assert all(end.shares_tokens for end in ends)


async def test_case_18_memory_is_bounded_and_evicted_turns_are_kept(tmp_path, model):
    limit = 20_000
    async with world(tmp_path, model, recent_bytes=limit, max_turns=50) as served:
        first = await said(served, "Hello.", [user("session 0")], extra_headers={
            "X-Session-Id": "s0"})  # fmt: skip
        for number in range(1, 60):
            await said(served, "Hello.", [user(f"session {number}")],
                       extra_headers={"X-Session-Id": f"s{number}"})  # fmt: skip
        lines = dict(line.rsplit(" ", 1) for line in (await served.metrics()).splitlines())
        assert 0 < float(lines["openclaw_rl_recent_bytes"]) <= 2 * limit
        assert float(lines["openclaw_rl_recent_turns"]) < 60
        assert served.journal.outcomes().main == 60
        # A forgotten session goes on as a new trajectory of the same name; nothing breaks.
        await said(served, "Again.", [*first, user("still there?")],
                   extra_headers={"X-Session-Id": "s0"})  # fmt: skip
        assert served.turns()[-1].session_id == served.turns()[0].session_id


async def test_case_18_an_evicted_prompt_comes_from_the_journal(tmp_path, model):
    async with world(tmp_path, model, recent_bytes=1) as served:
        talk = await said(served, "Paris.", [user("Capital of France?")])
        await said(served, "Rome.", [*talk, user("And of Italy?")])
        parent, child = served.turns()
        assert child.shares_tokens
        whole = [*parent.prompt_ids, *parent.output_ids]
        assert list(child.prompt_ids)[: len(whole)] == whole


async def test_case_19_the_last_turn_waits_and_ends_with_its_session(served):
    await said(served, "Bye.", [user("bye")], extra_headers=MAIN)
    assert served.only_turn().state is State.WAITING
    session_id = served.only_turn().session_id
    status, _ = await served.post({}, f"/v1/sessions/{session_id}/end")
    assert status == 200
    turn = served.only_turn()
    assert (turn.state, turn.drop_reason) == (State.DROPPED, "session_ended")


@pytest.mark.parametrize("ended", ["s1", "another"])
async def test_case_19_a_reply_under_way_when_its_session_ends_does_not_wait(served, ended):
    served.engine.gated = True
    served.engine.say("Too late.")
    named = {"extra_headers": {**MAIN, "X-Session-Id": "s1"}}
    asking = asyncio.ensure_future(served.chat([user("hi")], **named))
    await served.engine.arrived(1)
    assert (await served.post({}, f"/v1/sessions/{ended}/end"))[0] == 200
    await served.engine.open_gate()
    assert (await asking).text == "Too late."
    fate = ("dropped", "session_ended") if ended == "s1" else ("waiting", None)
    turn = served.only_turn()
    assert (turn.state.value, turn.drop_reason) == fate
    await said(served, "Anew.", [user("hello")], **named)  # OpenClaw keeps the name at a reset
    assert served.turns()[1].state is State.WAITING
    assert served.journal.outcomes().balanced()


async def test_case_20_a_transient_message_is_no_next_state(served):
    talk = await said(served, "Hello.", [user("hi")], extra_headers=MAIN)
    internal = user("<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nremember the milk\n<<<END>>>")
    await said(served, "Noted.", [*talk, internal], extra_headers=MAIN)
    assert served.turns()[0].next_state is None
    await said(served, "Sure.", [*talk, user("really?")], extra_headers=MAIN)
    first = served.turns()[0]
    assert [m["content"] for m in first.next_state] == ["really?"]


async def test_side_requests_are_served_and_recorded_as_side(served):
    headers = {**MAIN, "x-turn-type": "side"}
    await said(served, "Hello.", [user("hi")], extra_headers=headers)
    turn = served.only_turn()
    assert (turn.kind, turn.state) == ("side", State.SIDE)
    outcomes = served.journal.outcomes()
    assert (outcomes.seen, outcomes.main, outcomes.side) == (1, 0, 1)
