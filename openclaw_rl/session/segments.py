"""Which turns become one training sample.

A segment is a chain of turns in which each prompt begins with the previous prompt and reply, token
for token; its tokens are those of its last turn. `build_segments` puts each wanted turn in exactly
one segment and makes as few segments as possible: one for each wanted turn that no other wanted
turn continues. Turns that are not wanted may stand in between; they are context. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SegmentTurn:
    """A turn by its lengths in tokens. `parent_id` only where the prompt begins with the parent's
    prompt and output, token for token; a parent that is not among the turns counts as none."""

    turn_id: str
    parent_id: str | None
    prompt_len: int
    output_len: int
    wanted: bool = True


@dataclass(frozen=True, slots=True)
class Span:
    """Where the output of a turn stands in the leaf's prompt and output: `[start, end)`."""

    turn_id: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Segment:
    """`members` in the order of their tokens; the last one is the leaf."""

    leaf_id: str
    members: tuple[Span, ...]


def build_segments(turns: Sequence[SegmentTurn]) -> list[Segment]:
    """Segments in the order of their leaves in `turns`.

    A wanted turn that several leaves continue goes to the first of them. Raises `ValueError` for
    turns that are named twice, parents in a circle, or a prompt shorter than what it begins with.
    """
    by_id = {turn.turn_id: turn for turn in turns}
    if len(by_id) != len(turns):
        raise ValueError("a turn is named twice")
    continued = _continued(turns, by_id)
    taken: set[str] = set()
    segments = []
    for leaf in turns:
        if not leaf.wanted or leaf.turn_id in continued:
            continue
        members: list[Span] = []
        turn: SegmentTurn | None = leaf
        # Above a taken turn everything is taken already: whoever took it went on to the root.
        while turn is not None and turn.turn_id not in taken:
            taken.add(turn.turn_id)
            if turn.wanted:
                end = turn.prompt_len + turn.output_len
                members.append(Span(turn.turn_id, turn.prompt_len, end))
            turn = _parent(turn, by_id)
        segments.append(Segment(leaf.turn_id, tuple(reversed(members))))
    return segments


def _continued(turns: Sequence[SegmentTurn], by_id: dict[str, SegmentTurn]) -> set[str]:
    """All turns that a wanted turn continues, directly or not."""
    found: set[str] = set()
    for turn in turns:
        if not turn.wanted:
            continue
        above = _parent(turn, by_id)
        while above is not None and above.turn_id not in found:
            if above.turn_id == turn.turn_id:
                raise ValueError(f"turn {turn.turn_id} descends from itself")
            found.add(above.turn_id)
            above = _parent(above, by_id)
    return found


def _parent(turn: SegmentTurn, by_id: dict[str, SegmentTurn]) -> SegmentTurn | None:
    parent = by_id.get(turn.parent_id) if turn.parent_id is not None else None
    if parent is not None and turn.prompt_len < parent.prompt_len + parent.output_len:
        raise ValueError(f"the prompt of turn {turn.turn_id} is shorter than its parent's tokens")
    return parent
