"""Real slime on the CPU, in a process of its own: `RolloutManager`'s conversion and split,
the advantage computation, the logging and `loss_function`, on a journal's turns.

Only Ray's object store is replaced (by pickling, which is what it does), and the forward pass is
the tests' own small model. `check` writes what it saw; `test_real_slime.py` judges it.
"""

from __future__ import annotations

import math
import pickle
import sys
import types
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.losses.slime_dir import SLIME_DIR
from tests.slime.kit import Prefix, conversations, fill_journal, slime_args

DP = 2
LOSSES = ("grpo_loss", "opd_loss", "combined_loss")
TRAIN_KEYS = (  # what slime's train step asks the iterator for
    "tokens", "total_lengths", "response_lengths", "loss_masks", "log_probs", "ref_log_probs",
    "values", "advantages", "returns", "rollout_log_probs", "teacher_log_probs",
    "rollout_mask_sums",
)  # fmt: skip


def install() -> None:
    """Make slime importable: its folder, and a stand-in for the image library that SGLang's
    configurations import and that has no build for a CPU torch."""
    sys.path.insert(0, SLIME_DIR)
    import transformers  # noqa: F401  # looks for torchvision itself, and must find none

    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional",
                 "torchvision.io"):  # fmt: skip
        if name not in sys.modules:
            sys.modules[name] = _Anything(name)
    import ray

    ray.put = lambda value, **_: pickle.dumps(value)
    ray.get = lambda value, **_: pickle.loads(value)


class _Anything(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def arguments(journal: Path, turns: int, **given: Any) -> Namespace:
    """What slime's own code reads beyond our hooks."""
    fields: dict[str, Any] = {
        "rollout_function_path": "openclaw_rl.slime.generate_rollout",
        "actor_num_gpus_per_node": DP,
        "use_dynamic_batch_size": True, "max_tokens_per_gpu": 64, "micro_batch_size": 1,
        "balance_data": False, "balance_by_flops": False, "rollout_num_gpus": 1,
        "load_debug_rollout_data": None, "save_debug_rollout_data": None,
        "debug_rollout_only": False, "ci_test": False, "use_fault_tolerance": False,
        "custom_rollout_log_function_path": None, "log_reward_category": None,
        "wandb_always_use_train_step": False, "use_wandb": False, "use_tensorboard": False,
        "advantage_estimator": "grpo", "rewards_normalization": False, "kl_coef": 0.0,
        "use_rollout_logprobs": False, "use_opd": False, "normalize_advantages": False,
        "log_multi_turn": False, "log_passrate": False, "log_correct_samples": False,
        "recompute_loss_function": False, "allgather_cp": False, "log_probs_chunk_size": -1,
        "entropy_coef": 0.01, "eps_clip": 0.2, "eps_clip_high": 0.28, "w_rl": 0.7, "w_opd": 1.3,
        "use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "use_unbiased_kl": False,
    }  # fmt: skip
    return slime_args(journal, turns, **{**fields, **given})


def manager(args: Namespace) -> Any:
    """slime's `RolloutManager` without engines."""
    from slime.ray.rollout import RolloutManager
    from slime.utils.misc import load_function

    made = object.__new__(RolloutManager.__ray_metadata__.modified_class)
    made.args, made.servers, made.data_source, made._health_monitors = args, {}, None, []
    made.generate_rollout = load_function(args.rollout_function_path)
    made.custom_reward_post_process_func = None
    convert = args.custom_convert_samples_to_train_data_path
    made.custom_convert_samples_to_train_data_func = load_function(convert) if convert else None
    made.set_train_parallel_config(
        {"dp_size": DP, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    )
    return made


def separate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """The turns of `args.turns`, each as a sample of its own: stock slime's way."""
    from slime.rollout.base_types import RolloutFnTrainOutput
    from slime.utils.types import Sample

    taught = any("teacher_log_probs" in verdict for _, verdict in args.turns)
    groups = []
    for index, (turn, verdict) in enumerate(args.turns):
        length = len(turn.output_ids)
        values = verdict.get("teacher_log_probs") or [math.nan] * length
        sample = Sample(
            index=index, group_index=index, rollout_id=index,
            tokens=[*turn.prompt_ids, *turn.output_ids], response_length=length,
            loss_mask=[1] * length, reward=float(verdict["score"]),
            rollout_log_probs=list(turn.output_logprobs), status=Sample.Status.COMPLETED,
            teacher_log_probs=values if taught else None,
        )  # fmt: skip
        groups.append([sample])
    return RolloutFnTrainOutput(groups, {})


def log_probs(model: Prefix, tokens: Tensor, response: int) -> Tensor:
    scores = model(tokens)[-response - 1 : -1].log_softmax(-1)
    return scores.gather(1, tokens[-response:, None])[:, 0].float().detach()


def ranks(args: Namespace, old: Prefix, reference: Prefix) -> list[dict[str, Any]]:
    """One rollout through slime, up to what each data-parallel rank trains on."""
    from slime.backends.megatron_utils.loss import compute_advantages_and_returns
    from slime.utils.data import process_rollout_data

    refs = manager(args).generate(0)
    found = []
    for rank in range(DP):
        data = process_rollout_data(args, refs, rank, DP)
        pairs = list(zip(data["tokens"], data["response_lengths"], strict=True))
        data["log_probs"] = [log_probs(old, *pair) for pair in pairs]
        data["ref_log_probs"] = [log_probs(reference, *pair) for pair in pairs]
        compute_advantages_and_returns(args, data)
        found.append(data)
    return found


def step_gradient(args: Namespace, model: Prefix, data: list[dict[str, Any]]) -> Tensor:
    """The gradient of the one optimiser step, as Megatron puts micro-batches and ranks together."""
    from slime.backends.megatron_utils.data import DataIterator
    from slime.backends.megatron_utils.loss import loss_function

    total, tokens = torch.zeros((), dtype=torch.float64), 0.0
    for own in data:
        iterator = DataIterator(own, own["micro_batch_indices"])
        (number,) = own["num_microbatches"]
        for _ in range(number):
            batch = iterator.get_next(TRAIN_KEYS)
            batch["unconcat_tokens"] = batch["tokens"]
            logits = torch.cat([model(one) for one in batch["tokens"]])[None].float()
            loss, normaliser, _ = loss_function(
                args, batch, number, own["global_batch_sizes"][0], logits
            )
            if args.calculate_per_token_loss:
                tokens += float(normaliser)
                total = total + loss
            else:
                total = total + loss / number  # Megatron's mean over micro-batches
    grads = torch.autograd.grad(total / (tokens or 1.0), list(model.parameters()))
    return torch.cat([grad.flatten() for grad in grads])


def one_case(folder: Path, seed: int, per_token: bool) -> dict[str, Any]:
    """Merged and separate, through all of it."""
    from slime.observability import train_metric_utils

    path = folder / f"{seed}-{per_token}" / "journal.db"
    path.parent.mkdir()
    turns = conversations(seed, sessions=4)
    ready = set(fill_journal(path, turns))
    args = arguments(path, len(ready), calculate_per_token_loss=per_token)
    plain = Namespace(**vars(args))
    plain.turns = [(turn, verdict) for turn, verdict in turns if turn.turn_id in ready]
    plain.rollout_function_path = "tests.slime.real.separate_rollout"
    plain.custom_convert_samples_to_train_data_path = None
    plain.custom_advantage_function_path = None
    models = Prefix(seed), Prefix(seed + 100), Prefix(seed + 200)
    model, old, reference = models
    with torch.no_grad():  # an old policy near the current one
        for mine, former in zip(model.parameters(), old.parameters(), strict=True):
            former.copy_(mine + 0.02 * former)
    merged, separate = ranks(args, old, reference), ranks(plain, old, reference)
    logged: list[dict[str, float]] = []
    tracking, log = train_metric_utils.logging_utils, train_metric_utils.logging_utils.log
    tracking.log = lambda _args, values, **_: logged.append(values)
    for data in merged:
        train_metric_utils.log_rollout_data(0, args, data)
    tracking.log = log
    args.openclaw_rl_run.close()
    gradients = {}
    for name in LOSSES:
        args.custom_loss_function_path = f"openclaw_rl.losses.{name}"
        plain.custom_loss_function_path = args.custom_loss_function_path
        pair = step_gradient(args, model, merged), step_gradient(plain, model, separate)
        gradients[name] = pair
    keys = ("rollout_ids", "total_lengths", "response_lengths", "loss_masks", "advantages")
    return {
        "gradients": gradients,
        "turns": len(ready),
        "ranks": [{key: data[key] for key in keys} for data in merged],
        "values": [[float(value) for value in data["values"]] for data in merged],
        "weights": [[value.weights for value in data["values"]] for data in merged],
        "logged": logged,
        "distinct": _distinct(plain.turns),
        "trained": sum(int(mask.sum()) for data in merged for mask in data["loss_masks"]),
        "taught": sum(
            sum(map(math.isfinite, verdict.get("teacher_log_probs") or ()))
            for _, verdict in plain.turns
        ),
    }


def _distinct(turns: Any) -> int:
    return sum(len(turn.output_ids) for turn, _ in turns)


def check(rank: int, folder: str, cases: list[tuple[int, bool]]) -> None:
    """Run `cases` and save what came of them."""
    torch.set_num_threads(1)
    install()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    from megatron.core import mpu

    mpu.initialize_model_parallel()
    results: dict[str, Any] = {
        "cases": [one_case(Path(folder), seed, per_token) for seed, per_token in cases]
    }
    from tests.slime.contract_paths import generate_rollout

    found = generate_rollout(None, 0, None, evaluation=True)
    talk = found.data["talk"]
    results["evaluation"] = {
        "rewards": talk["rewards"],
        "lengths": [sample.response_length for sample in talk["samples"]],
        "metrics": found.metrics,
    }
    torch.save(results, Path(folder) / "results.pt")
    dist.destroy_process_group()
