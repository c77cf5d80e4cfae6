"""What the tests of slime's hooks share: its `args`, a router that names a version, its sums."""

from __future__ import annotations

import json
import random
import threading
from argparse import Namespace
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openclaw_rl.journal import Journal
from openclaw_rl.types import Turn
from tests.journal.build import judged, record

VOCAB, HIDDEN = 29, 7


def slime_args(journal: Path, turns: int, **given: Any) -> Namespace:
    """slime's arguments as the launch scripts set them, for `turns` turns a rollout."""
    model = journal.parent / "model"
    model.mkdir(parents=True, exist_ok=True)
    if not (model / "config.json").exists():
        (model / "config.json").write_text("{}")
    fields: dict[str, Any] = {
        "journal_path": str(journal),
        "hf_checkpoint": str(model),
        "session_share": 1.0,
        "max_staleness": None,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_batch_size": turns,
        "n_samples_per_prompt": 1,
        "global_batch_size": turns,
        "reward_key": None,
        "calculate_per_token_loss": False,
        "loss_type": "custom_loss",
        "custom_loss_function_path": "openclaw_rl.losses.grpo_loss",
        "custom_convert_samples_to_train_data_path": (
            "openclaw_rl.slime.convert_samples_to_train_data"
        ),
        "custom_advantage_function_path": "openclaw_rl.slime.compute_advantages",
        "custom_rm_path": None,
        "actor_num_nodes": 1,
        "actor_num_gpus_per_node": 1,
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": 1,
        "start_services": [],
        "rollout_poll_seconds": 0.01,
        "guards": False,
        "save": None,
        "save_interval": None,
    }
    return Namespace(**{**fields, **given})


class Router:
    """Stands for slime's router of the policy: `/get_model_info` names `version`, and like a real
    sglang-router it knows no `/model_info`."""

    def __init__(self, version: str = "1") -> None:
        self.version = version
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps({"weight_version": outer.version, "model_path": "m"}).encode()
                self.send_response(200 if self.path == "/get_model_info" else 404)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def __enter__(self) -> Router:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def until(there: Callable[[], object]) -> None:
    """For what other processes and threads do, which nobody tells us."""
    pause = threading.Event()
    for _ in range(600):
        if there():
            return
        pause.wait(0.1)
    raise AssertionError("it never happened")


def conversations(seed: int, sessions: int = 3, length: int = 6) -> list[tuple[Turn, dict]]:
    """Turns with their verdicts: sessions that keep their history, that fork, whose turns carry
    no signal here and there (context only), with and without a teacher."""
    rng = random.Random(seed)

    def ids(n: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(n)]

    found: list[tuple[Turn, dict]] = []
    for session in range(sessions):
        turns: list[Turn] = []
        for n in range(rng.randint(1, length)):
            fork = rng.random() < 0.2
            parent = None if not turns else rng.choice(turns) if fork else turns[-1]
            before = [*parent.prompt_ids, *parent.output_ids] if parent else []
            prompt, output = [*before, *ids(rng.randint(1, 5))], ids(rng.randint(1, 6))
            turn = record(
                f"s{session}-{n}",
                session_id=f"s{session}",
                parent_id=parent.turn_id if parent else None,
                shares_tokens=parent is not None,
                prompt_ids=prompt,
                output_ids=output,
                output_logprobs=[-rng.random() for _ in output],
                output_versions=["1"] * len(output),
                created=100.0 + len(found),
            )
            turns.append(turn)
            verdict: dict[str, Any] = {"score": rng.choice([-1.0, 1.0])}
            if rng.random() < 0.4:
                values = [rng.choice([-rng.random(), float("nan")]) for _ in output]
                verdict["teacher_log_probs"] = [-0.5, *values[1:]]
            if rng.random() < 0.15 and found:
                verdict = {"score": 0.0}  # no signal: context only
            found.append((turn, verdict))
    return found


def fill_journal(path: Path, turns: Sequence[tuple[Turn, dict]]) -> list[str]:
    """Record and judge; the ids of the ready ones."""
    with Journal.open(path) as journal:
        for turn, verdict in turns:
            if verdict.get("score") == 0.0 and "teacher_log_probs" not in verdict:
                journal.record_turn(turn)
                journal.drop(turn.turn_id, "no_signal", 300.0)
            else:
                judged(journal, turn, **verdict)
        return [turn.turn_id for turn in journal.ready()]


class Prefix(torch.nn.Module):
    """A model whose every logit depends on all tokens before it, and on nothing else."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = torch.nn.Parameter(
            torch.randn(VOCAB, HIDDEN, generator=generator).double()
        )
        self.output = torch.nn.Parameter(torch.randn(HIDDEN, VOCAB, generator=generator).double())

    def forward(self, tokens: Tensor) -> Tensor:
        """`[T]` ids to `[T, V]` logits."""
        places = torch.arange(1, tokens.numel() + 1, dtype=torch.float64)[:, None]
        return torch.tanh(self.embedding[tokens].cumsum(0) / places.sqrt()) @ self.output


def _normal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def plain_step(
    args: Namespace, loss: Loss, model: Prefix, batch: dict[str, Any], micro: int = 3
) -> Tensor:
    """slime's arithmetic of one step, written from its description: micro-batches, the masked sum
    of a sample over its rollout's tokens, and the mean over rollouts; or, per token, the sum over
    the number of tokens, at least 1 a sample. Returns the step's loss."""
    total = torch.zeros((), dtype=torch.float64)
    tokens = torch.zeros((), dtype=torch.float64)
    for begin in range(0, len(batch["tokens"]), micro):
        part = {key: values[begin : begin + micro] for key, values in batch.items()}

        def reduce(x: Tensor, part: dict[str, Any] = part) -> Tensor:
            pieces = x.split(part["response_lengths"])
            out = x.new_zeros(())
            for piece, mask, denominator in zip(
                pieces, part["loss_masks"], part["rollout_mask_sums"], strict=True
            ):
                share = 1 if args.calculate_per_token_loss else max(float(denominator), 1.0)
                out = out + (piece * mask).sum() / share
            return out

        part["unconcat_tokens"] = part["tokens"]
        logits = torch.cat([model(one) for one in part["tokens"]])[None]
        value, _ = loss(args, part, logits, reduce)
        total = total + value
        tokens += sum(max(float(mask.sum()), 1.0) for mask in part["loss_masks"])
    return total / (tokens if args.calculate_per_token_loss else args.global_batch_size)


def gradient(model: Prefix, loss: Tensor) -> Tensor:
    """The gradient as one vector."""
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([grad.flatten() for grad in grads])


def tensors(data: dict[str, Any]) -> dict[str, Any]:
    """slime's train data as the training ranks hold it."""
    out = dict(data)
    out["tokens"] = [torch.tensor(one, dtype=torch.long) for one in data["tokens"]]
    out["total_lengths"] = [len(one) for one in data["tokens"]]
    out["loss_masks"] = [torch.tensor(one, dtype=torch.int) for one in data["loss_masks"]]
    out["rollout_log_probs"] = [torch.tensor(one) for one in data["rollout_log_probs"]]
    return out


def unmerged(turns: Sequence[tuple[Turn, dict]], ready: Sequence[str]) -> dict[str, Any]:
    """The same turns as samples of their own, as stock slime would take them: a rollout each,
    every output token trained with the turn's reward, no signals of ours."""
    kept = [(turn, verdict) for turn, verdict in turns if turn.turn_id in set(ready)]
    lengths = [len(turn.output_ids) for turn, _ in kept]
    return {
        "tokens": [torch.tensor([*turn.prompt_ids, *turn.output_ids]) for turn, _ in kept],
        "total_lengths": [len(turn.prompt_ids) + len(turn.output_ids) for turn, _ in kept],
        "response_lengths": lengths,
        "loss_masks": [torch.ones(n, dtype=torch.int) for n in lengths],
        "rollout_mask_sums": lengths,
        "rollout_log_probs": [torch.tensor(turn.output_logprobs) for turn, _ in kept],
        "advantages": [
            torch.full((n,), float(verdict["score"]))
            for (_, verdict), n in zip(kept, lengths, strict=True)
        ],
        "teacher_log_probs": [
            torch.tensor(verdict.get("teacher_log_probs") or [float("nan")] * n)
            for (_, verdict), n in zip(kept, lengths, strict=True)
        ],
    }
