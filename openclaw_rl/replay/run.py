"""Reads files into the journal, once: `openclaw-rl replay`, and `up` with a data folder's own.

Guarantees: all files are read before anything is written, so a broken line changes nothing; a
turn that is in the journal already, replayed or served (an export of it lies in the folder), is
left alone; a dry run writes nothing at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from openclaw_rl.engine.chat import ChatTokenizer
from openclaw_rl.errors import ConfigError
from openclaw_rl.journal import Journal
from openclaw_rl.replay import files
from openclaw_rl.replay.turns import PastTurn, Reader
from openclaw_rl.wire.formats import choose_format


@dataclass
class Replay:
    """Counts of one run. `replies == added + sum(left_out.values())`."""

    files: int = 0
    conversations: int = 0
    added: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def replies(self) -> int:
        """All replies of models that were met."""
        return self.added + sum(self.left_out.values())


def open_reader(
    model_path: str, served_name: str, reply_format: str, context_length: int | None
) -> Reader:
    """The reader for a served model. Raises `ConfigError`."""
    tokenizer = ChatTokenizer.load(model_path)
    chosen, _ = choose_format(
        reply_format, tokenizer.template, tokenizer.added_tokens.keys(), served_name
    )
    length = context_length or tokenizer.context_length
    if not length:
        raise ConfigError("the model does not tell its context length: set --context-length")
    return Reader(tokenizer.showing(chosen.marks, chosen.inner), chosen, length)


def replay(
    paths: Sequence[Path],
    reader: Reader,
    journal_path: Path,
    now: float,
    *,
    dry_run: bool = False,
    emit: Callable[[str], None] = lambda line: None,
) -> Replay:
    """Bring the conversations at `paths` into the journal; `emit` gets a line a file.

    Raises `ReplayError` (file:line) before anything is written.
    """
    found = files.check(paths)
    total = Replay()
    with _journal(journal_path, dry_run) as journal:
        seen: set[str] = set()
        served = journal.served() if journal is not None else set()
        for number, file in enumerate(found, 1):
            one = Replay(files=1)
            for past in files.read(file):
                one.conversations += 1
                turns = reader.turns(past, now, one.left_out)
                one.added += _keep(turns, journal, seen, served, one.left_out, now, dry_run)
            emit(f"{number} of {len(found)} · {file}: {describe(one, dry_run)}")
            total.files += 1
            total.conversations += one.conversations
            total.added += one.added
            total.left_out.update(one.left_out)
    return total


def describe(counts: Replay, dry_run: bool) -> str:
    """The counts in words, left out by reason."""
    verb = "would be added" if dry_run else "added"
    words = f"{counts.added} of {counts.replies} replies {verb}"
    reasons = sorted(counts.left_out.items(), key=lambda item: (-item[1], item[0]))
    return words + "".join(f", {n} {reason}" for reason, n in reasons if n)


def _keep(
    turns: Sequence[PastTurn],
    journal: Journal | None,
    seen: set[str],
    served: Set[str],
    left_out: Counter[str],
    now: float,
    dry_run: bool,
) -> int:
    """Write what is new, a conversation at once; how many turns."""
    added, apart = 0, set()
    with contextlib.nullcontext() if journal is None or dry_run else journal.batch():
        for turn in turns:
            record, turn_id = turn.record, turn.record.turn_id
            if record.node_hash in served:
                apart.add(turn_id)
            if turn_id in seen or turn_id in apart or (journal and journal.knows(turn_id)):
                left_out["known"] += 1
                continue
            seen.add(turn_id)
            added += 1
            if journal is not None and not dry_run:
                if record.parent_id in apart:  # which is not there under this id
                    record = dataclasses.replace(
                        record, parent_id=None, matched=0, shares_tokens=False
                    )
                journal.record_turn(record)
                journal.set_next_state(turn_id, turn.next_state, now)
    return added


@contextlib.contextmanager
def _journal(path: Path, dry_run: bool) -> Iterator[Journal | None]:
    if dry_run and not path.exists():
        yield None
        return
    with Journal.open(path, create=not dry_run) as journal:
        yield journal
