"""Stop strings, memory of known turns, metrics, limits, feedback bodies."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.gateway.feedback import parse_feedback
from openclaw_rl.gateway.known import KnownTurn, KnownTurns, compact
from openclaw_rl.gateway.limits import Inflight, TooManyRequests
from openclaw_rl.gateway.metrics import Metrics
from openclaw_rl.gateway.stops import StopCut
from openclaw_rl.gateway.turn import fit_max_tokens
from openclaw_rl.wire.errors import WireError


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=3), max_size=3),
       st.lists(st.integers(0, 30)))  # fmt: skip
def test_stop_strings_are_cut_the_same_however_the_text_arrives(text, stops, cuts):
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    # The stop string that is complete first wins; of those the earliest beginning.
    complete = min((text.find(stop) + len(stop) for stop in stops if stop in text), default=None)
    cut = StopCut(stops)
    points = sorted({0, len(text), *(min(c, len(text)) for c in cuts)})
    shown = "".join(cut.push(text[a:b]) for a, b in itertools.pairwise(points))
    shown += cut.finish()
    assert (cut.matched in stops) == bool(ends)
    assert text.startswith(shown)
    if not ends:
        assert shown == text
    else:
        assert len(shown) <= complete
        assert not any(stop in shown for stop in stops)


def turn(tokens, text=""):
    return KnownTurn({"role": "assistant", "content": text}, compact(tokens), 1, 0, "")


def test_known_turns_stay_within_their_bytes():
    known = KnownTurns(50_000)
    for number in range(1000):
        known.put(str(number), turn(range(100), "x" * 500))
        assert known.bytes <= 50_000
    assert known.get("999") is not None
    assert known.get("0") is None
    assert known.bytes == sum(known.get(str(n)).bytes for n in range(1000) if known.get(str(n)))


def test_known_turns_recently_used_stay_and_too_large_ones_are_not_kept():
    known = KnownTurns(4 * 1500)
    for name in "abc":
        known.put(name, turn(range(100)))
    known.get("a")
    for name in "de":
        known.put(name, turn(range(100)))
    assert known.get("a") is not None
    assert known.get("b") is None
    known.put("huge", turn(range(100_000)))
    assert known.get("huge") is None
    assert known.get("e") is not None


def test_an_outgrown_turn_keeps_its_reply_only():
    known = KnownTurns(1_000_000)
    known.put("a", turn(range(1000), "hi"))
    before = known.bytes
    known.outgrow("a")
    assert known.get("a").tokens is None
    assert known.get("a").reply["content"] == "hi"
    assert known.bytes == before - 4000
    known.forget("a")
    assert known.bytes == 0


def test_metrics_are_prometheus_text():
    metrics = Metrics()
    metrics.count("turns", kind="main")
    metrics.count("turns", 12345678, kind="main")
    metrics.observe("commit", 0.003)
    text = metrics.render({"inflight": {(): 2}, "states": {(("s", 'a"\n'),): 1}})
    assert 'openclaw_rl_turns_total{kind="main"} 12345679\n' in text
    assert "# TYPE openclaw_rl_commit_seconds histogram" in text
    assert 'openclaw_rl_commit_seconds_bucket{le="0.0025"} 0\n' in text
    assert 'openclaw_rl_commit_seconds_bucket{le="0.005"} 1\n' in text
    assert "openclaw_rl_commit_seconds_count 1\n" in text
    assert "openclaw_rl_inflight 2\n" in text
    assert 'openclaw_rl_states{s="a\\"\\n"} 1\n' in text


def test_the_limit_counts_what_is_under_way():
    inflight = Inflight(1)
    with inflight.slot():
        with pytest.raises(TooManyRequests), inflight.slot():
            pass
        assert inflight.now == 1
    with inflight.slot():
        pass
    assert inflight.now == 0


@pytest.mark.parametrize(
    ("asked", "default", "prompt", "expected"),
    [(None, None, 10, 90), (None, 20, 10, 20), (50, 20, 10, 50), (99999, None, 10, 90),
     (5, None, 100, 0), (None, 8, 120, -20)],
)  # fmt: skip
def test_max_tokens_are_cut_to_what_is_left(asked, default, prompt, expected):
    assert fit_max_tokens(asked, default, prompt, 100) == expected


def test_feedback_bodies():
    given = parse_feedback(json.dumps({"turn_id": "chatcmpl-ab", "thumb": "down"}).encode())
    assert given.turn_id == "ab"
    assert given.message == {"role": "feedback", "thumb": "down", "score": None, "content": ""}
    given = parse_feedback(b'{"session_id": "s", "score": 0.5, "text": "more detail"}')
    assert (given.session_id, given.turn_id) == ("s", None)
    assert given.message["content"] == "more detail"


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b"{}", b'{"turn_id": "a"}', b'{"turn_id": "a", "session_id": "b", "score": 1}',
     b'{"turn_id": 1, "score": 1}', b'{"turn_id": "a", "score": 2}',
     b'{"turn_id":"a","score":true}',
     b'{"turn_id": "a", "thumb": "sideways"}', b'{"turn_id": "a", "score": NaN}',
     b'{"turn_id": "a", "text": 3}'],
)  # fmt: skip
def test_wrong_feedback_is_refused(body):
    with pytest.raises(WireError) as error:
        parse_feedback(body)
    assert error.value.status == 400
