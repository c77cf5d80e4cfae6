"""Writing a turn and putting it together again. Every function runs in the caller's transaction.

Guarantees: what `load_turn` returns equals what `insert_turn` was given, value for value (log-probs
as float32), although only what the turn adds to its parent is stored. Prefixes are checked, not
believed.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from openclaw_rl.errors import JournalError
from openclaw_rl.journal import codec
from openclaw_rl.types import Message, State, Turn, Verdict

_AS_IT_IS = (
    "turn_id", "session_id", "source", "owner", "kind", "kind_reason", "parent_id", "matched",
    "created", "finish_reason", "truncated", "off_policy", "request_hash", "node_hash",
    "rendered_len", "rendered_sha", "prompt_len", "output_len", "min_version", "max_version",
    "attempts", "lease_host", "lease_rollout", "trained_version",
)  # fmt: skip
"""Fields of `Turn` that are columns of `turns`, under the same name."""

_HEAD = (
    f"SELECT {', '.join(f't.{name}' for name in _AS_IT_IS)}, t.seq, t.state, t.reason, "
    "t.prompt_base, t.next_ids, p.sampling FROM turns t JOIN payloads p USING (seq) "
)


@dataclass(frozen=True, slots=True)
class _Tail:
    """What is stored of a prompt and of a history: the part beyond the parent's.

    `base` tokens, and the message rows `shared`, come from the parent (0 and none without one).
    The digests are of all tokens and of all messages but the system text, reply included.
    """

    base: int
    prompt: bytes
    tokens_sha: bytes
    shared: Sequence[int]
    history_sha: bytes


def insert_turn(db: sqlite3.Connection, turn: Turn) -> None:
    turn = replace(turn)  # its lengths and versions are those of its payload as it is now
    tail = _tail(db, turn)
    if turn.shares_tokens and tail.base == 0:
        add_count(db, "count", "prefix_mismatch")
    reason = "" if turn.kind == "side" else turn.drop_reason or _misfit(turn)
    state = State.DROPPED if reason else State.SIDE if turn.kind == "side" else State.WAITING
    temperature = turn.sampling.get("temperature")
    try:
        seq = _insert(
            db,
            "turns",
            {name: getattr(turn, name) for name in _AS_IT_IS}
            | {
                "state": state,
                "reason": reason,
                "prompt_base": tail.base,
                "tokens_sha": tail.tokens_sha,
                "history_sha": tail.history_sha,
                "temperature": 1.0 if temperature is None else float(temperature),
                "changed": turn.created,
            },
        )
    except sqlite3.IntegrityError as error:
        raise JournalError(f"turn {turn.turn_id} is already recorded") from error
    if turn.topk is not None and len(turn.topk.ids) != turn.output_len:
        add_count(db, "count", "topk_missing")
        turn.topk = None
    topk_ids, topk_logprobs = codec.pack_topk(turn.topk)
    one = partial(store_messages, db, turn.session_id)
    _insert(
        db,
        "payloads",
        {
            "seq": seq,
            "prompt_tail": tail.prompt,
            "output_ids": codec.pack_ints(turn.output_ids),
            "output_logprobs": codec.pack_floats(turn.output_logprobs),
            "output_versions": codec.pack_runs(turn.output_versions),
            "topk_ids": topk_ids,
            "topk_logprobs": topk_logprobs,
            "message_ids": codec.pack_ints(_message_ids(db, turn, tail.shared)),
            "reply_id": one([turn.reply])[0],
            "tools_id": one([list(turn.tools)])[0] if turn.tools else None,
            "template_kwargs": codec.to_json(turn.template_kwargs),
            "sampling": codec.to_json(turn.sampling),
        },
    )
    add_count(db, "seen", turn.source)


def _insert(db: sqlite3.Connection, table: str, values: Mapping[str, Any]) -> int | None:
    # Columns are named, so that an older process can go on beside one that added some.
    names = ", ".join(values)
    marks = ", ".join("?" * len(values))
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


def _tail(db: sqlite3.Connection, turn: Turn) -> _Tail:
    """One pass over tokens and messages: at the parent's end the digests must be the parent's."""
    row = db.execute(
        "SELECT t.prompt_len + t.output_len, t.tokens_sha, t.history_sha, p.message_ids, "
        "p.reply_id, t.session_id FROM turns t JOIN payloads p USING (seq) WHERE t.turn_id = ?",
        (turn.parent_id,),
    ).fetchone()
    prompt, output = codec.pack_ints(turn.prompt_ids), codec.pack_ints(turn.output_ids)
    tokens, base = codec.hasher(), 0
    # Less than the whole prompt: a request has at least one token after its parent's reply.
    if row and turn.shares_tokens and row[0] < len(turn.prompt_ids):
        tokens.update(prompt[: row[0] * 4])
        base = row[0] if tokens.digest() == row[1] else 0
        tokens.update(prompt[row[0] * 4 :])
    else:
        tokens.update(prompt)
    tokens.update(output)

    history, shared = codec.hasher(), []
    start = _system(turn.messages)
    rest = [*turn.messages[start:], turn.reply]
    if row and row[5] == turn.session_id:
        parents = [*codec.unpack_ints(row[3]), row[4]]
        end = len(parents)
        if start < end <= len(turn.messages):
            history.update(codec.to_items(turn.messages[start:end]))
            shared = parents[start:] if history.digest() == row[2] else []
            history.update(b",")
            rest = rest[end - start :]
    history.update(codec.to_items(rest))
    return _Tail(base, prompt[base * 4 :], tokens.digest(), shared, history.digest())


def _system(messages: Sequence[Message]) -> int:
    """1 where a system text leads: it may change with every request and is looked at apart."""
    return 1 if messages and messages[0].get("role") == "system" else 0


def _message_ids(db: sqlite3.Connection, turn: Turn, shared: Sequence[int]) -> list[int]:
    """Rows of the messages. Those shared with the parent need no look-up: the usual case, which
    spares 200 of them at turn 100."""
    start = _system(turn.messages) if shared else 0
    end = start + len(shared)
    new = store_messages(db, turn.session_id, [*turn.messages[:start], *turn.messages[end:]])
    return [*new[:start], *shared, *new[start:]]


def store_messages(db: sqlite3.Connection, session_id: str, values: Sequence[Any]) -> list[int]:
    """Row numbers of `values` in the session's message store, in order; new ones are added."""
    bodies = [codec.to_body(value) for value in values]
    known = {
        row[0]: row[1]
        for digest in {digest for _, digest in bodies}
        for row in db.execute(
            "SELECT digest, id FROM messages WHERE session_id = ? AND digest = ?",
            (session_id, digest),
        )
    }
    for body, digest in bodies:
        if digest not in known:
            known[digest] = db.execute(
                "INSERT INTO messages (session_id, digest, body) VALUES (?, ?, ?)",
                (session_id, digest, body),
            ).lastrowid
    return [known[digest] for _, digest in bodies]


def load_messages(db: sqlite3.Connection, ids: Sequence[int]) -> tuple[Message, ...]:
    bodies = dict(
        db.execute(
            "SELECT id, body FROM messages WHERE id IN (SELECT value FROM json_each(?))",
            (json.dumps(sorted(set(ids))),),
        )
    )
    return tuple(codec.from_body(bodies[i]) for i in ids)


_CHAIN = """
WITH RECURSIVE chain (seq, parent_id, prompt_base, depth) AS (
  SELECT seq, parent_id, prompt_base, 0 FROM turns WHERE turn_id = ?
  UNION ALL
  SELECT t.seq, t.parent_id, t.prompt_base, chain.depth + 1
  FROM chain JOIN turns t ON chain.prompt_base > 0 AND t.turn_id = chain.parent_id
)
SELECT p.prompt_tail, p.output_ids FROM chain JOIN payloads p USING (seq) ORDER BY depth DESC
"""


def load_tokens(db: sqlite3.Connection, turn_id: str) -> tuple[list[int], list[int]]:
    """Prompt ids and output ids, by walking the tails; the cost is that of the tokens."""
    rows = db.execute(_CHAIN, (turn_id,)).fetchall()
    if not rows:
        raise JournalError(f"no such turn: {turn_id}")
    parts = [blob for row in rows for blob in row]
    return codec.unpack_ints(b"".join(parts[:-1])), codec.unpack_ints(parts[-1])


def load_turn(db: sqlite3.Connection, turn_id: str) -> Turn | None:
    for seq, turn in _heads(db, "WHERE t.turn_id = ?", (turn_id,)):
        _fill_output(db, seq, turn)
        _fill_context(db, seq, turn)
        return turn
    return None


def load_heads(db: sqlite3.Connection, clause: str, values: Sequence[Any]) -> list[Turn]:
    """Heads of the turns `t` that an SQL clause (WHERE, ORDER BY, LIMIT) names."""
    return [turn for _, turn in _heads(db, clause, values)]


_LINEAGE = """
WHERE t.seq IN (
  WITH RECURSIVE chain (seq, parent_id, prompt_base) AS (
    SELECT seq, parent_id, prompt_base FROM turns
    WHERE turn_id IN (SELECT value FROM json_each(?))
    UNION
    SELECT parent.seq, parent.parent_id, parent.prompt_base
    FROM chain JOIN turns parent ON chain.prompt_base > 0 AND parent.turn_id = chain.parent_id
  )
  SELECT seq FROM chain
) ORDER BY t.created, t.seq
"""


def load_lineage(db: sqlite3.Connection, turn_ids: Collection[str]) -> list[Turn]:
    found = list(_heads(db, _LINEAGE, (json.dumps(list(turn_ids)),)))
    for seq, turn in found:
        if turn.turn_id in turn_ids:
            _fill_output(db, seq, turn)
    return [turn for _, turn in found]


def _heads(
    db: sqlite3.Connection, clause: str, values: Sequence[Any]
) -> Iterator[tuple[int, Turn]]:
    for row in db.execute(_HEAD + clause, values).fetchall():
        seq, state, reason, prompt_base, next_ids, sampling = row[len(_AS_IT_IS) :]
        turn = Turn(
            **dict(zip(_AS_IT_IS, row, strict=False)),
            state=State(state),
            drop_reason=reason or None,
            shares_tokens=prompt_base > 0,
            next_state=None if next_ids is None else (),
            sampling=json.loads(sampling),
        )
        turn.truncated, turn.off_policy = bool(turn.truncated), bool(turn.off_policy)
        yield seq, turn


def _fill_output(db: sqlite3.Connection, seq: int, turn: Turn) -> None:
    ids, logprobs, versions, topk_ids, topk_logprobs = db.execute(
        "SELECT output_ids, output_logprobs, output_versions, topk_ids, topk_logprobs "
        "FROM payloads WHERE seq = ?",
        (seq,),
    ).fetchone()
    turn.output_ids = codec.unpack_ints(ids)
    turn.output_logprobs = codec.unpack_floats(logprobs)
    turn.output_versions = codec.unpack_runs(versions)
    turn.topk = codec.unpack_topk(topk_ids, topk_logprobs, turn.output_len)
    turn.verdict = _load_verdict(db, seq, turn.output_len)


def _fill_context(db: sqlite3.Connection, seq: int, turn: Turn) -> None:
    message_ids, reply_id, tools_id, template_kwargs, next_ids = db.execute(
        "SELECT message_ids, reply_id, tools_id, template_kwargs, next_ids "
        "FROM payloads JOIN turns USING (seq) WHERE seq = ?",
        (seq,),
    ).fetchone()
    turn.prompt_ids, _ = load_tokens(db, turn.turn_id)
    turn.messages = load_messages(db, codec.unpack_ints(message_ids))
    (turn.reply,) = load_messages(db, [reply_id])
    if tools_id is not None:
        (tools,) = load_messages(db, [tools_id])
        turn.tools = tuple(tools)  # type: ignore[arg-type]  # a list of tools is stored like one
    turn.template_kwargs = json.loads(template_kwargs)
    if next_ids is not None:
        turn.next_state = load_messages(db, codec.unpack_ints(next_ids))


def store_verdict(db: sqlite3.Connection, seq: int, verdict: Verdict, now: float) -> None:
    teacher = verdict.teacher_log_probs
    topk_ids, topk_logprobs = codec.pack_topk(verdict.teacher_topk)
    _insert(
        db,
        "verdicts",
        {
            "seq": seq,
            "score": verdict.score,
            "hint": verdict.hint,
            "votes": codec.to_json(list(verdict.votes)),
            "reason": verdict.reason,
            "created": verdict.created or now,
            "teacher": None if teacher is None else codec.pack_floats(teacher),
            "topk_ids": topk_ids,
            "topk_logprobs": topk_logprobs,
        },
    )


def _load_verdict(db: sqlite3.Connection, seq: int, tokens: int) -> Verdict | None:
    """The verdict on a turn of so many output tokens."""
    row = db.execute(
        "SELECT score, hint, votes, reason, created, teacher, topk_ids, topk_logprobs "
        "FROM verdicts WHERE seq = ?",
        (seq,),
    ).fetchone()
    if row is None:
        return None
    score, hint, votes, reason, created, teacher, topk_ids, topk_logprobs = row
    return Verdict(
        score=score,
        hint=hint,
        votes=tuple(json.loads(votes)),
        reason=reason,
        created=created,
        teacher_log_probs=None if teacher is None else codec.unpack_floats(teacher),
        teacher_topk=codec.unpack_topk(topk_ids, topk_logprobs, tokens),
    )


def add_count(db: sqlite3.Connection, scope: str, name: str, n: int = 1) -> None:
    db.execute(
        "INSERT INTO counters VALUES (?, ?, ?) "
        "ON CONFLICT (scope, name) DO UPDATE SET n = n + excluded.n",
        (scope, name, n),
    )
