"""Bodies and headers that nobody sends by accident: refused in words, never a 500, never logged."""

import asyncio
import json
from urllib.parse import urlsplit

import pytest

from tests.gateway.conftest import world
from tests.wire.test_mutations import CHAT, MESSAGES, WRONG, changed, paths

pytestmark = pytest.mark.slow

HI = {"role": "user", "content": "hi"}


def nested(depth, leaf="1"):
    return '{"a":' * depth + leaf + "}" * depth


def called(arguments):
    """A history with one tool call; `arguments` is the JSON of them."""
    call = '{"id":"c","type":"function","function":{"name":"f","arguments":' + arguments + "}}"
    return (
        '{"max_tokens":3,"messages":[{"role":"user","content":"hi"},'
        '{"role":"assistant","content":null,"tool_calls":[' + call + "]},"
        '{"role":"tool","tool_call_id":"c","content":"x"}]}'
    )


@pytest.mark.parametrize("depth", [100, 800, 900, 940, 980, 1500, 100_000])
async def test_case_04_deep_nesting_is_served_or_refused(served, depth):
    head = '{"max_tokens":3,"messages":[{"role":"user","content":"hi"}],'
    deep, half = nested(depth), nested(depth, r'"\ud800"')
    tool = '{"type":"function","function":{"name":"f","parameters":' + deep + "}}"
    for body in (
        head + f'"metadata":{deep}}}',
        head + f'"metadata":{half}}}',
        head + f'"tools":[{tool}]}}',
        head + f'"chat_template_kwargs":{{"x":{deep}}}}}',
        called(deep),
        called(json.dumps(deep)),
    ):
        for _ in range(2):  # the second one finds a history that is known
            status, answer = await served.post(body.encode(), **{"x-session-id": "s"})
            assert status in (200, 400), answer
            assert status == 200 or depth > 100


@pytest.mark.parametrize("count", ["²", "9" * 5000, "٣", "-1", "0x1"])
async def test_a_retry_header_that_is_no_number(served, count):
    status, _ = await served.post({"messages": [HI]}, **{"x-stainless-retry-count": count})
    assert status == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (rb'{"turn_id":"\ud800","score":1}', 404),
        (rb'{"turn_id":"x\u0000","score":1}', 404),
        (b'{"turn_id":"x","score":1' + b"0" * 400 + b"}", 400),
        (b'{"turn_id":"x","score":' + b"[" * 100_000, 400),
        *((body, 400) for body in (
            b"{", b"[]", b"{}", b'{"turn_id":"a"}', b'{"turn_id":"a","session_id":"b","score":1}',
            b'{"turn_id":1,"score":1}', b'{"turn_id":"a","score":2}', b'{"turn_id":"a","text":3}',
            b'{"turn_id":"a","score":true}', b'{"turn_id":"a","score":NaN}',
            b'{"turn_id":"a","thumb":"sideways"}',
        )),
    ],
)  # fmt: skip
async def test_wrong_feedback_is_refused(served, body, status):
    assert (await served.post(body, "/v1/feedback"))[0] == status


async def test_half_characters_in_feedback_are_made_whole(served):
    turn_id = (await served.chat("hi")).turn_id
    body = '{"turn_id":"' + turn_id + r'","text":"bad \ud83d"}'
    assert (await served.post(body.encode(), "/v1/feedback"))[0] == 200
    (feedback,) = served.only_turn().next_state
    assert feedback["content"] == "bad \N{REPLACEMENT CHARACTER}"


async def test_bytes_that_are_no_request_stay_out_of_the_log(served, caplog):
    secret = b"xylophone-armadillo"
    post = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
    place = urlsplit(served.url)
    for request in (
        post + b"Authorization: Bearer " + secret + b"\0\r\n\r\n",
        post + b"Authorization: Bearer " + secret + b"x" * 10_000 + b"\r\n\r\n",
        post + b"Content-Length: 5\r\n\r\n" + secret,  # the length is a lie
        post + b"Content-Encoding: gzip\r\nContent-Length: 19\r\n\r\n" + secret,
        post + b"Transfer-Encoding: chunked\r\n\r\n" + secret + b"\r\n",
    ):
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(request)
        first = await reader.readline()
        writer.close()
        assert b" 400 " in first
    assert "Bad" in caplog.text  # something is said
    assert secret.decode() not in caplog.text
    assert "Traceback" not in caplog.text


async def test_names_of_ignored_keys_cannot_forge_log_lines(served, caplog):
    caplog.set_level("INFO", "openclaw_rl")
    status, _ = await served.post({"messages": [HI], "evil\n00:00:00 E all is lost": 1})
    assert status == 200
    assert "evil" in caplog.text
    assert "\n00:00:00 E" not in caplog.text


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/messages", MESSAGES)]
)
async def test_case_04_a_field_in_a_wrong_form_is_served_or_leaves_nothing(served, path, body):
    """The parser's own test goes through all of them; here every few, all the way."""
    bodies = [changed(body, place, value) for place in paths(body) for value in WRONG][::9]
    for made in bodies:
        asked, seen = len(served.engine.requests), served.journal.outcomes().seen
        status, answer = await served.post(json.dumps(made).encode(), path)
        if status == 200:
            continue
        assert status == 400, answer
        assert answer["error"]["type"] == "invalid_request_error"
        assert answer["error"]["message"]
        assert len(served.engine.requests) == asked
        assert served.journal.outcomes().seen == seen
    assert served.engine.requests


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("depth", [100, 900, 1500, 100_000])
async def test_case_04_deep_nesting_of_blocks_is_served_or_refused(served, path, depth):
    deep = nested(depth)
    head = '{"max_tokens":3,"messages":[{"role":"user","content":"hi"}'
    use = '{"type":"tool_use","id":"c","name":"f","input":' + deep + "}"
    result = '{"type":"tool_result","tool_use_id":"c","content":' + "[" * depth + "]" * depth + "}"
    for body in (
        head + '],"metadata":' + deep + "}",
        head + '],"tools":[{"name":"f","input_schema":' + deep + "}]}",
        head + '],"system":' + "[" * depth + "]" * depth + "}",
        head + ',{"role":"assistant","content":[' + use + ']},{"role":"user","content":"x"}]}',
        head + ',{"role":"user","content":[' + result + "]}]}",
    ):
        for _ in range(2):
            status, answer = await served.post(body.encode(), path, **{"x-session-id": "s"})
            assert status in (200, 400), answer
            assert status == 200 or answer["type"] == "error"
            assert status == 200 or answer["error"]["type"] == "invalid_request_error"


async def test_errors_are_told_in_the_words_of_the_dialect(tmp_path, model):
    async with world(tmp_path, model, max_body_mb=0.002, max_inflight=1) as served:
        big = json.dumps({"messages": [HI], "max_tokens": 1, "system": "x" * 3000}).encode()
        status, answer = await served.post(big, "/v1/messages")
        assert (status, answer["error"]["type"]) == (413, "request_too_large")
        status, answer = await served.post(big, "/v1/chat/completions")
        assert (status, answer["error"]["code"]) == (413, "request_too_large")
        status, answer = await served.post(b"{}", "/v1/messages/batches")
        assert (status, answer["error"]["type"]) == (404, "not_found_error")
        async with served.http.get(f"{served.url}/v1/messages") as response:
            assert response.status == 405
            assert (await response.json())["type"] == "error"
        served.engine.gated = True
        body = {"messages": [HI], "max_tokens": 1}
        asking = asyncio.ensure_future(served.post(body, "/v1/messages"))
        await served.engine.arrived(1)
        status, answer = await served.post(body, "/v1/messages")
        assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
        await served.engine.open_gate()
        assert (await asking)[0] == 200
