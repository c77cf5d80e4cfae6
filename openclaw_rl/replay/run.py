"""Reads files into the journal, once: `openclaw-rl replay`, and `up` with a data folder's own.

Guarantees: all files are read before anything is written, so a broken line changes nothing; a
turn that is in the journal already, replayed or served (an export of it lies in the folder), is
left alone; a dry run writes nothing at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from openclaw_rl.journal import Journal
from openclaw_rl.replay import files
from openclaw_rl.replay.turns import Reader
from openclaw_rl.types import Turn

_ROLE = "replay"
"""Under this name the journal keeps which files were read."""


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

    def describe(self, dry_run: bool = False) -> str:
        """The counts in words, left out by reason."""
        verb = "would be added" if dry_run else "added"
        reasons = sorted(self.left_out.items(), key=lambda item: (-item[1], item[0]))
        left_out = "".join(f", {n} {reason}" for reason, n in reasons if n)
        return f"{self.added} of {self.replies} replies {verb}{left_out}"


def new_files(folder: Path, journal_path: Path) -> list[Path]:
    """The files of past conversations in a data folder that no `replay` into this journal has read
    as they are now. Costs a look at each file's size and time, and reads none of them.

    Raises `ReplayError` where a folder cannot be looked into.
    """
    if not folder.is_dir():
        return []
    with _open(journal_path, dry_run=True) as journal:
        read = _read_before(journal)
    return [file for file in files.find(folder) if read.get(str(file.resolve())) != _stamp(file)]


def replay(
    paths: Sequence[Path],
    reader: Reader,
    journal_path: Path,
    now: float,
    *,
    dry_run: bool = False,
    emit: Callable[[str], None] = lambda line: None,
) -> Replay:
    """Bring the conversations in the files `paths` into the journal; `emit` gets a line a file.

    Raises `ReplayError` (file:line) before anything is written.
    """
    stamps = {file: _stamp(file) for file in paths}
    files.check(stamps)
    total = Replay(len(stamps))
    with _open(journal_path, dry_run) as journal:
        known = journal.known() if journal is not None else set()
        for number, file in enumerate(stamps, 1):
            one = Replay()
            for past in files.read(file):
                one.conversations += 1
                turns = reader.turns(past, now, one.left_out)
                new = list(_new(turns, known))
                one.added += len(new)
                one.left_out["known"] += len(turns) - len(new)
                if journal is not None and not dry_run:
                    with journal.batch():
                        for turn in new:
                            journal.record_turn(turn)
                            journal.set_next_state(turn.turn_id, turn.next_state or ())
            emit(f"{number} of {len(stamps)} · {file}: {one.describe(dry_run)}")
            total.conversations += one.conversations
            total.added += one.added
            total.left_out += one.left_out
        if journal is not None and not dry_run:
            read = {str(file.resolve()): stamp for file, stamp in stamps.items()}
            journal.publish(_ROLE, "", {"read": _read_before(journal) | read}, now)
    return total


def _new(turns: Iterable[Turn], known: set[str]) -> Iterator[Turn]:
    """The turns that are not there yet, a parent that is there under another id left out."""
    elsewhere = set()
    for turn in turns:
        if turn.node_hash in known:
            elsewhere.add(turn.turn_id)
        elif turn.turn_id not in known:
            known.add(turn.turn_id)
            if turn.parent_id in elsewhere:
                turn.parent_id, turn.matched, turn.shares_tokens = None, 0, False
            yield turn


def _open(path: Path, dry_run: bool) -> AbstractContextManager[Journal | None]:
    if dry_run and not path.exists():
        return nullcontext()
    return Journal.open(path, create=not dry_run)


def _stamp(file: Path) -> list[int]:
    """What tells a changed file: its size and time."""
    found = file.stat()
    return [found.st_size, found.st_mtime_ns]


def _read_before(journal: Journal | None) -> dict[str, list[int]]:
    """The files that were read into this journal, with their stamps as they were then."""
    found = journal.endpoint(_ROLE) if journal is not None else None
    return dict(found.info["read"]) if found is not None else {}
