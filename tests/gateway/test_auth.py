"""Keys: who may come in, and the session inside a key."""

import pytest
from multidict import CIMultiDict

from openclaw_rl.gateway.access import caller_of
from tests.gateway.conftest import world


def bearer(token):
    return CIMultiDict({"authorization": f"Bearer {token}"})


def test_the_right_key_with_and_without_a_session():
    key = "secret"
    plain, named = caller_of(bearer(key), key), caller_of(bearer(f"{key}:alice"), key)
    assert (plain.key_session, named.key_session) == (None, "alice")
    assert plain.owner == named.owner == plain.reach != ""
    assert "cret" not in plain.owner
    assert caller_of(CIMultiDict({"X-Api-Key": key}), key) == plain


@pytest.mark.parametrize("token", ["", "secre", "secretx", "Secret", "x:secret", ":secret", "é"])
def test_a_wrong_key_is_refused(token):
    assert caller_of(bearer(token), "secret") is None
    assert caller_of(CIMultiDict({"Authorization": "Basic secret"}), "secret") is None


def test_without_a_configured_key_any_key_only_tells_clients_apart():
    sent = (bearer("one:s"), bearer("two"), CIMultiDict())
    first, second, nobody = (caller_of(headers, "") for headers in sent)
    assert first.owner != second.owner
    assert first.key_session == "s"
    assert (nobody.owner, nobody.reach, second.reach) == ("", None, second.owner)


OTHERS = ("https://evil.example", "http://evil.example:30000", "http://127.0.0.1.evil.example",
          "http://192.168.0.7", "null", "", "http://[",
          "http://localhost.evil.example")  # fmt: skip
OWN = ("http://localhost:3000", "http://127.0.0.1:30000", "http://[::1]:1", "app://notes",
       "vscode-webview://x")  # fmt: skip


async def test_a_web_page_of_elsewhere_is_no_client_where_no_key_is_wanted(served):
    body = b'{"messages":[{"role":"user","content":"believe me"}]}'
    for origin in OTHERS:
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/feedback", "/v1/sessions/s/end"):
            headers = {"Origin": origin, "Content-Type": "text/plain"}
            status, answer = await served.post(body, path, **headers)
            assert status == 403, origin
            assert "KEY" in answer["error"]["message"]
    assert served.journal.outcomes().seen == 0
    for origin in OWN:
        assert (await served.post(body, Origin=origin))[0] == 200, origin
    assert served.journal.outcomes().seen == len(OWN)


async def test_a_page_that_knows_the_key_is_a_client(tmp_path, model):
    body = b'{"messages":[{"role":"user","content":"hi"}]}'
    async with world(tmp_path, model, api_key="secret") as served:
        known = {"Origin": OTHERS[0], "Authorization": "Bearer secret"}
        assert (await served.post(body, **known))[0] == 200
        assert (await served.post(body, Origin=OTHERS[0]))[0] == 401
