"""One at a time on a journal; what is no such thing is not taken for it."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from openclaw_rl.errors import ConfigError
from openclaw_rl.journal.lock import gateway_lock, trainer_lock

HOLD = """
import sys
from pathlib import Path
from openclaw_rl.errors import ConfigError
from openclaw_rl.journal import trainer_lock
try:
    held = trainer_lock(Path(sys.argv[1]))
except ConfigError as error:
    sys.exit(f"refused: {error}")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "data" / "journal.db"


def elsewhere(journal: Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    words = [sys.executable, "-c", HOLD, str(journal)]
    return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def open_files() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def test_case_55_a_second_trainer_is_refused_until_the_first_is_closed(journal: Path) -> None:
    first = trainer_lock(journal)
    before = open_files()
    with pytest.raises(
        ConfigError, match=f"another trainer is already running on {journal}: stop it"
    ):
        trainer_lock(journal)
    assert open_files() == before
    _, said = elsewhere(journal).communicate(timeout=60)
    assert said.startswith(f"refused: another trainer is already running on {journal}")
    gateway_lock(journal).close()  # another one's lock
    first.close()
    trainer_lock(journal).close()


def test_one_that_is_killed_holds_it_no_more(journal: Path) -> None:
    other = elsewhere(journal)
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="another trainer is already running"):
            trainer_lock(journal)
        other.kill()
    trainer_lock(journal).close()


def test_a_file_system_without_locks_is_not_taken_for_another_trainer(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    before = open_files()
    with pytest.raises(ConfigError) as caught:
        trainer_lock(journal)
    path = journal.with_suffix(".trainer.lock")
    assert str(caught.value) == f"cannot lock {path}: No locks available"
    assert open_files() == before


def test_what_cannot_be_opened_or_made_is_one_line(journal: Path) -> None:
    path = journal.with_suffix(".trainer.lock")
    path.mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"cannot lock {path}: Is a directory"):
        trainer_lock(journal)
    below_a_file = journal.parent / "file" / "journal.db"
    below_a_file.parent.touch()
    with pytest.raises(ConfigError, match=r"cannot lock .*: File exists"):
        trainer_lock(below_a_file)
