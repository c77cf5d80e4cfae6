"""Stop strings."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.gateway.replies import StopCut


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
