"""What the judge has done so far, out of the journal's counters.

Names: `waiting_for_judge`; `judged` (turns with a verdict); `dropped:<reason>` for the reasons that
are the judge's; `postponed:<reason>`; and what judges and teachers counted (`judge_abstained`,
`judge_timeout`, `judge_overflow`, `hint_accepted`, `hint_none`, `teacher_overflow`,
`teacher_failed`, `teacher_no_user_message`; over the top K `teacher_topk_candidates`, of them
`teacher_topk_unknown`, and turns without: `teacher_topk_none`, `teacher_topk_no_policy`).
"""

from __future__ import annotations

from collections.abc import Mapping

from openclaw_rl.journal.store import Journal

DROP_REASONS = (
    "no_signal",
    "no_verdict",
    "reward_failed",
    "reward_invalid",
    "reward_nan",
    "reward_timeout",
    "judge_lost",
    "judge_misconfigured",
    "judge_refused",
    "judge_unavailable",
)
_PREFIXES = ("judge_", "hint_", "teacher_", "postponed:")


def judge_counts(journal: Journal) -> dict[str, int]:
    """Counts by name, see the module; zero counts are left out."""
    fates = journal.fates()
    judged, _ = journal.judged(1)
    counts = {"waiting_for_judge": fates.judging, "judged": judged}
    counts |= {f"dropped:{name}": fates.dropped.get(name, 0) for name in DROP_REASONS}
    counts |= {name: n for name, n in sorted(fates.counters.items()) if name.startswith(_PREFIXES)}
    return {name: n for name, n in counts.items() if n}


def format_counts(counts: Mapping[str, int]) -> str:
    """One line."""
    return " · ".join(f"{name} {n}" for name, n in counts.items()) or "nothing to judge yet"
