"""Which `log pi` belongs into the distillation advantage? Exact expectations on a toy policy.

For a softmax policy over a small vocabulary the expected gradient of every variant can be summed
over all tokens, so nothing here is sampled except the policies themselves. Compared with the
gradient that distillation is after, `-d KL(pi || pi_T)`:

- cosine: direction of the variant's expected gradient against it (1 is best);
- size: its length over the true length (1 is best; 0 means the clip took everything);
- lost: share of the probability mass on the teacher's side (log pi_T > log pi) without gradient.

Two states are looked at: the first step of a batch, where the engine's log-probs differ from the
trainer's by noise (kernels, staleness), and a later step of the same batch, where the policy has
already gone part of the way to the teacher.

Run: python -m benchmarks.opd_baseline
"""

from __future__ import annotations

import torch
from torch import Tensor

from openclaw_rl.losses.terms import clipped_surrogate, distillation_advantage

VOCAB, PAIRS = 32, 400
VARIANTS = {
    # name: (log pi in the ratio, log pi in the advantage)
    "ratio recomputed, gap to current": ("old", "current"),
    "ratio recomputed, gap to recomputed": ("old", "old"),
    "ratio recomputed, gap to engine": ("old", "engine"),
    "ratio engine, gap to engine": ("engine", "engine"),
}


def measure(noise: float, progress: float, spread: float = 1.0, seed: int = 0) -> dict[str, Tensor]:
    """Mean (cosine, size, lost) of each variant over random students and teachers.

    `noise`: standard deviation of log pi_engine - log pi_old. `progress`: how far, in logits, the
    current policy has gone from the old one towards the teacher (0: first step).
    """
    g = torch.Generator().manual_seed(seed)
    draw = lambda scale: scale * torch.randn(PAIRS, VOCAB, generator=g, dtype=torch.float64)  # noqa: E731
    old_logits = draw(1.5)
    teacher_logits = old_logits + draw(spread)
    logits = (old_logits + progress * (teacher_logits - old_logits)).requires_grad_()
    log_pi = torch.log_softmax(logits, -1)
    log_teacher = torch.log_softmax(teacher_logits, -1)
    source = {"current": log_pi.detach(), "old": torch.log_softmax(old_logits, -1)}
    source["engine"] = source["old"] + draw(noise)
    behaviour = source["old"].exp()  # the samples: noise is a reading error of the log-probs

    kl = (log_pi.exp() * (log_pi - log_teacher)).sum()
    (true,) = torch.autograd.grad(-kl, logits, retain_graph=True)
    helped = (log_teacher > log_pi).detach()
    results = {}
    for name, (ratio, baseline) in VARIANTS.items():
        log_ratio = log_pi - source[ratio]
        gap, _ = distillation_advantage(log_teacher.flatten(), source[baseline].flatten())
        token_loss, clipped = clipped_surrogate(log_ratio.flatten(), gap, 0.2, 0.28)
        expected = (behaviour * -token_loss.view_as(log_pi)).sum()
        (grad,) = torch.autograd.grad(expected, logits, retain_graph=True)
        cosine = torch.cosine_similarity(grad, true, dim=-1).mean()
        size = grad.norm(dim=-1).sum() / true.norm(dim=-1).sum()
        mass = behaviour * helped
        lost = (mass * clipped.view_as(mass)).sum() / mass.sum()
        results[name] = torch.stack([cosine, size, lost]).detach()
    return results


def main() -> None:
    for title, noise, progress in [
        ("first step, engine noise 0.02", 0.02, 0.0),
        ("first step, engine noise 0.2", 0.2, 0.0),
        ("first step, engine noise 0.5", 0.5, 0.0),
        ("later step (30 % of the way), noise 0.2", 0.2, 0.3),
        ("later step (60 % of the way), noise 0.2", 0.2, 0.6),
    ]:
        print(f"\n{title}\n{'':40s}  cosine    size    lost")
        for name, (cosine, size, lost) in measure(noise, progress).items():
            print(f"{name:40s}  {cosine:6.3f}  {size:6.2f}  {lost:6.1%}")


if __name__ == "__main__":
    main()
