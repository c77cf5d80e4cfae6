"""A process with two connections to the journal (a host, and its rollout function)."""

import subprocess
import sys
from pathlib import Path

from openclaw_rl.journal import Journal

_VISIT = "import sys; from openclaw_rl.journal import Journal; Journal.open(sys.argv[1]).close()"
_COUNT = (
    "import sys; from openclaw_rl.journal import Journal\n"
    "with Journal.open(sys.argv[1]) as journal: journal.count('visits')"
)


def _elsewhere(code: str, path: Path) -> None:
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


def test_a_second_connection_leaves_the_locks_of_the_first(tmp_path: Path):
    path = tmp_path / "journal.db"
    with Journal.open(path) as first:
        Journal.open(path).close()
        # Were the first one's locks gone, the visitor would take itself for the last one there
        # and remove the write-ahead log that the first still reads and writes.
        _elsewhere(_VISIT, path)
        _elsewhere(_COUNT, path)
        first.count("visits")
        assert first.outcomes().counters["visits"] == 2
    with Journal.open(path) as afterwards:
        assert afterwards.outcomes().counters["visits"] == 2
