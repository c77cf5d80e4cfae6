"""A job on real Ray, through the launch script, with `standin.py` in the place of slime's driver:
conversations go on through weight updates, and every turn is learnt once."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from openclaw_rl.journal import Journal
from openclaw_rl.slime.rollout import HOST, Run
from openclaw_rl.types import State
from tests.e2e.system import free_port
from tests.e2e.talkers import Talkers
from tests.fakes.model import tiny_tokenizer
from tests.slime.kit import Router, slime_args

ROOT = Path(__file__).parent.parent.parent
BATCH, UPDATES, TALKERS = 4, 3, 6
SECONDS = 600

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="ray is not installed"),
]


class Job:
    """The launch script under way; `client` talks to its gateway."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "my data"
        self.saved = self.data / "checkpoints"
        self.port = free_port()
        model = self.model = tiny_tokenizer(folder / "model", context_length=32768)
        config = json.loads((model / "config.json").read_text())
        config |= {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
        (model / "config.json").write_text(json.dumps(config))
        self.temporary = tempfile.TemporaryDirectory(prefix="ocrl")  # Ray's sockets: a short path
        self.environ = {
            **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
            "PYTHON": sys.executable,
            "OMP_NUM_THREADS": "1",
            "USE_TORCH": "0",  # the tokenizers of gateway and judge do without, and load faster
            "MODEL_PATH": str(model),
            "DATA_PATH": str(self.data),
            "CKPT_SAVE_DIR": str(self.saved),
            "TRAIN_SCRIPT": str(Path(__file__).with_name("standin.py")),
            "NUM_GPUS": "3",
            "ACTOR_GPUS": "2",
            "TENSOR_PARALLEL": "1",
            "PORT": str(self.port),
            "RAY_TMPDIR": self.temporary.name,
            "CUSTOM_RM_PATH": "openclaw_rl.rewards.feedback.custom_rm",
        }
        self.client = AsyncOpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="-", max_retries=0, timeout=120
        )
        self.lines: list[str] = []

    async def __aenter__(self) -> Job:
        self.process = await asyncio.create_subprocess_exec(
            "bash", str(ROOT / "run_qwen3_7b_openclaw_rl.sh"),
            "--rollout-batch-size", str(BATCH), "--save-interval", "1",
            env=self.environ, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        await self.client.close()
        self.temporary.cleanup()

    async def stop(self) -> None:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        await self.process.wait()
        await self._reading

    async def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError):  # a line longer than the buffer
            while line := await self.process.stdout.readline():
                self.lines.append(line.decode(errors="replace").rstrip())

    def answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def notes(self, did: str) -> list[dict]:
        path = self.saved / "notes.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        return [found for line in lines if (found := json.loads(line))["did"] == did]

    async def until(self, predicate, what: str) -> None:
        """What is waited for happens in other processes, which nobody here hears of."""
        async with asyncio.timeout(SECONDS):
            while not predicate():
                ended = self.process.returncode is not None
                assert not ended, f"ended before {what}:\n" + "\n".join(self.lines[-60:])
                await asyncio.sleep(0.3)

    async def until_served(self) -> None:
        """For `Talkers`, after an error; the test fails for it in the end."""


async def test_case_33_conversations_go_on_and_every_turn_is_learnt_once(tmp_path: Path):
    async with Job(tmp_path) as job:
        await job.until(job.answers, "the gateway listens")
        talkers = Talkers(job)
        talking = [asyncio.create_task(talkers.one(n)) for n in range(TALKERS)]
        try:
            await job.until(
                lambda: len(job.notes("updated")) > UPDATES + 1,  # one before the first rollout
                f"{UPDATES + 1} weight updates",
            )
        finally:
            talkers.stopping = True
            await asyncio.gather(*talking, return_exceptions=True)
        assert talkers.errors == []
        await job.stop()
    assert job.process.returncode != 0
    assert not job.answers()  # nothing outlives the job

    saved = int((job.saved / "latest_checkpointed_iteration.txt").read_text())
    generated = {found["rollout"]: found["turns"] for found in job.notes("generated")}
    learnt = [turn for rollout, turns in generated.items() if rollout <= saved for turn in turns]
    assert saved >= UPDATES - 1
    assert len(learnt) == len(set(learnt)) == BATCH * (saved + 1)

    path = job.data / "journal.db"
    with Journal.open(path, create=False) as journal:
        outcomes = journal.outcomes()
        assert outcomes.balanced()
        assert outcomes.trained >= BATCH * (saved - 1)  # two rollouts may be under way
        assert all(journal.turn(turn) is not None for turn in talkers.acknowledged)
        probed = [one.version for one in journal.versions()]
        assert probed == sorted(set(probed), reverse=True)
        assert len(probed) >= UPDATES

    # As the next run would begin, which has loaded the last checkpoint.
    with Router() as router:
        run = Run.of(
            slime_args(path, BATCH, sglang_router_port=router.port, hf_checkpoint=str(job.model))
        )
        run.begin(saved + 1)
        trained = [
            turn for turn in run.journal.turn_ids() if run.journal.turn(turn).state is State.TRAINED
        ]
        assert sorted(trained) == sorted(learnt)
        assert run.journal.leases(HOST) == {}
        assert run.journal.outcomes().balanced()
        run.close()
