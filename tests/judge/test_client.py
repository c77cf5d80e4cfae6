"""Completions of judges: an engine's `/generate`, and OpenAI-compatible endpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openclaw_rl.engine.chat import ChatTokenizer
from openclaw_rl.engine.client import EngineClient
from openclaw_rl.engine.transport import connections
from openclaw_rl.errors import EngineRefused, EngineUnavailable
from openclaw_rl.judge.client import EngineJudge, OpenAIJudge, is_overflow
from openclaw_rl.judge.prompts import VERDICT
from tests.fakes.engine import FakeEngine, Fault
from tests.fakes.model import tiny_tokenizer
from tests.judge.helpers import FakeChat

MESSAGES = [{"role": "system", "content": "Judge."}, {"role": "user", "content": "data"}]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer.load(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
async def http():
    async with connections() as session:
        yield session


def client_of(url, http, chat, **options):
    return EngineJudge(EngineClient("sglang", url, http, **options), chat)


async def ask(llm, max_tokens=64):
    return await llm.complete(
        MESSAGES, schema=VERDICT.schema, temperature=0.3, max_tokens=max_tokens
    )


async def test_engine_completion_under_a_schema(chat, http) -> None:
    async with FakeEngine(tokenizer=chat) as engine:
        engine.say('{"why": "x", "verdict": 1}')
        llm = client_of(engine.url, http, chat)
        completion = await ask(llm)
        assert (completion.text, completion.finished) == ('{"why": "x", "verdict": 1}', True)
        assert not completion.in_reasoning
        request = engine.requests[0]
        assert request.ids == chat.encode(chat.render(MESSAGES))
        assert json.loads(request.sampling["json_schema"]) == VERDICT.schema
        assert request.sampling["temperature"] == 0.3


async def test_engine_without_schemas_is_asked_without(chat, http) -> None:
    async with FakeEngine(tokenizer=chat) as engine:
        engine.faults.append(Fault(status=400, message="json_schema is not supported"))
        llm = client_of(engine.url, http, chat)
        for _ in range(2):
            engine.say("verdict: 1")
            assert (await ask(llm)).text == "verdict: 1"
        assert ["json_schema" in r.sampling for r in engine.requests] == [True, False, False]


async def test_engine_completion_cut_off(chat, http) -> None:
    async with FakeEngine(tokenizer=chat) as engine:
        engine.say("verdict: 1 and much more text")
        completion = await ask(client_of(engine.url, http, chat), max_tokens=3)
        assert not completion.finished


async def test_a_prompt_that_ends_in_reasoning_is_known(tmp_path: Path, http) -> None:
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}<think>\n"
    chat = ChatTokenizer.load(tiny_tokenizer(tmp_path, template=template))
    async with FakeEngine(tokenizer=chat) as engine:
        engine.say("hm</think>verdict: 1")
        completion = await ask(client_of(engine.url, http, chat))
        assert completion.in_reasoning
        assert "json_schema" not in engine.requests[0].sampling


async def test_a_template_without_a_system_role(tmp_path: Path, http) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    )
    chat = ChatTokenizer.load(tiny_tokenizer(tmp_path, template=template))
    async with FakeEngine(tokenizer=chat) as engine:
        await ask(client_of(engine.url, http, chat))
        assert engine.requests[0].ids == chat.encode("[user] Judge.\n\ndata")


async def test_engine_overflow_and_absence(chat, http) -> None:
    async with FakeEngine(tokenizer=chat, context_length=20) as engine:
        with pytest.raises(EngineRefused) as error:
            await ask(client_of(engine.url, http, chat))
        assert is_overflow(error.value)
    with pytest.raises(EngineUnavailable):
        await ask(client_of(lambda: None, http, chat, wait_seconds=0.0))


async def test_openai_completion() -> None:
    async with FakeChat() as fake:
        llm = OpenAIJudge(fake.url, model="m", api_key="k")
        assert (await ask(llm)).text == fake.default
        body = fake.bodies[0]
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0.3, 64)
        assert body["response_format"]["json_schema"]["schema"] == VERDICT.schema
        assert fake.headers[0]["authorization"] == "Bearer k"


async def test_openai_address_forms() -> None:
    async with FakeChat() as fake:
        host = fake.url.removesuffix("/v1")
        for url in (host, f"{host}/", f"{host}/v1/", f"{host}/v1/chat/completions"):
            assert (await ask(OpenAIJudge(url))).finished


async def test_openai_gives_up_what_the_endpoint_does_not_take() -> None:
    def refuse(body):
        if "max_tokens" in body:
            return "use max_completion_tokens instead"
        if "temperature" in body:
            return "temperature must be 1"
        return "response_format is unknown" if "response_format" in body else None

    async with FakeChat() as fake:
        fake.refuse = refuse
        llm = OpenAIJudge(fake.url)
        await ask(llm)
        await ask(llm)
        assert len(fake.bodies) == 5
        assert fake.bodies[-1].keys() == {"messages", "max_completion_tokens"}


async def test_openai_reasoning_and_cut_off() -> None:
    async with FakeChat() as fake:
        llm = OpenAIJudge(fake.url)
        reasoning = {"content": None, "reasoning_content": "verdict: 1"}
        fake.answers.append({"message": reasoning, "finish_reason": "stop"})
        assert (await ask(llm)).text == ""
        fake.answers.append({"message": {"content": "verdict: 1"}, "finish_reason": "length"})
        assert not (await ask(llm)).finished


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_case_27_openai_away(status: int) -> None:
    async with FakeChat() as fake:
        fake.default = status
        with pytest.raises(EngineUnavailable):
            await ask(OpenAIJudge(fake.url))
        url = fake.url
    with pytest.raises(EngineUnavailable):
        await ask(OpenAIJudge(url))


async def test_openai_refusals() -> None:
    async with FakeChat() as fake:
        fake.default = 401
        with pytest.raises(EngineRefused) as error:
            await ask(OpenAIJudge(fake.url))
        assert error.value.status == 401
        assert not is_overflow(error.value)
        fake.refuse = lambda body: "This model's maximum context length is 10 tokens. SECRET"
        with pytest.raises(EngineRefused) as error:
            await ask(OpenAIJudge(fake.url))
        assert is_overflow(error.value)
        assert "SECRET" not in str(error.value)
