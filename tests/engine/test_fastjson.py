"""JSON of the hot path gives what the standard library gives."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.engine.fastjson import dumps, loads

NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@given(VALUES)
def test_values_survive_writing_and_reading(value):
    assert json.loads(dumps(value)) == value
    assert loads(json.dumps(value).encode()) == json.loads(json.dumps(value))


def test_what_only_the_standard_library_reads_is_read():
    assert math.isnan(loads(b'{"a": NaN}')["a"])
    assert loads(b"[-Infinity]") == [-math.inf]
    assert loads(b'"\\ud83d"') == "\ud83d"


def test_what_nobody_reads_is_an_error():
    with pytest.raises(ValueError, match="line 1"):
        loads(b"{bad")
