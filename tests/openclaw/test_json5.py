"""JSON5 is read as its specification says, and a change touches nothing but its member."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.errors import ConfigError
from openclaw_rl.openclaw.json5 import append, get, parse, remove, remove_item, set_value

COMMENTED = """\
// my agents
{
  gateway: { port: 18789, }, // keep this
  models: {
    /* two of them */
    providers: {
      'local': { baseUrl: "http://x", n: [1, 2,], hex: 0x1F },
    },
  },
}
"""
NAME = st.text(min_size=1, max_size=4)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAME, inner, max_size=3),
    max_leaves=8,
)
OBJECT = st.dictionaries(NAME, VALUE, max_size=4)
PATH = st.lists(NAME, min_size=1, max_size=3).map(tuple)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[+1, -.5, 1., 0x10, -0xA, 1e3,]", [1, -0.5, 1.0, 16, -10, 1000.0]),
        ("[Infinity, -Infinity]", [float("inf"), float("-inf")]),
        (r"""['it\'s', "a\
b", '\x41\u00e9\ud83d\ude00\q\0']""", ["it's", "ab", "Aé😀q\0"]),
        ("{a: null, $b_1: true, 'c d': false, é: 1}", {"a": None, "$b_1": True, "c d": False,
                                                       "é": 1}),
        ("\ufeff // only\n {} /* end */ ", {}),
        ("{a: 1, a: 2}", {"a": 2}),
    ],
)  # fmt: skip
def test_it_reads_json5(text, value):
    assert parse(text).value == value


@pytest.mark.parametrize("text", ["", "{", "{a}", "[1 2]", "{a: 1,, b: 2}", "'a", '"a\nb"', "{} x",
                                  "truth", '"\\u12"', "[" * 5000])  # fmt: skip
def test_what_is_none_is_refused_with_its_place_only(text):
    with pytest.raises(ConfigError, match=r"^not JSON5: line \d+, column \d+$"):
        parse(text)


@given(VALUE)
def test_it_reads_all_json(value):
    for text in (json.dumps(value), json.dumps(value, indent=2, ensure_ascii=False)):
        assert parse(text).value == value


def test_comments_order_and_style_stay():
    text = set_value(COMMENTED, ("models", "providers", "ours"), {"a": 1})
    text = set_value(text, ("plugins", "on"), True)
    for line in COMMENTED.splitlines():
        assert line.rstrip(",") in text
    assert parse(text).value["models"]["providers"] == {
        "local": {"baseUrl": "http://x", "n": [1, 2], "hex": 31},
        "ours": {"a": 1},
    }
    back = remove(remove(text, ("plugins",)), ("models", "providers", "ours"))
    assert parse(back).value == parse(COMMENTED).value
    assert "// keep this" in back
    assert "/* two of them */" in back


@given(OBJECT, PATH, VALUE)
def test_what_is_set_is_there_and_all_else_is_as_it_was(start, path, value):
    expected = json.loads(json.dumps(start))
    inner = expected
    for name in path[:-1]:
        inner = inner.setdefault(name, {})
        if not isinstance(inner, dict):
            with pytest.raises(ConfigError, match="is not an object"):
                set_value(json.dumps(start), path, value)
            return
    inner[path[-1]] = value
    for text in (json.dumps(start), json.dumps(start, indent=4), json.dumps(start, indent="\t")):
        changed = set_value(text, path, value)
        assert json.dumps(parse(changed).value) == json.dumps(expected)
        assert set_value(changed, path, value) == changed


@given(OBJECT, NAME, VALUE)
def test_set_and_removed_again_is_the_same_text(start, name, value):
    if name in start:
        return
    text = json.dumps(start or {"a": 1}, indent=2)
    if name in parse(text).value:
        return
    assert remove(set_value(text, (name,), value), (name,)) == text


@given(OBJECT)
def test_each_member_can_be_removed(start):
    for indent in (None, 2):
        text = json.dumps(start, indent=indent)
        for name in start:
            rest = {key: value for key, value in start.items() if key != name}
            assert parse(remove(text, (name,))).value == rest
    assert remove(json.dumps(start), ("no", "such")) == json.dumps(start)


def test_get_stops_where_there_is_nothing():
    assert get({"a": {"b": 1}}, ("a", "b")) == 1
    assert get({"a": [1]}, ("a", "b"), 7) == 7
    assert get(None, ("a",)) is None


@given(st.lists(st.text(max_size=3), max_size=4), st.text(max_size=3), st.booleans())
def test_an_item_that_is_appended_and_removed_leaves_the_list_as_it_was(items, item, lines):
    text = json.dumps({"a": {"list": items}}, indent=2 if lines else None)
    path = ("a", "list")
    longer = append(text, path, item)
    assert get(parse(longer).value, path) == [*items, item]
    if item not in items:
        assert parse(remove_item(longer, path, item)).value == parse(text).value
        if items:
            assert remove_item(longer, path, item) == text


def test_comments_beside_a_removed_item_stay():
    text = '{a: ["x", // one\n  "y", // two\n  "z"]}'
    for item in "xyz":
        without = remove_item(text, ("a",), item)
        assert parse(without).value == {"a": [one for one in "xyz" if one != item]}
        assert "// one" in without
        assert "// two" in without
