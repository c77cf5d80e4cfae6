"""A real OpenClaw, connected by `openclaw-rl connect`, talks to our gateway: every main turn is
bound to its session with exact tokens, every side request is untrained, next states are right, and
after a training step its next turn is served by the new version.

One OpenClaw lives through the whole story; the tests read what the journal says afterwards. The
first part is answered by the fake engine, so that it is known what was sampled; the second by
`openclaw-rl up` with a tiny model.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from openclaw_rl.engine.chat import ChatTokenizer
from openclaw_rl.journal import Outcomes
from openclaw_rl.types import State, Turn
from tests.e2e.system import System
from tests.fakes.engine import EOS_ID, FakeEngine, Request, logprob_of
from tests.fakes.model import tiny_model
from tests.gateway.conftest import world
from tests.openclaw.real import VERSION, RealOpenClaw, why_not
from tests.openclaw.wire import Seen, Wire, text_of
from tests.session.helpers import REQUESTS

pytestmark = pytest.mark.slow

CONTEXT, LONG_TOKENS = (30_000, 2_600) if VERSION < "2026.9" else (16_000, 4_500)
"""OpenClaw itself sends 5,700 tokens here (2026.9: 4,900), and it compacts when fewer than 20,000
are left (2026.9: a quarter of the context): the second long message is one too many."""


@dataclass
class Story:
    """What OpenClaw sent, what the engine sampled, and what the journals say in the end."""

    chats: list[Seen] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    sampled: dict[str, Request] = field(default_factory=dict)
    turns: dict[str, Turn] = field(default_factory=dict)
    outcomes: Outcomes = field(default_factory=Outcomes)
    learned: list[Turn] = field(default_factory=list)
    """Turns of the second part, oldest first."""

    def asked(self, *texts: str) -> list[Turn]:
        """The main turns whose last message holds one of `texts`, in order."""
        found = [
            self.turns[seen.turn_id]
            for seen in self.chats
            if seen.turn_id in self.turns and any(text in seen.last_text for text in texts)
        ]
        return [turn for turn in found if turn.kind == "main"]


def script(model: Path) -> Any:
    """Answers by what was asked last; no two plain answers are alike."""
    tokenizer = ChatTokenizer.load(str(model))
    backend = Tokenizer.from_file(str(model / "tokenizer.json"))
    count = 0

    def call(word: str) -> str:
        return (
            '<tool_call>\n{"name": "exec", "arguments": '
            f'{{"command": "echo {word}"}}}}\n</tool_call>'
        )

    def reply(request: Request) -> list[int]:
        nonlocal count
        count += 1
        text = backend.decode(request.ids, skip_special_tokens=False)
        last = text.rpartition("<|im_start|>user")[2]
        if "context summarization assistant" in text[:2000]:
            answer = "They talked for long."
        elif "second-hop" in last:
            answer = "Both hops are done."
        elif "first-hop" in last:
            answer = call("second-hop")
        elif "use the tool" in last:
            answer = call("first-hop")
        else:
            answer = f"Answer {count}."
        return [*tokenizer.encode(answer), EOS_ID]

    return tokenizer, reply


async def live(folder: Path) -> Story:
    corpus = [path.read_text() for path in REQUESTS.glob("*.json")]
    model = tiny_model(
        folder / "tiny", context_length=CONTEXT, vocab_size=2000, corpus=corpus
    )  # OpenClaw's prompt in half the tokens
    tokenizer, reply = script(model)
    engine = FakeEngine(tokenizer=tokenizer, context_length=CONTEXT)
    engine.reply_fn = reply
    story = Story()
    async with contextlib.AsyncExitStack() as stack:
        wire = await stack.enter_async_context(Wire(""))
        first = world(folder / "first", model, engine=engine, max_tokens=64)
        async with engine, first as served:
            wire.upstream = served.url
            openclaw = await stack.enter_async_context(RealOpenClaw(folder / "openclaw", wire.url))
            filler = " long" * (LONG_TOKENS // len(tokenizer.encode(" long")))
            await converse(openclaw, wire, engine, filler)
            story.chats = list(wire.chats)
            story.ends = [seen.path.split("/")[3] for seen in wire.seen if "/end" in seen.path]
            story.sampled = {request.rid: request for request in engine.requests}
            story.turns = {turn.turn_id: turn for turn in served.turns()}
            story.outcomes = served.journal.outcomes()
        await learn(openclaw, wire, folder / "second", model, story)
    return story


async def converse(openclaw: RealOpenClaw, wire: Wire, engine: FakeEngine, filler: str) -> None:
    await openclaw.wake()
    for text in ("First question?", "Second question?", "Third question?", "use the tool"):
        await openclaw.say("ann", text)
    await wire.until(lambda: any(seen.is_heartbeat for seen in wire.chats))
    wire.break_once.append("this breaks")
    await openclaw.say("ann", "this breaks")
    await openclaw.say("ann", "last words")
    engine.gated = True  # both are under way before either gets a token
    seen = len(engine.requests)
    both = asyncio.gather(openclaw.say("bob", "I am bob"), openclaw.say("cid", "I am cid"))
    await engine.wait_until(lambda: len(engine.requests) == seen + 2, 60)
    await engine.open_gate()
    await both
    await asyncio.gather(openclaw.say("bob", "bob again"), openclaw.say("cid", "cid again"))
    for text in ("It was" + filler, "and now?", "It is" + filler):
        await openclaw.say("bob", text)
    if VERSION >= "2026.9":  # it compacts after the answer, but not if the next message is faster
        async with asyncio.timeout(120):
            while await openclaw.tokens_of("bob") > 2 * LONG_TOKENS:
                pass
    for text in ("after the summary", "all good"):
        await openclaw.say("bob", text)
    await openclaw.call("sessions.reset", key=openclaw.key_of("ann"))
    await openclaw.call("sessions.delete", key=openclaw.key_of("cid"))
    await wire.until(lambda: sum(seen.path.endswith("/end") for seen in wire.seen) == 2)


async def learn(
    openclaw: RealOpenClaw, wire: Wire, folder: Path, model: Path, story: Story
) -> None:
    flags = ["--method", "rl", "--rollout-batch-size", "2", "--num-rollout", "1",
             "--max-tokens", "16", "--dtype", "float32",
             "--engine-threads", "1", "--train-threads", "1"]  # fmt: skip
    async with System(folder, model, *flags) as system:
        wire.upstream = f"http://127.0.0.1:{system.port}"
        for name in ("dan", "eve"):  # one session gives only its share of a batch
            await openclaw.say(name, f"I am {name}, who are you?")
            await openclaw.say(name, "Perfect, thanks.")
        await system.until(lambda: system.outcomes().trained == 2, 600)
        await openclaw.say("dan", "And now?")
        journal = system.journal()
        found = [journal.turn(turn_id) for turn_id in journal.turn_ids()]
        journal.close()
        story.learned = [turn for turn in found if turn is not None]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    return asyncio.run(live(tmp_path_factory.mktemp("real")))


def follows(turn: Turn) -> list[str]:
    """The texts of its next state."""
    return [text_of(message) for message in turn.next_state or ()]


def chain(turns: Sequence[Turn]) -> None:
    """Each turn continues the one before, token for token, in one session."""
    assert len({turn.session_id for turn in turns}) == 1
    for parent, child in itertools.pairwise(turns):
        assert child.parent_id == parent.turn_id
        assert child.shares_tokens
        whole = [*parent.prompt_ids, *parent.output_ids]
        assert list(child.prompt_ids[: len(whole)]) == whole


def test_every_turn_is_bound_by_the_plugins_name(story):
    assert story.outcomes.balanced()
    main = [turn for turn in story.turns.values() if turn.kind == "main"]
    assert {turn.source for turn in main} == {"header:x-session-id"}
    for seen in story.chats:
        assert seen.turn_id is not None
        turn = story.turns[seen.turn_id]
        assert turn.kind == ("main" if seen.headers.get("x-turn-type") == "main" else "side")
        if "x-session-id" in seen.headers:
            assert turn.session_id == seen.headers["x-session-id"]
    sessions = {user: {turn.session_id for turn in turns} for user, turns in (
        ("ann", story.asked("question?", "use the tool", "last words")),
        ("bob", story.asked("I am bob", "bob again", "and now?", "all good")),
        ("cid", story.asked("I am cid", "cid again")),
    )}  # fmt: skip
    assert all(len(ids) == 1 for ids in sessions.values())
    assert len(set.union(*sessions.values())) == 3


def test_trained_tokens_are_the_sampled_ones(story):
    assert story.turns
    for turn in story.turns.values():
        request = story.sampled[turn.turn_id]
        assert list(turn.prompt_ids) == request.ids
        assert list(turn.output_ids) == request.sent
        at = len(request.ids)
        expected = [logprob_of(token, at + n) for n, token in enumerate(request.sent)]
        assert list(turn.output_logprobs) == expected


def test_plain_turns_and_a_tool_loop_have_the_right_next_states(story):
    first, second, third, call, hop, done = story.asked(
        "question?", "use the tool", "first-hop", "second-hop"
    )
    chain([first, second, third, call, hop, done])
    for turn, words in zip(
        (first, second, third), ("Second question?", "Third question?", "use the tool"), strict=True
    ):
        (said,) = follows(turn)
        assert words in said
    # The tool is a real one: what follows a call is what the command printed.
    assert call.reply["tool_calls"][0]["function"]["name"] == "exec"
    assert [said.strip() for said in follows(call)] == ["first-hop"]
    assert [said.strip() for said in follows(hop)] == ["second-hop"]
    assert "this breaks" in follows(done)[0]


def test_a_retry_is_no_feedback_and_its_first_answer_is_not_trained(story):
    lost, kept = story.asked("this breaks", "Queued user message")
    assert follows(lost) == []
    assert "last words" in follows(kept)[0]
    if VERSION.startswith("2026.3."):  # repeats the very request
        assert (lost.state, lost.drop_reason) == (State.DROPPED, "retried")


def test_two_sessions_at_once_stay_apart(story):
    for name in ("bob", "cid"):
        one, two = story.asked(f"I am {name}", f"{name} again")
        chain([one, two])
        assert f"{name} again" in follows(one)[0]
        held = str(one.messages) + str(two.messages) + str(follows(two))
        other = "cid" if name == "bob" else "bob"
        assert f"I am {other}" not in held
        assert f"{other} again" not in held


def test_heartbeat_and_compaction_are_side_and_never_trained(story):
    heartbeats = [story.turns[one.turn_id or ""] for one in story.chats if one.is_heartbeat]
    compactions = [
        turn
        for turn in story.turns.values()
        if "context summarization assistant" in str(turn.messages[0])
    ]
    for turns in (heartbeats, compactions):
        assert turns
        assert all((turn.kind, turn.state) == ("side", State.SIDE) for turn in turns)
        assert all(turn.next_state is None for turn in turns)
    users = {turn.session_id for turn in story.asked("I am bob", "I am cid", "last words")}
    assert not users & {turn.session_id for turn in heartbeats}


def test_nothing_is_judged_against_a_summary(story):
    before, after, then = (story.asked(text)[-1] for text in (
        "It is long", "after the summary", "all good"))  # fmt: skip
    assert "They talked for long." in str(after.messages)
    assert follows(before) == []
    assert after.parent_id is None
    assert not after.shares_tokens
    assert after.session_id == before.session_id
    assert "all good" in follows(after)[0]
    assert then.parent_id == after.turn_id
    for turn in story.turns.values():
        assert "They talked for long." not in str(turn.next_state)


def test_reset_and_delete_end_the_session(story):
    reset, deleted = story.asked("last words")[-1], story.asked("cid again")[-1]
    assert story.ends == [reset.session_id, deleted.session_id]
    for last in (reset, deleted):
        assert (last.state, last.drop_reason) == (State.DROPPED, "session_ended")


def test_after_a_training_step_the_next_turn_is_served_by_the_new_version(story):
    *before, after = story.learned
    assert [turn.kind for turn in story.learned] == ["main"] * 5
    trained = [turn for turn in before if turn.state is State.TRAINED]
    assert len(trained) == 2
    assert {turn.session_id for turn in trained} == {turn.session_id for turn in before}
    for turn in trained:
        assert set(turn.output_versions) == {"0"}
        assert "Perfect, thanks." in follows(turn)[0]
        assert turn.verdict is not None
        assert turn.verdict.score is not None
        assert turn.verdict.score > 0
    assert set(after.output_versions) == {"1"}
    assert "And now?" in str(after.messages)
