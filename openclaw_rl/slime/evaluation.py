"""Evaluation: slime's own, on its prompt sets, rewarded by our reward hooks.

Guarantees: prompts, sampling and data sets are slime's (`--eval-prompt-data`, `--eval-config`);
the reward is the hook of `--custom-rm-path` in every form that the judge takes. A sample that
cannot be scored is left out and counted; it never ends the run.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
from typing import Any

from openclaw_rl.config import Config, hook_args
from openclaw_rl.errors import ConfigError, HookError
from openclaw_rl.hooks import load_hook
from openclaw_rl.journal import Journal
from openclaw_rl.judge.models import Models
from openclaw_rl.judge.reward import call_reward, read_reward, where_of

log = logging.getLogger("openclaw_rl.slime")

_REWARD = "openclaw_rl.slime.evaluation.scored"


def evaluate(args: Any, rollout_id: int, data_source: Any) -> Any:
    """slime's `RolloutFnEvalOutput` for `args.eval_datasets`."""
    try:
        from slime.rollout.base_types import RolloutFnEvalOutput
        from slime.rollout.sglang_rollout import generate_rollout
        from slime.utils.async_utils import run
    except ModuleNotFoundError as error:
        raise HookError(f"evaluation runs inside slime only: {error}") from error
    if args is None or not getattr(args, "eval_datasets", None):
        raise ConfigError("evaluation needs --eval-prompt-data or --eval-config")
    # slime's arguments, and ours where slime's configuration does not name them.
    given = {name: value for name, value in vars(args).items() if value is not None}
    ours = copy.copy(args)
    ours.__dict__.update(vars(hook_args(Config())) | given)
    ours.rollout_global_dataset = True  # which slime asserts, and evaluation does not use
    ours.eval_datasets = [_with_our_reward(dataset) for dataset in args.eval_datasets]
    journal = Journal.open(args.journal_path) if getattr(args, "journal_path", None) else None
    models = ours.judge_models = Models(ours, journal)
    try:
        output = generate_rollout(ours, rollout_id, data_source, evaluation=True)
    finally:
        run(models.close())
        if journal is not None:
            journal.close()
    metrics = dict(output.metrics or {})
    data = {}
    for name, found in output.data.items():
        kept = [i for i, reward in enumerate(found["rewards"]) if math.isfinite(reward)]
        metrics[f"eval/{name}-unscored"] = len(found["rewards"]) - len(kept)
        if kept:  # slime divides by their number
            data[name] = {key: [values[i] for i in kept] for key, values in found.items()}
    return RolloutFnEvalOutput(data=data, metrics=metrics)


def _with_our_reward(dataset: Any) -> Any:
    """slime loads dotted paths to coroutine functions only; ours loads the rest."""
    if not dataset.custom_rm_path:
        return dataset
    known = {**dataset.metadata_overrides, "custom_rm_path": dataset.custom_rm_path}
    return dataclasses.replace(dataset, custom_rm_path=_REWARD, metadata_overrides=known)


async def scored(args: Any, sample: Any, **kwargs: Any) -> Any:
    """The reward of a sample by the hook its metadata names: a float, or a dict with the key that
    slime will look up; NaN where there is none."""
    hook = load_hook(
        sample.metadata["custom_rm_path"], default_name="custom_rm", flag="--custom-rm-path"
    )
    key = getattr(args, "eval_reward_key", None) or getattr(args, "reward_key", None)
    try:
        result = await call_reward(hook, args, _seen(sample))
        score = read_reward(result, sample.response_length, key).score
    except Exception as error:
        log.warning("[slime] an evaluation sample could not be scored: %s", where_of(error))
        score = None
    value = math.nan if score is None else score
    return {key: value} if key else value


def _seen(sample: Any) -> Any:
    """`sample` with the metadata that a judge reads of a turn."""
    seen = copy.copy(sample)
    prompt = sample.prompt
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    reply = {"role": "assistant", "content": sample.response}
    turn = {"messages": messages, "reply": reply, "next_state": [], "tools": []}
    seen.metadata = {**turn, **sample.metadata}
    return seen
