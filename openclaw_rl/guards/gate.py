"""The gate: a version is served unless its replies to the probes are worse than the limits allow.

Guarantees: the decision depends on figures alone (`refusal`); what the base says to a prompt is
asked once while the prompt is in use; a figure that is no number is a refusal, and a limit of 0 is
none. Owns no weights: who serves and who goes back is the host's business.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from openclaw_rl.config import GuardsConfig
from openclaw_rl.guards import measures
from openclaw_rl.guards.probes import Probes
from openclaw_rl.journal import Journal, Version

Figures = Mapping[str, float]
"""Only where the base can be asked: kl, harm, logprob (nats a token), vague (a share). Always:
empty, cut, repetition, similarity, sound (shares), length (tokens)."""

Limits = Namespace | GuardsConfig
"""What has the settings of `[guards]`: `hook_args`, or the section itself."""

RECENT, RECENT_TOKENS = 6, 256
"""So many first questions of recent sessions are probes too, of at most so many tokens each."""
OTHERS = 2
"""Other questions after which the base scores a reply as well."""


class Prober(Protocol):
    """The candidate, and the base that it grew from."""

    def reply(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, base: bool = False
    ) -> list[list[int]]:
        """The likeliest reply to each prompt (greedy), without the token that ends it; one of
        `max_tokens` was cut."""

    def score(
        self, prompts: Sequence[Sequence[int]], replies: Sequence[Sequence[int]], *, base: bool
    ) -> list[list[float]]:
        """Log-prob of each token of each reply, at temperature 1."""


class Guard:
    """`has_base` False: the prober cannot ask the base. Then only the replies' texts are measured,
    and the best version so far stands for the base."""

    def __init__(
        self,
        limits: Limits,
        journal: Journal,
        probes: Probes,
        prober: Prober,
        *,
        has_base: bool = True,
    ) -> None:
        self.has_base = has_base
        self.limits, self.journal, self.probes, self.prober = limits, journal, probes, prober
        self._base: dict[tuple[int, ...], tuple[list[int], list[float]]] = {}

    def examine(self) -> tuple[str, Figures]:
        """Ask the candidate; why it must not be served ("": it may be), and what was measured."""
        recent = self.journal.first_prompts(RECENT, RECENT_TOKENS)
        asked, unrelated = [*self.probes.questions, *recent], self.probes.unrelated
        best = best_of(self.journal.versions(1000))
        if not self.has_base:
            figures = self._of(self.prober.reply(asked, self.limits.probe_tokens))
            before = best.figures if best else figures
            return refusal(figures, before, before, self.limits), figures
        self._ask_base([*asked, *unrelated])
        base, base_scores = zip(*(self._base[tuple(prompt)] for prompt in asked), strict=True)
        kept, kept_before = zip(*(self._base[tuple(prompt)] for prompt in unrelated), strict=True)

        replies = self.prober.reply(asked, self.limits.probe_tokens)
        own = self.prober.score(asked, replies, base=False)
        under_base = self.prober.score(asked, replies, base=True)
        kept_now = self.prober.score(unrelated, kept, base=False)
        elsewhere = [
            self.prober.score([*asked[at:], *asked[:at]], replies, base=True)
            for at in range(1, min(OTHERS + 1, len(asked)))
        ]

        mean = measures.mean_of_tokens
        figures = {
            **self._of(replies),
            "logprob": mean(under_base),
            "kl": mean(own) - mean(under_base),
            "harm": mean(kept_now) - mean(kept_before),
            "vague": measures.share(map(measures.vague, under_base, zip(*elsewhere, strict=True))),
        }
        of_base = {**self._of(base), "logprob": mean(base_scores)}
        return refusal(figures, of_base, best.figures if best else None, self.limits), figures

    def _ask_base(self, prompts: Sequence[Sequence[int]]) -> None:
        """Have the base's replies to these prompts, and no others."""
        new = [prompt for prompt in prompts if tuple(prompt) not in self._base]
        replies = self.prober.reply(new, self.limits.probe_tokens, base=True) if new else []
        scores = self.prober.score(new, replies, base=True) if new else []
        found = dict(zip(map(tuple, new), zip(replies, scores, strict=True), strict=True))
        self._base = {tuple(prompt): (self._base | found)[tuple(prompt)] for prompt in prompts}

    def _of(self, replies: Sequence[Sequence[int]]) -> dict[str, float]:
        """What replies to different questions are, without a model."""
        texts = [self.probes.decode(reply) for reply in replies]
        return {
            "empty": measures.share(not measures.words(text) for text in texts),
            "cut": measures.share(len(reply) >= self.limits.probe_tokens for reply in replies),
            "repetition": measures.share(map(measures.repeats, texts)),
            "similarity": measures.similarity(texts),
            "sound": measures.sound(texts),
            "length": sum(map(len, replies)) / max(1, len(replies)),
        }


def refusal(found: Figures, base: Figures, best: Figures | None, limits: Limits) -> str:
    """Why a candidate must not be served, "" where it may be: what is beyond its limit, from the
    figures of the candidate, the base, and the best version so far."""
    beyond = {}
    if "kl" in found:
        beyond["kl"], beyond["harm"] = found["kl"], -found["harm"]
        beyond["drift"], beyond["vague"] = base["logprob"] - found["logprob"], found["vague"]
    beyond["fall"] = best["sound"] - found["sound"] if best else 0.0
    for name in ("empty", "cut", "repetition", "similarity"):
        beyond[name] = found[name] - base[name]
    return ", ".join(
        f"{name} {value:.2f} (limit {limit:g})"
        for name, value in beyond.items()
        if (limit := getattr(limits, f"max_{name}")) and not value <= limit
    )


def best_of(versions: Iterable[Version]) -> Version | None:
    """The served version with the largest share of sound replies, of equal ones the newest."""
    probed = [one for one in versions if one.state == "served" and "sound" in one.figures]
    return max(probed, key=lambda one: (one.figures["sound"], one.version), default=None)


def batch_refusal(replies: Sequence[str], sessions: Sequence[str], limits: Limits) -> str:
    """Why a batch must not be learnt, "" where it may be: `empty`, `looping` or `one_session`.
    `sessions`: the session of each reply."""
    largest = max((sessions.count(session) for session in set(sessions)), default=0)
    shares = (
        ("empty", measures.share(not measures.words(text) for text in replies),
         limits.max_batch_empty),
        ("looping", measures.share(map(measures.loops, replies)), limits.max_batch_looping),
        ("one_session", largest / max(1, len(sessions)), limits.max_batch_session),
    )  # fmt: skip
    return next((name for name, value, limit in shares if limit and value > limit), "")
