"""Turn records for tests: any field can be given, the rest fits together."""

from __future__ import annotations

from typing import Any

from openclaw_rl.journal import Journal
from openclaw_rl.types import State, Turn, Verdict

USER = ({"role": "user", "content": "thanks"},)


def record(turn_id: str = "t1", **given: Any) -> Turn:
    output = list(given.pop("output_ids", [7, 8, 9]))
    fields: dict[str, Any] = {
        "turn_id": turn_id,
        "session_id": "s1",
        "source": "header:x-session-id",
        "owner": "",
        "kind": "main",
        "kind_reason": "opens",
        "parent_id": None,
        "matched": 0,
        "shares_tokens": False,
        "prompt_ids": [1, 2, 3],
        "output_ids": output,
        "output_logprobs": [-0.5] * len(output),
        "output_versions": ["1"] * len(output),
        "finish_reason": "stop",
        "truncated": False,
        "messages": ({"role": "user", "content": f"question {turn_id}"},),
        "reply": {"role": "assistant", "content": f"answer {turn_id}"},
        "tools": (),
        "template_kwargs": {},
        "sampling": {"temperature": 1.0},
        "request_hash": f"sys.{turn_id}",
        "node_hash": f"node-{turn_id}",
        "rendered_len": 12,
        "rendered_sha": "sha",
        "created": 100.0,
    }
    fields.update(given)
    return Turn(**fields)


def chain(length: int, session_id: str = "s1", **given: Any) -> list[Turn]:
    """A conversation whose template keeps history: each prompt begins with all before it."""
    turns: list[Turn] = []
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be kind."}]
    tokens = [1000]
    for n in range(length):
        turn_id = f"{session_id}-{n}"
        messages = [*messages, {"role": "user", "content": f"question {n} of {session_id}"}]
        reply = {"role": "assistant", "content": f"answer {n}"}
        prompt = [*tokens, 2 * n, 2 * n + 1]
        output = [5000 + n, 6000 + n, 2]
        turns.append(
            record(
                turn_id,
                session_id=session_id,
                parent_id=turns[-1].turn_id if turns else None,
                matched=len(messages) - 1 if turns else 0,
                shares_tokens=bool(turns),
                prompt_ids=prompt,
                output_ids=output,
                messages=tuple(messages),
                reply=reply,
                created=100.0 + n,
                **given,
            )
        )
        messages = [*messages, reply]
        tokens = prompt + output
    return turns


def judged(journal: Journal, rec: Turn, **verdict: Any) -> None:
    """Bring a turn to READY, with any field of its verdict."""
    journal.record_turn(rec)
    assert journal.set_next_state(rec.turn_id, USER)
    assert [turn.turn_id for turn in journal.claim("w", 1, 201.0, 60.0)] == [rec.turn_id]
    values = Verdict(**({"score": 1.0} | verdict))
    assert journal.write_verdict(rec.turn_id, "w", values) is State.READY
