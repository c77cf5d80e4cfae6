"""The host beside an engine outside: steps become adapters there, and a mismatch is seen."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.journal import Journal
from openclaw_rl.local import checkpoint
from openclaw_rl.types import State, Verdict
from tests.fakes.vllm import FakeVLLM
from tests.journal.build import record
from tests.local.test_trainer_host import Running, arguments, model_dir, until

pytestmark = pytest.mark.slow

__all__ = ["model_dir"]


def judged_turn(journal: Journal, name: str, version: str, log_prob: float) -> None:
    """A turn whose every token the engine gave this log-prob."""
    ids = [61, 62, 63, 2]
    rec = record(
        name, session_id=name, prompt_ids=[1, 40, 41], output_ids=ids,
        output_logprobs=[log_prob] * len(ids), output_versions=[version] * len(ids),
        node_hash=name, created=time.time(),
    )  # fmt: skip
    journal.record_turn(rec)
    journal.set_next_state(name, ({"role": "user", "content": "ok"},))
    (turn,) = journal.claim("w", 1, time.time(), 60)
    verdict = Verdict(score=1.0 if int(name[1:]) % 2 else -1.0)
    assert journal.write_verdict(turn.turn_id, "w", verdict) is State.READY


def info(journal: Journal, role: str) -> dict[str, Any]:
    found = journal.endpoint(role)
    return dict(found.info) if found is not None else {}


async def test_a_step_becomes_an_adapter_and_a_mismatch_is_shown_and_bounded(
    model_dir: Path,
    tmp_path: Path,
) -> None:
    async with FakeVLLM() as fake:
        args = arguments(
            model_dir, tmp_path, engine_url=fake.url, engine_kind="auto", rollout_batch_size=2,
            use_tis=True, tis_clip=2.0, max_logprob_diff=30.0,
        )  # fmt: skip

        def scenario() -> None:
            with Journal.open(args.journal_path) as journal, Running(args):
                assert info(journal, "policy")["weight_version"] == "0"
                assert info(journal, "teacher") == {
                    **info(journal, "judge"), "engine": "vllm", "weight_version": "base"
                }  # fmt: skip
                for n in range(2):
                    judged_turn(journal, f"t{n}", "0", -6.0)
                until(lambda: info(journal, "policy")["weight_version"] == "1")
                name = info(journal, "policy")["adapter"]
                folder = Path(fake.adapters[name])
                assert folder.name == checkpoint.name_of(1)
                about = json.loads((folder / "adapter_config.json").read_text())
                assert about["peft_type"] == "LORA"
                until(lambda: journal.outcomes().trained == 2 and info(journal, "trainer"))
                gap = info(journal, "trainer")
                assert gap["tokens"] == 8
                assert 0 < gap["mean"] <= gap["max"]
                assert gap["skipped"] is None
                assert 0 <= gap["truncated"] <= 1
                for n in range(2, 4):
                    judged_turn(journal, f"t{n}", "1", -60.0)
                until(lambda: journal.outcomes().dropped.get("step_skipped") == 2)
                until(lambda: info(journal, "trainer")["skipped"] == "logprob_diff")
                assert info(journal, "policy")["weight_version"] == "1"
                assert journal.outcomes().counters["step_skipped_logprob_diff"] == 1

        await asyncio.to_thread(scenario)


@pytest.mark.parametrize("kind", ["embedded"])
async def test_the_embedded_engine_is_what_there_is_without_an_address(
    model_dir: Path,
    tmp_path: Path,
    kind: str,
) -> None:
    args = arguments(model_dir, tmp_path, engine_url=None, engine_kind=kind)

    def scenario() -> None:
        with Journal.open(args.journal_path) as journal, Running(args):
            assert info(journal, "policy")["engine"] == kind
            assert "adapter" not in info(journal, "policy")

    await asyncio.to_thread(scenario)
