"""Which turns become one training sample.

A segment is a chain of turns in which each prompt begins with the previous prompt and reply, token
for token; its tokens are those of its last turn. `build_segments` puts each wanted turn in exactly
one segment and makes as few segments as possible: one for each wanted turn that no other wanted
turn continues. Turns that are not wanted may stand in between; they are context. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from openclaw_rl.types import Turn


def build_segments(turns: Sequence[Turn], wanted: Collection[str]) -> list[list[Turn]]:
    """The `wanted` turns (ids), segment by segment, each in the order of its tokens; segments in
    the order of their last turns in `turns`, whose heads are enough. A parent that is not among
    `turns` counts as none. A turn that several others continue goes to the first of them."""
    by_id = {turn.turn_id: turn for turn in turns}
    continued: set[str] = set()
    for turn in turns:
        if turn.turn_id in wanted:
            _chain(token_parent(turn, by_id), by_id, continued)
    taken: set[str] = set()
    return [
        [turn for turn in reversed(_chain(leaf, by_id, taken)) if turn.turn_id in wanted]
        for leaf in turns
        if leaf.turn_id in wanted and leaf.turn_id not in continued
    ]


def token_parent(turn: Turn, by_id: Mapping[str, Turn]) -> Turn | None:
    """The turn whose prompt and output the prompt of `turn` begins with."""
    return by_id.get(turn.parent_id or "") if turn.shares_tokens else None


def _chain(turn: Turn | None, by_id: Mapping[str, Turn], seen: set[str]) -> list[Turn]:
    """`turn` and all that it continues, newest first, up to the first one that was `seen`: whoever
    saw it went on to the root."""
    chain = []
    while turn is not None and turn.turn_id not in seen:
        seen.add(turn.turn_id)
        chain.append(turn)
        turn = token_parent(turn, by_id)
    return chain
