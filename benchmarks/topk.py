"""The top-K distillation term: what it costs, and which gradient it has.

Cost: forward and backward of `topk_opd_loss`'s gather and KL in one pass over the logits, against
a loop that clones the logits and takes one log-softmax for each of the K ids. Each measurement is
a process of its own, on one thread. Memory is the rise of its peak resident size (Linux; on a GPU:
torch's own peak) over what it holds before, so the gradient of the logits is part of it. Time is
the process's own (on a GPU: the wall's), which a busy machine does not stretch.

Gradient: exact expectations on a toy policy, as in `benchmarks.opd_baseline`. The log-prob
difference is either held (no gradient through it) or differentiated with the rest, with or without
the tail; the sampled term of `opd_loss` is there for its variance.

Run: python -m benchmarks.topk [--rows 256 --vocab 32768 --device cpu]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from openclaw_rl.losses.logprobs import log_probs_at
from openclaw_rl.losses.terms import subset_reverse_kl

FORMS = ("one pass", "loop of clones")
VOCAB, PAIRS, SUBSET = 256, 400, 4


# --- cost -----------------------------------------------------------------------------------------


def student_log_probs(form: str, logits: Tensor, ids: Tensor) -> Tensor:
    """`[T, K]` log-probs of `ids`, either way."""
    if form == "one pass":
        return log_probs_at(logits, torch.arange(ids.size(0), device=ids.device), ids)
    columns = [
        torch.log_softmax(logits.clone(), dim=-1).gather(1, ids[:, k : k + 1])
        for k in range(ids.size(1))
    ]
    return torch.cat(columns, dim=1)


def one_step(form: str, logits: Tensor, ids: Tensor, teacher: Tensor) -> float:
    """Forward and backward once; the loss."""
    logits.grad = None
    kl, _, _ = subset_reverse_kl(student_log_probs(form, logits, ids), teacher, 1.0, tail=True)
    loss = kl.mean()
    loss.backward()
    return loss.item()


def child(form: str, k: int, rows: int, vocab: int, device: str, repeats: int) -> dict[str, float]:
    """In this process: milliseconds (best of `repeats`), MiB above the inputs (worst), the loss."""
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    small = torch.randn(8, 64, generator=g).to(device).requires_grad_()
    few = torch.randint(64, (8, 2), generator=g).to(device)
    one_step(form, small, few, torch.full((8, 2), -1.0, device=device))  # warm-up
    logits = torch.randn(rows, vocab, generator=g).to(device).requires_grad_()
    ids = torch.stack([torch.randperm(vocab, generator=g)[:k] for _ in range(rows)]).to(device)
    teacher = torch.full((rows, k), -12.0, device=device)
    clock = time.process_time if device == "cpu" else time.perf_counter
    times, peaks, loss = [], [], 0.0
    for _ in range(repeats):
        logits.grad = None
        before = _reset_peak(device)
        began = clock()
        loss = one_step(form, logits, ids, teacher)
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(clock() - began)
        peaks.append(_peak_mib(device) - before)
    return {"ms": 1e3 * min(times), "mib": max(peaks), "loss": loss}


def _reset_peak(device: str) -> float:
    """Let the peak begin anew; MiB held now."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's way to reset VmHWM
    return _peak_mib(device)


def _peak_mib(device: str) -> float:
    if device != "cpu":
        return torch.cuda.max_memory_allocated() / 2**20
    status = Path("/proc/self/status").read_text()
    return float(status.split("VmHWM:")[1].split()[0]) / 2**10


def measure(
    form: str, k: int, rows: int = 256, vocab: int = 32768, device: str = "cpu", repeats: int = 3
) -> dict[str, float]:
    """`child`'s figures from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.topk", "--child", form, "--k", str(k)]
    command += ["--rows", str(rows), "--vocab", str(vocab), "--device", device]
    command += ["--repeats", str(repeats)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def costs(rows: int, vocab: int, device: str, ks: tuple[int, ...] = (4, 20, 50)) -> None:
    size = rows * vocab * 4 / 2**20
    print(f"\n{rows} tokens, vocabulary {vocab}: logits of {size:.0f} MiB; forward and backward")
    print(f"{'K':>3s}  {'one pass':>20s}  {'loop of clones':>20s}  {'memory':>7s}  {'time':>7s}")
    for k in ks:
        one, loop = (measure(form, k, rows, vocab, device) for form in FORMS)
        cells = [f"{x['mib']:8.0f} MiB {x['ms']:5.0f} ms" for x in (one, loop)]
        memory, duration = loop["mib"] / one["mib"], loop["ms"] / one["ms"]
        print(f"{k:3d}  {cells[0]:>20s}  {cells[1]:>20s}  {memory:6.1f}x  {duration:6.1f}x")


# --- gradient -------------------------------------------------------------------------------------


def kl_form(name: str, log_p: Tensor, log_q: Tensor, ids: Tensor) -> Tensor:
    """`[N]` losses of a form over `ids` `[N, K]` of whole distributions `[N, V]`."""
    p, q = log_p.gather(1, ids), log_q.gather(1, ids)
    tail = "tail" in name
    if name.startswith("held"):
        return subset_reverse_kl(p, q, tail=tail)[0]
    loss = (p.exp() * (p - q)).sum(-1)
    if tail:
        rest, other = 1 - p.exp().sum(-1), 1 - q.exp().sum(-1)
        loss = loss + rest * (rest.log() - other.log())
    return loss


GRADIENTS = ("held, tail", "held", "differentiated, tail", "differentiated", "sampled")


def gradients(spread: float = 1.0, steps: int = 200, seed: int = 0) -> dict[str, dict[str, float]]:
    """Per form, over random policies and teachers (`spread` 0: the teacher agrees).

    `cosine`: the descent direction against that of the whole KL(pi || pi_T), the mean of single
    tokens; `kl`: the whole KL after `steps` of plain descent as a share of its start (nats where
    the teacher agrees); `mass`: change of the policy's probability of the K ids, `target`: what
    the teacher's would be.
    """
    g = torch.Generator().manual_seed(seed)
    draw = lambda scale: scale * torch.randn(PAIRS, VOCAB, generator=g, dtype=torch.float64)  # noqa: E731
    start = draw(5.0)  # the likeliest four have most of it, as in language models
    log_q = torch.log_softmax(start + draw(spread), -1)
    ids = start.topk(SUBSET).indices
    mass = lambda x: x.softmax(-1).gather(1, ids).sum(-1).mean().item()  # noqa: E731
    found = {}
    for name in GRADIENTS:
        logits = start.clone().requires_grad_()
        cosine = 0.0
        for step in range(steps):
            log_p = logits.log_softmax(-1)
            whole = (log_p.exp() * (log_p - log_q)).sum()
            (true,) = torch.autograd.grad(whole, logits, retain_graph=True)
            if name == "sampled":
                token = torch.multinomial(log_p.detach().exp(), 1, generator=g)
                own = -log_p.gather(1, token) * (log_q - log_p.detach()).gather(1, token)
            else:
                own = kl_form(name, log_p, log_q, ids)
            (grad,) = torch.autograd.grad(own.sum(), logits)
            if step == 0:
                first = whole.item() / PAIRS
                cosine = torch.cosine_similarity(grad, true, dim=-1).mean().item()
            logits = (logits.detach() - grad).requires_grad_()
        log_p = logits.detach().log_softmax(-1)
        last = (log_p.exp() * (log_p - log_q)).sum().item() / PAIRS
        found[name] = {
            "cosine": cosine,
            "kl": last / first if spread else last,
            "mass": mass(logits.detach()) - mass(start),
            "target": mass(log_q) - mass(start),
            "start": mass(start),
        }
    return found


def directions() -> None:
    apart, agreeing = gradients(spread=1.0), gradients(spread=0.0)
    share = apart["held"]["start"]
    print(
        f"\nKL over the policy's {SUBSET} likeliest of {VOCAB} ids, {share:.0%} of its probability"
    )
    print(f"{'':22s}  {'cosine':>6s}  {'KL left':>7s}  {'mass':>6s}  (teacher's)  agrees: KL")
    for name in GRADIENTS:
        a, b = apart[name], agreeing[name]
        print(
            f"{name:22s}  {a['cosine']:6.2f}  {a['kl']:7.1%}  {a['mass']:+6.3f}  "
            f"({a['target']:+6.3f})     {b['kl']:.4f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--child", choices=FORMS, help=argparse.SUPPRESS)
    parser.add_argument("--k", type=int, default=50, help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=3, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.child:
        print(json.dumps(child(a.child, a.k, a.rows, a.vocab, a.device, a.repeats)))
        return
    costs(a.rows, a.vocab, a.device)
    directions()


if __name__ == "__main__":
    main()
