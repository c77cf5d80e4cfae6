"""The table and the plot of quickstart runs.

    python -m quickstart.report learning.png combined=../runs/A rl=../runs/B

draws kept runs into one plot.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .talk import Exam
from .user import HELD_OUT_QUESTIONS


def table(exams: Sequence[Exam]) -> str:
    """Return the exams as a text table, and one question answered before and after."""
    lines = [
        "version  to the user's liking  mean words  too long  too short  unfinished  off topic",
        "-------  --------------------  ----------  --------  ---------  ----------  ---------",
    ]
    for exam in exams:
        short = exam.verdicts["too short"] + exam.verdicts["empty"]
        lines.append(
            f"{exam.version:7d}  {exam.satisfied:20.0%}  {exam.mean_words:10.1f}  "
            f"{exam.verdicts['too long']:8.0%}  {short:9.0%}  "
            f"{exam.verdicts['unfinished']:10.0%}  {exam.verdicts['off topic']:9.0%}"
        )
    question = HELD_OUT_QUESTIONS[0].text
    for word, exam in [("before", exams[0]), ("after", exams[-1])][: len(exams)]:
        lines += ["", f"{question}  ({word}, version {exam.version})", f"  {exam.example.strip()}"]
    return "\n".join(lines)


def plot(runs: Mapping[str, Sequence[Exam]], path: Path) -> None:
    """Draw satisfaction and reply length over versions, one line a run, into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(7, 6), sharex=True)
    for name, exams in runs.items():
        versions = [exam.version for exam in exams]
        top.plot(versions, [exam.satisfied for exam in exams], marker="o", label=name)
        bottom.plot(versions, [exam.mean_words for exam in exams], marker="o", label=name)
    top.set_ylabel("held-out questions\nanswered to the user's liking")
    top.set_ylim(-0.03, 1.03)
    top.grid(alpha=0.3)
    top.legend()
    bottom.axhspan(6, 25, color="tab:green", alpha=0.12, label="what the user likes")
    bottom.set_ylabel("mean words of a reply")
    bottom.set_xlabel("weight version (16 turns each)")
    bottom.grid(alpha=0.3)
    bottom.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def load(folder: Path) -> list[Exam]:
    """Return the exams that a run kept in its folder."""
    return [Exam(**json.loads(line)) for line in (folder / "exams.jsonl").open()]


if __name__ == "__main__":
    if len(sys.argv) < 3 or not all("=" in word for word in sys.argv[2:]):
        sys.exit(__doc__)
    named = dict(word.split("=", 1) for word in sys.argv[2:])
    plot({name: load(Path(folder)) for name, folder in named.items()}, Path(sys.argv[1]))
