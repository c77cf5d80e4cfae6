"""Other models' ways of writing calls, through the whole gateway."""

import pytest

from openclaw_rl.cli.status import read_status
from openclaw_rl.config import Config, DataConfig
from tests.gateway.conftest import world
from tests.wire.test_formats import CALLS, TOOLS


@pytest.mark.parametrize("stream", [True, False])
async def test_the_named_format_is_served_and_shown(tmp_path, model, stream):
    async with world(tmp_path, model, reply_format="qwen3-coder") as served:
        ids = served.engine.say("Let me.\n" + CALLS["qwen3-coder"])
        answer = await served.chat("go", stream=stream, tools=TOOLS)
        assert answer.text == "Let me."
        (call,) = answer.message.tool_calls
        assert call.function.arguments == '{"path": "a\\n</parameter> b", "lines": 3}'
        assert answer.finish_reason == "tool_calls"
        assert list(served.only_turn().output_ids) == ids
        assert (await served.get("/healthz"))["reply_format"] == "qwen3-coder"
        status = read_status(Config(data=DataConfig(path=str(tmp_path))))
        assert status["reply_format"] == "qwen3-coder (by --reply-format)"


async def test_a_continued_turn_of_another_format_keeps_its_tokens(tmp_path, model):
    """The template writes Hermes' calls, so only turns without calls go on from their tokens."""
    async with world(tmp_path, model, reply_format="gpt-oss") as served:
        served.engine.say("plain words")
        first = await served.chat("go")
        await served.chat(
            [{"role": "user", "content": "go"}, first.replay(), {"role": "user", "content": "on"}]
        )
        before, after = served.turns()
        known = [*before.prompt_ids, *before.output_ids]
        assert list(after.prompt_ids[: len(known)]) == known
        assert after.shares_tokens


async def test_without_a_flag_the_template_decides(served):
    assert (await served.get("/healthz"))["reply_format"] == "hermes"
