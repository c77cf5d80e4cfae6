"""What really leaves the gateway, byte for byte: the golden transcripts once more, over HTTP.

The engine gives each reply in one piece, so that the events do not depend on its pace; ids and
times are replaced by fixed ones. `python -m tests.gateway.test_transcripts` writes the files anew.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from pathlib import Path

import pytest

from tests.fakes.engine import FakeEngine
from tests.fakes.model import tiny_tokenizer
from tests.gateway.conftest import World, world

FOLDER = Path(__file__).parents[1] / "wire" / "golden"
REPLY = (
    "<think>\nI look.\n</think>\n\nOn it.\n"
    '<tool_call>\n{"name": "run", "arguments": {"a":  1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "run", "arguments": {"b": "é"}}\n</tool_call>\n'
)
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"type": "function", "function": {"name": "run", "parameters": PARAMETERS}}
SYSTEM = {"role": "system", "content": "Be kind."}
USER = {"role": "user", "content": "go"}
REQUESTS = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [SYSTEM, USER], "tools": [FUNCTION],
         "stream_options": {"include_usage": True}},
    ),
    "messages": (
        "/v1/messages",
        {"system": "Be kind.", "messages": [USER], "max_tokens": 500,
         "tools": [{"name": "run", "input_schema": PARAMETERS}]},
    ),
}  # fmt: skip


def fixed(raw: str) -> str:
    """Without what changes from run to run."""
    raw = re.sub(r"(chatcmpl-|msg_)[0-9a-f]{32}", r"\1TURN", raw)
    raw = re.sub(r'"signature":( ?)"[A-Za-z0-9+/=]+"', r'"signature":\1"TURN"', raw)
    raw = re.sub(r'"created":( ?)\d+', r'"created":\g<1>0', raw)
    names: dict[str, str] = {}
    return re.sub(
        r"call[0-9a-f]{24}", lambda found: names.setdefault(found[0], f"call{len(names)}"), raw
    )


async def transcript(served: World, dialect: str, stream: bool) -> str:
    path, body = REQUESTS[dialect]
    served.engine.tokens_per_chunk = 10_000
    served.engine.say(REPLY)
    request = {"model": "tiny", "stream": stream, **body}
    async with served.http.post(served.url + path, json=request) as response:
        assert response.status == 200
        return fixed(await response.text()) + ("" if stream else "\n")


def name_of(dialect: str, stream: bool) -> str:
    return f"gateway_{dialect}.{'sse' if stream else 'json'}"


@pytest.mark.parametrize("dialect", REQUESTS)
@pytest.mark.parametrize("stream", [True, False])
async def test_every_byte_is_as_it_was(served, dialect, stream):
    expected = (FOLDER / name_of(dialect, stream)).read_text("utf-8")
    assert await transcript(served, dialect, stream) == expected


async def test_both_dialects_serve_the_same_prompt(served):
    for dialect in REQUESTS:
        await transcript(served, dialect, stream=False)
    one, two = served.engine.requests
    assert one.ids == two.ids
    assert {**one.sampling, "max_new_tokens": 0} == {**two.sampling, "max_new_tokens": 0}
    assert json.dumps(served.turns()[0].reply["content"]) == '"On it."'


async def write() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_tokenizer(Path(folder) / "model")
        async with world(Path(folder), model) as served:
            assert isinstance(served.engine, FakeEngine)
            for dialect in REQUESTS:
                for stream in (True, False):
                    text = await transcript(served, dialect, stream)
                    (FOLDER / name_of(dialect, stream)).write_text(text, "utf-8")


if __name__ == "__main__":
    asyncio.run(write())
