"""Writing a turn and putting it together again. Every function runs in the caller's transaction.

Guarantees: what `load_turn` returns equals what `insert_turn` was given, value for value, although
only what the turn adds to its parent is stored: ids are kept as int32, log-probs as float32,
versions run by run. Prefixes are checked, not believed.
"""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby
from typing import Any, NamedTuple

import orjson

from openclaw_rl.errors import JournalError
from openclaw_rl.types import State, TopK, Turn, Verdict

_AS_IT_IS = (
    "turn_id", "session_id", "source", "owner", "kind", "kind_reason", "parent_id", "matched",
    "created", "finish_reason", "truncated", "off_policy", "request_hash", "node_hash",
    "rendered_len", "rendered_sha", "prompt_len", "output_len", "min_version", "max_version",
    "attempts", "lease_host", "lease_rollout", "trained_version",
)  # fmt: skip
"""Fields of `Turn` that are columns of `turns`, under the same name."""

PRACTICE = "practice"
"""The source of turns that nobody asked for (`judge/practice.py`): no conversation goes on from
them, and no opinion is about them."""


class Opinion(NamedTuple):
    """What a live turn's verdict says of it: a score that is not 0, a correction, or both."""

    owner: str
    score: float | None
    hint: str | None


# -- values ------------------------------------------------------------------------------------


def pack_ints(values: Iterable[int]) -> bytes:
    """int32. Raises `JournalError` for what is no token id."""
    try:
        return array("i", values).tobytes()
    except (OverflowError, TypeError) as error:
        raise JournalError("token ids must be integers below 2**31") from error


def unpack_ints(blob: bytes) -> list[int]:
    return array("i", blob).tolist()


def _pack_topk(topk: TopK | None) -> tuple[bytes | None, bytes | None]:
    """Ids and log-probs, row by row."""
    if topk is None:
        return None, None
    ids, log_probs = chain.from_iterable(topk.ids), chain.from_iterable(topk.log_probs)
    return pack_ints(ids), array("f", log_probs).tobytes()


def _unpack_topk(ids: bytes | None, log_probs: bytes | None, rows: int) -> TopK | None:
    if ids is None or log_probs is None or not rows:
        return None
    flat_ids, flat = unpack_ints(ids), array("f", log_probs).tolist()
    width = len(flat_ids) // rows
    starts = [row * width for row in range(rows)]
    return TopK(
        [flat_ids[start : start + width] for start in starts],
        [flat[start : start + width] for start in starts],
    )


to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""JSON text; key order is kept, because templates may print it."""


def _to_bytes(value: Any) -> bytes:
    # surrogatepass: a lone surrogate in a client's text is odd, but no reason to lose the turn.
    return to_json(value).encode("utf-8", "surrogatepass")


def _items(values: Sequence[Any]) -> bytes:
    """JSON of `values`, separated by commas: items of a and b joined by one are those of a + b.
    To be compared, never to be stored: `orjson` writes NaN as null."""
    try:
        return orjson.dumps(values)[1:-1]
    except TypeError:  # a lone surrogate, a number beyond 64 bits
        return _to_bytes(values)[1:-1]


def _hasher() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)


# -- writing -----------------------------------------------------------------------------------


def insert_turn(db: sqlite3.Connection, turn: Turn) -> None:
    turn = replace(turn)  # its lengths and versions are those of its payload as it is now
    parent = db.execute(
        "SELECT t.prompt_len + t.output_len, t.tokens_sha, t.history_sha, p.message_ids, "
        "p.reply_id, t.session_id FROM turns t JOIN payloads p USING (seq) WHERE t.turn_id = ?",
        (turn.parent_id,),
    ).fetchone()
    length, tokens_sha = parent[:2] if parent else (0, b"")
    prompt, output = pack_ints(turn.prompt_ids), pack_ints(turn.output_ids)
    tokens, base = _hasher(), 0
    # Less than the whole prompt: a request has at least one token after its parent's reply.
    if turn.shares_tokens and 0 < length < turn.prompt_len:
        tokens.update(prompt[: length * 4])
        base = length if tokens.digest() == tokens_sha else 0
        tokens.update(prompt[length * 4 :])
    else:
        tokens.update(prompt)
    tokens.update(output)
    if turn.shares_tokens and not base:
        add_count(db, "count", "prefix_mismatch")
    if turn.topk is not None and len(turn.topk.ids) != turn.output_len:
        add_count(db, "count", "topk_missing")
        turn.topk = None
    messages, history_sha = _store_history(db, turn, parent[2:] if parent else None)
    reason = "" if turn.kind == "side" else turn.drop_reason or _misfit(turn)
    state = State.DROPPED if reason else State.SIDE if turn.kind == "side" else State.WAITING
    try:
        seq = _insert(
            db,
            "turns",
            {name: getattr(turn, name) for name in _AS_IT_IS}
            | {
                "state": state,
                "reason": reason,
                "prompt_base": base,
                "tokens_sha": tokens.digest(),
                "history_sha": history_sha,
            },
        )
    except sqlite3.IntegrityError as error:
        raise JournalError(f"turn {turn.turn_id} is already recorded") from error
    topk_ids, topk_logprobs = _pack_topk(turn.topk)
    runs = [[version, len(list(run))] for version, run in groupby(turn.output_versions)]
    tools = store_messages(db, turn.session_id, [list(turn.tools)] if turn.tools else [])
    _insert(
        db,
        "payloads",
        {
            "seq": seq,
            "prompt_tail": prompt[base * 4 :],
            "output_ids": output,
            "output_logprobs": array("f", turn.output_logprobs).tobytes(),
            "output_versions": to_json(runs),
            "topk_ids": topk_ids,
            "topk_logprobs": topk_logprobs,
            "message_ids": pack_ints(messages[:-1]),
            "reply_id": messages[-1],
            "tools_id": tools[0] if tools else None,
            "template_kwargs": to_json(turn.template_kwargs),
            "sampling": to_json(turn.sampling),
        },
    )
    add_count(db, "seen", turn.source)


def _insert(db: sqlite3.Connection, table: str, values: Mapping[str, Any]) -> int | None:
    names, marks = ", ".join(values), ", ".join("?" * len(values))
    insert = f"INSERT INTO {table} ({names}) VALUES ({marks})"
    return db.execute(insert, tuple(values.values())).lastrowid


def _misfit(turn: Turn) -> str:
    """Why a turn cannot be trained as it came: nothing is padded or guessed to make it fit."""
    length = len(turn.output_ids)
    if length == 0:
        return "empty_output"
    if turn.off_policy:
        return ""  # nobody sampled it here: the trainer computes its log-probs
    if len(turn.output_logprobs) != length:
        return "logprobs_missing"
    if not all(map(math.isfinite, turn.output_logprobs)):
        return "logprobs_invalid"
    if len(turn.output_versions) != length or "" in turn.output_versions:
        return "versions_missing"
    return ""


def _store_history(
    db: sqlite3.Connection, turn: Turn, parent: tuple[bytes, bytes, int, str] | None
) -> tuple[list[int], bytes]:
    """Rows of the messages and of the reply, last; and the digest of all but a leading system text,
    which may change with every request.

    `parent` is the parent's digest, its rows and its session. Where the history begins with the
    same messages, these are its rows and need no look-up, which spares 200 of them at turn 100.
    """
    start = 1 if turn.messages and turn.messages[0].get("role") == "system" else 0
    rest = [*turn.messages[start:], turn.reply]
    history, shared, at = _hasher(), list[int](), 0
    if parent is not None and parent[3] == turn.session_id:
        rows = [*unpack_ints(parent[1]), parent[2]][start:]
        if 0 < len(rows) < len(rest):
            at = len(rows)
            history.update(_items(rest[:at]))
            shared = rows if history.digest() == parent[0] else []
            history.update(b",")
    history.update(_items(rest[at:]))
    new = store_messages(db, turn.session_id, [*turn.messages[:start], *rest[len(shared) :]])
    return [*new[:start], *shared, *new[start:]], history.digest()


def store_messages(db: sqlite3.Connection, session_id: str, values: Sequence[Any]) -> list[int]:
    """Row numbers of `values` in the session's message store, in order; new ones are added."""
    rows: list[int] = []
    for value in values:
        body = _to_bytes(value)
        key = session_id, hashlib.blake2b(body, digest_size=16).digest()
        row = db.execute(
            "SELECT id FROM messages WHERE session_id = ? AND digest = ?", key
        ).fetchone() or [
            db.execute(
                "INSERT INTO messages (session_id, digest, body) VALUES (?, ?, ?)", (*key, body)
            ).lastrowid
        ]
        rows += row
    return rows


def store_verdict(db: sqlite3.Connection, seq: int, verdict: Verdict) -> None:
    teacher = verdict.teacher_log_probs
    topk_ids, topk_logprobs = _pack_topk(verdict.teacher_topk)
    _insert(
        db,
        "verdicts",
        {
            "seq": seq,
            "score": verdict.score,
            "hint": verdict.hint,
            "votes": to_json(list(verdict.votes)),
            "teacher": None if teacher is None else array("f", teacher).tobytes(),
            "topk_ids": topk_ids,
            "topk_logprobs": topk_logprobs,
        },
    )


def add_count(db: sqlite3.Connection, scope: str, name: str, n: int = 1) -> None:
    db.execute(
        "INSERT INTO counters VALUES (?, ?, ?) "
        "ON CONFLICT (scope, name) DO UPDATE SET n = n + excluded.n",
        (scope, name, n),
    )


# -- reading -----------------------------------------------------------------------------------

_HEAD = (
    f"SELECT {', '.join(f't.{name}' for name in _AS_IT_IS)}, t.state, t.reason, t.prompt_base, "
    "t.next_ids, p.sampling FROM turns t JOIN payloads p USING (seq) "
)

_CHAIN = """(
  WITH RECURSIVE chain (seq, parent_id, prompt_base) AS (
    SELECT seq, parent_id, prompt_base FROM turns
    WHERE turn_id IN (SELECT value FROM json_each(?))
    UNION
    SELECT parent.seq, parent.parent_id, parent.prompt_base
    FROM chain JOIN turns parent ON chain.prompt_base > 0 AND parent.turn_id = chain.parent_id
  )
  SELECT seq FROM chain
)"""
"""Turns (a JSON list of ids) and all whose tokens their prompts begin with."""


def load_turn(db: sqlite3.Connection, turn_id: str) -> Turn | None:
    for turn in load_heads(db, "WHERE t.turn_id = ?", (turn_id,)):
        _fill_output(db, turn)
        _fill_context(db, turn)
        return turn
    return None


def load_lineage(db: sqlite3.Connection, turn_ids: Collection[str]) -> list[Turn]:
    clause = f"WHERE t.seq IN {_CHAIN} ORDER BY t.created, t.seq"
    found = load_heads(db, clause, (json.dumps(list(turn_ids)),))
    for turn in found:
        if turn.turn_id in turn_ids:
            _fill_output(db, turn)
    return found


def load_heads(db: sqlite3.Connection, clause: str, values: Sequence[Any]) -> list[Turn]:
    """Heads of the turns `t` that an SQL clause (WHERE, ORDER BY, LIMIT) names."""
    found = []
    for row in db.execute(_HEAD + clause, values):
        state, reason, prompt_base, next_ids, sampling = row[len(_AS_IT_IS) :]
        turn = Turn(
            **dict(zip(_AS_IT_IS, row, strict=False)),
            state=State(state),
            drop_reason=reason or None,
            shares_tokens=prompt_base > 0,
            next_state=None if next_ids is None else (),
            sampling=json.loads(sampling),
        )
        turn.truncated, turn.off_policy = bool(turn.truncated), bool(turn.off_policy)
        found.append(turn)
    return found


def load_tokens(db: sqlite3.Connection, turn_id: str) -> tuple[list[int], list[int]]:
    """Prompt ids and output ids, by walking the tails; the cost is that of the tokens."""
    rows = db.execute(  # a turn shares tokens only with one that was there before it
        f"SELECT prompt_tail, output_ids FROM payloads WHERE seq IN {_CHAIN} ORDER BY seq",
        (json.dumps([turn_id]),),
    ).fetchall()
    if not rows:
        raise JournalError(f"no such turn: {turn_id}")
    parts = [blob for row in rows for blob in row]
    return unpack_ints(b"".join(parts[:-1])), unpack_ints(parts[-1])


def _fill_output(db: sqlite3.Connection, turn: Turn) -> None:
    """What was sampled, and the verdict on it."""
    ids, logprobs, versions, score, hint, votes, teacher, *topk = db.execute(
        "SELECT output_ids, output_logprobs, output_versions, score, hint, votes, teacher, "
        "p.topk_ids, p.topk_logprobs, v.topk_ids, v.topk_logprobs FROM turns "
        "JOIN payloads p USING (seq) LEFT JOIN verdicts v USING (seq) WHERE turn_id = ?",
        (turn.turn_id,),
    ).fetchone()
    turn.output_ids = unpack_ints(ids)
    turn.output_logprobs = array("f", logprobs).tolist()
    turn.output_versions = [name for name, count in json.loads(versions) for _ in range(count)]
    turn.topk = _unpack_topk(topk[0], topk[1], turn.output_len)
    if votes is not None:
        turn.verdict = Verdict(
            score=score,
            hint=hint,
            votes=tuple(json.loads(votes)),
            teacher_log_probs=None if teacher is None else array("f", teacher).tolist(),
            teacher_topk=_unpack_topk(topk[2], topk[3], turn.output_len),
        )


def _fill_context(db: sqlite3.Connection, turn: Turn) -> None:
    """What it answered, and what followed."""
    [(message_ids, reply_id, tools_id, template_kwargs, next_ids)] = db.execute(
        "SELECT message_ids, reply_id, tools_id, template_kwargs, next_ids "
        "FROM turns JOIN payloads USING (seq) WHERE turn_id = ?",
        (turn.turn_id,),
    )
    turn.prompt_ids, _ = load_tokens(db, turn.turn_id)
    *messages, turn.reply = _load_messages(db, [*unpack_ints(message_ids), reply_id])
    turn.messages = tuple(messages)
    if tools_id is not None:
        [tools] = _load_messages(db, [tools_id])
        turn.tools = tuple(tools)
    turn.template_kwargs = json.loads(template_kwargs)
    if next_ids is not None:
        turn.next_state = tuple(_load_messages(db, unpack_ints(next_ids)))


def _load_messages(db: sqlite3.Connection, ids: Sequence[int]) -> list[Any]:
    bodies = dict(
        db.execute(
            "SELECT id, body FROM messages WHERE id IN (SELECT value FROM json_each(?))",
            (json.dumps(sorted(set(ids))),),
        )
    )
    return [json.loads(bodies[i].decode("utf-8", "surrogatepass")) for i in ids]
