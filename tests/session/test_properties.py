"""Random conversations of several clients, owners and sessions, interleaved, with branches,
retries, edits, rewritten replays and side requests."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from openclaw_rl.session.canonical import extend, read_history
from openclaw_rl.session.identity import RequestView
from openclaw_rl.session.tracker import Placement, Tracker
from tests.session.helpers import assistant, system, tool, user

TRANSIENT = user("<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nn\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>")

STEP = st.fixed_dictionaries(
    {
        "who": st.integers(0, 4),
        "act": st.sampled_from(
            [
                "say",
                "say",
                "say",
                "say",
                "branch",
                "edit",
                "retry",
                "side",
                "restart",
                "compact",
                "late",
                "arrive",
            ]
        ),
        "words": st.sampled_from(["hello", "more", "thanks", "no"]),
        "calls": st.integers(0, 2),
        "empty": st.booleans(),
        "transient": st.booleans(),
        "cut": st.integers(0, 5),
    }
)

# (owner, session header, hints): the same name under two owners, two without any name, a user
PEOPLE = [
    ("a", "s1", None),
    ("b", "s1", None),
    ("a", None, None),
    ("a", None, None),
    ("a", None, {"user": "u"}),
]


class Person:
    """One client with the conversation it believes in."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.owner, self.session, self.hints = PEOPLE[number]
        self.messages: list[dict[str, Any]] = []
        self.last: tuple[RequestView, list[dict[str, Any]]] | None = None

    def view(self, messages: list[dict[str, Any]], **headers: str) -> RequestView:
        if self.session:
            headers["x-session-id"] = self.session
        sent = tuple(rewritten(m) for m in messages)
        return RequestView(sent, headers, self.owner, self.hints)


def rewritten(message: dict[str, Any]) -> dict[str, Any]:
    """As clients replay it: other ids, other JSON, parts, no reasoning."""
    message = copy.deepcopy(message)
    message.pop("reasoning_content", None)
    message.pop("turn", None)
    if message["role"] == "user":
        message["content"] = [{"type": "text", "text": message["content"]}]
    if message["role"] == "tool":
        message["tool_call_id"] = message["tool_call_id"].replace("_", "")
    for call in message.get("tool_calls", ()):
        call["id"] = call["id"].replace("_", "")
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"))
    return message


class World:
    """Plays steps and checks every placement against what truly happened."""

    def __init__(self, tracker: Tracker | None = None, *, looks: bool = False) -> None:
        self.tracker = tracker or Tracker()
        self.looks = looks
        self.people = [Person(n) for n in range(len(PEOPLE))]
        self.now = 0.0
        self.count = 0
        self.makers: dict[str, tuple[int, Placement]] = {}  # turn -> whose request, where placed
        self.next_states: dict[str, tuple[Any, ...]] = {}
        self.under_way: list[tuple[Person, Placement, dict[str, Any]]] = []

    def run(self, step: dict[str, Any]) -> None:
        person = self.people[step["who"]]
        act = step["act"]
        if act == "arrive":
            for late in self.under_way:
                self.commit(*late)
            self.under_way.clear()
            return
        if act == "restart":
            person.messages = []
        if act == "compact" and person.messages:
            person.messages = [user(f"summary {self.count} of {person.number}")]
        if act == "branch":
            at = [i for i, m in enumerate(person.messages) if m["role"] == "assistant"]
            if at:
                person.messages = person.messages[: at[step["cut"] % len(at)] + 1]
        if act == "edit" and person.messages:
            at = step["cut"] % len(person.messages)
            message = person.messages[at]
            if not message.get("tool_calls"):  # an earlier message, with all that followed it
                person.messages[at] = {**message, "content": f"edited {self.count} {at}"}
        if act == "retry" and person.last:
            request, person.messages = person.last[0], list(person.last[1])
            self.ask(person, request, step)
            return
        if act == "side":
            aside = [system("You are a context summarization assistant."), *person.messages,
                     user("sum up")]  # fmt: skip
            self.ask(person, person.view(aside), step)
            return
        last = person.messages[-1] if person.messages else {}
        for call in last.get("tool_calls", ()):
            person.messages.append(tool(call["id"], f"{step['words']} {call['id']}"))
        if not last.get("tool_calls"):
            person.messages.append(user(step["words"]))
        messages = [system(f"now {self.count}"), *person.messages]
        if step["transient"]:
            messages.append(TRANSIENT)
        self.ask(person, person.view(messages), step)

    def ask(self, person: Person, request: RequestView, step: dict[str, Any]) -> None:
        self.now += 1
        side = step["act"] == "side"
        if self.looks:  # at what is never sent: named as a turn, and with tools
            named = {**request.headers, "x-turn-type": "main"}
            self.tracker.look(replace(request, headers=named, has_tools=True), self.now)
        placement = self.tracker.place(request, self.now)
        self.check(person, request, placement, side)
        reply = self.reply(step)
        if step["act"] == "late":  # the client breaks off; the turn may be recorded all the same
            self.under_way.append((person, placement, reply))
            return
        self.commit(person, placement, reply)
        if side:
            return
        person.last = (request, list(person.messages))
        if reply["content"] or reply.get("tool_calls"):
            person.messages.append(reply)

    def reply(self, step: dict[str, Any]) -> dict[str, Any]:
        """A reply like no other, save for the empty one."""
        self.count += 1
        calls = [(f"call_{self.count}_{n}", "f", '{"x":  1}') for n in range(step["calls"])]
        text = "" if step["empty"] else f" reply {self.count}\n"
        return {**assistant(text, *calls), "reasoning_content": "hm", "turn": f"t{self.count}"}

    def commit(self, person: Person, placement: Placement, reply: dict[str, Any]) -> None:
        turn = reply["turn"]
        self.makers[turn] = (person.number, placement)
        state = placement.next_state
        if state is not None:  # two requests under way: the journal keeps the first
            self.next_states.setdefault(placement.turn.parent_id, state)
        head = self.tracker.commit(placement, turn, reply)
        assert head.node_hash == extend(placement.history_hash, reply)

    def check(self, person: Person, request: RequestView, placement: Placement, side: bool) -> None:
        if person.session:
            assert placement.turn.session_id == person.session
        assert (placement.turn.kind == "side") == side
        assert placement == self.tracker.look(request, self.now) or placement.turn.source == "new"
        assert 0 <= placement.turn.matched <= len(request.messages)
        for turn in {
            placement.turn.parent_id,
            *placement.superseded,
            *placement.served_replies.values(),
        }:
            if turn is not None:
                number, made = self.makers[turn]
                assert number == person.number
                assert made.turn.session_id == placement.turn.session_id
        for index, turn in placement.served_replies.items():
            assert request.messages[index]["role"] == "assistant"
            assert f"reply {turn[1:]}" in str(request.messages[index]["content"]) or (
                f"call{turn[1:]}" in str(request.messages[index])
            )
        parent = self.makers.get(placement.turn.parent_id)
        for turn in placement.superseded:
            asked = [placement.turn.request_hash, parent and parent[1].turn.request_hash]
            assert self.makers[turn][1].turn.request_hash in asked
            assert turn not in self.next_states
        state = placement.next_state
        if state is None:
            return
        assert placement.turn.kind == "main"
        assert placement.turn.parent_id not in (None, *placement.superseded)
        assert placement.turn.parent_id not in self.next_states
        assert self.makers[placement.turn.parent_id][1].turn.kind == "main"
        assert state
        assert all(m["role"] in ("user", "tool") for m in state)
        assert TRANSIENT["content"] not in json.dumps(state)
        matched = placement.turn.matched
        if matched == 0:  # something earlier was re-worded: what follows the last reply
            roles = [m["role"] for m in request.messages]
            matched = len(roles) - roles[::-1].index("assistant")
        followed = list(request.messages[matched:])
        assert list(state) == followed[: len(state)]


@given(st.lists(STEP, max_size=40))
@settings(max_examples=300, deadline=None)
def test_no_message_of_one_session_is_ever_next_state_of_anothers_turn(steps):
    world = World()
    for step in steps:
        world.run(step)


@given(st.lists(STEP, max_size=25))
@settings(max_examples=100, deadline=None)
def test_a_plain_conversation_binds_every_turn(steps):
    world = World()
    turns: dict[int, str] = {}
    for step in steps:
        world.run({**step, "act": "say", "empty": False})
        person = world.people[step["who"]]
        turn = f"t{world.count}"
        _, placement = world.makers[turn]
        assert placement.turn.parent_id == turns.get(person.number)
        if placement.turn.parent_id is not None:
            replies = [i for i, m in enumerate(person.messages) if m["role"] == "assistant"]
            after = person.messages[replies[-2] + 1 : replies[-1]]
            assert placement.next_state is not None
            assert list(placement.next_state) == [rewritten(m) for m in after]
        turns[person.number] = turn


@given(st.lists(STEP, max_size=30), st.integers(2, 8))
@settings(max_examples=60, deadline=None)
def test_the_same_requests_are_placed_the_same_way_whatever_was_only_looked_at(steps, most):
    worlds = World(Tracker(max_turns=most)), World(Tracker(max_turns=most), looks=True)
    for step in steps:
        for world in worlds:
            world.run(step)
    assert worlds[0].makers == worlds[1].makers


@given(st.lists(STEP, max_size=40), st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_eviction_never_binds_wrongly(steps, most):
    world = World(Tracker(max_turns=most))
    for step in steps:
        world.run(step)
        assert world.tracker.turns <= most


TEXT = st.text(alphabet="ab \n<>", max_size=6)


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), TEXT), max_size=8), TEXT)
def test_reading_a_history_and_extending_one_agree(parts, reply):
    messages = [
        {"role": role, "content": text, **({"tool_call_id": "c"} if role == "tool" else {})}
        for role, text in parts
    ]
    answer = assistant(reply)
    node = extend(read_history(messages).history_hash, answer)
    whole = read_history([*messages, answer])
    if reply.strip():
        assert whole.marks[-1].node == node
    else:
        assert whole.history_hash == read_history(messages).history_hash
        assert not whole.marks or whole.marks[-1].empty == node


@given(st.lists(TEXT, min_size=1, max_size=6), st.integers(0, 5), TEXT)
def test_another_meaning_is_another_hash(words, at, other):
    at %= len(words)
    if words[at].strip() == other.strip():
        return
    changed = [*words[:at], other, *words[at + 1 :]]
    one, two = (read_history([user(w) for w in ws]).history_hash for ws in (words, changed))
    assert one != two


MESSAGE = st.one_of(
    st.builds(system, TEXT),
    st.builds(user, TEXT),
    st.just(TRANSIENT),
    st.just(user("The previous attempt did not produce a user-visible answer.")),
    st.builds(assistant, TEXT),
    st.builds(lambda text, args: assistant(text, ("call_1", "f", args)), TEXT, TEXT),
    st.builds(tool, st.sampled_from(["call_1", "call1"]), TEXT),
)


@given(st.lists(st.lists(MESSAGE, max_size=6), min_size=2, max_size=5), st.integers(0, 6))
def test_reading_on_from_any_other_request_changes_nothing(parts, keep):
    """Each request keeps some of the one before, and goes on otherwise."""
    messages: list[dict[str, Any]] = []
    before = None
    for part in parts:
        messages = [*messages[:keep], *part]
        before = read_history(messages, before)
        assert before == read_history(messages)
        assert before.steps == read_history(messages).steps
