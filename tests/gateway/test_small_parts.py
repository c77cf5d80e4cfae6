"""Stop strings, memory of known turns, metrics, limits, feedback bodies."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.gateway.feedback import parse_feedback
from openclaw_rl.gateway.turn import StopCut
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
