"""Whatever histories look like, a turn comes back as it was given, and deleting harms no other."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from openclaw_rl.journal import Journal
from openclaw_rl.types import Turn
from tests.journal.build import record

texts = st.sampled_from(["", "a", "b", "\ud800", "中", '"],["', ","])
messages = st.builds(
    lambda role, text: {"role": role, "content": text},
    st.sampled_from(["system", "user", "assistant", "tool"]),
    texts,
)


@st.composite
def trees(draw: st.DrawFn) -> list[Turn]:
    turns: list[Turn] = []
    for n in range(draw(st.integers(1, 8))):
        parent = draw(st.sampled_from([None, *turns])) if turns else None
        history: list[Any] = []
        tokens: list[int] = []
        if parent is not None:
            history = [*parent.messages, parent.reply]
            tokens = [*parent.prompt_ids, *parent.output_ids]
        if history and draw(st.booleans()):  # not quite the parent's history
            history[draw(st.integers(0, len(history) - 1))] = draw(messages)
        if tokens and draw(st.integers(0, 3)) == 0:
            tokens[draw(st.integers(0, len(tokens) - 1))] += 1
        added = draw(st.lists(st.integers(0, 3), max_size=3))
        output = draw(st.lists(st.integers(0, 3), max_size=3))
        turns.append(
            record(
                f"t{n}",
                session_id=f"s{draw(st.integers(0, 1))}",
                parent_id=parent.turn_id if parent else draw(st.sampled_from([None, "gone"])),
                shares_tokens=draw(st.booleans()),
                prompt_ids=[*tokens, *added],
                output_ids=output,
                messages=(*history, *draw(st.lists(messages, max_size=3))),
                reply=draw(messages),
                tools=tuple(draw(st.lists(messages, max_size=1))),
                created=100.0 + n,
            )
        )
    return turns


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def check(journal: Journal, turns: list[Turn]) -> None:
    for rec in turns:
        turn = journal.turn(rec.turn_id)
        assert journal.tokens(rec.turn_id) == [*rec.prompt_ids, *rec.output_ids]
        for name in ("prompt_ids", "output_ids", "messages", "reply", "tools"):
            assert plain(getattr(turn, name)) == plain(getattr(rec, name)), name


@settings(max_examples=40, deadline=None)
@given(turns=trees(), cut=st.integers(0, 8), session=st.sampled_from(["s0", "s1", None]))
def test_turns_come_back_exactly_and_survive_the_deletion_of_others(
    turns, cut, session, tmp_path_factory
):
    with Journal.open(tmp_path_factory.mktemp("exact") / "journal.db") as journal:
        for rec in turns:
            journal.record_turn(rec)
        check(journal, turns)
        if session is not None:
            journal.purge(session_id=session)
            turns = [rec for rec in turns if rec.session_id != session]
        journal.purge(older_than=100.0 + cut)
        turns = [rec for rec in turns if rec.created >= 100.0 + cut]
        assert journal.turn_ids() == [rec.turn_id for rec in turns]
        check(journal, turns)
        lineage = {x.turn_id: x for x in journal.lineage([rec.turn_id for rec in turns])}
        for rec in turns:
            assert lineage[rec.turn_id].prompt_len == len(rec.prompt_ids)
        assert journal.outcomes().balanced()
