"""Reads the events of one `/generate` stream into deltas, exactly.

Guarantees: every token is given once, in order; a log-prob is given only where the engine named
that token id beside it and the value is finite; nothing is padded. Servers may send the whole
reply with every event (SGLang's default) or only what is new, for ids and log-probs separately. An
engine that says `meta_info.incremental` (the embedded one) is taken at its word; of any other the
form is found out, and what cannot be told apart is not guessed.

Speed: an event of a cumulative stream repeats all earlier tokens. Their text is the same bytes as
before, so it is compared, not parsed, and only the new tail goes through the JSON parser.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openclaw_rl.engine.fastjson import loads
from openclaw_rl.engine.refusals import Lost, passing, reason_of, refusal
from openclaw_rl.engine.scores import are_ids, is_log_prob, read_top
from openclaw_rl.engine.types import Delta, Finish
from openclaw_rl.errors import EngineError, EngineUnavailable

_ARRAYS = (
    (b'"output_ids"', b"]"),
    (b'"output_token_logprobs"', b"]]"),
    (b'"output_top_logprobs"', b"]]]"),
)
"""The arrays that grow, in the order in which they are sent, and how each ends."""
_SHORT = 2048
"""Bytes up to which an event is parsed whole: that is faster than looking for its tail."""
_IN_META = ("output_token_logprobs", "output_top_logprobs")
_Known = tuple[bytes, bytes, bytes]
"""An array that was read: its key up to the bracket, its text, and how it ends."""
_Tail = tuple[dict[str, Any], list[int], list[Any], list[Any] | None]
"""An event without its arrays, and what is new in each of them."""


class ReplyReader:
    """Reads one reply. `prompt_tokens` is for error messages, `top` for `top_logprobs`. `version`
    is that of the adapter asked for; "": as each event says."""

    def __init__(self, prompt_tokens: int, *, top: bool = False, version: str = "") -> None:
        self.seen = 0
        self._prompt_tokens = prompt_tokens
        self._top = top
        self._version = version
        self._fixed = bool(version)
        self._arrays = _ARRAYS if top else _ARRAYS[:2]
        self._known: list[_Known] | None = None
        self._cumulative_logprobs: bool | None = None
        self._first: list[Any] = []

    def read(self, payload: bytes) -> Delta:
        """The new tokens of one event. Raises EngineRefused or EngineError."""
        entries: list[Any] | None
        tops: list[Any] | None = None
        fast = self._read_tail(payload)
        if fast is not None:
            event, ids, entries, tops = fast
        else:
            event = _loads(payload)
            if not isinstance(event, dict):
                raise EngineError("the engine sent an event that is no JSON object")
            if "error" in event:
                raise broken_off(event["error"], payload, self._prompt_tokens)
            ids, entries = self._cut(event, payload)
            if self._top:
                tops = self._cut_top(event["meta_info"], len(ids))
        if not are_ids(ids):
            raise EngineError("the engine sent what is no token id")
        meta = event["meta_info"]
        finish = self._finish(meta)
        if not self._fixed and meta.get("weight_version") is not None:
            self._version = str(meta["weight_version"])
        self.seen += len(ids)
        cached = meta.get("cached_tokens")
        return Delta(
            ids=ids,
            logprobs=_values(ids, entries),
            version=self._version,
            finish=finish,
            cached_tokens=cached if isinstance(cached, int) else 0,
            top=read_top(tops, len(ids)) if tops else None,
        )

    # --- which tokens are new ------------------------------------------------------------------

    def _cut(self, event: dict[str, Any], payload: bytes) -> tuple[list[int], list[Any] | None]:
        meta, ids = event.get("meta_info"), event.get("output_ids")
        if not isinstance(meta, dict) or not isinstance(ids, list):
            raise EngineError("the engine's event lacks meta_info or output_ids")
        total = meta.get("completion_tokens")
        if not isinstance(total, int):
            raise EngineError("the engine's event lacks meta_info.completion_tokens")
        entries = meta.get("output_token_logprobs")
        seen, new = self.seen, total - self.seen
        if meta.get("incremental") is True:
            if len(ids) != new:
                raise EngineError(f"the engine sent {len(ids)} ids where {new} are new")
            return ids, entries if isinstance(entries, list) and len(entries) == new else None
        if new <= 0:
            # An aborted request may repeat its last id; a count that shrinks brings nothing new.
            return [], []
        if len(ids) >= total:  # cumulative; a busy server's list may be ahead of its count
            fresh = ids[seen:total]
        elif len(ids) == new:
            fresh = ids
        elif isinstance(meta.get("finish_reason"), dict) and (
            meta["finish_reason"].get("type") == "abort"
        ):
            return [], []  # ids that did not arrive are generated again after the abort
        else:
            raise EngineError(f"the engine sent {len(ids)} ids where {new} of {total} are new")
        logprobs = self._cut_logprobs(entries, new, total)
        cumulative = len(ids) == total and seen and self._cumulative_logprobs
        if cumulative and len(payload) > _SHORT:
            self._known = _known_text(payload, self._arrays)
        return fresh, logprobs

    def _cut_logprobs(self, entries: Any, new: int, total: int) -> list[Any] | None:
        if not isinstance(entries, list):
            return None
        if not self.seen:
            self._first = entries[:new]
            return entries[:new] if len(entries) >= new else None
        if len(entries) >= total and self._cumulative_logprobs is not False:
            self._cumulative_logprobs = True
            return entries[self.seen : total]
        if len(entries) == new and not self._cumulative_logprobs:
            if self._cumulative_logprobs is None and entries == self._first[:new]:
                return None  # the first ones again, with later ones missing? Not to be told apart
            self._cumulative_logprobs = False
            return entries
        return None

    def _cut_top(self, meta: dict[str, Any], new: int) -> list[Any] | None:
        tops = meta.get("output_top_logprobs")
        if not isinstance(tops, list) or len(tops) < new:
            return None
        total = self.seen + new
        if len(tops) >= total:
            return tops[self.seen : total]
        return tops if len(tops) == new else None

    def _read_tail(self, payload: bytes) -> _Tail | None:
        """The event with only its new tokens parsed, or None where that does not apply."""
        if self._known is None:
            return None
        known, self._known = self._known, None
        pieces: list[bytes] = []
        now: list[_Known] = []
        done = 0
        for head, text, close in known:
            start = payload.find(head, done) + len(head)
            middle = end = start + len(text)
            if start < done + len(head) or not payload.startswith(text, start):
                return None
            begins = payload[middle : middle + 1]
            if begins == b",":
                end = payload.find(close, middle) + len(close) - 1
            if end < middle or begins not in (b",", b"]"):
                return None  # the last known element went on: 1 became 12
            pieces += (payload[done:start], payload[middle + 1 : end])
            now.append((head, payload[start:end], close))
            done = end
        pieces.append(payload[done:])
        try:
            event = loads(b"".join(pieces))
            meta, ids = event["meta_info"], event["output_ids"]
            tails = [meta[name] for name in _IN_META[: len(known) - 1]]
            if meta["completion_tokens"] != self.seen + len(ids):
                return None
            if any(len(tail) != len(ids) for tail in tails):
                return None
        except (ValueError, KeyError, TypeError):
            return None  # cut at the wrong place: a null where a list was expected
        self._known = now
        return event, ids, tails[0], tails[1] if self._top else None

    # --- the rest of an event ------------------------------------------------------------------

    def _finish(self, meta: dict[str, Any]) -> Finish | None:
        reason = meta.get("finish_reason")
        if reason is None:
            return None
        kind = reason.get("type") if isinstance(reason, dict) else reason
        if kind == "abort" and isinstance(reason, dict):
            status = reason.get("status_code")
            message = str(reason.get("message") or "no reason given")[:300]
            if isinstance(status, int) and 400 <= status < 500:
                raise refusal(status, message, self._prompt_tokens)
            if status == 500:  # its own fault, or this request's: not to be tried for ever
                raise EngineUnavailable(f"the engine failed: {message}")
        if kind not in ("stop", "length", "abort"):
            raise EngineError(f"the engine ended with an unknown finish reason {str(kind)[:40]!r}")
        matched = reason.get("matched") if isinstance(reason, dict) else None
        return Finish(kind, matched if isinstance(matched, int | str) else None)


def broken_off(error: Any, payload: bytes, prompt_tokens: int) -> EngineError | Lost:
    """The error that an event of a stream brings instead of tokens."""
    if passing(reason_of(payload)):
        return Lost("the engine has not loaded the adapter, or is about to end")
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(code, int) and code >= 500:
        return EngineUnavailable(f"the engine broke off ({code}): {reason_of(payload)}")
    return refusal(400, reason_of(payload), prompt_tokens)


def _values(ids: list[int], entries: list[Any] | None) -> list[float] | None:
    """One finite log-prob per id, named by its id; else None."""
    if entries is None or len(entries) != len(ids):
        return None
    values: list[float] = []
    for token, entry in zip(ids, entries, strict=True):
        if not isinstance(entry, list) or len(entry) < 2 or entry[1] != token:
            return None
        if not is_log_prob(entry[0]):
            return None
        values.append(float(entry[0]))
    return values


def _array(payload: bytes, key: bytes) -> int:
    """Where the array under `key` begins, behind its bracket; -1 if there is none.

    A quoted copy of the key inside a JSON string has its quotes escaped, so it is not found.
    """
    at = payload.find(key)
    if at < 0:
        return -1
    head = payload[at + len(key) : at + len(key) + 4].lstrip()
    if not head.startswith(b":") or not head[1:].lstrip().startswith(b"["):
        return -1
    return payload.index(b"[", at + len(key)) + 1


def _known_text(payload: bytes, arrays: Sequence[tuple[bytes, bytes]]) -> list[_Known] | None:
    """The text of each array, without its brackets, and what surrounds it; None where one is not
    found."""
    texts: list[_Known] = []
    done = 0
    for key, close in arrays:
        start = _array(payload, key)
        end = payload.find(close, start) + len(close) - 1
        # It ends as its kind does only if its elements are of that kind (a null is not).
        if start < max(done, 1) or not payload.startswith(b"[" * (len(close) - 1), start):
            return None
        if end < start:
            return None
        texts.append((payload[payload.find(key) : start], payload[start:end], close))
        done = end
    return texts


def _loads(payload: bytes) -> Any:
    try:
        return loads(payload)
    except ValueError:
        raise EngineError("the engine sent an event that is no JSON") from None
