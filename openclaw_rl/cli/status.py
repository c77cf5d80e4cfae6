"""What became of every turn; all counts add up.

Where nothing is trained, it says why.
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from openclaw_rl.config import Config
from openclaw_rl.errors import JournalError
from openclaw_rl.journal import Journal
from openclaw_rl.rollout.batch import Rules, choose

_RECENT = 32
"""Verdicts in the mean reward that is shown: two batches of the usual size."""

_MANY = 20
"""Turns from which on a warning is worth reading."""

_PROBE_SECONDS = 0.5
_WATCH_SECONDS = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that are no settings."""
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument("--watch", action="store_true", help="print it again every 2 s")


def run(config: Config, options: argparse.Namespace) -> int:
    """Print the status. Raises `JournalError`."""
    while True:
        status = read_status(config)
        probe(status)
        text = json.dumps(status, indent=2) if options.json else render_status(status)
        print(text, flush=True)
        if not options.watch:
            return 0
        time.sleep(_WATCH_SECONDS)
        if not options.json:
            print()


def read_status(config: Config) -> dict[str, Any]:
    """Return the outcomes of all turns, the served version and warnings, as plain values.

    Raises `JournalError` where there is no journal.
    """
    with Journal.open(config.journal_path, create=False) as journal:
        outcomes = journal.outcomes()
        policy = journal.endpoint("policy")
        gateway = journal.endpoint("gateway")
        trainer = journal.endpoint("trainer")
        rollout = journal.endpoint("rollout")
        judged, mean_reward = journal.judged(_RECENT)
        ready = journal.ready() if outcomes.ready else []
    # What the rollout waits for; before there was one, what it would wait for.
    waits_for = rollout.info if rollout else config.rollout.model_dump()
    rules = Rules(waits_for["batch_size"], waits_for["session_share"], max_staleness=None)
    choice = choose(ready, rules, None)
    status: dict[str, Any] = {
        "seen": outcomes.seen,
        "main": outcomes.main,
        "side": outcomes.side,
        "waiting": outcomes.waiting,
        "judging": outcomes.judging,
        "ready": outcomes.ready,
        "leased": outcomes.leased,
        "trained": outcomes.trained,
        "dropped": dict(outcomes.dropped),
        "counters": dict(outcomes.counters),
        "by_source": outcomes.by_source,
        "balanced": outcomes.balanced(),
        "version": policy.info.get("weight_version") if policy else None,
        "engine": policy.url if policy else None,
        "gateway": gateway.url if gateway else None,
        "reply_format": gateway.info.get("reply_format") if gateway else None,
        "refused_adapter": policy.info.get("refused") if policy else None,
        "mismatch": dict(trainer.info) if trainer else None,
        "judged": judged,
        "mean_reward": mean_reward,
        "batch_size": rules.batch_size,
        "usable": len(choice.take),
    }
    status["warnings"] = _warnings(status)
    return status


def probe(status: dict[str, Any]) -> None:
    """Add `answering`: whether somebody listens now at the addresses of `engine` and `gateway`,
    which the journal keeps after their end."""
    status["answering"] = {
        name: _listens(status[name]) for name in ("engine", "gateway") if status[name]
    }


def _listens(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname or "", port), timeout=_PROBE_SECONDS):
            return True
    except (OSError, ValueError):
        return False


def _warnings(status: dict[str, Any]) -> list[str]:
    found = []
    if not status["balanced"]:
        found.append("the counts do not add up: please report this")
    if status["engine"] is None and status["seen"] == 0:
        found.append("no engine has come up yet: is `openclaw-rl train` running?")
    if status["side"] >= _MANY and status["main"] == 0:
        found.append(
            "every request was taken as side traffic, so nothing can be trained: let the "
            "agent name its turns (x-turn-type: main), or set --unnamed main"
        )
    unbound = sum(count["unbound"] for count in status["by_source"].values())
    if status["main"] >= _MANY and unbound == status["main"]:
        found.append(
            "no turn could be bound to a conversation: the agent names none and does not send "
            "its history back; for OpenClaw run `openclaw-rl doctor`"
        )
    elif status["waiting"] >= _MANY and status["waiting"] == status["main"]:
        found.append("no turn ever got a next state: does the agent send its history back?")
    dropped = sum(status["dropped"].values())
    if dropped >= _MANY and dropped == status["main"]:
        reason = max(status["dropped"], key=status["dropped"].get)
        found.append(f"every turn was dropped, most as {reason}")
    slow = status["counters"].get("judge_timeout", 0)
    if slow >= _MANY and status["judged"] == 0:
        found.append(
            f"no judge answered in time ({slow} votes): take a faster one (--prm-url, --judge-url),"
            " give it longer (--judge-timeout), or learn from plain words (--custom-rm-path "
            "openclaw_rl.rewards.feedback.custom_rm)"
        )
    blind = status["counters"].get("topk_missing", 0)
    if blind >= _MANY and 2 * blind > status["main"]:
        found.append(
            f"{blind} turns have no candidates, so they cannot be distilled over the top K: the "
            "engine gives no top_logprobs"
        )
    if status["refused_adapter"]:
        found.append(f"the engine refused an adapter, so an older one is served: "
                     f"{status['refused_adapter']}")  # fmt: skip
    foreign = status["dropped"].get("sampling", 0)
    if foreign >= _MANY and 2 * foreign > status["main"]:
        found.append(
            f"{foreign} turns were sampled with parameters that the trainer cannot compute "
            "log-probs for (penalties, top-p, top-k, min-p, another temperature), so they are "
            "never trained: let the client send none, or set --client-sampling ignore"
        )
    return found


def render_status(status: dict[str, Any]) -> str:
    """Return `status` as text for people."""
    reward = "-" if status["mean_reward"] is None else f"{status['mean_reward']:+.2f}"
    lines = [
        f"engine   {_address(status, 'engine')} · weight version {status['version'] or 0}",
        f"gateway  {_address(status, 'gateway')} · reply format {status['reply_format'] or '-'}",
        f"seen     {status['seen']} = {status['main']} main + {status['side']} side",
        f"main     {status['main']} = {status['waiting']} waiting for a next state"
        f" + {status['judging']} judging + {status['ready']} ready"
        f" + {status['leased']} leased + {status['trained']} trained"
        f" + {sum(status['dropped'].values())} dropped",
        f"judged   {status['judged']} · mean reward of the last ones {reward}",
        f"batch    {status['usable']}/{status['batch_size']} ready",
    ]
    if status["mismatch"]:
        gap = status["mismatch"]
        skipped = f" · SKIPPED ({gap['skipped']})" if gap["skipped"] else ""
        cut = gap.get("truncated")
        truncated = "" if cut is None else f" · {100 * cut:.1f} % of the weights truncated"
        lines.append(
            f"mismatch |log-prob of engine - of trainer| mean {gap['mean']:.4f}, max "
            f"{gap['max']:.2f} over {gap['tokens']} tokens of rollout {gap['rollout']}"
            f"{truncated}{skipped}"
        )
    if status["by_source"]:
        lines.append("sessions " + render_sources(status["by_source"]))
    for title in ("dropped", "counters"):
        if status[title]:
            ordered = sorted(status[title].items(), key=lambda item: (-item[1], item[0]))
            lines.append(f"{title:8} " + ", ".join(f"{name} {n}" for name, n in ordered))
    lines += [f"warning  {words}" for words in status["warnings"]]
    return "\n".join(lines)


def _address(status: dict[str, Any], name: str) -> str:
    if not status[name]:
        return "none"
    silent = status.get("answering", {}).get(name) is False
    return f"{status[name]} (last seen there; does not answer)" if silent else str(status[name])


def render_sources(by_source: Mapping[str, Mapping[str, int]]) -> str:
    """Return by what sessions were recognised: turns that are bound to one, side requests, and
    turns that nothing ties to a conversation (yet)."""
    parts = []
    for name, counts in sorted(by_source.items(), key=lambda item: -sum(item[1].values())):
        words = [f"{n} {kind}" for kind, n in counts.items() if n]
        parts.append(f"{name}: {' + '.join(words)}")
    return "; ".join(parts)


def progress_line(config: Config) -> str | None:
    """Return one line about the loop, or None while there is no journal."""
    try:
        status = read_status(config)
    except JournalError:
        return None
    reward = "-" if status["mean_reward"] is None else f"{status['mean_reward']:+.2f}"
    return (
        f"turns {status['main']} · judged {status['judged']} · "
        f"ready {status['ready']}/{status['batch_size']} · trained {status['trained']} · "
        f"dropped {sum(status['dropped'].values())} · version {status['version'] or 0} · "
        f"reward {reward}"
    )
