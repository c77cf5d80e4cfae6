"""Does it learn from one person, and does it harm? Simulated people over the real system.

    python -m benchmarks.learning --model FOLDER --people a,b,c --seeds 0 --sessions 30
    python -m benchmarks.learning --model FOLDER --people a --control system
    python -m benchmarks.learning --report runs/learning/*.jsonl --plot learning.png
    python -m benchmarks.learning --samples runs/learning/a-combined-0.jsonl

One person at a time talks, four questions a session, slower than the trainer: the next session
begins when everything that could be judged, practised and trained is. The default form runs
gateway, engine, judge and trainer in one process, in lockstep, over HTTP and the journal; with
`--processes` the same person talks to `openclaw-rl up`. Everything that a run measured goes into
one JSONL file: a line a session, a line a weight version; `--report` makes table and plots of them.

Measured of each version, uncoached (a fresh question, greedy): share pleased, words, replies that
hold two stems of their question (`strict`), a repeated 4-gram within a reply, mean ROUGE-L between
replies to different questions; nats a token: KL to the base on these replies, the base's log-prob
of them, and harm (log-prob of the base's own replies to unrelated requests, less the base's own).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import re
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import aiohttp
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from benchmarks.people import PEOPLE, count_words, strictly_on_subject
from benchmarks.processes import free_port
from examples.quickstart.talk import learnt
from openclaw_rl.config import Config, hook_args, load_config
from openclaw_rl.engine.chat import ChatTokenizer
from openclaw_rl.engine.client import EngineClient
from openclaw_rl.engine.kinds import engine_api
from openclaw_rl.engine.transport import connections
from openclaw_rl.hooks import load_hook
from openclaw_rl.journal import Journal

QUESTIONS_A_SESSION = 4
PROBES = 12
IN_A_ROW = 3
"""Sessions that must please from beginning to end until a person counts as served."""

# What the quickstart sets, too; all else is the default of `up`.
SETTINGS: Mapping[str, str] = {
    "gateway.temperature": "0.4",
    "gateway.unnamed": "main",
    "judge.custom_rm_path": "openclaw_rl.rewards.feedback.custom_rm",
    "judge.standing_rule_path": "openclaw_rl.rewards.feedback.standing_rule",
    "judge.practice_idle_seconds": "0",
    "engine.threads": "1",
    "train.threads": "1",
}

UNRELATED = (
    "Write a short poem about the sea.",
    'Translate "good morning" into French.',
    "What is 12 plus 7?",
    "Name three colors.",
    "Write a Python function that adds two numbers.",
    "Tell me a story about a fox.",
    "Write an email that cancels a meeting.",
    "Give me a recipe for soup.",
)
"""Requests of another kind, by which harm is measured."""

ANSWERABLE = (
    ("What is the capital of France?", "paris"),
    ("What color is grass?", "green"),
    ("How many days are in a week?", "seven|7"),
    ("What is 2 + 2?", "4|four"),
    ("What planet do we live on?", "earth"),
    ("What is the opposite of hot?", "cold"),
    ("Who wrote Romeo and Juliet?", "shakespeare"),
    ("What is the largest ocean?", "pacific"),
)
"""Questions with an answer that the base mostly knows."""


class System(Protocol):
    """What a person talks to, and how one waits for it to have learnt."""

    url: str
    journal: Path

    async def settle(self) -> None:
        """Until nothing is left to judge, to practise or to train."""


@dataclass(frozen=True)
class Plan:
    """One run: who, how, how long."""

    person: str
    method: str
    seed: int
    sessions: int
    model: str
    folder: str
    control: str = ""
    """none: no training; system: none either, but the corrections stand in the system prompt."""
    processes: bool = False
    changes: Mapping[str, str] = field(default_factory=dict)
    label: str = ""

    @property
    def name(self) -> str:
        how = self.label or self.control or self.method
        return f"{self.person}-{how}-{self.seed}" + ("-processes" if self.processes else "")

    def config(self) -> Config:
        given = {
            **SETTINGS,
            "model.path": self.model,
            "data.path": str(Path(self.folder) / self.name),
            "gateway.port": str(free_port()),
            "engine.port": str(free_port()),
            "train.method": self.method,
            "train.seed": str(self.seed),
            **self.changes,
        }
        return load_config(given, {}, None)


# -- the two forms of the system --------------------------------------------------------------


class InProcess:
    """All four loops in this process, one after the other."""

    def __init__(self, config: Config, train: bool) -> None:
        from openclaw_rl.judge.models import Models
        from openclaw_rl.judge.practice import Practice
        from openclaw_rl.judge.worker import JudgeWorker
        from openclaw_rl.local.host import Host

        args = hook_args(config)
        self.config, self.journal, self.train = config, config.journal_path, train
        self.host = Host(args)
        self.trainer = self.host.trainer
        self.judge_args = hook_args(config)
        self.book = Journal.open(self.journal)
        models = self.judge_args.judge_models = Models(self.judge_args, self.book)
        reward = load_hook(args.custom_rm_path, default_name="custom_rm", flag="")
        rule = load_hook(args.standing_rule_path, default_name="standing_rule", flag="")
        self.judge = JudgeWorker(self.book, reward, self.judge_args, name="judge")
        self.practice = Practice(self.book, models, self.judge_args, rule)
        self.models = models
        batch = {"batch_size": args.rollout_batch_size, "session_share": args.session_share}
        self.book.publish("rollout", "", batch, time.time())

    async def start(self) -> None:
        from openclaw_rl.gateway.app import serving

        await asyncio.to_thread(self.trainer.resume)
        await self.host.serving.start(self.trainer.state.version)
        self.stack = contextlib.AsyncExitStack()
        self.url = await self.stack.enter_async_context(serving(self.config))

    async def settle(self) -> None:
        while True:
            await self.judge.run_until_idle()
            if not self.train or "pause" in self.book.asked():
                return
            await self.practice.fill()
            if self.book.outcomes().ready < self.config.rollout.batch_size:
                return
            await asyncio.to_thread(self._step)

    def _step(self) -> None:
        import torch

        torch.set_num_threads(1)  # of this thread
        self.trainer.args.num_rollout = self.trainer.state.rollout_id + 2
        self.trainer.run()

    async def close(self) -> None:
        await self.stack.aclose()
        await self.models.close()
        await self.host.serving.close()


class Processes:
    """`openclaw-rl up`."""

    def __init__(self, config: Config, train: bool) -> None:
        self.config, self.journal, self.train = config, config.journal_path, train
        self.url = config.gateway.url

    async def start(self) -> None:
        self.book: Journal | None = None
        self.config.journal_path.parent.mkdir(parents=True, exist_ok=True)
        with (self.config.journal_path.parent / "up.log").open("wb") as output:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "openclaw_rl.cli", "up", "--supervised", "--config", "-",
                stdin=asyncio.subprocess.PIPE, stdout=output, stderr=output,
            )  # fmt: skip
        assert self.process.stdin is not None
        self.process.stdin.write(self.config.model_dump_json().encode() + b"\n")
        await self.process.stdin.drain()
        async with aiohttp.ClientSession() as http:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.get(f"{self.url}/healthz") as answer:
                        if (await answer.json())["engine"]["state"] == "ready":
                            return
                if self.process.returncode is not None:
                    raise SystemExit("openclaw-rl up ended: see up.log")
                await asyncio.sleep(0.5)

    async def settle(self) -> None:
        self.book = self.book or Journal.open(self.journal)
        await learnt(self.book, self.config.rollout.batch_size if self.train else sys.maxsize)

    async def close(self) -> None:
        self.process.terminate()
        await self.process.wait()


# -- one run ----------------------------------------------------------------------------------


class Talk:
    """A person's side of the wire, and the probes' (side requests, never judged or trained)."""

    def __init__(self, plan: Plan, system: System) -> None:
        self.plan, self.person = plan, PEOPLE[plan.person]
        self.rng = random.Random(f"{plan.seed}/{plan.person}")
        self.said: list[str] = []
        """Corrections, oldest first."""
        self.client = AsyncOpenAI(
            base_url=f"{system.url}/v1", api_key="none",
            http_client=DefaultAsyncHttpxClient(trust_env=False),
        )  # fmt: skip

    async def session(self, number: int) -> dict[str, Any]:
        """One conversation of four questions; what came of it."""
        person, began = self.person, time.monotonic()
        questions = self.rng.sample(list(person.questions), QUESTIONS_A_SESSION)
        messages: list[dict[str, str]] = []
        if self.plan.control == "system" and self.said:
            rules = " ".join(dict.fromkeys(self.said[-3:]))
            messages.append({"role": "system", "content": f"You are a helpful assistant. {rules}"})
        words = questions[0].text
        pleased, replies, strict = [], [], []
        for i, question in enumerate(questions):
            messages.append({"role": "user", "content": words})
            reply = await self.ask(
                messages, person.max_tokens, session=f"{self.plan.name}-{number}"
            )
            messages.append({"role": "assistant", "content": reply})
            complaint = person.complaint(question, reply, number)
            reaction = person.react(complaint, self.rng)
            if complaint and reaction:
                self.said.append(reaction)
            pleased.append(not complaint)
            replies.append(reply)
            strict.append(strictly_on_subject(question, reply))
            following = questions[i + 1].text if i + 1 < len(questions) else ""
            words = f"{reaction} {following}".strip()
        if words:  # the reaction to the last reply; the answer to it is of no interest
            messages.append({"role": "user", "content": words})
            await self.ask(messages, 1, session=f"{self.plan.name}-{number}")
        return {
            "pleased": statistics.fmean(pleased),
            "corrections": len(self.said),
            "words": [count_words(reply) for reply in replies],
            "strict": statistics.fmean(strict),
            "replies": replies,
            "messages": messages,
            "seconds": round(time.monotonic() - began, 1),
        }

    async def ask(
        self, messages: Sequence[Mapping[str, str]], max_tokens: int, session: str = "",
        temperature: float | None = None,
    ) -> str:  # fmt: skip
        """A reply; without a session a side request."""
        headers = {"x-session-id": session} if session else {"x-turn-type": "side"}
        extra = {} if temperature is None else {"temperature": temperature}
        answer = await self.client.chat.completions.create(
            model=Path(self.plan.model).name,
            messages=list(messages),
            max_tokens=max_tokens,
            extra_headers=headers,
            **extra,
        )  # type: ignore[call-overload]
        return str(answer.choices[0].message.content or "")


class Probe:
    """See the module. Talks to the engine itself for log-probs."""

    def __init__(self, talk: Talk, system: System, http: aiohttp.ClientSession) -> None:
        self.talk, self.person = talk, talk.person
        self.chat = ChatTokenizer.load(talk.plan.model)
        self.questions = self.person.held_out[:PROBES]
        self.book = Journal.open(system.journal)
        self.http = http
        self.own: list[tuple[list[int], list[int]]] = []
        """The base's replies to unrelated requests."""
        self.own_log_prob = 0.0

    def engine(self, role: str) -> EngineClient:
        found = self.book.endpoint(role)
        assert found is not None
        key = found.info.get("key")
        return EngineClient(
            engine_api(found.info.get("engine")), found.url, self.http, key=lambda: key
        )

    def ids(self, text: str) -> list[int]:
        return self.chat.encode(self.chat.render([{"role": "user", "content": text}]))

    async def begin(self) -> None:
        """At version 0, which is the base."""
        replies = await self._ask(list(UNRELATED), 48)
        self.own = [(self.ids(q), self._tokens(r)) for q, r in zip(UNRELATED, replies, strict=True)]
        self.own_log_prob = await self._mean("teacher", self.own)

    async def measure(self, session: int) -> dict[str, Any]:
        questions = self.questions
        texts = [question.text for question in questions]
        replies = await self._ask(texts, self.person.max_tokens)
        pairs = [(self.ids(q), self._tokens(r)) for q, r in zip(texts, replies, strict=True)]
        pairs = [pair for pair in pairs if pair[1]]
        base, own = await self._mean("teacher", pairs), await self._mean("policy", pairs)
        answers = await self._ask([q for q, _ in ANSWERABLE], 16)
        pleased = [
            not self.person.complaint(q, r, session)
            for q, r in zip(questions, replies, strict=True)
        ]
        return {
            "version": self.version(),
            "pleased": statistics.fmean(pleased),
            "words": statistics.fmean(map(count_words, replies)),
            "strict": statistics.fmean(map(strictly_on_subject, questions, replies)),
            "repeats": statistics.fmean(map(repeats, replies)),
            "alike": alike(replies),
            "empty": statistics.fmean(not reply.strip() for reply in replies),
            "kl": own - base,
            "base_log_prob": base,
            "harm": await self._mean("policy", self.own) - self.own_log_prob,
            "answers": sum(
                bool(re.search(right, reply, re.IGNORECASE))
                for (_, right), reply in zip(ANSWERABLE, answers, strict=True)
            ),
            "replies": replies[:4],
        }

    async def base_log_prob(self, messages: Sequence[Mapping[str, str]]) -> float:
        """Mean log-prob a token that the base gives to the replies of a conversation."""
        total, n = 0.0, 0
        teacher = self.engine("teacher")
        for at, message in enumerate(messages):
            if message["role"] != "assistant" or not message["content"]:
                continue
            ids, reply = (
                self.chat.encode(self.chat.render(messages[:at])),
                self._tokens(message["content"]),
            )
            scores = await teacher.score([*ids, *reply], len(ids))
            total, n = total + sum(scores.log_probs), n + len(reply)
        return total / max(1, n)

    def version(self) -> int:
        found = self.book.endpoint("policy")
        return 0 if found is None else int(found.info["weight_version"])

    def _tokens(self, reply: str) -> list[int]:
        return self.chat.encode(reply)

    async def _ask(self, texts: Sequence[str], max_tokens: int) -> list[str]:
        return await asyncio.gather(*(
            self.talk.ask([{"role": "user", "content": text}], max_tokens, temperature=0.0)
            for text in texts
        ))  # fmt: skip

    async def _mean(self, role: str, pairs: Sequence[tuple[list[int], list[int]]]) -> float:
        engine = self.engine(role)
        scored = await asyncio.gather(
            *(engine.score([*prompt, *reply], len(prompt)) for prompt, reply in pairs)
        )
        values = [value for scores in scored for value in scores.log_probs]
        return statistics.fmean(values) if values else 0.0


def repeats(text: str) -> bool:
    """Whether a reply holds some four words in a row twice."""
    words = text.lower().split()
    grams = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return len(set(grams)) < len(grams)


def alike(replies: Sequence[str]) -> float:
    """Mean ROUGE-L (F1 over words) between replies to different questions; 0 for fewer than two."""
    words = [reply.lower().split() for reply in replies]
    pairs = [_rouge_l(a, b) for i, a in enumerate(words) for b in words[:i]]
    return statistics.fmean(pairs) if pairs else 0.0


def _rouge_l(a: Sequence[str], b: Sequence[str]) -> float:
    if not a or not b:
        return float(a == b)
    row = [0] * (len(b) + 1)
    for word in a:
        before = 0
        for j, other in enumerate(b):
            before, row[j + 1] = (
                row[j + 1],
                before + 1 if word == other else max(row[j + 1], row[j]),
            )
    return 2 * row[-1] / (len(a) + len(b))


async def run(plan: Plan) -> Path:
    """One run; the file that holds what it measured."""
    config, kept = plan.config(), Path(plan.folder) / f"{plan.name}.jsonl"
    shutil.rmtree(Path(plan.folder) / plan.name, ignore_errors=True)  # an earlier run's journal
    train = not plan.control
    system = (Processes if plan.processes else InProcess)(config, train)
    with kept.open("w") as out:

        def keep(kind: str, **values: Any) -> None:
            out.write(json.dumps({"kind": kind, "run": plan.name, **values}) + "\n")
            out.flush()

        keep("plan", **asdict(plan))
        await system.start()
        try:
            async with connections(None) as http:
                talk = Talk(plan, system)
                probe = Probe(talk, system, http)
                await probe.begin()
                keep("version", session=0, **await probe.measure(0))
                measured = probe.version()
                for number in range(plan.sessions):
                    version = probe.version()
                    found = await talk.session(number)
                    found["base_log_prob"] = await probe.base_log_prob(found.pop("messages"))
                    keep("session", session=number, version=version, **found)
                    await system.settle()
                    if probe.version() != measured:
                        measured = probe.version()
                        keep("version", session=number, **await probe.measure(number))
                keep("end", outcomes=asdict(probe.book.outcomes()),
                     versions=[asdict(v) for v in probe.book.versions()])  # fmt: skip
        finally:
            await system.close()
    return kept


def _run(plan: Plan) -> Path:
    import logging

    import torch

    torch.set_num_threads(1)
    logging.basicConfig(
        level=logging.INFO, filename=f"{plan.folder}/{plan.name}.log", filemode="w",
        format="%(asctime)s %(message)s",
    )  # fmt: skip
    logging.getLogger("httpx").setLevel(logging.WARNING)
    began = time.monotonic()
    kept = asyncio.run(run(plan))
    print(f"{kept} ({(time.monotonic() - began) / 60:.1f} min)", flush=True)
    return kept


# -- the report -------------------------------------------------------------------------------


def load(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def served_at(sessions: Sequence[Mapping[str, Any]], begin: int = 0) -> int | None:
    """The session (counted from 1) that was the last of three pleased ones in a row."""
    shares = [one["pleased"] for one in sessions]
    for end in range(begin + IN_A_ROW, len(shares) + 1):
        if min(shares[end - IN_A_ROW : end]) == 1.0:
            return end
    return None


def row(lines: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """One run as a row of the table."""
    plan = lines[0]
    sessions = [line for line in lines if line["kind"] == "session"]
    versions = [line for line in lines if line["kind"] == "version"]
    served = served_at(sessions)
    rest = [one["pleased"] for one in sessions[served or len(sessions) :]]
    person = PEOPLE[plan["person"]]
    again = "-"
    if person.then is not None:
        found = served_at(sessions, person.changes_at)
        again = "never" if found is None else str(found - person.changes_at)
    last, harm = versions[-1], min(one["harm"] for one in versions)
    own = [one["base_log_prob"] for one in sessions[-20:]]
    return {
        "run": plan["run"],
        "three in a row": "never" if served is None else str(served),
        "again": again,
        "corrections until then": "-"
        if served is None
        else str(sessions[served - 1]["corrections"]),
        "pleased after it": f"{statistics.fmean(rest):.2f} of {len(rest)}" if rest else "-",
        "last 10": f"{statistics.fmean(one['pleased'] for one in sessions[-10:]):.2f}",
        "uncoached": f"{versions[0]['pleased']:.2f} > {last['pleased']:.2f}",
        "words": f"{versions[0]['words']:.0f} > {last['words']:.0f}",
        "strict": f"{versions[0]['strict']:.2f} > {last['strict']:.2f}",
        "repeats": f"{versions[0]['repeats']:.2f} > {last['repeats']:.2f}",
        "alike": f"{versions[0]['alike']:.2f} > {last['alike']:.2f}",
        "KL": f"{last['kl']:.2f}",
        "base log-prob": f"{statistics.fmean(own):.2f}",
        "harm, worst": f"{last['harm']:+.3f}, {harm:+.3f}",
        "answers": f"{versions[0]['answers']} > {last['answers']}",
        "versions": str(last["version"]),
    }


def samples(lines: Sequence[Mapping[str, Any]], every: int = 10) -> str:
    """What the base, every tenth version and the last replied, uncoached, beside their figures."""
    versions = [line for line in lines if line["kind"] == "version"]
    questions = [question.text for question in PEOPLE[lines[0]["person"]].held_out]
    told = [lines[0]["run"]]
    for one in versions:
        if one["version"] % every and one is not versions[-1]:
            continue
        told.append(
            f"\nversion {one['version']}: pleased {one['pleased']:.2f}, {one['words']:.0f} words, "
            f"strict {one['strict']:.2f}, KL {one['kl']:.2f}, harm {one['harm']:+.3f}"
        )
        for question, reply in zip(questions, one["replies"], strict=False):
            told.append(f"  {question} {' '.join(reply.split())}")
    return "\n".join(told)


def report(paths: Sequence[Path], image: Path | None) -> str:
    """The table of runs, in Markdown; their plot in `image`."""
    runs = [load(path) for path in paths]
    rows = [row(lines) for lines in runs]
    names = list(rows[0])
    table = [names, ["---"] * len(names), *([one[name] for name in names] for one in rows)]
    if image is not None:
        plot(runs, image)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def plot(runs: Sequence[Sequence[Mapping[str, Any]]], image: Path) -> None:
    """Pleased (mean of five sessions), reply length and harm over the sessions."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(4, 1, figsize=(8, 10), sharex=True)
    for lines in runs:
        sessions = [line for line in lines if line["kind"] == "session"]
        versions = [line for line in lines if line["kind"] == "version"]
        at, shares = [one["session"] for one in sessions], [one["pleased"] for one in sessions]
        mean = [statistics.fmean(shares[max(0, i - 4) : i + 1]) for i in range(len(shares))]
        panels[0].plot(at, mean, label=lines[0]["run"])
        panels[1].plot(at, [statistics.fmean(one["words"]) for one in sessions])
        panels[2].plot(at, [one["base_log_prob"] for one in sessions])
        panels[3].plot([one["session"] for one in versions], [one["harm"] for one in versions])
    labels = ("share pleased\n(mean of 5 sessions)", "words of a reply",
              "base log-prob\nof the replies", "harm, nats a token")  # fmt: skip
    for panel, label in zip(panels, labels, strict=True):
        panel.set_ylabel(label)
        panel.grid(alpha=0.3)
    panels[0].set_ylim(-0.03, 1.03)
    panels[0].legend(fontsize="small", ncol=2)
    panels[-1].set_xlabel("session")
    figure.tight_layout()
    figure.savefig(image, dpi=110)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct", help="the base's folder")
    parser.add_argument("--people", default="a", help=f"of {', '.join(PEOPLE)}, with commas")
    parser.add_argument("--methods", default="combined", help="combined, rl, opd, with commas")
    parser.add_argument("--seeds", default="0", help="numbers, with commas")
    parser.add_argument("--sessions", type=int, default=30)
    parser.add_argument("--control", choices=("none", "system"), default="")
    parser.add_argument("--processes", action="store_true", help="talk to `openclaw-rl up`")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.NAME=VALUE",
                        help="a setting other than the default")  # fmt: skip
    parser.add_argument("--label", default="", help="name of this variant in the table")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a core each")
    parser.add_argument("--folder", default="runs/learning", help="where runs are kept")
    parser.add_argument("--report", nargs="+", type=Path, help="only this: a table of kept runs")
    parser.add_argument("--samples", nargs="+", type=Path, help="only this: replies of kept runs")
    parser.add_argument("--plot", type=Path, help="with --report: a PNG file to draw")
    options = parser.parse_args(argv)
    if options.report:
        print(report(options.report, options.plot))
        return 0
    if options.samples:
        print("\n\n".join(samples(load(path)) for path in options.samples))
        return 0
    Path(options.folder).mkdir(parents=True, exist_ok=True)
    plans = [
        Plan(person, method, int(seed), options.sessions, options.model, options.folder,
             options.control, options.processes, dict(one.split("=", 1) for one in options.set),
             options.label)
        for person in options.people.split(",")
        for method in options.methods.split(",")
        for seed in options.seeds.split(",")
    ]  # fmt: skip
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=1) as pool:
        kept = list(pool.imap_unordered(_run, plans))
    print(report(sorted(kept), None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
