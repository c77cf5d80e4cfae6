"""`make quickstart`: watch a small real model adapt to a user, on two CPU cores.

Starts `openclaw-rl up` as anybody would, lets a simulated user talk to it over HTTP, asks
held-out questions every few weight versions, and ends with a table and a plot. The reward comes
only through the served conversation, the journal, the judge and the hooks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path

from openai import AsyncOpenAI

from openclaw_rl.config import load_config
from openclaw_rl.status import read_status

from .model import fetch_model
from .report import plot, table
from .talk import Exam, Users, examine

RECIPE = Path(__file__).with_name("recipe.toml")


@dataclass(frozen=True)
class Plan:
    """What to run and where to keep it."""

    method: str
    updates: int
    every: int
    seed: int
    users: int
    folder: Path
    repeats: int
    up: tuple[str, ...] = ()
    """More flags of `openclaw-rl up`."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; METHOD, UPDATES and SEED in the environment are the defaults."""
    environ = os.environ
    parser = argparse.ArgumentParser(prog="make quickstart", description=__doc__)
    parser.add_argument(
        "--method", choices=("combined", "rl", "opd"), default=environ.get("METHOD", "combined")
    )
    parser.add_argument(
        "--updates",
        type=int,
        default=int(environ.get("UPDATES", "36")),
        help="weight updates of 16 turns each (default 36)",
    )
    parser.add_argument(
        "--every",
        type=int,
        default=int(environ.get("EVERY", "6")),
        help="ask the held-out questions every so many versions",
    )
    parser.add_argument("--seed", type=int, default=int(environ.get("SEED", "0")))
    parser.add_argument("--users", type=int, default=8, help="users talking at the same time")
    parser.add_argument("--repeats", type=int, default=2, help="times a held-out question is asked")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="where the run is kept")
    parser.add_argument("--models", type=Path, default=Path("models"), help="where models are kept")
    parser.add_argument("--engine-url", help="a vLLM or SGLang that serves, in place of our engine")
    parser.add_argument("--engine", choices=("vllm", "sglang"), help="which of the two it is")
    parser.add_argument(
        "--at-least",
        type=float,
        default=None,
        help="fail unless this share is satisfied at the end",
    )
    parser.add_argument(
        "--shorter",
        action="store_true",
        help="fail unless replies to held-out questions became shorter",
    )
    return parser.parse_args(argv)


def say(words: str) -> None:
    """Print a line with the time."""
    print(f"{time.strftime('%H:%M:%S')}  {words}", flush=True)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def engine_flags(options: argparse.Namespace) -> tuple[str, ...]:
    """Flags for an engine outside; vLLM's log-probs are those at temperature 1."""
    if not options.engine_url:
        return ()
    engine = options.engine or "vllm"
    temperature = ("--temperature", "1") if engine == "vllm" else ()
    return ("--engine-url", options.engine_url, "--engine", engine, *temperature)


@contextlib.asynccontextmanager
async def system(plan: Plan, model: Path, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run `openclaw-rl up`; its output goes to `up.log` in the run's folder."""
    log = plan.folder / "up.log"
    command = [
        sys.executable,
        "-m",
        "openclaw_rl.cli",
        "up",
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
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={key: value for key, value in os.environ.items() if key != "CUSTOM_RM_PATH"},
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
                await process.wait()


class Broken(Exception):
    """The system ended or does not come up; the message names the log."""


async def until_ready(client: AsyncOpenAI, plan: Plan, process: asyncio.subprocess.Process) -> str:
    """Wait until the policy answers; return the served model's name."""
    deadline = time.monotonic() + 180
    while True:
        if process.returncode is not None:
            raise Broken(f"openclaw-rl up ended; see {plan.folder / 'up.log'}")
        with contextlib.suppress(Exception):  # not listening yet
            name = (await client.models.list()).data[0].id
            hello = {"role": "user", "content": "Hello"}
            await client.chat.completions.create(
                model=name, messages=[hello], max_tokens=1, extra_headers={"x-turn-type": "side"}
            )  # type: ignore[call-overload]
            return name
        if time.monotonic() > deadline:
            raise Broken(f"the model does not answer; see {plan.folder / 'up.log'}")
        await asyncio.sleep(0.5)


async def learn(plan: Plan, model: Path) -> list[Exam]:
    """Run the system, the users and the exams; return the exams by version."""
    port = free_port()
    config = load_config({"data.path": str(plan.folder / "data")}, {}, str(RECIPE))
    exams: list[Exam] = []
    async with (
        system(plan, model, port) as process,
        AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=600, max_retries=0
        ) as client,
    ):
        name = await until_ready(client, plan, process)
        say(f"{name} is served at http://127.0.0.1:{port}/v1 · method {plan.method}")
        users = Users(client, name, plan.seed, plan.users)

        async def exam(version: int) -> None:
            exams.append(await examine(client, name, version, plan.repeats))
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
            shown, told, due = "", 0.0, plan.every
            warned: set[str] = set()
            while True:
                await asyncio.sleep(1)
                if talking.done():
                    await talking
                if process.returncode is not None:
                    raise Broken(f"openclaw-rl up ended; see {plan.folder / 'up.log'}")
                status = await asyncio.to_thread(read_status, config)
                version = int(status["version"] or 0)
                line = progress(status, users, config.rollout.batch_size)
                if line != shown and time.monotonic() - told >= 10:
                    say(line)
                    shown, told = line, time.monotonic()
                for warning in status["warnings"]:
                    if users.recent and warning not in warned:
                        say(f"warning: {warning}")
                        warned.add(warning)
                if version >= min(due, plan.updates):
                    await users.pause()
                    await exam(version)
                    if version >= plan.updates:
                        return exams
                    users.resume()
                    due = version + plan.every
        finally:
            talking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await talking


def progress(status: dict, users: Users, batch: int) -> str:
    """Return one line: turns, judged, ready, version, the user's mood."""
    pleased = [liked for liked, _ in users.recent]
    mood = (
        f"{sum(pleased)}/{len(pleased)} of the last replies pleased" if pleased else "no reply yet"
    )
    reward = status["mean_reward"]
    return (
        f"turns {status['main']} · judged {status['judged']} · ready {status['ready']}/{batch} · "
        f"trained {status['trained']} · version {status['version'] or 0} · "
        f"reward {'-' if reward is None else format(reward, '+.2f')} · {mood}"
    )


def main(argv: list[str] | None = None) -> int:
    """Run the quickstart; return the exit status."""
    options = parse(argv)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = options.folder / f"quickstart-{options.method}-{options.seed}-{stamp}"
    folder.mkdir(parents=True)
    plan = Plan(
        options.method,
        options.updates,
        options.every,
        options.seed,
        options.users,
        folder,
        options.repeats,
        engine_flags(options),
    )
    started = time.monotonic()
    model = fetch_model(options.models, say)
    try:
        exams = asyncio.run(learn(plan, model))
    except Broken as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 1
    minutes = (time.monotonic() - started) / 60
    print("\n" + table(exams))
    plot({options.method: exams}, folder / "learning.png")
    print(f"\nplot: {folder / 'learning.png'} · {minutes:.1f} minutes · method {plan.method}")
    if options.at_least is not None and exams[-1].satisfied < options.at_least:
        print(f"quickstart: {exams[-1].satisfied:.2f} is below {options.at_least}", file=sys.stderr)
        return 1
    if options.shorter and not exams[-1].mean_words < 0.85 * exams[0].mean_words:
        print("quickstart: the replies did not become shorter", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
