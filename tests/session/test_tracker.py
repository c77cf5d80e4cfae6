from __future__ import annotations

import pickle
from typing import Any

import pytest

from openclaw_rl.session.tracker import Tracker
from openclaw_rl.session.tree import Tree
from openclaw_rl.types import Turn
from tests.session.helpers import Client, assistant, system, texts, tool, user, view

Q, A = user("hello"), assistant("hi, what can I do?")


def test_case_12_two_users_who_say_the_same_stay_apart():
    client = Client()
    first, t1 = client.turn(view(Q), A)
    second, t2 = client.turn(view(Q), assistant("good day"))
    assert first.turn.session_id != second.turn.session_id
    assert (first.turn.source, second.turn.source) == ("new", "new")
    one = client.place(view(Q, A, user("for one")))
    two = client.place(view(Q, assistant("good day"), user("for two")))
    assert (one.turn.parent_id, texts(one), one.turn.session_id) == (
        t1,
        ["for one"],
        first.turn.session_id,
    )
    assert (two.turn.parent_id, texts(two), two.turn.session_id) == (
        t2,
        ["for two"],
        second.turn.session_id,
    )
    assert one.turn.source == "history"


def test_case_12_identical_twins_are_continued_one_after_the_other():
    client = Client()
    _, t1 = client.turn(view(Q), A)
    _, t2 = client.turn(view(Q), A)
    one, _ = client.turn(view(Q, A, user("one")), assistant("1"))
    two, _ = client.turn(view(Q, A, user("two")), assistant("2"))
    assert (one.turn.parent_id, texts(one)) == (t1, ["one"])
    assert (two.turn.parent_id, texts(two)) == (t2, ["two"])
    assert one.turn.session_id != two.turn.session_id


def test_case_12_nothing_tells_whose_empty_reply_it_was():
    client = Client()
    client.turn(view(Q), assistant(""))
    placement = client.place(view(Q, user("more")))
    assert (placement.turn.parent_id, placement.next_state) == (None, None)
    _, t2 = client.turn(view(Q, A, user("x")), assistant(""))
    assert client.place(view(Q, A, user("x"), user("y"))).turn.parent_id == t2


def test_case_12_a_retry_is_not_taken_for_the_twin_s_answer():
    client = Client()
    _, t1 = client.turn(view(Q), A)
    client.turn(view(Q), A)
    _, t3 = client.turn(view(Q, A, user("x")), assistant("y"))
    again = client.place(view(Q, A, user("x"), headers={"x-stainless-retry-count": "1"}))
    assert (again.turn.parent_id, again.superseded, again.next_state) == (t1, (t3,), None)


def test_case_12_a_nameless_request_prefers_nameless_turns():
    client = Client()
    client.turn(view(Q, session="named"), A)
    _, t2 = client.turn(view(Q), A)
    assert client.place(view(Q, A, user("x"))).turn.parent_id == t2


def test_the_system_text_breaks_ties_and_nothing_else():
    client = Client()
    _, t1 = client.turn(view(system("for A"), Q), A)
    _, t2 = client.turn(view(system("for B"), Q), A)
    assert client.place(view(system("for B"), Q, A, user("x"))).turn.parent_id == t2
    assert client.place(view(system("another"), Q, A, user("x"))).turn.parent_id == t1


def test_owners_never_meet():
    client = Client()
    client.turn(view(Q, owner="a"), A)
    placement = client.place(view(Q, A, user("x"), owner="b"))
    assert (placement.turn.parent_id, placement.next_state) == (None, None)
    client.turn(view(Q, owner="a", session="s"), A)
    assert client.place(view(Q, A, user("x"), owner="b", session="s")).turn.parent_id is None


def test_named_sessions_never_meet():
    client = Client()
    client.turn(view(Q, session="one"), A)
    client.turn(view(Q), A)
    placement = client.place(view(Q, A, user("x"), session="two"))
    assert (placement.turn.session_id, placement.turn.parent_id, placement.next_state) == (
        "two",
        None,
        None,
    )


def test_an_unnamed_request_joins_the_named_session_that_it_extends():
    client = Client()
    _, t1 = client.turn(view(Q, session="one"), A)
    placement = client.place(view(Q, A, user("x")))
    assert (placement.turn.session_id, placement.turn.parent_id) == ("one", t1)


@pytest.mark.parametrize("headers", [{}, {"x-stainless-retry-count": "1"}, {"x-retry": "true"}])
def test_case_13_the_same_request_twice_is_one_turn(headers):
    client = Client()
    _, t1 = client.turn(view(Q, session="s"), A)
    _, t2 = client.turn(view(Q, A, user("x"), session="s"), assistant("y"))
    again = client.place(view(Q, A, user("x"), session="s", headers=headers))
    assert (again.superseded, again.turn.parent_id, again.next_state) == ((t2,), t1, None)
    t3 = client.commit(again, assistant("z"))
    # Whichever reply the client kept, only the one that was not repeated is judged.
    kept = client.place(view(Q, A, user("x"), assistant("z"), user("w"), session="s"))
    assert (kept.turn.parent_id, texts(kept)) == (t3, ["w"])
    old = client.place(view(Q, A, user("x"), assistant("y"), user("w"), session="s"))
    assert (old.turn.parent_id, old.next_state) == (t2, None)
    third = client.place(view(Q, A, user("x"), session="s"))
    assert third.superseded == (t3,)


def test_case_13_of_two_at_once_the_one_that_is_continued_is_kept():
    client = Client()
    first, second = (client.place(view(Q, session="s")) for _ in "12")
    t1 = client.commit(first, assistant("one"))
    t2 = client.commit(second, assistant("two"))
    on = client.place(view(Q, assistant("two"), user("x"), session="s"))
    assert (on.turn.parent_id, texts(on), on.superseded) == (t2, ["x"], (t1,))
    t3 = client.commit(on, A)
    again = client.place(view(Q, assistant("two"), user("x"), session="s"))
    assert again.superseded == (t3,)
    old = client.place(view(Q, assistant("one"), user("x"), session="s"))
    assert (old.turn.parent_id, old.next_state) == (t1, None)


def test_case_13_a_later_question_in_the_same_words_overtakes_nothing():
    client = Client()
    client.turn(view(Q, session="s"), A)
    client.turn(view(Q, A, user("x"), session="s"), assistant("y"))
    branch = client.place(view(Q, session="s"))
    other = client.place(view(Q, session="another"))
    ids = [client.commit(placement, assistant("b")) for placement in (branch, other)]
    assert [client.heads[turn].drop_reason for turn in ids] == [None, None]


def test_case_13_a_reply_that_comes_after_the_client_went_on_from_another_is_dropped():
    client = Client()
    first, second = (client.place(view(Q, session="s")) for _ in "12")
    client.commit(first, A)
    client.place(view(Q, A, user("x"), session="s"))
    t2 = client.commit(second, assistant("b"))
    assert client.heads[t2].drop_reason == "retried"


def test_case_13_asked_again_although_the_client_goes_on_from_the_first_reply():
    client = Client()
    _, t1 = client.turn(view(Q, session="s"), A)
    again = client.place(view(Q, session="s"))
    on = client.place(view(Q, A, user("x"), session="s"))
    assert (on.turn.parent_id, texts(on)) == (t1, ["x"])
    t2 = client.commit(again, assistant("b"))
    assert client.heads[t2].drop_reason == "retried"


def test_case_13_without_any_name():
    client = Client()
    client.turn(view(Q), A)
    _, t2 = client.turn(view(Q, A, user("x")), assistant("y"))
    assert client.place(view(Q, A, user("x"))).superseded == (t2,)
    assert client.place(view(Q)).superseded == ()  # somebody else may say hello


def test_case_13_an_opening_without_any_name_needs_the_retry_header():
    client = Client()
    first, t1 = client.turn(view(Q), A)
    retry = view(Q, headers={"x-stainless-retry-count": "2"})
    placement = client.place(retry)
    assert (placement.superseded, placement.turn.session_id) == ((t1,), first.turn.session_id)
    client.now += 3600
    assert client.place(retry).superseded == ()
    client.turn(view(Q), A)
    client.turn(view(Q), A)
    assert client.place(retry).superseded == ()  # whose retry would it be?


def test_case_13_a_user_name_is_no_conversation():
    client = Client()
    client.turn(view(Q, hints={"user": "u"}), A)
    assert client.place(view(Q, hints={"user": "u"})).superseded == ()
    client.turn(view(Q, hints={"user": "u"}), assistant("b"))
    on = client.place(view(Q, assistant("b"), user("x"), hints={"user": "u"}))
    assert (texts(on), on.superseded) == (["x"], ())  # the first one goes on by itself


def test_case_13_a_repeated_user_message_after_nothing_is_no_feedback():
    client = Client()
    _, t1 = client.turn(view(Q, session="s"), assistant(""))
    placement = client.place(view(Q, Q, session="s"))
    assert (placement.turn.parent_id, placement.next_state) == (t1, None)
    again = client.place(view(Q, session="s"))
    assert (again.superseded, again.turn.parent_id) == ((t1,), None)


def test_a_turn_with_a_next_state_is_not_retried():
    client = Client()
    client.turn(view(Q, session="s"), A)
    client.turn(view(Q, A, user("x"), session="s"), assistant("y"))
    placement = client.place(view(Q, session="s"))
    assert (placement.superseded, placement.turn.parent_id) == ((), None)


def test_case_14_both_tool_results_are_the_next_state():
    client = Client()
    calls = assistant(None, ("c1", "f", "{}"), ("c2", "g", "{}"))
    _, t1 = client.turn(view(Q, session="s"), calls)
    results = (tool("c1", "Error: no such file"), tool("c2", "ok"))
    placement = client.place(view(Q, calls, *results, session="s"))
    assert placement.next_state is not None
    assert placement.turn.parent_id == t1
    assert texts(placement) == ["Error: no such file", "ok"]


def test_case_15_a_compaction_opens_a_new_trajectory():
    client = Client()
    client.turn(view(Q, session="s"), A)
    summary = user("The conversation so far was compacted: they greeted each other.")
    placement = client.place(view(summary, A, user("and now?"), session="s"))
    assert placement.turn.session_id == "s"
    assert (placement.turn.parent_id, placement.next_state, placement.turn.matched) == (
        None,
        None,
        0,
    )
    assert placement.turn.kind == "main"


def test_case_16_a_replay_in_other_words_is_the_same_conversation():
    client = Client()
    served = {
        "role": "assistant",
        "content": "Look:\n",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "call_1-a", "type": "function",
             "function": {"name": "f", "arguments": '{"b":  1, "a": "é"}'}},
        ],
    }  # fmt: skip
    _, t1 = client.turn(view(user("go"), session=None), served)
    replayed = assistant("<think>hm</think>\nLook:", ("call1a", "f", '{"a":"\\u00e9","b":1}'))
    asked = {"role": "user", "content": [{"type": "text", "text": "go"}]}
    placement = client.place(view(asked, replayed, tool("call1a", "done")))
    assert (placement.turn.parent_id, texts(placement)) == (t1, ["done"])


def test_case_16_openclaws_line_about_itself_is_no_part_of_the_history():
    client = Client()
    _, t1 = client.turn(view(user("go\n\nRuntime: agent=main | model=a | x"), session="s"), A)
    asked = user("go\n\nRuntime: agent=main | model=b")
    assert client.place(view(asked, A, user("x"), session="s")).turn.parent_id == t1
    assert client.place(view(user("go Runtime: agent=main"), A, user("x"))).turn.parent_id is None


def test_case_16_other_arguments_are_another_conversation():
    client = Client()
    client.turn(view(user("go")), assistant(None, ("c", "f", '{"a": 1}')))
    other = assistant(None, ("c", "f", '{"a": 2}'))
    assert client.place(view(user("go"), other, tool("c", "x"))).turn.parent_id is None


def test_case_16_history_that_is_reworded_in_the_middle_is_still_recognised():
    client = Client()
    client.turn(view(Q, session="s"), A)
    queued = user("Queued user message (retry): do it")
    _, t2 = client.turn(view(Q, A, queued, session="s"), assistant("done, it is there"))
    restored = (Q, A, user("do it"), assistant("done, it is there"), user("thanks"))
    placement = client.place(view(*restored, session="s"))
    assert (placement.turn.parent_id, texts(placement)) == (t2, ["thanks"])
    assert placement.turn.matched == 0  # the texts before the reply are not the same
    assert placement.served_replies[3] == t2
    assert client.place(view(*restored, session="other")).turn.parent_id is None


def test_case_17_two_requests_at_once_are_two_branches():
    client = Client()
    _, t1 = client.turn(view(Q, session="s"), A)
    left = client.place(view(Q, A, user("left"), session="s"))
    right = client.place(view(Q, A, user("right"), session="s"))
    tl, tr = client.commit(left, assistant("l")), client.commit(right, assistant("r"))
    assert (left.turn.parent_id, right.turn.parent_id) == (t1, t1)
    on_left = client.place(view(Q, A, user("left"), assistant("l"), user("x"), session="s"))
    on_right = client.place(view(Q, A, user("right"), assistant("r"), user("y"), session="s"))
    assert (on_left.turn.parent_id, texts(on_left)) == (tl, ["x"])
    assert (on_right.turn.parent_id, texts(on_right)) == (tr, ["y"])


def test_a_second_continuation_is_a_branch_without_feedback():
    client = Client()
    _, t1 = client.turn(view(Q, session="s"), A)
    client.turn(view(Q, A, user("first"), session="s"), assistant("1"))
    branch = client.place(view(Q, A, user("second"), session="s"))
    assert (branch.turn.parent_id, branch.next_state, branch.turn.matched) == (t1, None, 2)


def test_case_18_memory_is_bounded_and_old_sessions_go_first():
    client = Client(Tracker(max_turns=10))
    for n in range(30):
        client.turn(view(user(f"q{n}"), session="kept"), assistant(f"a{n}"))
        client.turn(view(user("q"), session=f"s{n}"), assistant("a"))
    assert client.tracker.turns == 10
    last = client.place(view(user("q29"), assistant("a29"), user("x"), session="kept"))
    assert last.turn.parent_id is not None
    gone = client.place(view(user("q"), assistant("a"), user("x"), session="s0"))
    assert gone.turn.parent_id is None


def test_case_18_one_endless_session_forgets_its_beginning():
    client = Client(Tracker(max_turns=5))
    history = [user("q0")]
    for n in range(20):
        placement, turn = client.turn(view(*history, session="s"), assistant(f"a{n}"))
        assert placement.turn.parent_id == (f"t{n}" if n else None)
        assert turn == f"t{n + 1}"
        history += [assistant(f"a{n}"), user(f"q{n + 1}")]
    assert client.tracker.turns == 5
    first = client.place(view(user("q0"), assistant("a0"), user("x"), session="s"))
    assert first.turn.parent_id is None


def test_case_18_evicted_turns_leave_nothing_behind():
    tree, sizes = Tree(max_turns=1), []
    for n in range(100, 150):
        hashes = {"node_hash": f"chain{n}.2-first-{n}", "request_hash": f"request{n}"}
        tree.add(Turn(turn_id=f"t{n}", session_id=f"s{n}", **hashes))
        sizes.append(len(pickle.dumps(tree)))
    assert len(tree) == 1
    assert set(sizes) == {sizes[0]}


def test_case_19_the_last_turn_has_no_next_state():
    client = Client()
    _, t1 = client.turn(view(Q, session="s"), A)
    opened = client.place(view(user("something else"), session="s"))
    assert (opened.turn.parent_id, opened.next_state) == (None, None)
    assert t1


def test_case_20_a_request_without_news_continues_without_feedback():
    client = Client()
    _, t1 = client.turn(view(Q, session="s"), A)
    internal = user("<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nx\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>")
    for tail in ((), (internal,), (assistant(""),)):
        placement = client.place(view(Q, A, *tail, session="s"))
        assert (placement.turn.parent_id, placement.next_state) == (t1, None)
    mixed = user(internal["content"] + "\nand please hurry")
    assert texts(client.place(view(Q, A, mixed, session="s"))) == ["and please hurry"]


def test_the_next_state_ends_at_the_next_reply_of_anybody():
    client = Client()
    _, t1 = client.turn(view(Q, session="s"), A)
    foreign = assistant("said by a command of the agent")
    placement = client.place(view(Q, A, user("/status"), foreign, user("ok"), session="s"))
    assert (placement.turn.parent_id, texts(placement)) == (t1, ["/status"])
    placement = client.place(view(Q, A, foreign, user("ok"), session="s"))
    assert (placement.turn.parent_id, placement.next_state) == (t1, None)


def test_case_25_served_replies_name_each_turn_of_the_history():
    client = Client()
    _, t1 = client.turn(view(Q, session="s"), A)
    _, t2 = client.turn(view(Q, A, user("x"), session="s"), assistant("<think>a</think>y"))
    placement = client.place(view(system("new"), Q, A, user("x"), assistant("y"), user("z"),
                                  session="s"))  # fmt: skip
    assert placement.served_replies == {2: t1, 4: t2}
    assert placement.turn.matched == 5


def test_case_25_of_two_that_said_the_same_the_one_in_this_history_is_known():
    client = Client()
    client.turn(view(system("for A"), Q, session="s"), A)
    b = [system("for B"), Q, A, user("x"), assistant("y"), user("z")]
    _, t2 = client.turn(view(*b[:2], session="s"), A)
    _, t3 = client.turn(view(*b[:4], session="s"), assistant("y"))
    placement = client.place(view(*b, session="s"))
    assert (placement.turn.parent_id, placement.served_replies) == (t3, {2: t2, 4: t3})


def test_restore_gives_the_same_placements():
    client = Client()

    def turn(request, reply):
        placement, _ = client.turn(request, reply)
        if placement.next_state:
            client.heads[placement.turn.parent_id].next_state = ()

    turn(view(Q, session="s"), A)
    turn(view(Q, A, user("x"), session="s"), assistant("y"))
    turn(view(Q), A)
    again = Tracker()
    again.restore(reversed(client.heads.values()))
    for request in (
        view(Q, A, user("x"), session="s"),
        view(Q, A, user("x"), assistant("y"), user("z"), session="s"),
        view(Q, A, user("other"), session="s"),
        view(Q, A, user("w")),
    ):
        assert again.place(request, 99.0) == client.tracker.place(request, 99.0)


def test_what_an_ended_session_said_is_forgotten():
    client = Client()
    client.turn(view(Q, session="s", owner="a"), A)
    client.turn(view(Q, session="s", owner="b"), A)
    client.tracker.end_session("s", owner="a")
    assert client.place(view(Q, A, user("x"), session="s", owner="a")).turn.parent_id is None
    assert client.place(view(Q, A, user("x"), session="s", owner="b")).turn.parent_id == "t2"
    client.tracker.end_session("s")
    assert client.tracker.turns == 0


def test_placing_does_not_change_the_tree():
    client = Client()
    client.turn(view(Q, session="s"), A)
    request = view(Q, A, user("x"), session="s")
    assert client.tracker.place(request, 9.0) == client.tracker.place(request, 9.0)
    assert client.tracker.turns == 1


def test_each_message_is_hashed_once(monkeypatch):
    from openclaw_rl.session import canonical

    seen: list[int] = []
    original = canonical._digest
    monkeypatch.setattr(
        canonical, "_digest", lambda m, text: (seen.append(id(m)), original(m, text))[1]
    )
    messages = [user("q"), assistant("a"), user("r"), assistant("b"), user("s")]
    Client().place(view(*messages, session="s"))
    assert sorted(seen) == sorted(id(m) for m in messages)


WINDOWS = {
    "last_5": lambda history: history[-5:],
    "last_6": lambda history: history[-6:],
    "first_2_last_4": lambda history: [*history[:2], *history[2:][-4:]],
}


@pytest.mark.parametrize("session", ["s", None])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("reply", ["Reply number {}.", "Done."])
def test_case_44_a_window_of_the_history_goes_on(
    session: str | None, window: str, reply: str
) -> None:
    """Eight questions, each followed by a correction: every correction reaches its reply, also
    where the replies are the same."""
    client = Client()
    history: list[dict[str, Any]] = []
    turns: list[str] = []
    for n in range(8):
        history.append(user(f"Correction {n}. Question {n}?"))
        request = view(system("Be brief."), *WINDOWS[window](history), session=session)
        placement, turn = client.turn(request, assistant(reply.format(n)))
        if n:
            assert placement.turn.parent_id == turns[-1]
            assert texts(placement) == [f"Correction {n}. Question {n}?"]
        turns.append(turn)
        history.append(assistant(reply.format(n)))


@pytest.mark.parametrize("session", ["s", None])
def test_case_44_old_tool_results_that_were_cut_do_not_matter(session: str | None) -> None:
    client = Client()
    call = assistant(None, ("c1", "read", "{}"))
    history = [user("Read it."), call, tool("c1", "a long text " * 50)]
    client.turn(view(*history[:1], session=session), call)
    _, t2 = client.turn(view(*history, session=session), assistant("It is long."))
    history[2] = tool("c1", "[cut]")
    history += [assistant("It is long."), user("Shorter, please.")]
    placement = client.place(view(*history[1:], session=session))
    assert (placement.turn.parent_id, texts(placement)) == (t2, ["Shorter, please."])


def test_case_45_a_clock_in_the_first_message() -> None:
    """From the second exchange on: before it, nothing tells it from a summary. Without a name each
    such request opens a conversation."""
    client, told = Client(), []
    history = [user("")]
    for n in range(6):
        history[0] = user(f"It is 12:0{n}. What is rain?")
        placement, _ = client.turn(view(*history, session="s"), assistant(f"Answer {n}."))
        told.append(texts(placement))
        history += [assistant(f"Answer {n}."), user(f"Correction {n}.")]
    assert told[2:] == [[f"Correction {n}."] for n in range(1, 5)]


@pytest.mark.parametrize("session", ["s", None])
def test_case_45_retrieved_text_that_is_gone_from_the_next_request(session: str | None) -> None:
    client, history, before = Client(), [user("What is rain?")], ""
    for n in range(6):
        found = user(f"{history[-1]['content']}\n\n<context>{n} pages</context>")
        asked = [*history[:-1], found] if n else history
        placement, turn = client.turn(view(*asked, session=session), assistant(f"Answer {n}."))
        if n:
            assert placement.turn.parent_id == before
            assert [text.partition("\n")[0] for text in texts(placement) or ()] == [
                f"Correction {n - 1}."
            ]
        before = turn
        history += [assistant(f"Answer {n}."), user(f"Correction {n}.")]


def test_case_44_equal_replies_of_two_people_do_not_meet() -> None:
    client = Client()
    for name in ("a", "b"):
        client.turn(view(user(f"{name} one")), assistant("Done."))
        history = [user(f"{name} one"), assistant("Done."), user(f"{name} two")]
        client.turn(view(*history), assistant("Done."))
    window = [assistant("Done."), user("b two"), assistant("Done."), user("Too short.")]
    placement = client.place(view(*window))
    assert (placement.turn.parent_id, placement.next_state) == (None, None)
