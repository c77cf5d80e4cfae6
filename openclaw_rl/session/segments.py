"""Which turns become one training sample.

A segment is a chain of turns in which each prompt begins with the previous prompt and reply, token
for token; its tokens are those of its last turn. `build_segments` puts each wanted turn in exactly
one segment and makes as few segments as possible: one for each wanted turn that no other wanted
turn continues. Turns that are not wanted may stand in between; they are context. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from openclaw_rl.types import Turn


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


def build_segments(turns: Sequence[Turn], wanted: Collection[str]) -> list[Segment]:
    """Segments of the `wanted` turns (ids), in the order of their leaves in `turns`, whose heads
    are enough. A parent that is not among them counts as none.

    A wanted turn that several leaves continue goes to the first of them. Raises `ValueError` for
    turns that are named twice, parents in a circle, or a prompt shorter than what it begins with.
    """
    by_id = {turn.turn_id: turn for turn in turns}
    if len(by_id) != len(turns):
        raise ValueError("a turn is named twice")
    continued = _continued(by_id, wanted)
    taken: set[str] = set()
    segments = []
    for leaf in turns:
        if leaf.turn_id not in wanted or leaf.turn_id in continued:
            continue
        members: list[Span] = []
        turn: Turn | None = leaf
        # Above a taken turn everything is taken already: whoever took it went on to the root.
        while turn is not None and turn.turn_id not in taken:
            taken.add(turn.turn_id)
            if turn.turn_id in wanted:
                end = turn.prompt_len + turn.output_len
                members.append(Span(turn.turn_id, turn.prompt_len, end))
            turn = token_parent(turn, by_id)
        segments.append(Segment(leaf.turn_id, tuple(reversed(members))))
    return segments


def token_parent(turn: Turn, by_id: Mapping[str, Turn]) -> Turn | None:
    """The turn whose prompt and output the prompt of `turn` begins with. Raises `ValueError` where
    that cannot be: the prompt is shorter."""
    parent = by_id.get(turn.parent_id or "") if turn.shares_tokens else None
    if parent is not None and turn.prompt_len < parent.prompt_len + parent.output_len:
        raise ValueError(f"the prompt of turn {turn.turn_id} is shorter than its parent's tokens")
    return parent


def _continued(by_id: Mapping[str, Turn], wanted: Collection[str]) -> set[str]:
    """All turns that a wanted turn continues, directly or not."""
    found: set[str] = set()
    for turn in by_id.values():
        above = token_parent(turn, by_id) if turn.turn_id in wanted else None
        while above is not None and above.turn_id not in found:
            if above.turn_id == turn.turn_id:
                raise ValueError(f"turn {turn.turn_id} descends from itself")
            found.add(above.turn_id)
            above = token_parent(above, by_id)
    return found
