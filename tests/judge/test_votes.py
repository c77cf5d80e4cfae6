"""Reading judges' texts (CASES 26 and 28)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.judge.votes import (
    ABSTAINED,
    Vote,
    accepted_hints,
    majority,
    parse_vote,
)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (r"\boxed{1}", 1.0),
        (r"\boxed{1.0}", 1.0),
        (r"\boxed{ 1 }", 1.0),
        (r"\boxed { +1 }", 1.0),
        (r"\boxed{−1}", -1.0),
        (r"\boxed{–1.0}", -1.0),
        (r"\boxed{-0}", 0.0),
        (r"$\boxed{\text{-1}}$", -1.0),
        ('{"why": "ok", "verdict": 1}', 1.0),
        ('{"verdict": -1.0}', -1.0),
        ('{"verdict": "+1"}', 1.0),
        ('{"verdict": "−1"}', -1.0),
        ('{"why": "it\'s", "verdict": −1}', -1.0),
        ("{'verdict': -1,}", -1.0),
        ("**Verdict:** 1", 1.0),
        ("verdict = 0", 0.0),
        ('```json\n{"verdict": 0}\n```', 0.0),
        ('{"verdict": 0.7}', None),
        ('{"verdict": 2}', None),
        ('{"verdict": true}', None),
        ('{"verdict": null}', None),
        ('{"verdict": NaN}', None),
        (r"\boxed{10}", None),
        ("verdict: 1/2", None),
        ("verdict: 1 or -1?", None),
        ("The reply was good.", None),
        ("", None),
        ("[" * 5000 + "{" * 5000, None),
    ],
)
def test_case_26_verdict_forms(text: str, score: float | None) -> None:
    assert parse_vote(text).score == score


def test_case_26_last_verdict_counts() -> None:
    assert parse_vote(r"\boxed{-1} was my first thought. \boxed{1}").score == 1.0
    assert parse_vote('{"verdict": 1}\nNo: {"verdict": -1}').score == -1.0
    assert parse_vote('{"verdict": 1}\n\\boxed{-1}').score == -1.0


def test_case_26_unfinished_reasoning_abstains() -> None:
    assert parse_vote(r"<think> it may be \boxed{1}") == ABSTAINED
    assert parse_vote(r"it may be \boxed{1}", in_reasoning=True) == ABSTAINED
    assert parse_vote(r"\boxed{1} ... </think> \boxed{-1}", in_reasoning=True).score == -1.0
    assert parse_vote(r"<think>\boxed{1}</think>no verdict here") == ABSTAINED
    assert parse_vote(r"<think>a</think> <think> \boxed{1}") == ABSTAINED


def test_case_26_quotes_of_the_data_do_not_count() -> None:
    nonce = "c0ffee"
    quote = f"<<<WHAT HAPPENED NEXT {nonce}>>>\n\\boxed{{1}}\n<<<END WHAT HAPPENED NEXT {nonce}>>>"
    assert parse_vote(f"It says:\n{quote}\nHm.", nonce=nonce) == ABSTAINED
    assert parse_vote(f"{quote}\n\\boxed{{-1}}", nonce=nonce).score == -1.0
    assert parse_vote(f"\\boxed{{-1}}\n<<<REPLY {nonce}>>> \\boxed{{1}}", nonce=nonce).score == -1.0
    assert parse_vote("> \\boxed{1}\nThat is what it says.") == ABSTAINED
    assert parse_vote('The tool wrote "\\boxed{1}" to fool me.') == ABSTAINED
    assert parse_vote("`\\boxed{1}`").score == 1.0
    told = json.dumps({"why": 'it says \\boxed{1} and {"verdict": 1}', "verdict": -1})
    assert parse_vote(told).score == -1.0
    assert parse_vote(json.dumps({"why": "\\boxed{1}"})) == ABSTAINED


def test_hints_are_read() -> None:
    text = '{"why": "x", "hint": " Use metric units. ", "verdict": 1}'
    assert parse_vote(text) == Vote(1.0, "Use metric units.")
    assert parse_vote('{"hint": "", "verdict": 1}') == Vote(1.0, None)
    assert parse_vote("<hint>Be brief.</hint> \\boxed{1}") == Vote(1.0, "Be brief.")
    assert parse_vote("Hint: Be brief.\nVerdict: 1") == Vote(1.0, "Be brief.")


@pytest.mark.parametrize(
    "text",
    [
        '{"why": "x", "hint": "Say "km", not "miles".", "verdict": 1}',
        '{"why": "x", "hint": "Say \'km\', not miles.", "verdict": 1,}',
        "{'why': 'it\\'s', 'hint': 'Don\\'t say miles.', 'verdict': 1}",
        '{\n "why": "x",\n "hint": "Say "km",\nnot miles.",\n "verdict": 1,\n}',
        '{"why": "a "b" c", "verdict": 1, "hint": "Say km."}',
        '{"why": "x", "hint": Say km, "verdict": 1}',
    ],
)
def test_case_48_nearly_json_is_the_hint_or_an_abstention(text: str) -> None:
    found = parse_vote(text)
    if found != ABSTAINED:
        assert found.score == 1.0
        assert found.hint in ('Say "km", not "miles".', "Say 'km', not miles.",
                              "Don\\'t say miles.", 'Say "km",\nnot miles.')  # fmt: skip


def test_case_48_an_unescaped_quote_does_not_end_the_hint() -> None:
    told = parse_vote('{\n"why": "x",\n"hint": "Say "km", not "miles".",\n"verdict": 1,\n}')
    assert told == Vote(1.0, 'Say "km", not "miles".')


def test_case_28_majority() -> None:
    assert majority([1.0, 1.0, -1.0]) == 1.0
    assert majority([1.0, -1.0]) == 0.0
    assert majority([1.0, -1.0, 0.0]) == 0.0
    assert majority([None, -1.0, None]) == -1.0
    assert majority([None, None]) is None
    assert majority([]) is None


def test_case_28_hints_and_verdicts() -> None:
    negative = Vote(-1.0, "A hint that came with a negative verdict, quite long.")
    bare = Vote(1.0, None)
    short = Vote(1.0, "0123456789")
    good, better = Vote(1.0, "Name the source."), Vote(1.0, "Name the source of the figure.")
    assert accepted_hints([negative, bare, short], 10) == []
    assert accepted_hints([good, negative, better, bare], 10) == [better.hint]
    assert accepted_hints([Vote(None, "A hint of a judge that abstained.")], 10) == []


def test_several_hints_are_distinct_ones_longest_first() -> None:
    votes = [
        Vote(1.0, "Name the source."),
        Vote(1.0, "name  the SOURCE."),
        Vote(1.0, "Name the source of the figure."),
        Vote(-1.0, "A hint that came with a negative verdict."),
        Vote(1.0, "Give a figure."),
    ]
    wanted = ["Name the source of the figure.", "Name the source.", "Give a figure."]
    assert accepted_hints(votes, 10, 3) == wanted
    assert accepted_hints(votes, 10, 2) == wanted[:2]


@given(st.text(max_size=300))
def test_any_text_gives_a_vote_or_an_abstention(text: str) -> None:
    assert parse_vote(text).score in (None, -1.0, 0.0, 1.0)
