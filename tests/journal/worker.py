"""A process of the kill tests: `python -m tests.journal.worker ROLE PATH NAME`.

It prints a line for what it did after the journal acknowledged it, until it is killed.
"""

from __future__ import annotations

import sys
import time

from openclaw_rl.journal import Journal
from openclaw_rl.types import Verdict
from tests.journal.build import record

FOLLOWS = ({"role": "user", "content": "and then?"},)


def gateway(journal: Journal, name: str) -> None:
    for n in range(1_000_000):
        turn_id = f"{name}-{n}"
        journal.record_turn(
            record(
                turn_id,
                session_id=name,
                source=f"test:{name}",
                parent_id=f"{name}-{n - 1}" if n else None,
                shares_tokens=n > 0,
                prompt_ids=[i % 5000 for i in range(3 + 5 * n)],
                output_ids=[i % 5000 for i in range(3 + 5 * n, 6 + 5 * n)],
                created=time.time(),
            )
        )
        print("recorded", turn_id, flush=True)
        if n and journal.set_next_state(f"{name}-{n - 1}", FOLLOWS):
            print("followed", f"{name}-{n - 1}", flush=True)


def judge(journal: Journal, name: str) -> None:
    while True:
        # Claims of a killed judge must come back within the test: they last 50 ms.
        for turn in journal.claim(name, 4, time.time(), 0.05):
            score = 0.0 if turn.turn_id.endswith("7") else 1.0
            if journal.write_verdict(turn.turn_id, name, Verdict(score=score)):
                print("judged", turn.turn_id, flush=True)


def trainer(journal: Journal, host: str) -> None:
    """Comes back like a host: an unfinished lease is trained (odd) or given back (even)."""
    rollout = 0
    for rollout, turn_ids in journal.leases(host).items():
        if rollout % 2:
            train(journal, host, rollout, turn_ids)
        else:
            journal.give_back(rollout, host)
    rollout = max(rollout, int(time.time() * 1e6))  # never one that was used before
    while True:
        rollout += 1
        ids = [turn.turn_id for turn in journal.ready(4)]
        if len(ids) == 4 and journal.lease(rollout, host, ids):
            print("leased", rollout, *ids, flush=True)
            train(journal, host, rollout, ids)


def train(journal: Journal, host: str, rollout: int, ids: object) -> None:
    if journal.mark_trained(rollout, host, "2"):
        print("trained", *ids, flush=True)  # type: ignore[misc]


def watch(journal: Journal, _: str) -> None:
    while True:
        outcomes = journal.outcomes()
        print("balanced" if outcomes.balanced() else f"BROKEN {outcomes}", flush=True)


if __name__ == "__main__":
    role, path, name = sys.argv[1:]
    {"gateway": gateway, "judge": judge, "trainer": trainer, "watch": watch}[role](
        Journal.open(path), name
    )
