"""Keys: who may come in, and the session inside a key."""

import pytest
from multidict import CIMultiDict

from openclaw_rl.gateway.auth import Auth


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
