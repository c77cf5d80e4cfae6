"""What a request says about the turn before it. Pure."""

from __future__ import annotations

from openclaw_rl.session.canonical import History, Mark, Trace, without_internal
from openclaw_rl.session.types import NextState, RequestView
from openclaw_rl.types import Kind, Message, Turn


def next_state_of(
    view: RequestView, history: History, kind: Kind, parent: Turn | None, mark: Mark | None
) -> NextState | None:
    """What followed the parent's reply, up to the next reply of anybody's. None where it has its
    next state already or was repeated, where one of the two is side, and where nothing followed.

    `mark` is where the parent's history ends in the request, None where something between its first
    message and its reply was re-worded since.
    """
    if kind == "side" or parent is None or parent.kind == "side":
        return None
    if parent.next_state is not None or parent.drop_reason == "retried":
        return None
    if mark is None:  # re-worded in the middle: the reply is the last one of the request
        mark = next(m for m in reversed(history.marks) if m.node)
    followed: list[Message] = []
    for message, trace in zip(view.messages[mark.end :], history.traces[mark.end :], strict=True):
        if trace in (Trace.SYSTEM, Trace.TRANSIENT, Trace.EMPTY):
            continue
        if message.get("role") == "assistant":
            break
        followed.append(without_internal(message))
    if not followed or _repeats(history, mark):
        return None
    return NextState(parent.turn_id, tuple(followed))


def _repeats(history: History, mark: Mark) -> bool:
    """Whether the user only said the same again after a turn without a visible reply."""
    if mark.node:
        return False
    at = next(i for i, other in enumerate(history.marks) if other is mark)
    return at + 1 < len(history.marks) and history.digests[at] == history.digests[at + 1]
