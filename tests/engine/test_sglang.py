"""SGLang's events: any cut of the bytes and both forms of stream give the same tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openclaw_rl.engine.kinds import Generation, engine_api
from openclaw_rl.engine.transport import Lost, reason_of, refusal
from openclaw_rl.engine.types import Delta, Finish
from openclaw_rl.errors import ContextOverflow, EngineError, EngineRefused


def reader_of(prompt_tokens: int = 4, top: bool = False) -> Callable[[bytes], Delta]:
    _, reader = engine_api("sglang").generation(
        Generation([9] * prompt_tokens, {}, "r", top=int(top))
    )
    return reader


def event(
    ids: list[int],
    entries: list[Any] | None,
    total: int,
    finish: dict[str, Any] | None = None,
    text: str = "",
    **meta: Any,
) -> bytes:
    info: dict[str, Any] = {"completion_tokens": total, "finish_reason": finish}
    if entries is not None:
        info["output_token_logprobs"] = entries
    info |= {"weight_version": "3", **meta}
    return json.dumps({"text": text, "output_ids": ids, "meta_info": info}).encode()


def entry(token: int, at: int) -> list[Any]:
    return [-0.25 * (at + 1), token, None]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 12), max_size=4), min_size=1, max_size=8),
    st.booleans(),
    st.booleans(),
)
def test_all_forms_read_alike(chunks: list[list[int]], whole: bool, top: bool) -> None:
    reader = reader_of(4, top=top)
    tokens: list[int] = []
    for number, chunk in enumerate(chunks):
        before = len(tokens)
        tokens += chunk
        entries = [entry(token, at) for at, token in enumerate(tokens)]
        last = number == len(chunks) - 1
        tops = [[entry(token, at), entry(token + 1, at + 1)] for at, token in enumerate(tokens)]
        more = {"output_top_logprobs": tops if whole else tops[before:]} if top else {}
        payload = event(
            tokens if whole else chunk,
            entries if whole else entries[before:],
            len(tokens),
            {"type": "stop", "matched": 2} if last else None,
            **more,
        )
        delta = reader(payload)
        assert delta.ids == chunk
        assert delta.logprobs == [value for value, _, _ in entries[before:]]
        expected = [[(a[0], a[1]), (b[0], b[1])] for a, b in tops[before:]]
        assert delta.top == (expected if top and chunk else None)
        assert delta.version == "3"
        assert (delta.finish is not None) == last


@pytest.mark.parametrize("known", [1, 4])
def test_ids_ahead_of_the_count_come_again(known: int) -> None:
    """SGLang passes its list by reference: it may have grown since the count was taken."""
    reader = reader_of(4)
    tokens = list(range(known + 3))
    entries = [entry(token, at) for at, token in enumerate(tokens)]
    for total in range(1, known + 1):
        reader(event(tokens[:total], entries[:total], total))
    ahead = reader(event(tokens[: known + 2], entries[: known + 2], known + 1))
    rest = reader(event(tokens, entries, known + 3))
    assert (ahead.ids, rest.ids) == (tokens[known : known + 1], tokens[known + 1 :])
    assert [*(ahead.logprobs or []), *(rest.logprobs or [])] == [
        value for value, _, _ in entries[known:]
    ]


def test_an_abort_in_the_queue_repeats_the_last_id() -> None:
    """SGLang: `output_ids` is the last id alone, and may be one already seen."""
    reader = reader_of(4)
    reader(event([5, 6], [entry(5, 0), entry(6, 1)], 2))
    delta = reader(event([6], [entry(5, 0), entry(6, 1)], 2, {"type": "abort"}))
    assert delta.ids == []
    assert delta.logprobs == []
    assert delta.finish is not None
    assert delta.finish.type == "abort"
    later = reader_of(4)
    later(event([5], [entry(5, 0)], 1))
    assert later(event([8], None, 3, {"type": "abort"})).ids == [], "7 never arrived"


def test_log_probs_of_the_other_form_than_the_ids_are_none() -> None:
    """SGLang 0.5.9 with --stream-output: new ids, but all log-probs again."""
    reader = reader_of()
    reader(event([5], [entry(5, 0)], 1))
    assert reader(event([5], [entry(5, 0), entry(5, 1)], 2)).logprobs is None
    whole = reader_of()
    whole(event([5], [entry(5, 0)], 1))
    assert whole(event([5, 5], [entry(5, 0)], 2)).logprobs is None


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        (b"{bad", EngineError),
        (b"[1]", EngineError),
        (b'{"output_ids": [1]}', EngineError),
        (b'{"output_ids": [1], "meta_info": {}}', EngineError),
        (event([1, 2], None, 5), EngineError),
        (event([1], None, 1, {"type": "exploded"}), EngineError),
        (b'{"error": {"message": "bad request"}}', EngineRefused),
        (b'{"error": {"message": "scheduler died", "code": 500}}', Lost),
        (event([], None, 0, {"type": "abort", "status_code": 400, "message": "no"}), EngineRefused),
    ],
)
def test_what_is_no_event(payload: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        reader_of(4)(payload)


def test_positive_logprobs_are_none() -> None:
    assert reader_of(4)(event([1], [[1e-6, 1, None]], 1)).logprobs == [1e-6]
    assert reader_of(4)(event([1], [[0.5, 1, None]], 1)).logprobs is None


def test_a_stop_string_is_named() -> None:
    delta = reader_of(4)(event([1], None, 1, {"type": "stop", "matched": "END"}))
    assert delta.finish == Finish("stop", "END")


@pytest.mark.parametrize(
    ("message", "tokens", "limit"),
    [
        ("The input (9 tokens) is longer than the model's context length (8 tokens).", 5, 8),
        (
            "Requested token count exceeds the model's maximum context length of 8 tokens. You "
            "requested a total of 12 tokens: 5 tokens from the input messages and 7 tokens for "
            "the completion.",
            12,
            8,
        ),
        ("Input length (9 tokens) exceeds the maximum allowed length (8 tokens).", 5, 8),
        ("This model's maximum context length is 8 tokens. However, you requested 9", 5, 8),
        ("prompt is too long: 9 tokens, but the context holds 8 tokens", 5, 8),
    ],
)
def test_case_03_wordings_of_overflow(message: str, tokens: int, limit: int) -> None:
    error = refusal(400, message, 5)
    assert isinstance(error, ContextOverflow)
    assert (error.prompt_tokens, error.limit) == (tokens, limit)


def test_case_03_overflow_without_a_number_is_still_worded_for_agents() -> None:
    error = refusal(400, "too much for the context window", 5)
    assert error.status == 400
    assert str(error).startswith("prompt is too long")


def test_validation_errors_do_not_echo_the_request() -> None:
    body = {"detail": [{"loc": ["body", "input_ids"], "type": "int_type", "input": "secret words"}]}
    reason = reason_of(json.dumps(body).encode())
    assert reason == "body.input_ids: int_type"
    assert reason_of(b"<html>") == "no reason given"


@pytest.mark.parametrize("token", [-1, 2**31, 2**40, "a", None, 1.5, True, [1]])
def test_what_is_no_token_id_ends_the_reply(token: object) -> None:
    meta = {"completion_tokens": 1, "finish_reason": None}
    payload = json.dumps({"output_ids": [token], "meta_info": meta}).encode()
    with pytest.raises(EngineError, match="not a token id"):
        reader_of(1)(payload)


@pytest.mark.parametrize("ids", [[-7, 1], [7, 7], [7, 2**31], [7, 1.0], [7, "1"]])
def test_candidates_that_cannot_be_are_none(ids: list[object]) -> None:
    meta = {
        "completion_tokens": 1,
        "finish_reason": None,
        "output_token_logprobs": [[-0.1, 7, None]],
        "output_top_logprobs": [[[-0.1, one, None] for one in ids]],
    }
    payload = json.dumps({"output_ids": [7], "meta_info": meta}).encode()
    delta = reader_of(1, top=True)(payload)
    assert (delta.ids, delta.logprobs, delta.top) == ([7], [-0.1], None)
