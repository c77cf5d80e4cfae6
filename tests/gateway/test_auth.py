"""Keys: who may come in, and the session inside a key."""

import pytest
from multidict import CIMultiDict

from openclaw_rl.gateway.access import Auth
from tests.gateway.conftest import world


def bearer(token):
    return CIMultiDict({"authorization": f"Bearer {token}"})


def test_the_right_key_with_and_without_a_session():
    auth = Auth("secret")
    plain, named = auth.caller(bearer("secret")), auth.caller(bearer("secret:alice"))
    assert plain.key_session is None
    assert named.key_session == "alice"
    assert plain.owner == named.owner != ""
    assert "secret" not in plain.owner


def test_x_api_key_is_a_key_too():
    assert Auth("secret").caller(CIMultiDict({"X-Api-Key": "secret"})) is not None


@pytest.mark.parametrize("token", ["", "secre", "secretx", "Secret", "x:secret", ":secret", "é"])
def test_a_wrong_key_is_refused(token):
    assert Auth("secret").caller(bearer(token)) is None


def test_no_key_at_all_is_refused():
    assert Auth("secret").caller(CIMultiDict()) is None
    assert Auth("secret").caller(CIMultiDict({"Authorization": "Basic secret"})) is None


def test_a_key_may_contain_colons():
    auth = Auth("a:b")
    assert auth.caller(bearer("a:b:s1")).key_session == "s1"
    assert auth.caller(bearer("a")) is None


def test_without_a_configured_key_any_key_only_tells_clients_apart():
    auth = Auth("")
    first, second = auth.caller(bearer("one:s")), auth.caller(bearer("two"))
    assert first.owner != second.owner
    assert first.key_session == "s"
    assert auth.caller(CIMultiDict()).owner == ""
    assert auth.caller(CIMultiDict()).may_name(first.owner)
    assert not second.may_name(first.owner)


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
