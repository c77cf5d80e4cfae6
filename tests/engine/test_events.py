"""Lines and events: any cut of the bytes, any form of stream, and the short cut for cumulative
streams gives what plain parsing gives."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openclaw_rl.engine import events
from openclaw_rl.engine.events import ReplyReader
from openclaw_rl.engine.refusals import reason_of, refusal
from openclaw_rl.engine.sse import EventLines
from openclaw_rl.errors import ContextOverflow, EngineError, EngineRefused, EngineUnavailable


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


@given(
    st.lists(st.sampled_from([b'{"a": 1}', b"[DONE]", b'{"b": "\xc3\xa9"}']), max_size=6),
    st.sampled_from([b"\n", b"\r\n"]),
    st.data(),
)
def test_lines_survive_any_cut(payloads: list[bytes], end: bytes, data: st.DataObject) -> None:
    lines = [b": keep-alive" + end, b"event: x" + end]
    lines += [b"data: " + payload + end + end for payload in payloads]
    stream = b"".join(lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reader = EventLines()
    found: list[bytes] = []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += reader.feed(stream[start:stop])
    assert found == payloads


@pytest.fixture
def short_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events of a test are short: take the way of long ones all the same."""
    monkeypatch.setattr(events, "_SHORT", 0)


@pytest.mark.usefixtures("short_cut")
@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(st.lists(st.integers(0, 12), max_size=4), min_size=1, max_size=8),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, (",", ":")]),
    st.booleans(),
)
def test_all_forms_read_alike(
    chunks: list[list[int]], whole_ids: bool, whole_logprobs: bool, separators: Any, top: bool
) -> None:
    reader = ReplyReader(4, top=top)
    tokens: list[int] = []
    for number, chunk in enumerate(chunks):
        before = len(tokens)
        tokens += chunk
        entries = [entry(token, at) for at, token in enumerate(tokens)]
        last = number == len(chunks) - 1
        tops = [[entry(token, at), entry(token + 1, at + 1)] for at, token in enumerate(tokens)]
        more = {"output_top_logprobs": tops if whole_logprobs else tops[before:]} if top else {}
        payload = event(
            tokens if whole_ids else chunk,
            entries if whole_logprobs else entries[before:],
            len(tokens),
            {"type": "stop", "matched": 2} if last else None,
            text='a "output_ids": [9, 9] \\" ]]' * number,
            **more,
        )
        if separators:
            payload = json.dumps(json.loads(payload), separators=separators).encode()
        delta = reader.read(payload)
        assert delta.ids == chunk
        assert delta.logprobs == [value for value, _, _ in entries[before:]]
        expected = [[(a[0], a[1]), (b[0], b[1])] for a, b in tops[before:]]
        assert delta.top == (expected if top and chunk else None)
        assert delta.version == "3"
        assert (delta.finish is not None) == last


@pytest.mark.parametrize("top", [False, True])
def test_only_the_tail_of_a_cumulative_event_is_parsed(
    monkeypatch: pytest.MonkeyPatch, top: bool
) -> None:
    parsed: list[int] = []
    plain = events._loads

    def counting(payload: bytes) -> Any:
        parsed.append(len(payload))
        return plain(payload)

    monkeypatch.setattr(events, "_loads", counting)
    reader = ReplyReader(4, top=top)
    sizes = []
    for total in range(1, 400):
        parsed.clear()
        tokens = list(range(total))
        entries = [entry(token, token) for token in tokens]
        tops = [[one, [one[0], one[1] + 1000, None]] for one in entries]
        more = {"output_top_logprobs": tops} if top else {}
        delta = reader.read(event(tokens, entries, total, **more))
        assert delta.ids == [total - 1]
        likeliest = [(-0.25 * total, total - 1), (-0.25 * total, total + 999)]
        assert delta.top == ([likeliest] if top else None)
        sizes.append(sum(parsed))
    assert max(sizes) < 2 * events._SHORT
    assert max(sizes[100:]) < 300, "the cost of an event does not grow with the reply"


@pytest.mark.usefixtures("short_cut")
def test_the_short_cut_is_left_when_history_differs() -> None:
    """A server whose earlier log-probs change in print (a cut-off digit) is read in full."""
    reader = ReplyReader(4)
    for total in range(1, 6):
        tokens = list(range(total))
        entries = [[-0.5 - total / 1024, token, None] for token in tokens]
        delta = reader.read(event(tokens, entries, total))
        assert delta.ids == [total - 1]
        assert delta.logprobs == [-0.5 - total / 1024]


@pytest.mark.usefixtures("short_cut")
def test_a_token_without_candidates_is_no_error_in_the_short_cut() -> None:
    reader = ReplyReader(4, top=True)
    tops: list[Any] = []
    for total in range(1, 9):
        tokens = list(range(total))
        tops.append(None if total == 6 else [entry(total, 0)])
        entries = [entry(token, token) for token in tokens]
        delta = reader.read(event(tokens, entries, total, output_top_logprobs=tops, extra=[[[1]]]))
        assert delta.ids == [total - 1]
        assert delta.top == (None if total == 6 else [[(-0.25, total)]])


@pytest.mark.usefixtures("short_cut")
def test_a_last_id_that_goes_on_is_not_mistaken_for_a_known_one() -> None:
    reader = ReplyReader(4)
    for total in (1, 2, 3):
        tokens = [1] * total
        reader.read(event(tokens, [entry(1, at) for at in range(total)], total))
    # Begins with the bytes of [1, 1, 1]: a server that contradicts itself, in its ids alone.
    entries = [entry(token, at) for at, token in enumerate([1, 1, 1, 7])]
    delta = reader.read(event([1, 1, 12, 7], entries, 4))
    assert (delta.ids, delta.logprobs) == ([7], [-1.0])


@pytest.mark.parametrize("known", [1, 4])
@pytest.mark.usefixtures("short_cut")
def test_ids_ahead_of_the_count_come_again(known: int) -> None:
    """SGLang passes its list by reference: it may have grown since the count was taken."""
    reader = ReplyReader(4)
    tokens = list(range(known + 3))
    entries = [entry(token, at) for at, token in enumerate(tokens)]
    for total in range(1, known + 1):
        reader.read(event(tokens[:total], entries[:total], total))
    ahead = reader.read(event(tokens[: known + 2], entries[: known + 2], known + 1))
    rest = reader.read(event(tokens, entries, known + 3))
    assert (ahead.ids, rest.ids) == (tokens[known : known + 1], tokens[known + 1 :])
    assert [*(ahead.logprobs or []), *(rest.logprobs or [])] == [
        value for value, _, _ in entries[known:]
    ]


def test_an_abort_in_the_queue_repeats_the_last_id() -> None:
    """SGLang: `output_ids` is the last id alone, and may be one already seen."""
    reader = ReplyReader(4)
    reader.read(event([5, 6], [entry(5, 0), entry(6, 1)], 2))
    delta = reader.read(event([6], [entry(5, 0), entry(6, 1)], 2, {"type": "abort"}))
    assert delta.ids == []
    assert delta.logprobs == []
    assert delta.finish is not None
    assert delta.finish.type == "abort"
    later = ReplyReader(4)
    later.read(event([5], [entry(5, 0)], 1))
    assert later.read(event([8], None, 3, {"type": "abort"})).ids == [], "7 never arrived"


def test_cumulative_ids_with_the_first_logprobs_again() -> None:
    """One entry where two are due, for equal ids: not to be told from an incremental one."""
    reader = ReplyReader(4)
    reader.read(event([5], [entry(5, 0)], 1))
    assert reader.read(event([5, 5], [entry(5, 0)], 2)).logprobs is None


def test_an_engine_that_says_incremental_is_taken_at_its_word() -> None:
    reader = ReplyReader(4, top=True)
    same = entry(5, 0)
    for total in (1, 2, 3):
        delta = reader.read(
            event([5], [same], total, incremental=True, output_top_logprobs=[[same]])
        )
        assert (delta.ids, delta.logprobs, delta.top) == ([5], [-0.25], [[(-0.25, 5)]])
    nothing = reader.read(event([], [], 3, {"type": "abort"}, incremental=True))
    assert (nothing.ids, nothing.logprobs) == ([], [])
    whole = [same, same, same, same]
    assert reader.read(event([5], whole, 4, incremental=True)).logprobs is None
    with pytest.raises(EngineError):
        reader.read(event([5] * 5, whole, 5, incremental=True))


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
        (b'{"error": {"message": "scheduler died", "code": 500}}', EngineUnavailable),
        (event([], None, 0, {"type": "abort", "status_code": 400, "message": "no"}), EngineRefused),
    ],
)
def test_what_is_no_event(payload: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        ReplyReader(4).read(payload)


def test_positive_logprobs_are_none() -> None:
    assert ReplyReader(4).read(event([1], [[1e-6, 1, None]], 1)).logprobs == [1e-6]
    assert ReplyReader(4).read(event([1], [[0.5, 1, None]], 1)).logprobs is None


def test_matched_stop_string_and_plain_finish() -> None:
    finish = ReplyReader(4).read(event([1], None, 1, {"type": "stop", "matched": "END"})).finish
    assert finish is not None
    assert finish.matched == "END"


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
    with pytest.raises(EngineError, match="no token id"):
        ReplyReader(1).read(payload)


@pytest.mark.parametrize("ids", [[-7, 1], [7, 7], [7, 2**31], [7, 1.0], [7, "1"]])
def test_candidates_that_cannot_be_are_none(ids: list[object]) -> None:
    meta = {
        "completion_tokens": 1,
        "finish_reason": None,
        "output_token_logprobs": [[-0.1, 7, None]],
        "output_top_logprobs": [[[-0.1, one, None] for one in ids]],
    }
    payload = json.dumps({"output_ids": [7], "meta_info": meta}).encode()
    delta = ReplyReader(1, top=True).read(payload)
    assert (delta.ids, delta.logprobs, delta.top) == ([7], [-0.1], None)
