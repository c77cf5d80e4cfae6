"""The judge as a process: started, stopped, killed and started again (CASE 33)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from openclaw_rl.errors import HookError
from openclaw_rl.journal.store import Journal
from openclaw_rl.judge.worker import run_judge
from tests.judge.helpers import add_turn, make_args, until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

PROGRAM = """
import asyncio, logging, sys
from openclaw_rl.judge import worker
from tests.judge.helpers import make_args
worker.CLAIM_SECONDS = 1.0
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
args = make_args(sys.argv[1], custom_rm_path=sys.argv[2], judge_concurrency=2)
asyncio.run(worker.run_judge(args))
"""


def start(path: Path, reward: Path | str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path), str(reward)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


async def test_the_service_judges_and_stops(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    args = make_args(path, custom_rm_path="openclaw_rl.rewards.feedback")
    with Journal.open(path) as journal:
        add_turn(journal, "t1", "Perfect, thanks.")
        running = asyncio.create_task(run_judge(args))
        await asyncio.to_thread(until, lambda: journal.outcomes().ready == 1)
        add_turn(journal, "t2", "What is snow?")
        await asyncio.to_thread(until, lambda: journal.outcomes().dropped)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(running, 20)
        assert journal.outcomes().dropped == {"no_signal": 1}


async def test_a_reward_that_cannot_be_loaded_is_one_clear_error(tmp_path: Path) -> None:
    args = make_args(tmp_path / "j.db", custom_rm_path="./none.py")
    with pytest.raises(HookError, match="--custom-rm-path"):
        await run_judge(args)
    assert not (tmp_path / "j.db").exists()


def test_case_33_a_killed_judge_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    stuck = tmp_path / "stuck.py"
    stuck.write_text("import time\ndef custom_rm(args, sample, **kw):\n    time.sleep(60)\n")
    with Journal.open(path) as journal:
        for n in range(3):
            add_turn(journal, f"t{n}", "Perfect, thanks.")
        first = start(path, stuck)
        try:
            until(lambda: (journal.turn("t0") or 0).attempts == 1)  # type: ignore[union-attr]
        finally:
            first.kill()
            first.communicate()
        second = start(path, "openclaw_rl.rewards.feedback")
        try:
            until(lambda: journal.outcomes().ready == 3)
            second.send_signal(signal.SIGTERM)
            output, _ = second.communicate(timeout=20)
        finally:
            second.kill()
        assert second.returncode == 0
        assert output.count("verdict turn=") == 3
        assert "Perfect" not in output
        assert journal.outcomes().balanced()


def test_a_stopped_judge_gives_its_turns_back_at_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    stuck = tmp_path / "stuck.py"
    stuck.write_text("import time\ndef custom_rm(args, sample, **kw):\n    time.sleep(60)\n")
    with Journal.open(path) as journal:
        add_turn(journal, "t0", "x")
        judge = start(path, stuck)
        try:
            until(lambda: (journal.turn("t0") or 0).attempts == 1)  # type: ignore[union-attr]
            judge.send_signal(signal.SIGTERM)
            judge.communicate(timeout=20)
        finally:
            judge.kill()
        assert judge.returncode == 0
        assert journal.turn("t0").attempts == 0  # type: ignore[union-attr]
        assert len(journal.claim("next", 1, time.time(), 60.0)) == 1
