from __future__ import annotations

import pytest

from openclaw_rl.session.identity import RequestView, identify, is_conversation, is_named
from openclaw_rl.session.tracker import Tracker
from tests.session.helpers import Client, assistant, system, texts, tool, user, view

UUID = "93f4cc03-afa7-4f51-aee5-891ae8ebd937"
Q, A = user("hello"), assistant("hi")


def who(headers=None, hints=None, key_session=None):
    found = identify(RequestView((), headers or {}, "", hints, key_session))
    return found and (found.session_id, found.source)


def test_the_ladder():
    headers = {"x-session-id": "a", "session_id": "b", "x-session-affinity": "c"}
    hints = {"prompt_cache_key": "d", "metadata": {"session_id": "e"}, "user": "f"}
    assert who(headers, hints, "g") == ("a", "header:x-session-id")
    assert who({"session_id": "b", "x-session-affinity": "c"}, hints) == ("b", "header:session_id")
    assert who({"x-session-affinity": "c"}, hints) == ("c", "header:x-session-affinity")
    assert who({}, hints, "g") == ("d", "body:prompt_cache_key")
    del hints["prompt_cache_key"]
    assert who({}, hints, "g") == ("e", "body:metadata.session_id")
    del hints["metadata"]
    assert who({}, hints, "g") == ("f", "body:user")
    assert who({}, {}, "g") == ("g", "key")
    assert who({"x-client-request-id": UUID}) is None


@pytest.mark.parametrize("value", ["", " ", "unknown", "undefined", "NULL", "None", "a\x00b"])
def test_a_placeholder_is_no_name(value):
    assert who({"x-session-id": value, "session_id": "real"}) == ("real", "header:session_id")
    assert who({}, {"user": value}) is None


def test_the_counter_of_openclaw_is_no_part_of_the_name():
    assert who({"x-session-affinity": f"{UUID}:3"}) == (UUID, "header:x-session-affinity")
    assert who({}, {"prompt_cache_key": f"{UUID}:0"}) == (UUID, "body:prompt_cache_key")
    assert who({"x-session-id": "agent:main:3"}) == ("agent:main:3", "header:x-session-id")


def test_odd_hints_are_no_names():
    assert who({}, {"user": 3, "metadata": ["x"], "prompt_cache_key": None}) is None
    assert who({}, {"metadata": {"session_id": {"a": 1}}}) is None
    assert who({"x-session-id": "x" * 10_000}) is None


def test_what_counts_as_a_name():
    assert is_named("key")
    assert is_named("body:user")
    assert not is_named("history")
    assert is_conversation("header:x-session-id")
    assert not is_conversation("body:user")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Pre-compaction memory flush. Store durable memories only in memory/x.md", "memory-flush"),
        ("[Mon 2026-11-30 01:29 UTC] Pre-compaction memory flush.", "memory-flush"),
        ("Based on this conversation, generate a short 1-2 word filename slug", "slug"),
        ("Notes\n\nA new session was started via /new or /reset. Greet the user.", "greeting"),
        ("Read HEARTBEAT.md if it exists (workspace context). Follow it strictly.", "heartbeat"),
        ("Follow the heartbeat monitor scratch context when provided.", "heartbeat"),
        ("### Task:\nGenerate a concise title\n<chat_history>\nx\n</chat_history>", "chat-ui-task"),
    ],
)  # fmt: skip
def test_housekeeping_is_side_and_gives_no_next_state(text, reason):
    client = Client()
    client.turn(view(Q, session="s", has_tools=True), A)
    placement = client.place(view(Q, A, user(text), session="s", has_tools=True))
    assert (placement.turn.kind, placement.turn.kind_reason) == ("side", f"pattern:{reason}")
    assert placement.turn.parent_id == "t1"
    assert placement.next_state is None


def test_the_second_hop_of_housekeeping_is_side_and_the_user_comes_back_as_main():
    client = Client()
    client.turn(view(Q, session="s", has_tools=True), A)
    flush = user("Pre-compaction memory flush. Store durable memories.")
    call = assistant(None, ("c", "write", "{}"))
    client.turn(view(Q, A, flush, session="s", has_tools=True), call)
    hop = client.place(view(Q, A, flush, call, tool("c", "ok"), session="s", has_tools=True))
    assert (hop.turn.kind, hop.turn.parent_id, hop.next_state) == ("side", "t2", None)
    back = client.place(view(Q, A, user("on"), session="s", has_tools=True))
    assert (back.turn.kind, back.turn.parent_id, texts(back)) == ("main", "t1", ["on"])


def test_a_conversation_behind_a_greeting_is_main():
    client = Client()
    greeting = user("A new session was started via /new or /reset. Greet the user.")
    client.turn(view(greeting, session="s", has_tools=True), assistant("Hey!"))
    placement = client.place(
        view(greeting, assistant("Hey!"), user("hi"), session="s", has_tools=True)
    )
    assert (placement.turn.kind, placement.turn.parent_id, placement.next_state) == (
        "main",
        "t1",
        None,
    )


def test_the_header_wins_over_everything():
    client = Client()
    heartbeat = user("Read HEARTBEAT.md if it exists.")
    assert client.place(view(heartbeat, headers={"x-turn-type": "main"})).turn.kind == "main"
    client.turn(view(Q, session="s", headers={"x-turn-type": "main"}), A)
    placement = client.place(view(Q, A, user("x"), session="s", headers={"x-turn-type": "Side"}))
    assert (placement.turn.kind, placement.next_state) == ("side", None)


def test_who_names_turns_and_then_does_not_is_side_when_in_doubt():
    client = Client()
    agent = {"user-agent": "OpenAI/JS 7"}
    assert client.place(view(Q, headers=agent)).turn.kind == "main"
    client.turn(view(Q, session="s", headers={**agent, "x-turn-type": "main"}), A)
    assert client.place(view(user("odd job"), headers=agent)).turn.kind == "side"
    extends = client.place(view(Q, A, user("x"), session="s", headers=agent))
    assert extends.turn.kind == "main"  # no doubt about this one
    assert client.place(view(user("chat"), headers={"user-agent": "curl"})).turn.kind == "main"
    assert client.place(view(user("chat"), owner="other", headers=agent)).turn.kind == "main"


def test_a_program_that_names_only_what_is_side_has_main_turns_without_a_name():
    client, agent = Client(), {"user-agent": "agent/1"}
    client.turn(view(user("probe"), headers={**agent, "x-turn-type": "banana"}), A)
    assert client.place(view(Q, headers=agent)).turn.kind == "main"


def test_unnamed_can_be_set():
    assert Client(Tracker(unnamed="side")).place(view(Q)).turn.kind == "side"
    client = Client(Tracker(unnamed="main"))
    client.turn(view(Q, headers={"x-turn-type": "main"}), A)
    assert client.place(view(user("odd job"))).turn.kind == "main"


def test_a_request_without_tools_that_opens_beside_turns_with_tools_is_side():
    client = Client()
    client.turn(view(Q, session="s", has_tools=True), A)
    placement = client.place(view(system("Name this chat."), user("hello"), session="s"))
    assert placement.turn.kind == "side"
    assert client.place(view(user("new topic"), session="s", has_tools=True)).turn.kind == "main"


def test_conversations_that_nobody_named_do_not_push_out_what_is_known_of_named_ones():
    client = Client()
    client.turn(view(Q, session="s", has_tools=True), A)
    for n in range(1100):  # more than are remembered
        client.place(view(user(f"q {n}"), has_tools=True))
    placement = client.place(view(system("Name this chat."), user("hello"), session="s"))
    assert placement.turn.kind == "side"


def test_what_a_client_adds_for_one_request_says_nothing_about_its_kind():
    inside = "Read HEARTBEAT.md if it exists"
    begin, end = (f"<<<{word}_OPENCLAW_INTERNAL_CONTEXT>>>" for word in ("BEGIN", "END"))
    added = user(f"{begin}\n{inside}\n{end}")
    assert Client().place(view(user(inside))).turn.kind_reason == "pattern:heartbeat"
    assert Client().place(view(Q, added)).turn.kind == "main"
    assert Client().place(view(added)).turn.kind_reason == "no user message"


def test_nothing_but_a_system_text_is_side():
    assert Client().place(view(system("x"))).turn.kind == "side"


def test_a_side_turn_gets_no_next_state():
    client = Client()
    client.turn(view(Q, session="s", headers={"x-turn-type": "side"}), A)
    placement = client.place(view(Q, A, user("x"), session="s", headers={"x-turn-type": "main"}))
    assert (placement.turn.kind, placement.turn.parent_id, placement.next_state) == (
        "main",
        "t1",
        None,
    )
