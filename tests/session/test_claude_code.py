"""Recorded requests of Claude Code (texts shortened): each gets what a person reading it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openclaw_rl.session.identity import RequestView, identify, is_conversation
from openclaw_rl.session.tracker import Placement
from openclaw_rl.wire.anthropic import parse_messages_request
from openclaw_rl.wire.dialect import ChatRequest, WireError
from tests.session.helpers import Client, assistant, texts

FOLDER = Path(__file__).parents[1] / "fixtures" / "claude_code_requests"

HELLO = assistant("  Hello there. \n")
CALLS = assistant(
    "  Hello there. \n",
    ("call02", "Bash", '{"command":"echo hi2","description":"say"}'),
    ("call03", "Bash", '{"command":"echo hi3","description":"say"}'),
)


def recorded(name: str) -> tuple[ChatRequest, dict[str, str]]:
    (path,) = FOLDER.glob(f"{name}_*.json")
    data = json.loads(path.read_text())
    body = {k: v for k, v in data["body"].items() if k != "output_config"}  # titles: see below
    headers = {key.lower(): value for key, value in data["headers"].items()}
    return parse_messages_request(json.dumps(body).encode()), headers


def view(name: str, **changes: str | None) -> RequestView:
    request, headers = recorded(name)
    headers.update({k.replace("_", "-"): v for k, v in changes.items() if v is not None})
    for key in [k.replace("_", "-") for k, v in changes.items() if v is None]:
        headers.pop(key, None)
    return RequestView(
        messages=request.messages, headers=headers, hints=request.hints,
        has_tools=bool(request.tools),
    )  # fmt: skip


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_the_session_is_named_twice(path):
    name = path.stem[:2]
    header = view(name).headers["x-claude-code-session-id"]
    by_header = identify(view(name))
    assert (by_header.session_id, by_header.source) == (
        header, "header:x-claude-code-session-id",
    )  # fmt: skip
    by_body = identify(view(name, x_claude_code_session_id=None))
    assert (by_body.session_id, by_body.source) == (header, "body:metadata.user_id")
    assert is_conversation(by_body.source)


def play(client: Client, name: str, reply: dict, **changes: str | None) -> tuple[Placement, str]:
    placement = client.place(view(name, **changes))
    return placement, client.commit(placement, reply)


@pytest.mark.parametrize("named", [True, False])
def test_a_conversation_with_tools_a_compaction_and_what_follows(named):
    changes = {} if named else {"x_claude_code_session_id": None}
    client = Client()
    first, one = play(client, "01", CALLS, **changes)
    assert (first.turn.kind, first.turn.kind_reason) == ("main", "opens")
    second, two = play(client, "02", HELLO, **changes)
    assert second.turn.parent_id == one
    assert texts(second) == ["hi2", "hi3"]
    third, three = play(client, "03", HELLO, **changes)
    assert third.turn.parent_id == two
    assert texts(third) == ["second question"]
    summary, _ = play(client, "04", assistant("a summary"), **changes)
    assert (summary.turn.kind, summary.turn.kind_reason) == ("side", "pattern:compaction")
    assert summary.next_state is None
    after, _ = play(client, "05", HELLO, **changes)
    assert (after.turn.kind, after.turn.kind_reason) == ("main", "opens")
    assert after.turn.session_id == first.turn.session_id
    assert after.next_state is None  # a summary is no feedback on the turn before it
    assert three


def test_a_sub_agent_is_another_branch_of_its_session():
    request, headers = recorded("06")
    assert "x-claude-code-agent-id" in headers
    placement = Client().place(view("06"))
    assert (placement.turn.kind, placement.turn.parent_id) == ("main", None)
    assert request.tools


def test_deferred_tools_are_shown_when_they_were_found():
    names = {tool["function"]["name"] for tool in recorded("01")[0].tools}
    assert "DeferredToolPlaceholder" not in names
    assert "WebFetch" not in names
    request, _ = recorded("07")
    names = {tool["function"]["name"] for tool in request.tools}
    assert "WebFetch" in names
    assert "DeferredToolPlaceholder" not in names
    assert request.messages[-1] == {"role": "tool", "tool_call_id": "call02", "content": "WebFetch"}


def test_a_title_is_side_even_before_any_tool_was_seen():
    placement = Client().place(view("08"))
    assert (placement.turn.kind, placement.turn.kind_reason) == ("side", "pattern:title")


def test_what_claude_code_asks_without_tools_is_side():
    request = view("09")
    probe = RequestView(messages=request.messages, headers=request.headers, hints=request.hints)
    assert Client().place(request).turn.kind == "main"
    placement = Client().place(probe)
    assert (placement.turn.kind, placement.turn.kind_reason) == (
        "side",
        "no tools in a program with tools",
    )


def test_a_side_question_has_the_main_turns_tools_and_history_and_is_side():
    client = Client()
    play(client, "09", HELLO)
    placement = client.place(view("10"))
    assert placement.turn.parent_id is not None
    assert (placement.turn.kind, placement.turn.kind_reason) == ("side", "pattern:btw")


def test_a_title_with_a_schema_is_refused_by_name():
    (path,) = FOLDER.glob("08_*.json")
    with pytest.raises(WireError) as caught:
        parse_messages_request(json.dumps(json.loads(path.read_text())["body"]).encode())
    assert caught.value.param == "output_config.format"


def test_the_accounting_line_is_not_shown_to_the_model():
    for path in FOLDER.glob("*.json"):
        request, _ = recorded(path.stem[:2])
        assert request.messages[0]["role"] == "system"
        assert "billing" not in request.messages[0]["content"]
    assert "cch=" not in recorded("01")[0].messages[0]["content"]


@pytest.mark.parametrize(
    ("user_id", "session", "source"),
    [
        ("user_ab_account__session_6ff2175f-d65c-4b4b-83f7-335ab3fb23a7",
         "6ff2175f-d65c-4b4b-83f7-335ab3fb23a7", "body:metadata.user_id"),
        ('{"session_id": "s1"}', "s1", "body:metadata.user_id"),
        ("somebody", "somebody", "body:user"),
        ("{bad json", "{bad json", "body:user"),
        ('{"device_id": "d"}', '{"device_id": "d"}', "body:user"),
        ("[" * 600, None, None),
    ],
)  # fmt: skip
def test_what_a_user_id_says(user_id, session, source):
    request = RequestView(messages=(), headers={}, hints={"metadata": {"user_id": user_id}})
    found = identify(request)
    assert (found and found.session_id) == session
    assert (found and found.source) == source
