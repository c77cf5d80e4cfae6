"""Housekeeping does what the settings say, and a broken journal does not end it."""

import asyncio
import contextlib
import logging

from openclaw_rl.cli.serve import keep_retention, retain
from openclaw_rl.config import load_config
from openclaw_rl.journal import Journal
from tests.journal.build import record


def configured(tmp_path, **data):
    flags = {"data.path": str(tmp_path)} | {f"data.{k}": str(v) for k, v in data.items()}
    return load_config(flags, {})


def test_a_turn_without_a_next_state_is_given_up_after_its_time(tmp_path):
    config = configured(tmp_path, next_state_hours=1)
    with Journal.open(config.journal_path) as journal:
        journal.record_turn(record("old", created=1000.0))
        journal.record_turn(record("new", created=4000.0))
        assert retain(config, 1000.0 + 3601) == {"no_next_state": 1}
        assert journal.outcomes().dropped == {"no_next_state": 1}
        assert journal.outcomes().waiting == 1


def test_old_sessions_are_forgotten_only_where_asked(tmp_path):
    config = configured(tmp_path, next_state_hours=1)
    with Journal.open(config.journal_path) as journal:
        journal.record_turn(record("old", created=1000.0))
        retain(config, 1e9)
        assert journal.turn("old") is not None
        assert retain(configured(tmp_path, retention_days=1), 1e9) == {"purged": 1}
        assert journal.turn("old") is None
        assert journal.outcomes().balanced()


async def test_a_journal_that_cannot_be_read_is_said_and_tried_again(tmp_path, caplog):
    config = configured(tmp_path)
    config.journal_path.write_text("no database at all, but long enough to look like one" * 40)
    twice = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Listener(logging.Handler):
        def emit(self, _: logging.LogRecord) -> None:
            if caplog.text.count("retention failed") >= 2:
                loop.call_soon_threadsafe(twice.set)

    listener = Listener()
    logging.getLogger("openclaw_rl.cli").addHandler(listener)
    keeping = asyncio.create_task(keep_retention(config, every=0.0))
    try:
        await asyncio.wait_for(twice.wait(), 10)
    finally:
        logging.getLogger("openclaw_rl.cli").removeHandler(listener)
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
