"""`make quickstart`: watch a small real model adapt to a person, on two CPU cores.

Starts `openclaw-rl up` as anybody would, lets a simulated person talk to it over HTTP, asks
held-out questions every few weight versions, and ends with a table and a plot. The reward comes
only through the served conversation, the journal, the judge and the hooks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path

from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAIError

from openclaw_rl.cli.status import read_status
from openclaw_rl.config import load_config
from openclaw_rl.journal import Journal

from .model import ModelUnavailable, fetch_model
from .options import engine_flags, parse, shown, without_settings
from .report import plot, table
from .talk import Exam, Users, examine, learnt

RECIPE = Path(__file__).with_name("recipe.toml")


@dataclass(frozen=True)
class Plan:
    """What to run and where to keep it."""

    method: str
    updates: int
    every: int
    seed: int
    users: int
    conversations: int
    folder: Path
    repeats: int
    up: tuple[str, ...] = ()
    """More flags of `openclaw-rl up`."""

    @property
    def log(self) -> Path:
        """What `openclaw-rl up` prints."""
        return self.folder / "up.log"


def say(words: str) -> None:
    """Print a line with the time."""
    print(f"{time.strftime('%H:%M:%S')}  {words}", flush=True)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def system(plan: Plan, model: Path, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run `openclaw-rl up`; its output goes to `up.log` in the run's folder.

    It is in a session of its own, so that Ctrl-C reaches us alone and we end it, and it ends by
    itself once its standard input closes, however we ended.
    """
    command = [
        sys.executable,
        "-m",
        "openclaw_rl.cli",
        "up",
        "--supervised",
        "--config",
        str(RECIPE),
        "--model",
        str(model),
        "--data",
        str(plan.folder / "data"),
        "--method",
        plan.method,
        "--num-rollout",
        str(plan.updates),
        "--seed",
        str(plan.seed),
        "--port",
        str(port),
        "--engine-port",
        str(free_port()),
        *plan.up,
    ]
    with plan.log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=without_settings(os.environ, keep=("ENGINE_API_KEY",) if plan.up else ()),
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
                await process.wait()


class Broken(Exception):
    """The system ended or does not answer; the message names the reason and the log."""


def ended(plan: Plan, status: int) -> Broken:
    """The error for an `openclaw-rl up` that ended early, with the reason it gave, if any."""
    lines = [line.strip() for line in plan.log.read_bytes().decode(errors="replace").split("\n")]
    own = [line for line in lines if line and not line.startswith("[")]  # not a loop's log
    reasons = [line for line in lines if "openclaw-rl: " in line] or own or [f"status {status}"]
    return Broken(f"openclaw-rl up ended: {reasons[-1]} (log: {shown(plan.log)})")


async def until_ready(client: AsyncOpenAI, plan: Plan, process: asyncio.subprocess.Process) -> str:
    """Wait until the policy answers; return the served model's name."""
    deadline = time.monotonic() + 180
    while True:
        if process.returncode is not None:
            raise ended(plan, process.returncode)
        try:
            name = (await client.models.list()).data[0].id
            hello = {"role": "user", "content": "Hello"}
            await client.chat.completions.create(
                model=name, messages=[hello], max_tokens=1, extra_headers={"x-turn-type": "side"}
            )  # type: ignore[call-overload]
            return name
        except OpenAIError as error:  # not listening yet
            if time.monotonic() > deadline:
                raise Broken(
                    f"the model does not answer: {error} (log: {shown(plan.log)})"
                ) from error
        await asyncio.sleep(0.5)


async def learn(plan: Plan, model: Path, exams: list[Exam]) -> None:
    """Run the system, the users and the exams; each exam is appended to `exams`."""
    port = free_port()
    config = load_config({"data.path": str(plan.folder / "data")}, {}, str(RECIPE))
    say(f"starting openclaw-rl up (log: {shown(plan.log)})")
    async with (
        system(plan, model, port) as process,
        AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1",
            api_key="none",
            timeout=600,
            max_retries=0,
            http_client=DefaultAsyncHttpxClient(trust_env=False),  # no proxy on the loopback
        ) as client,
    ):
        name = await until_ready(client, plan, process)
        say(f"{name} is served at http://127.0.0.1:{port}/v1 · method {plan.method}")
        batch = config.rollout.batch_size
        book = Journal.open(config.journal_path)
        if plan.users == 1:
            users = Users(client, name, plan.seed, 1, 4, lambda: learnt(book, batch))
        else:
            users = Users(client, name, plan.seed, plan.users)

        async def exam(version: int) -> None:
            try:
                exams.append(await examine(client, name, version, plan.repeats))
            except OpenAIError as error:
                raise Broken(f"an exam failed: {error} (log: {shown(plan.log)})") from error
            with (plan.folder / "exams.jsonl").open("a") as file:
                file.write(json.dumps(asdict(exams[-1])) + "\n")
            last = exams[-1]
            say(
                f"held-out questions at version {version}: {last.satisfied:.0%} to the user's "
                f"liking, {last.mean_words:.0f} words on average"
            )

        await exam(0)
        talking = asyncio.create_task(users.run())
        try:
            before, told, due = "", 0.0, plan.every
            warned: set[str] = set()
            while True:
                await asyncio.sleep(1)
                if process.returncode is not None:
                    raise ended(plan, process.returncode)
                if talking.done():
                    raise Broken(f"the users got no reply (log: {shown(plan.log)})")
                status = await asyncio.to_thread(read_status, config)
                version = int(status["version"] or 0)
                line = progress(status, users, batch)
                if line != before and time.monotonic() - told >= 10:
                    say(line)
                    before, told = line, time.monotonic()
                for warning in status["warnings"]:
                    if users.recent and warning not in warned:
                        say(f"warning: {warning}")
                        warned.add(warning)
                last = version >= plan.updates or (
                    plan.users == 1 and users.conversations >= plan.conversations
                )
                if last or version >= due:
                    await users.pause()
                    await exam(version)
                    if last:
                        return
                    users.resume()
                    due = version + plan.every
        finally:
            talking.cancel()
            await asyncio.wait({talking})
            book.close()


def progress(status: dict, users: Users, batch: int) -> str:
    """Return one line: turns, judged, ready, version, the user's mood."""
    pleased = [liked for liked, _ in users.recent]
    mood = (
        f"{sum(pleased)}/{len(pleased)} of the last replies pleased" if pleased else "no reply yet"
    )
    reward = status["mean_reward"]
    return (
        f"conversations {users.conversations} · turns {status['main']} · "
        f"judged {status['judged']} · ready {status['ready']}/{batch} · "
        f"trained {status['trained']} · version {status['version'] or 0} · "
        f"reward {'-' if reward is None else format(reward, '+.2f')} · {mood}"
    )


def go_on(plan: Plan, model: Path) -> str:
    """Return the commands that serve the learnt model, which goes on learning."""
    program = shown(Path(sys.executable).with_name("openclaw-rl"))
    data = shown(plan.folder / "data")
    serve = [program, "up", "--config", shown(RECIPE), "--model", shown(model), "--data", data]
    return "\n".join(
        [
            "go on with it:",
            "  " + shlex.join([*serve, "--method", plan.method]),
            "what became of every turn:",
            "  " + shlex.join([program, "status", "--data", data]),
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Run the quickstart; return the exit status (2: misused, 130: interrupted)."""
    options = parse(sys.argv[1:] if argv is None else argv, os.environ)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = options.folder / f"quickstart-{options.method}-{options.seed}-{stamp}"
    plan = Plan(
        options.method,
        options.updates,
        options.every,
        options.seed,
        options.users,
        options.conversations,
        folder,
        options.repeats,
        engine_flags(options),
    )
    started = time.monotonic()
    exams: list[Exam] = []
    try:
        model = fetch_model(options.models, say)
        folder.mkdir(parents=True)
        asyncio.run(learn(plan, model, exams))
    except (Broken, ModelUnavailable, OSError) as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if exams:
            print("\n" + table(exams))
        kept = f"; the run is kept in {shown(folder)}" if folder.exists() else ""
        print(f"\nquickstart: interrupted{kept}", file=sys.stderr)
        return 130
    minutes = (time.monotonic() - started) / 60
    print("\n" + table(exams))
    image = folder / "learning.png"
    plot({options.method: exams}, image)
    print(f"\nplot: {shown(image)} · {minutes:.1f} minutes · method {plan.method}")
    print(go_on(plan, model))
    if options.at_least is not None and exams[-1].satisfied < options.at_least:
        print(f"quickstart: {exams[-1].satisfied:.2f} is below {options.at_least}", file=sys.stderr)
        return 1
    if options.shorter and not exams[-1].mean_words < 0.85 * exams[0].mean_words:
        print("quickstart: the replies did not become shorter", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
