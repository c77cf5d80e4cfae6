"""What slime's contract tests are pointed at: our rollout function, given what slime would give.

The contracts call it with `args=None`. Live turns cannot be made of nothing, so this is
`openclaw_rl.slime.generate_rollout` with a journal of ready turns and an engine behind it.
Loaded as a plugin (`-p`) before the contracts put stand-ins in the place of what is installed here.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import threading
from argparse import Namespace
from pathlib import Path
from typing import Any

from openclaw_rl.rewards import exit_code
from openclaw_rl.slime import generate_rollout as ours
from tests.slime import real

real.install()

from tests.fakes.engine import FakeEngine  # noqa: E402
from tests.fakes.model import tiny_tokenizer  # noqa: E402
from tests.journal.build import judged, record  # noqa: E402


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Our function, with slime's arguments where the contract leaves them out."""
    assert args is None, "outside the contracts, name openclaw_rl.slime.generate_rollout itself"
    with tempfile.TemporaryDirectory() as folder, Engine() as engine:
        args = _args(Path(folder), engine.port)
        if evaluation:
            return ours(args, rollout_id, data_source, evaluation=True)
        _turns(Path(folder) / "journal.db")
        try:
            return ours(args, rollout_id, data_source, evaluation=False)
        finally:
            args.openclaw_rl_run.close()


async def reward(args: Any, sample: Any, **kwargs: Any) -> Any:
    """One of our rewards as slime gets it: a number, where the judge takes a dict."""
    sample.metadata.setdefault("next_state", [])
    return (await exit_code.custom_rm(args, sample))["score"] or 0.0


async def half_a_reward(args: Any, sample: Any, **kwargs: Any) -> float:
    """A reward of an evaluation."""
    return 0.5


class Engine:
    """The fake engine on a loop of its own: slime's evaluation blocks the calling thread."""

    def __enter__(self) -> Engine:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._engine = FakeEngine()
        self._do(self._engine.start())
        self.port = int(self._engine.url.rpartition(":")[2])
        return self

    def _do(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def __exit__(self, *_: object) -> None:
        self._do(self._engine.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


def _args(folder: Path, port: int) -> Namespace:
    from slime.utils.eval_config import EvalDatasetConfig
    from slime.utils.http_utils import init_http_client

    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"Question {n}?"}) + "\n" for n in range(4)))
    data = EvalDatasetConfig(
        name="talk", path=str(prompts), input_key="input", n_samples_per_eval_prompt=1,
        temperature=1.0, top_p=1.0, top_k=-1, max_response_len=16, metadata_key="metadata",
        custom_rm_path="tests.slime.contract_paths.half_a_reward",
    )  # fmt: skip
    args = real.arguments(
        folder / "journal.db", 2, n_samples_per_prompt=2, global_batch_size=4,
        hf_checkpoint=str(tiny_tokenizer(folder / "model")), sglang_router_port=port,
        eval_datasets=[data], eval_max_prompt_len=None, eval_reward_key=None, eval_top_p=None,
        sglang_server_concurrency=4, rollout_num_gpus_per_engine=1, sglang_dp_size=1,
        rollout_top_k=-1, rollout_max_response_len=16, rollout_stop=None, group_rm=False,
        rollout_stop_token_ids=None, rollout_skip_special_tokens=True, rollout_seed=1,
        apply_chat_template=True, apply_chat_template_kwargs={}, multimodal_keys=None,
        partial_rollout=False, custom_generate_function_path=None, rm_type=None,
        use_rollout_routing_replay=False, use_distributed_post=False, num_gpus_per_node=1,
        rollout_sample_hook_path=None, rollout_external=False, sglang_config=None,
    )  # fmt: skip
    init_http_client(args)
    return args


def _turns(path: Path) -> None:
    from openclaw_rl.journal import Journal

    with Journal.open(path) as journal:
        for n in range(4):
            judged(journal, record(f"t{n}", session_id=f"s{n % 3}", created=100.0 + n))


os.environ.setdefault("SLIME_CONTRACT_ROLLOUT_FUNCTION_PATH", f"{__name__}.generate_rollout")
os.environ.setdefault("SLIME_CONTRACT_EVAL_FUNCTION_PATH", f"{__name__}.generate_rollout")
os.environ.setdefault("SLIME_CONTRACT_CUSTOM_RM_PATH", f"{__name__}.reward")
os.environ.setdefault(
    "SLIME_CONTRACT_CUSTOM_CONVERT_SAMPLES_TO_TRAIN_DATA_PATH",
    "openclaw_rl.slime.convert_samples_to_train_data",
)
