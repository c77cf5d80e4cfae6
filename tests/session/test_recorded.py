"""The recorded OpenClaw requests: each gets what a person reading it would say."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from openclaw_rl.session.canonical import text_of
from openclaw_rl.session.identity import RequestView, identify
from tests.session.helpers import REQUESTS, Client, assistant, before, recorded, texts

WHO_AND_WHAT = {
    "v2026.3.23-2_gateway_replay": ("51f0453d-c27e-4045-9c06-476ab0bf5e2c", "x-session-id", "main"),
    "v2026.3.23-2_gateway_turn1": ("51f0453d-c27e-4045-9c06-476ab0bf5e2c", "x-session-id", "main"),
    "v2026.3.23-2_side-run_003": (None, None, "side"),
    "v2026.3.23-2_side-run_012": ("d6a17191-436e-44c4-b4e1-4cd607269080", "x-session-id", "main"),
    "v2026.9.6_empty-reply-retry": ("1737dc56-9aac-480f-bade-58123cb63467", "x-session-id", "main"),
    "v2026.9.6_gateway_affinity_turn1": (
        "e7e12e19-17ed-4e18-83ac-e3ff4aa849f5", "session_id", "main",
    ),
    "v2026.9.6_lean": ("5db96261-8f9c-4a64-9c9c-cbf8788f444a", "x-session-id", "main"),
    "v2026.9.6_main_after-compaction": (
        "082627ca-3be4-4ab6-8707-f5d3aaf6ef38", "x-session-id", "main",
    ),
    "v2026.9.6_plugin-headers_tool-hop2": (
        "0b5de196-bced-479d-853d-6b8d6d718451", "x-session-id", "main",
    ),
    "v2026.9.6_plugin-headers_turn1": (
        "0b5de196-bced-479d-853d-6b8d6d718451", "x-session-id", "main",
    ),
    "v2026.9.6_side_btw": ("93f4cc03-afa7-4f51-aee5-891ae8ebd937", "session_id", "side"),
    "v2026.9.6_side_compaction": ("93f4cc03-afa7-4f51-aee5-891ae8ebd937", "session_id", "side"),
}  # fmt: skip


def test_every_recorded_request_is_told():
    assert {path.stem for path in REQUESTS.glob("*.json")} == set(WHO_AND_WHAT)


@pytest.mark.parametrize("name", WHO_AND_WHAT)
def test_who_speaks_and_what_kind(name):
    session, header, kind = WHO_AND_WHAT[name]
    request = recorded(name)
    identity = identify(request)
    assert (identity and identity.session_id) == session
    assert (identity and identity.source) == (header and f"header:{header}")
    placement = Client().place(request)
    assert placement.turn.kind == kind
    assert placement.next_state is None
    assert placement.turn.parent_id is None


def nameless(request: RequestView) -> RequestView:
    kept = {k: v for k, v in request.headers.items() if k in ("user-agent", "content-type")}
    return RequestView(messages=request.messages, headers=kept, has_tools=request.has_tools)


@pytest.mark.parametrize("name", WHO_AND_WHAT)
def test_the_kind_is_found_without_any_header_too(name):
    assert Client().place(nameless(recorded(name))).turn.kind == WHO_AND_WHAT[name][2]


@pytest.mark.parametrize("strip", [lambda r: r, nameless], ids=["named", "by history"])
def test_a_conversation_of_3_23_is_bound_turn_by_turn(strip):
    client = Client()
    replay = recorded("v2026.3.23-2_gateway_replay")
    messages = replay.messages
    first, t1 = client.turn(strip(recorded("v2026.3.23-2_gateway_turn1")), dict(messages[2]))
    assert (first.turn.kind, first.turn.parent_id) == ("main", None)
    # What was served has other ids, white space and reasoning than what is replayed.
    served = assistant("I will run a tool.", ("call_mock2_0", "exec", '{"command":  "echo x"}'))
    second, t2 = client.turn(strip(before(replay, 4)), served)
    assert (second.turn.parent_id, second.turn.matched) == (t1, 3)
    assert second.next_state is not None
    assert second.turn.parent_id == t1
    assert texts(second) == [messages[3]["content"]]
    hop = assistant(None, ("call_mock3_0", "exec", '{"command": "echo second-hop"}'))
    third, t3 = client.turn(strip(before(replay, 6)), hop)
    assert (third.turn.parent_id, texts(third)) == (t2, ["x"])
    fourth, t4 = client.turn(strip(before(replay, 8)), assistant("Tool said: second-hop"))
    assert (fourth.turn.parent_id, texts(fourth)) == (t3, ["second-hop"])
    last = client.place(strip(replay))
    assert (last.turn.parent_id, last.turn.matched, texts(last)) == (t4, 9, ["third"])
    assert last.served_replies == {2: t1, 4: t2, 6: t3, 8: t4}
    assert {p.turn.session_id for p in (second, third, fourth, last)} == {first.turn.session_id}


def test_a_conversation_of_9_6_is_bound_over_a_tool_loop():
    client = Client()
    hop2 = recorded("v2026.9.6_plugin-headers_tool-hop2")
    _, t1 = client.turn(recorded("v2026.9.6_plugin-headers_turn1"), dict(hop2.messages[2]))
    second, t2 = client.turn(before(hop2, 4), dict(hop2.messages[4]))
    assert second.next_state is not None
    assert second.turn.parent_id == t1
    _, t3 = client.turn(before(hop2, 6), dict(hop2.messages[6]))
    placement = client.place(hop2)
    assert (placement.turn.parent_id, texts(placement)) == (t3, ["second-hop"])
    assert placement.served_replies == {2: t1, 4: t2, 6: t3}


NEXT_STATE: dict[str, list[str] | None] = {
    "v2026.3.23-2_gateway_replay": ["third"],
    "v2026.3.23-2_gateway_turn1": None,  # nothing was said before
    "v2026.3.23-2_side-run_003": None,  # a summary is asked for
    "v2026.3.23-2_side-run_012": ["x"],  # a turn like any other: the tool's result on the call
    "v2026.9.6_empty-reply-retry": [
        "[Mon 2026-11-30 02:20 UTC] The previous attempt did not produce a user-visible answer."
    ],
    "v2026.9.6_gateway_affinity_turn1": None,
    "v2026.9.6_lean": ['[Mon 2026-11-30 01:41 UTC] second CALL:exec {"command":"echo x"} END'],
    "v2026.9.6_main_after-compaction": None,  # the history is a summary by now
    "v2026.9.6_plugin-headers_tool-hop2": ["second-hop"],
    "v2026.9.6_plugin-headers_turn1": None,
    "v2026.9.6_side_btw": None,
    "v2026.9.6_side_compaction": None,
}


def lived(name: str, strip: Callable[[RequestView], RequestView]) -> Client:
    """A tracker that has seen what came before the request, as far as it tells."""
    client = Client()
    request = recorded(name)
    if "after-compaction" in name:  # the reply that it keeps answered another history
        said = request.messages[2]
        client.turn(strip(before(recorded(name), 1)), assistant("An older reply."))
        old = RequestView(({"role": "user", "content": "b"},), request.headers, has_tools=True)
        client.turn(strip(old), dict(said))
        return client
    for index, message in enumerate(request.messages):
        if message["role"] == "assistant":
            client.turn(strip(before(request, index)), dict(message))
        elif "did not produce a user-visible answer" in text_of(message):
            client.turn(strip(before(request, index)), assistant(""))
    return client


@pytest.mark.parametrize("strip", [lambda r: r, nameless], ids=["named", "by history"])
@pytest.mark.parametrize("name", WHO_AND_WHAT)
def test_the_next_state_is_what_a_person_reads(name, strip):
    placement = lived(name, strip).place(strip(recorded(name)))
    expected = NEXT_STATE[name]
    found = None
    if placement.next_state is not None:
        found = [text_of(message) for message in placement.next_state]
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert len(found) == len(expected)
        assert all(text.startswith(start) for text, start in zip(found, expected, strict=True))
        assert placement.next_state is not None


def test_case_20_the_transient_message_is_no_feedback_and_no_history():
    client = Client()
    request = recorded("v2026.9.6_gateway_affinity_turn1")
    _, t1 = client.turn(request, assistant("Hi."))
    base = request.messages[:-1]  # the internal context never returns
    only_internal = RequestView((*base, assistant("Hi."), request.messages[-1]), request.headers)
    placement = client.place(only_internal)
    assert (placement.turn.parent_id, placement.next_state) == (t1, None)
    following = (*base, assistant("Hi."), {"role": "user", "content": "next"}, request.messages[-1])
    placement = client.place(RequestView(following, request.headers))
    assert (placement.turn.parent_id, texts(placement)) == (t1, ["next"])


@pytest.mark.parametrize("persists", [True, False])
def test_an_empty_reply_is_told_so_and_the_history_goes_on(persists):
    client = Client()
    request = recorded("v2026.9.6_empty-reply-retry")
    _, empty = client.turn(before(request, 6), assistant(""))
    nudged, turn = client.turn(request, assistant("Here it is."))
    assert (nudged.turn.parent_id, nudged.superseded) == (empty, ())
    assert texts(nudged) == [request.messages[-1]["content"]]
    kept = request.messages if persists else request.messages[:-1]
    messages = (*kept, assistant("Here it is."), {"role": "user", "content": "ta"})
    placement = client.place(RequestView(messages, request.headers, has_tools=True))
    assert (placement.turn.parent_id, texts(placement)) == (turn, ["ta"])


def test_case_15_after_a_compaction_nothing_is_judged_against_the_summary():
    client = Client()
    after = recorded("v2026.9.6_main_after-compaction")
    old = RequestView(
        ({"role": "user", "content": "b two"},), {**after.headers}, has_tools=True
    )  # the turn whose reply survives the compaction word for word
    _, t1 = client.turn(old, dict(after.messages[2]))
    placement, t2 = client.turn(after, assistant("c answered"))
    assert placement.turn.session_id == "082627ca-3be4-4ab6-8707-f5d3aaf6ef38"
    assert (placement.turn.parent_id, placement.turn.matched, placement.next_state) == (
        None,
        0,
        None,
    )
    messages = (*after.messages[:-1], assistant("c answered"), {"role": "user", "content": "d"})
    goes_on = client.place(RequestView(messages, after.headers, has_tools=True))
    assert (goes_on.turn.parent_id, texts(goes_on)) == (t2, ["d"])
    assert t1 != t2


def test_side_requests_leave_the_main_turn_waiting():
    client = Client()
    btw = recorded("v2026.9.6_side_btw")
    main = RequestView((btw.messages[1],), btw.headers, btw.owner, btw.hints, has_tools=True)
    _, t1 = client.turn(main, dict(btw.messages[2]))
    for name in ("v2026.9.6_side_btw", "v2026.9.6_side_compaction"):
        placement, _ = client.turn(recorded(name), assistant("aside"))
        assert (placement.turn.kind, placement.next_state) == ("side", None)
    messages = (btw.messages[1], btw.messages[2], {"role": "user", "content": "on"})
    placement = client.place(RequestView(messages, btw.headers, has_tools=True))
    assert (placement.turn.parent_id, texts(placement)) == (t1, ["on"])
