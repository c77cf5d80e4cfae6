"""Real processes on one journal, killed with SIGKILL in the middle of their work."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from openclaw_rl.journal import Journal
from openclaw_rl.types import State

pytestmark = pytest.mark.slow

ROLES = [("gateway", "g1"), ("gateway", "g2"), ("judge", "j1"), ("trainer", "h1"), ("watch", "w")]


class Fleet:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.outputs: list[Path] = []
        self.running: dict[tuple[str, str], subprocess.Popen[bytes]] = {}
        self.round = 0

    def start(self, role: str, name: str) -> None:
        self.round += 1
        # A gateway that comes back speaks for new sessions: names are used once.
        unique = f"{name}x{self.round}" if role == "gateway" else name
        output = self.path.parent / f"out-{self.round}"
        self.outputs.append(output)
        with output.open("wb") as file:
            self.running[role, name] = subprocess.Popen(
                [sys.executable, "-m", "tests.journal.worker", role, str(self.path), unique],
                stdout=file,
            )

    def kill(self, role: str, name: str) -> None:
        process = self.running.pop((role, name))
        assert process.poll() is None, f"{role} died by itself"
        process.kill()
        process.wait()

    def lines(self) -> list[list[str]]:
        # A last line that was cut off by the kill was not acknowledged to anybody.
        text = [o.read_text().rpartition("\n")[0].splitlines() for o in self.outputs]
        return [line.split() for lines in text for line in lines]

    def wait_for(self, word: str, count: int, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while sum(line[0] == word for line in self.lines()) < count:
            assert time.monotonic() < deadline, f"fewer than {count} x {word}"
            time.sleep(0.02)


@pytest.fixture
def fleet(tmp_path: Path):
    fleet = Fleet(tmp_path / "journal.db")
    yield fleet
    for process in fleet.running.values():
        process.kill()
        process.wait()


def test_case_33_nothing_acknowledged_is_lost_and_nothing_trains_twice(fleet: Fleet):
    rng = random.Random(33)
    for role, name in ROLES:
        fleet.start(role, name)
    fleet.wait_for("trained", 3)
    for _ in range(3):
        for role, name in ROLES[:4]:
            time.sleep(rng.uniform(0.0, 0.03))  # a random moment of its work, not a wait
            fleet.kill(role, name)
            fleet.start(role, name)
    done = sum(line[0] == "trained" for line in fleet.lines())
    fleet.wait_for("trained", done + 3)  # all are back at work without help
    for role, name in ROLES:
        fleet.kill(role, name)

    lines = fleet.lines()
    assert not [line for line in lines if line[0] == "BROKEN"]
    assert [line for line in lines if line[0] == "balanced"]
    acknowledged = {
        word: [turn for line in lines if line[0] == word for turn in line[1:]]
        for word in ("recorded", "followed", "judged", "trained")
    }
    assert max(Counter(acknowledged["trained"]).values()) == 1
    with Journal.open(fleet.path, create=False) as journal:
        outcomes = journal.outcomes()
        assert outcomes.balanced()
        known = set(journal.turn_ids())
        assert set(acknowledged["recorded"]) <= known
        # At most the turn each killed gateway was writing is known without its acknowledgment.
        assert len(known) - len(acknowledged["recorded"]) <= 2 * 4
        ends = {turn_id: journal.turn(turn_id) for turn_id in known}
        assert all(ends[t].next_state is not None for t in acknowledged["followed"])
        assert all(ends[t].verdict is not None for t in acknowledged["judged"])
        assert all(ends[t].state is State.TRAINED for t in acknowledged["trained"])
        for turn in ends.values():  # tails still lead to the whole prompt
            assert len(turn.prompt_ids) == 3 + 5 * int(turn.turn_id.split("-")[1])
        assert outcomes.trained <= len(acknowledged["trained"]) + 4 * 4
        if outcomes.leased:
            [lease] = journal.leases("h1")
            assert journal.give_back(lease, "h1") == outcomes.leased
            assert journal.outcomes().leased == 0


def test_processes_that_open_a_new_journal_at_once_all_get_it(tmp_path: Path):
    code = (
        "import sys; from openclaw_rl.journal import Journal\n"
        "with Journal.open(sys.argv[1]) as journal: journal.count('opened')"
    )
    path = tmp_path / "new" / "journal.db"
    processes = [subprocess.Popen([sys.executable, "-c", code, str(path)]) for _ in range(6)]
    assert [process.wait(60) for process in processes] == [0] * 6
    with Journal.open(path, create=False) as journal:
        assert journal.outcomes().counters == {"opened": 6}
