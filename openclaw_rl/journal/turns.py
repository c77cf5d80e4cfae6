"""Writing a turn and putting it together again. Every function runs in the caller's transaction.

Guarantees: what `load_turn` returns equals what `insert_turn` was given, value for value (log-probs
as float32), although only what the turn adds to its parent is stored. Prefixes are checked, not
believed.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from openclaw_rl.errors import JournalError
from openclaw_rl.journal import codec
from openclaw_rl.journal.records import Lineage, Output
from openclaw_rl.types import Message, State, Turn, Verdict

_TURN_COLUMNS = (
    "turn_id, session_id, source, owner, kind, kind_reason, state, reason, parent_id, "
    "matched, prompt_base, prompt_len, output_len, tokens_sha, history_sha, created, "
    "min_version, max_version, temperature, off_policy, truncated, finish_reason, "
    "request_hash, node_hash, rendered_len, rendered_sha, changed"
)
_INSERT_TURN = (
    f"INSERT INTO turns ({_TURN_COLUMNS}) VALUES ({', '.join('?' * _TURN_COLUMNS.count(','))}, ?)"
)

# Columns are named, so that an older process can go on beside one that added some.
_PAYLOAD_COLUMNS = (
    "seq, prompt_tail, output_ids, output_logprobs, output_versions, message_ids, reply_id, "
    "tools_id, template_kwargs, sampling, topk_ids, topk_logprobs"
)
_VERDICT_COLUMNS = "seq, score, hint, teacher, votes, reason, created, topk_ids, topk_logprobs"


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


def insert_turn(db: sqlite3.Connection, rec: Turn) -> None:
    tail = _tail(db, rec)
    if rec.shares_tokens and tail.base == 0:
        add_count(db, "count", "prefix_mismatch")
    state, reason = _first_state(rec)
    low, high = codec.version_bounds(rec.output_versions)
    temperature = rec.sampling.get("temperature")
    try:
        cursor = db.execute(
            _INSERT_TURN,
            (
                rec.turn_id, rec.session_id, rec.source, rec.owner, rec.kind, rec.kind_reason,
                state, reason, rec.parent_id, rec.matched, tail.base, len(rec.prompt_ids),
                len(rec.output_ids), tail.tokens_sha,
                tail.history_sha, rec.created, low, high,
                1.0 if temperature is None else float(temperature), rec.off_policy, rec.truncated,
                rec.finish_reason, rec.request_hash, rec.node_hash, rec.rendered_len,
                rec.rendered_sha, rec.created,
            ),
        )  # fmt: skip
    except sqlite3.IntegrityError as error:
        raise JournalError(f"turn {rec.turn_id} is recorded already") from error
    messages = _message_ids(db, rec, tail.shared)
    reply = store_messages(db, rec.session_id, [rec.reply])[0]
    tools = store_messages(db, rec.session_id, [list(rec.tools)])[0] if rec.tools else None
    topk = rec.topk
    if topk is not None and len(topk.ids) != len(rec.output_ids):
        add_count(db, "count", "topk_missing")
        topk = None
    db.execute(
        f"INSERT INTO payloads ({_PAYLOAD_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            cursor.lastrowid, tail.prompt, codec.pack_ints(rec.output_ids),
            codec.pack_floats(rec.output_logprobs), codec.pack_runs(rec.output_versions),
            codec.pack_ints(messages), reply, tools,
            codec.to_json(rec.template_kwargs), codec.to_json(rec.sampling),
            *codec.pack_topk(topk),
        ),
    )  # fmt: skip
    add_count(db, "seen", rec.source)


def _first_state(rec: Turn) -> tuple[State, str]:
    if rec.kind == "side":
        return State.SIDE, ""
    reason = rec.drop_reason or _misfit(rec)
    return (State.DROPPED, reason) if reason else (State.WAITING, "")


def _misfit(rec: Turn) -> str:
    """Why a turn cannot be trained as it came: nothing is padded or guessed to make it fit."""
    length = len(rec.output_ids)
    if length == 0:
        return "empty_output"
    if rec.off_policy:
        return ""  # nobody sampled it here: the trainer computes its log-probs
    if len(rec.output_logprobs) != length:
        return "logprobs_missing"
    if not codec.all_finite(rec.output_logprobs):
        return "logprobs_invalid"
    if len(rec.output_versions) != length or "" in rec.output_versions:
        return "versions_missing"
    return ""


def _tail(db: sqlite3.Connection, rec: Turn) -> _Tail:
    """One pass over tokens and messages: at the parent's end the digests must be the parent's."""
    row = db.execute(
        "SELECT t.prompt_len + t.output_len, t.tokens_sha, t.history_sha, p.message_ids, "
        "p.reply_id, t.session_id FROM turns t JOIN payloads p USING (seq) WHERE t.turn_id = ?",
        (rec.parent_id,),
    ).fetchone()
    prompt, output = codec.pack_ints(rec.prompt_ids), codec.pack_ints(rec.output_ids)
    tokens, base = codec.hasher(), 0
    # Less than the whole prompt: a request has at least one token after its parent's reply.
    if row and rec.shares_tokens and row[0] < len(rec.prompt_ids):
        tokens.update(prompt[: row[0] * 4])
        base = row[0] if tokens.digest() == row[1] else 0
        tokens.update(prompt[row[0] * 4 :])
    else:
        tokens.update(prompt)
    tokens.update(output)

    history, shared = codec.hasher(), []
    start = _system(rec.messages)
    rest = [*rec.messages[start:], rec.reply]
    if row and row[5] == rec.session_id:
        parents = [*codec.unpack_ints(row[3]), row[4]]
        end = len(parents)
        if start < end <= len(rec.messages):
            history.update(codec.to_items(rec.messages[start:end]))
            shared = parents[start:] if history.digest() == row[2] else []
            history.update(b",")
            rest = rest[end - start :]
    history.update(codec.to_items(rest))
    return _Tail(base, prompt[base * 4 :], tokens.digest(), shared, history.digest())


def _system(messages: Sequence[Message]) -> int:
    """1 where a system text leads: it may change with every request and is looked at apart."""
    return 1 if messages and messages[0].get("role") == "system" else 0


def _message_ids(db: sqlite3.Connection, rec: Turn, shared: Sequence[int]) -> list[int]:
    """Rows of the messages. Those shared with the parent need no look-up: the usual case, which
    spares 200 of them at turn 100."""
    start = _system(rec.messages) if shared else 0
    end = start + len(shared)
    new = store_messages(db, rec.session_id, [*rec.messages[:start], *rec.messages[end:]])
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
        raise JournalError(f"there is no turn {turn_id}")
    parts = [blob for row in rows for blob in row]
    return codec.unpack_ints(b"".join(parts[:-1])), codec.unpack_ints(parts[-1])


def load_turn(db: sqlite3.Connection, turn_id: str) -> Turn | None:
    cursor = db.execute(
        "SELECT * FROM turns JOIN payloads USING (seq) WHERE turn_id = ?", (turn_id,)
    )
    values = cursor.fetchone()
    if values is None:
        return None
    row = dict(zip((column[0] for column in cursor.description), values, strict=True))
    prompt_ids, output_ids = load_tokens(db, turn_id)
    reply = load_messages(db, [row["reply_id"]])[0]
    tools = load_messages(db, [row["tools_id"]])[0] if row["tools_id"] is not None else []
    next_ids = row["next_ids"]
    return Turn(
        turn_id=turn_id,
        session_id=row["session_id"],
        source=row["source"],
        owner=row["owner"],
        kind=row["kind"],
        kind_reason=row["kind_reason"],
        parent_id=row["parent_id"],
        matched=row["matched"],
        shares_tokens=row["prompt_base"] > 0,
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        output_logprobs=codec.unpack_floats(row["output_logprobs"]),
        output_versions=codec.unpack_runs(row["output_versions"]),
        finish_reason=row["finish_reason"],
        truncated=bool(row["truncated"]),
        messages=load_messages(db, codec.unpack_ints(row["message_ids"])),
        reply=reply,
        tools=tuple(tools),  # type: ignore[arg-type]  # a list of tools is stored like a message
        template_kwargs=json.loads(row["template_kwargs"]),
        sampling=json.loads(row["sampling"]),
        request_hash=row["request_hash"],
        node_hash=row["node_hash"],
        rendered_len=row["rendered_len"],
        rendered_sha=row["rendered_sha"],
        created=row["created"],
        drop_reason=row["reason"] or None,
        off_policy=bool(row["off_policy"]),
        topk=codec.unpack_topk(row["topk_ids"], row["topk_logprobs"], len(output_ids)),
        state=State(row["state"]),
        next_state=None if next_ids is None else load_messages(db, codec.unpack_ints(next_ids)),
        attempts=row["attempts"],
        verdict=load_verdict(db, row["seq"], len(output_ids)),
        lease_host=row["lease_host"],
        lease_rollout=row["lease_rollout"],
        trained_version=row["trained_version"],
    )


def store_verdict(db: sqlite3.Connection, seq: int, verdict: Verdict, now: float) -> None:
    teacher = verdict.teacher_log_probs
    db.execute(
        f"INSERT OR REPLACE INTO verdicts ({_VERDICT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            seq, verdict.score, verdict.hint,
            None if teacher is None else codec.pack_floats(teacher),
            codec.to_json(list(verdict.votes)), verdict.reason, verdict.created or now,
            *codec.pack_topk(verdict.teacher_topk),
        ),
    )  # fmt: skip


def load_verdict(db: sqlite3.Connection, seq: int, tokens: int) -> Verdict | None:
    """The verdict on a turn of so many output tokens."""
    row = db.execute(f"SELECT {_VERDICT_COLUMNS} FROM verdicts WHERE seq = ?", (seq,)).fetchone()
    if row is None:
        return None
    return Verdict(
        score=row[1],
        hint=row[2],
        teacher_log_probs=None if row[3] is None else codec.unpack_floats(row[3]),
        votes=tuple(json.loads(row[4])),
        reason=row[5],
        created=row[6],
        teacher_topk=codec.unpack_topk(row[7], row[8], tokens),
    )


def load_outputs(db: sqlite3.Connection, turn_ids: Iterable[str]) -> list[Output]:
    rows = db.execute(
        "SELECT t.seq, t.turn_id, t.session_id, t.created, t.prompt_len, p.output_ids, "
        "p.output_logprobs, p.output_versions, t.truncated, t.off_policy "
        "FROM turns t JOIN payloads p USING (seq) "
        "WHERE t.turn_id IN (SELECT value FROM json_each(?)) ORDER BY t.created, t.seq",
        (json.dumps(list(turn_ids)),),
    ).fetchall()
    return [
        Output(
            turn_id=row[1],
            session_id=row[2],
            created=row[3],
            prompt_len=row[4],
            output_ids=codec.unpack_ints(row[5]),
            output_logprobs=codec.unpack_floats(row[6]),
            output_versions=codec.unpack_runs(row[7]),
            truncated=bool(row[8]),
            verdict=load_verdict(db, row[0], len(row[5]) // 4),
            off_policy=bool(row[9]),
        )
        for row in rows
    ]


_LINEAGE = """
WITH RECURSIVE chain (turn_id, parent_id, prompt_base, prompt_len, output_len, created, seq) AS (
  SELECT turn_id, parent_id, prompt_base, prompt_len, output_len, created, seq FROM turns
  WHERE turn_id IN (SELECT value FROM json_each(?))
  UNION
  SELECT t.turn_id, t.parent_id, t.prompt_base, t.prompt_len, t.output_len, t.created, t.seq
  FROM chain JOIN turns t ON chain.prompt_base > 0 AND t.turn_id = chain.parent_id
)
SELECT turn_id, CASE WHEN prompt_base > 0 THEN parent_id END, prompt_len, output_len FROM chain
ORDER BY created, seq
"""


def load_lineage(db: sqlite3.Connection, turn_ids: Iterable[str]) -> list[Lineage]:
    return [
        Lineage(turn_id=row[0], parent_id=row[1], prompt_len=row[2], output_len=row[3])
        for row in db.execute(_LINEAGE, (json.dumps(list(turn_ids)),))
    ]


def add_count(db: sqlite3.Connection, scope: str, name: str, n: int = 1) -> None:
    db.execute(
        "INSERT INTO counters VALUES (?, ?, ?) "
        "ON CONFLICT (scope, name) DO UPDATE SET n = n + excluded.n",
        (scope, name, n),
    )
