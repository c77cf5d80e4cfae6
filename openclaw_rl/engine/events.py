"""Reads the events of one `/generate` stream into deltas, exactly.

Guarantees: every token is given once, in order; a log-prob is given only where the engine named
that token id beside it and the value is finite; nothing is padded. Servers may send the whole
reply with every event (SGLang's default) or only what is new, for ids and log-probs separately.

Speed: an event of a cumulative stream repeats all earlier tokens. Their text is the same bytes as
before, so it is compared, not parsed, and only the new tail goes through the JSON parser.
"""

from __future__ import annotations

import json
import math
from typing import Any

from openclaw_rl.engine.refusals import reason_of, refusal
from openclaw_rl.engine.types import Delta, Finish
from openclaw_rl.errors import EngineError, EngineUnavailable

_IDS = b'"output_ids"'
_LOGPROBS = b'"output_token_logprobs"'
_SHORT = 2048
"""Bytes up to which an event is parsed whole: that is faster than looking for its tail."""
_POSITIVE = 1e-3
"""A log-prob may exceed 0 by rounding, not by more."""


class ReplyReader:
    """Reads one reply. `prompt_tokens` is for error messages, `top` for `top_logprobs`."""

    def __init__(self, prompt_tokens: int, *, top: bool = False) -> None:
        self.seen = 0
        self._prompt_tokens = prompt_tokens
        self._top = top
        self._version = ""
        self._known: tuple[bytes, bytes] | None = None
        self._cumulative_logprobs: bool | None = None
        self._first: list[Any] = []

    def read(self, payload: bytes) -> Delta:
        """The new tokens of one event. Raises EngineRefused or EngineError."""
        entries: list[Any] | None
        fast = self._read_tail(payload)
        if fast is not None:
            event, ids, entries = fast
        else:
            event = _loads(payload)
            if not isinstance(event, dict):
                raise EngineError("the engine sent an event that is no JSON object")
            if "error" in event:
                raise self._error(event["error"], payload)
            ids, entries = self._cut(event, payload)
        meta = event["meta_info"]
        finish = self._finish(meta)
        if meta.get("weight_version") is not None:
            self._version = str(meta["weight_version"])
        before = self.seen
        self.seen += len(ids)
        return Delta(
            ids=ids,
            logprobs=_values(ids, entries),
            version=self._version,
            finish=finish,
            cached_tokens=meta.get("cached_tokens") or 0,
            top=self._top_of(meta, ids, before) if self._top else None,
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
        if cumulative and not self._top and len(payload) > _SHORT:
            self._known = _known_text(payload)
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

    def _read_tail(self, payload: bytes) -> tuple[dict[str, Any], list[int], list[Any]] | None:
        """The event with only its new tokens parsed, or None where that does not apply."""
        if self._known is None:
            return None
        (known_ids, known_logprobs), self._known = self._known, None
        ids_at = _array(payload, _IDS)
        logprobs_at = _array(payload, _LOGPROBS)
        if not payload.startswith(known_ids, ids_at) or ids_at < 0 or logprobs_at < ids_at:
            return None
        if not payload.startswith(known_logprobs, logprobs_at):
            return None
        ids_end = payload.find(b"]", ids_at + len(known_ids))
        logprobs_end = logprobs_at + len(known_logprobs)
        if payload[logprobs_end : logprobs_end + 1] != b"]":
            logprobs_end = payload.find(b"]]", logprobs_end) + 1
        if ids_end < ids_at or ids_end > logprobs_at or logprobs_end <= logprobs_at:
            return None
        rest = payload[:ids_at] + payload[ids_end:logprobs_at] + payload[logprobs_end:]
        event = _loads(rest)
        ids = _tail(payload[ids_at + len(known_ids) : ids_end])
        entries = _tail(payload[logprobs_at + len(known_logprobs) : logprobs_end])
        meta = event.get("meta_info") if isinstance(event, dict) else None
        if not isinstance(meta, dict) or ids is None or entries is None:
            return None
        total = meta.get("completion_tokens")
        if total != self.seen + len(ids) or len(entries) != len(ids):
            return None
        self._known = (payload[ids_at:ids_end], payload[logprobs_at:logprobs_end])
        return event, ids, entries

    # --- the rest of an event ------------------------------------------------------------------

    def _error(self, error: Any, payload: bytes) -> EngineError:
        code = error.get("code") if isinstance(error, dict) else None
        if isinstance(code, int) and code >= 500:
            return EngineUnavailable(f"the engine broke off ({code}): {reason_of(payload)}")
        return refusal(400, reason_of(payload), self._prompt_tokens)

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

    def _top_of(
        self, meta: dict[str, Any], ids: list[int], seen: int
    ) -> list[list[tuple[float, int]]] | None:
        entries = meta.get("output_top_logprobs")
        if not isinstance(entries, list) or not ids:
            return None
        total = seen + len(ids)
        if len(entries) >= total:
            entries = entries[seen:total]
        elif len(entries) != len(ids):
            return None
        try:
            return [[(float(entry[0]), int(entry[1])) for entry in one] for one in entries]
        except (TypeError, ValueError, IndexError):
            return None


def _values(ids: list[int], entries: list[Any] | None) -> list[float] | None:
    """One finite log-prob per id, named by its id; else None."""
    if entries is None or len(entries) != len(ids):
        return None
    values: list[float] = []
    for token, entry in zip(ids, entries, strict=True):
        if not isinstance(entry, list) or len(entry) < 2 or entry[1] != token:
            return None
        value = entry[0]
        if not isinstance(value, int | float) or not math.isfinite(value) or value > _POSITIVE:
            return None
        values.append(float(value))
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


def _known_text(payload: bytes) -> tuple[bytes, bytes] | None:
    ids_at, logprobs_at = _array(payload, _IDS), _array(payload, _LOGPROBS)
    if ids_at < 0 or logprobs_at < 0:
        return None
    ids_end = payload.find(b"]", ids_at)
    logprobs_end = payload.find(b"]]", logprobs_at) + 1
    if ids_end < 0 or logprobs_end <= 0:
        return None
    return payload[ids_at:ids_end], payload[logprobs_at:logprobs_end]


def _tail(text: bytes) -> list[Any] | None:
    """The elements behind a known beginning of an array: `,5,6` -> [5, 6]."""
    text = text.strip()
    if not text:
        return []
    if not text.startswith(b","):
        return None  # the last known element went on: 1 became 12
    value = _loads(b"[" + text[1:] + b"]")
    return value if isinstance(value, list) else None


def _loads(payload: bytes) -> Any:
    try:
        return json.loads(payload)
    except ValueError:
        raise EngineError("the engine sent an event that is no JSON") from None
