"""Golden transcripts of both dialects: every byte that leaves, with ids and times fixed.

`python -m tests.wire.test_golden` writes the files anew; read the difference before you commit it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from openclaw_rl.wire.anthropic import MESSAGES
from openclaw_rl.wire.chat import CHAT
from openclaw_rl.wire.dialect import Dialect, Ending, ReplyInfo, TokenLogprob, Usage, unavailable
from openclaw_rl.wire.reply import ReplyEvent

FOLDER = Path(__file__).parent / "golden"
TURN = "0123456789abcdef0123456789abcdef"
CREATED = 1_700_000_000


def thought(text: str) -> ReplyEvent:
    return ReplyEvent("reasoning", text)


def said(text: str) -> ReplyEvent:
    return ReplyEvent("content", text)


def call(index: int, name: str, arguments: str) -> ReplyEvent:
    return ReplyEvent("tool_call", "", index, f"callf{index}", name, arguments)


@dataclass(frozen=True)
class Script:
    """One reply: its events, `None` for a silence that is filled; then its ending or error."""

    events: list[ReplyEvent | None]
    ending: Ending | None = None
    options: dict = field(default_factory=dict)
    """More keys of the body."""
    only: str = ""
    """The dialect, if it is for one only."""


SCRIPTS = {
    "text": Script(
        [said("Paris"), said(" é✓ \N{GRINNING FACE}\n")], Ending("stop", Usage(12, 5, 4))
    ),
    "thinking": Script(
        [thought("hm"), thought(", so"), said("Yes.")], Ending("stop", Usage(12, 9, 0, 5))
    ),
    "thinking_left_out": Script(
        [thought("hm"), None, thought(", so"), said("Yes.")],
        Ending("stop", Usage(12, 9, 0, 5)),
        {"thinking": {"type": "adaptive", "display": "omitted"}},
        only="messages",
    ),
    "calls": Script(
        [
            thought("I look."), said("On it."), call(0, "run", '{"a":  1, "b": "\\u00e9"}'),
            call(1, "read", "{}"), said("\nThat was it."),
        ],
        Ending("tool_calls", Usage(30, 40, 16, 3)),
    ),
    "length": Script([said("one two")], Ending("length", Usage(12, 2))),
    "context_full": Script([said("one two")], Ending("length", Usage(12, 2), context_full=True)),
    "stop_sequence": Script([said("one ")], Ending("stop", Usage(12, 3), "STOP")),
    "empty": Script([], Ending("stop", Usage(12, 1))),
    "silences": Script(
        [None, None, thought("hm"), None, said("a"), None, call(0, "run", "{}"), None],
        Ending("tool_calls", Usage(12, 9)),
    ),
    "broken_off": Script([said("one "), None]),
    "usage": Script(
        [said("yes")],
        Ending("stop", Usage(12, 5, 4, 1)),
        {"stream_options": {"include_usage": True}},
        only="chat",
    ),
}  # fmt: skip

CASES = [
    (dialect, name)
    for dialect in (CHAT, MESSAGES)
    for name, script in SCRIPTS.items()
    if script.only in ("", dialect.name)
]


def head(dialect: Dialect, script: Script) -> ReplyInfo:
    body = {"max_tokens": 99, "messages": [{"role": "user", "content": "hi"}], **script.options}
    return ReplyInfo(TURN, "tiny", CREATED, dialect.parse(json.dumps(body).encode()))


def transcript(dialect: Dialect, script: Script) -> bytes:
    stream = dialect.stream(head(dialect, script))
    data = stream.start(Usage(script.ending.usage.prompt if script.ending else 12))
    for event in script.events:
        data += stream.keepalive() if event is None else stream.event(event)
    if script.ending is None:
        return data + stream.fail(unavailable("the engine is away"))
    return data + stream.end(script.ending)


def whole(dialect: Dialect, script: Script) -> bytes:
    assert script.ending is not None
    events = [event for event in script.events if event is not None]
    body = dialect.whole(head(dialect, script), events, script.ending, None)
    return (json.dumps(body, ensure_ascii=False, indent=1) + "\n").encode()


def golden() -> dict[str, bytes]:
    found = {}
    for dialect, name in CASES:
        script = SCRIPTS[name]
        found[f"{dialect.name}_{name}.sse"] = transcript(dialect, script)
        if script.ending is not None:
            found[f"{dialect.name}_{name}.json"] = whole(dialect, script)
    return found


@pytest.mark.parametrize("name", sorted(golden()))
def test_every_byte_is_as_it_was(name):
    assert golden()[name] == (FOLDER / name).read_bytes()


def test_no_file_is_left_over():
    written = {path.name for path in FOLDER.iterdir() if not path.name.startswith("gateway_")}
    assert written == set(golden())


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*chat*")), ids=lambda path: path.name)
def test_the_openai_sdk_knows_every_key(path):
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    text = path.read_text("utf-8")
    if path.suffix == ".json":
        ChatCompletion.model_validate(json.loads(text), strict=True)
        return
    events = [line.removeprefix("data: ") for line in text.split("\n") if line]
    assert events.pop() == "[DONE]"
    for event in map(json.loads, events):
        if "error" not in event:
            ChatCompletionChunk.model_validate(event, strict=True)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*messages*")), ids=lambda path: path.name)
def test_the_anthropic_sdk_knows_every_key(path):
    pytest.importorskip("anthropic", reason="needs the anthropic SDK (dev extra)")
    from anthropic.types import Message, RawMessageStreamEvent
    from pydantic import TypeAdapter

    text = path.read_text("utf-8")
    if path.suffix == ".json":
        assert not list(unknown(Message.model_validate(json.loads(text), strict=True)))
        return
    known: TypeAdapter = TypeAdapter(RawMessageStreamEvent)
    for block in text.removesuffix("\n\n").split("\n\n"):
        first, second = block.split("\n")
        event = json.loads(second.removeprefix("data: "))
        assert first == f"event: {event['type']}"
        if event["type"] not in ("ping", "error"):
            assert not list(unknown(known.validate_python(event, strict=True)))


def unknown(value):
    """The keys that an SDK's own types do not name."""
    if isinstance(value, list):
        for item in value:
            yield from unknown(item)
    elif hasattr(value, "model_extra"):
        yield from value.model_extra or ()
        for name in type(value).model_fields:
            yield from unknown(getattr(value, name))


def test_log_probs_do_not_disturb_a_messages_stream():
    stream = MESSAGES.stream(head(MESSAGES, SCRIPTS["text"]))
    plain = MESSAGES.stream(head(MESSAGES, SCRIPTS["text"]))
    token = [TokenLogprob("a", -1.0)]
    assert stream.event(said("a"), token) + stream.logprobs(token) == plain.event(said("a"))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, data in golden().items():
        (FOLDER / name).write_bytes(data)
