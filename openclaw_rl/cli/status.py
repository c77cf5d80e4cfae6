"""What became of every turn; all counts add up.

Where nothing is trained, it says why.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import takewhile
from typing import Any

from openclaw_rl.config import Config
from openclaw_rl.engine.transport import listens
from openclaw_rl.journal import Journal, Outcomes, Version
from openclaw_rl.rollout.batch import Rules, choose

_RECENT = 32
"""Verdicts in the mean reward that is shown: two batches of the usual size."""

_MANY = 20
"""Turns from which on a warning is worth reading."""

_IN_A_ROW = 3
"""Refused versions from which on chance is no explanation."""

_MAIN_FIGURES = ("kl", "harm", "repetition", "similarity", "length")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that are no settings."""
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(config: Config, options: argparse.Namespace) -> int:
    """Print the status. Raises `JournalError`."""
    status = read_status(config)
    # The journal keeps the addresses beyond the end of what was there.
    status["answering"] = {
        name: listens(status[name], 0.5) for name in ("engine", "gateway") if status[name]
    }
    print(json.dumps(status, indent=2) if options.json else render_status(status))
    return 0


def read_status(config: Config) -> dict[str, Any]:
    """Return the outcomes of all turns, the served version and warnings, as plain values.

    Raises `JournalError` where there is no journal.
    """
    with Journal.open(config.journal_path, create=False) as journal:
        outcomes = journal.outcomes()
        policy, gateway, trainer, rollout = (
            journal.endpoint(role) for role in ("policy", "gateway", "trainer", "rollout")
        )
        judged, mean_reward = journal.judged(_RECENT)
        ready = journal.ready() if outcomes.ready else []
        asked, versions = journal.asked(), journal.versions()
    # What the rollout waits for; before there was one, what it would wait for.
    waits_for = rollout.info if rollout else config.rollout.model_dump()
    rules = Rules(waits_for["batch_size"], waits_for["session_share"], max_staleness=None)
    status = {
        **asdict(outcomes),
        "version": policy.info.get("weight_version") if policy else None,
        "engine": policy.url if policy else None,
        "gateway": gateway.url if gateway else None,
        "reply_format": gateway.info.get("reply_format") if gateway else None,
        "refused_adapter": policy.info.get("refused") if policy else None,
        "mismatch": dict(trainer.info) if trainer else None,
        "judged": judged,
        "mean_reward": mean_reward,
        "batch_size": rules.batch_size,
        "usable": len(choose(ready, rules, None).take),
        "paused": asked.get("pause"),
        "rollback": asked.get("rollback"),
        "last_served": _last(versions, "served"),
        "last_refused": _last(versions, "refused"),
        "refused_in_a_row": len(list(takewhile(lambda one: one.state == "refused", versions))),
    }
    return {**status, "warnings": list(_warnings(outcomes, status))}


def _last(versions: Iterable[Version], state: str) -> dict[str, Any] | None:
    return next((asdict(one) for one in versions if one.state == state), None)


def _warnings(outcomes: Outcomes, status: Mapping[str, Any]) -> Iterator[str]:
    """What a person should look at, and do about it."""
    main, dropped, counters = outcomes.main, outcomes.dropped, outcomes.counters
    slow, blind = counters.get("judge_timeout", 0), counters.get("topk_missing", 0)
    foreign = dropped.get("sampling", 0)
    if not outcomes.balanced():
        yield "the counts do not add up: please report this"
    if status["engine"] is None and outcomes.seen == 0:
        yield "no engine has come up yet: is `openclaw-rl train` running?"
    if outcomes.side >= _MANY and main == 0:
        yield (
            "every request was taken as side traffic, so nothing can be trained: let the agent "
            "name its turns (x-turn-type: main), or set --unnamed main"
        )
    if main >= _MANY and outcomes.unbound == main:
        yield (
            "no turn could be bound to a conversation: the agent names none and does not send its "
            "history back; for OpenClaw run `openclaw-rl doctor`"
        )
    elif outcomes.waiting >= _MANY and outcomes.waiting == main:
        yield "no turn ever got a next state: does the agent send its history back?"
    if main >= _MANY and sum(dropped.values()) == main:
        yield f"every turn was dropped, most as {max(dropped, key=lambda name: dropped[name])}"
    if slow >= _MANY and status["judged"] == 0:
        yield (
            f"no judge answered in time ({slow} votes): take a faster one (--prm-url, --judge-url),"
            " give it longer (--judge-timeout), or learn from plain words (--custom-rm-path "
            "openclaw_rl.rewards.feedback.custom_rm)"
        )
    if blind >= _MANY and 2 * blind > main:
        yield (
            f"{blind} turns have no candidates, so they cannot be distilled over the top K: the "
            "engine gives no top_logprobs"
        )
    if status["refused_adapter"]:
        yield (
            f"the engine refused an adapter, so an older one is served: {status['refused_adapter']}"
        )
    if status["paused"] is not None:
        yield (
            f"training is paused ({status['paused']}); serving and judging go on: openclaw-rl "
            "resume ends that"
        )
    if (n := status["refused_in_a_row"]) >= _IN_A_ROW:
        yield (
            f"the last {n} versions were refused, so what is learnt now is not served: see why "
            "(openclaw-rl rollback --list), and docs/guards.md"
        )
    if foreign >= _MANY and 2 * foreign > main:
        yield (
            f"{foreign} turns were sampled with parameters that the trainer cannot compute "
            "log-probs for (penalties, top-p, top-k, min-p, another temperature), so they are "
            "never trained: let the client send none, or set --client-sampling ignore"
        )


def render_status(status: Mapping[str, Any]) -> str:
    """Return `status` as text for people."""
    lines = [
        f"engine   {_address(status, 'engine')} · weight version {status['version'] or 0}",
        f"gateway  {_address(status, 'gateway')} · reply format {status['reply_format'] or '-'}",
        f"seen     {status['seen']} = {status['main']} main + {status['side']} side",
        f"main     {status['main']} = {status['waiting']} waiting for a next state"
        f" + {status['judging']} judging + {status['ready']} ready"
        f" + {status['leased']} leased + {status['trained']} trained"
        f" + {sum(status['dropped'].values())} dropped",
        f"judged   {status['judged']} · mean reward of the last ones {mean_reward(status)}",
        f"batch    {status['usable']}/{status['batch_size']} ready",
    ]
    if gap := status["mismatch"]:
        cut, skipped = gap.get("truncated"), gap["skipped"]
        lines.append(
            f"mismatch |log-prob of engine - of trainer| mean {gap['mean']:.4f}, max "
            f"{gap['max']:.2f} over {gap['tokens']} tokens of rollout {gap['rollout']}"
            + ("" if cut is None else f" · {100 * cut:.1f} % of the weights truncated")
            + (f" · SKIPPED ({skipped})" if skipped else "")
        )
    for name in ("last_served", "last_refused"):
        if status[name]:
            lines.append(version_line(Version(**status[name])))
    if status["rollback"] is not None:
        lines.append(f"asked    version {status['rollback']} again, which is still to be done")
    # By what sessions were recognised, and how many turns are bound to one.
    for source, kinds in status["by_source"].items():
        counts = " + ".join(f"{n} {kind}" for kind, n in kinds.items() if n)
        lines.append(f"sessions {source}: {counts}")
    for title in ("dropped", "counters"):
        if status[title]:
            ordered = sorted(status[title].items(), key=lambda item: (-item[1], item[0]))
            lines.append(f"{title:8} " + ", ".join(f"{name} {n}" for name, n in ordered))
    lines += [f"warning  {words}" for words in status["warnings"]]
    return "\n".join(lines)


def version_line(version: Version, *, all_figures: bool = False) -> str:
    """What became of a version, and what the probes measured."""
    figures = ", ".join(
        f"{name} {value:.3g}"
        for name, value in version.figures.items()
        if all_figures or name in _MAIN_FIGURES
    )
    parts = (
        f"{version.state:8} version {version.version}",
        "" if version.restored is None else f"restored from {version.restored}",
        version.reason,
        figures,
    )
    return " · ".join(filter(None, parts))


def _address(status: Mapping[str, Any], name: str) -> str:
    silent = status.get("answering", {}).get(name) is False
    return (status[name] or "none") + (" (last seen there; does not answer)" if silent else "")


def mean_reward(status: Mapping[str, Any]) -> str:
    """The mean of the last rewards as text."""
    return "-" if status["mean_reward"] is None else f"{status['mean_reward']:+.2f}"
