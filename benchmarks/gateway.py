"""What the gateway costs, against the bare fake engine in the same run, as a client sees it.

    python -m benchmarks.gateway              # about two minutes; prints a table
    python -m benchmarks.gateway --quick      # about twenty seconds

Three processes: this client, the gateway, the fake engine (of `tests/fakes`); where SLIME_DIR names
a checkout of slime, its OpenAI adapter is a fourth, asked the same burst in the same rounds. Each
request is asked twice, in turns: once at the engine's `/generate`, once at the gateway. The gateway
recognises every conversation, journals every turn and tokenises with a real tokenizer; the tiny one
of the tests, or that of `--model`. The client only looks for the first token while replies come,
and reads them afterwards. `CPU` is what each process used in all for a row: on a busy machine it
tells more than the times.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from benchmarks.processes import Meter, free_port, process
from openclaw_rl.config import Config, DataConfig, EngineConfig, GatewayConfig, ModelConfig
from openclaw_rl.engine.chat import ChatTokenizer
from openclaw_rl.gateway.app import run
from tests.fakes.model import tiny_tokenizer

SYSTEM = "You are a careful assistant. " * 60
"""About 1,700 characters: a small agent's system prompt."""
STREAMS = 64
TOKEN_SECONDS = 0.02


@dataclass(frozen=True)
class Times:
    """Seconds from the request to the first token and to the end."""

    first: float
    total: float
    text: str = ""


@dataclass(frozen=True)
class Row:
    what: str
    bare: str
    gateway: str
    figure: str
    promise: str
    kept: bool | None
    cpu: str = ""


class Client:
    """Asks engine and gateway the same things."""

    def __init__(self, http: aiohttp.ClientSession, tokenizer: ChatTokenizer, gateway: str) -> None:
        self._http = http
        self._tokenizer = tokenizer
        self._gateway = gateway

    async def bare(self, engine: str, messages: list[dict[str, str]], tokens: int) -> Times:
        """One streamed request at the engine itself."""
        ids = self._tokenizer.encode(self._tokenizer.render(messages))
        return await self.bare_ids(engine, ids, tokens)

    async def bare_ids(self, engine: str, ids: list[int], tokens: int) -> Times:
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": tokens, "temperature": 1.0},
            "stream": True,
            "return_logprob": True,
        }
        started = time.perf_counter()
        first = 0.0
        async with self._http.post(f"{engine}/generate", json=body) as response:
            async for data in response.content.iter_any():
                if not first and b"data: {" in data:
                    first = time.perf_counter() - started
        return Times(first, time.perf_counter() - started)

    async def through(
        self, messages: list[dict[str, str]], tokens: int, session: str, stream: bool = True
    ) -> Times:
        """One request at the gateway."""
        return await self.chat(self._gateway, messages, tokens, session, stream)

    async def chat(
        self, base: str, messages: list[dict[str, str]], tokens: int, session: str, stream: bool
    ) -> Times:
        """One request at whatever speaks Chat Completions."""
        body = {"messages": messages, "max_tokens": tokens, "stream": stream, "user": session}
        headers = {"X-Session-Id": session}
        started = time.perf_counter()
        first = 0.0
        url = f"{base}/v1/chat/completions"
        async with self._http.post(url, json=body, headers=headers) as response:
            if response.status != 200:
                raise SystemExit(f"the gateway answered {response.status}")
            if not stream:
                text = (await response.json())["choices"][0]["message"]["content"]
                return Times(0.0, time.perf_counter() - started, text)
            pieces = []
            async for data in response.content.iter_any():
                pieces.append(data)
                # The first piece may be the role alone.
                if not first and data.count(b"data: {") > data.count(b'"role":'):
                    first = time.perf_counter() - started
        spent = time.perf_counter() - started
        return Times(first, spent, _text(b"".join(pieces)))


def _text(stream: bytes) -> str:
    """What a finished stream said."""
    if b'data: {"error"' in stream:
        raise SystemExit("a stream ended with an error")
    events = (line[6:] for line in stream.split(b"\n") if line.startswith(b"data: {"))
    choices = (choice for event in events for choice in json.loads(event)["choices"])
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def question(number: int) -> list[dict[str, str]]:
    """A conversation of its own."""
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"Question {number}: what is the capital of France, and why?"},
    ]


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


async def one_stream(client: Client, engine: str, count: int) -> Row:
    """One after the other; the added time to the first token."""
    bare, gateway = [], []
    for number in range(count):
        bare.append((await client.bare(engine, question(number), 8)).first)
        gateway.append((await client.through(question(number), 8, f"one-{number}")).first)
    added = statistics.median(gateway) - statistics.median(bare)
    return Row(
        "first token, 1 stream, median",
        ms(statistics.median(bare)),
        ms(statistics.median(gateway)),
        f"added {ms(added)}",
        "<= 5 ms",
        added <= 0.005,
    )


async def steady(ask: Callable[[int], Awaitable[Times]], count: int, tokens: int) -> list[Times]:
    """Arrivals so that `STREAMS` are under way at any time."""
    pause = tokens * TOKEN_SECONDS / STREAMS
    started = time.perf_counter()
    asked = []
    for number in range(count):
        await asyncio.sleep(max(0.0, started + number * pause - time.perf_counter()))
        asked.append(asyncio.ensure_future(ask(number)))
    return await asyncio.gather(*asked)


async def many_streams(client: Client, engine: str, count: int) -> Row:
    """64 under way at 20 ms a token."""
    tokens = 50
    bare = await steady(lambda n: client.bare(engine, question(n), tokens), count, tokens)
    gateway = await steady(lambda n: client.through(question(n), tokens, f"m{n}"), count, tokens)
    warm = STREAMS  # until all are under way
    plain = percentile([t.first for t in bare[warm:]], 0.99)
    ours = percentile([t.first for t in gateway[warm:]], 0.99)
    return Row(
        f"first token, {STREAMS} streams, p99",
        ms(plain),
        ms(ours),
        f"added {ms(ours - plain)}",
        "<= 25 ms",
        ours - plain <= 0.025,
    )


async def cost(client: Client, meter: Meter, stream: bool, tokens: int) -> Row:
    """The gateway's CPU a turn of two tokens and for each further token, `STREAMS` at a time."""
    spent: dict[int, float] = {}
    for size, rounds in ((2, 5), (tokens, 1)):
        before = meter.read()["gateway"]
        for number in range(rounds):
            names = [f"cost-{stream}-{size}-{number}-{n}" for n in range(STREAMS)]
            await asyncio.gather(
                *(client.through(question(n), size, name, stream) for n, name in enumerate(names))
            )
        spent[size] = (meter.read()["gateway"] - before) / (rounds * STREAMS)
    token = (spent[tokens] - spent[2]) / (tokens - 2)
    allowed = 35e-6 if stream else 5e-6
    return Row(
        f"CPU a turn and a token, {STREAMS} {'streamed' if stream else 'whole'}",
        "-",
        f"{ms(spent[2])}, {token * 1e6:.1f} us",
        "",
        f"<= 3 ms, {allowed * 1e6:.0f} us",
        spent[2] <= 0.003 and token <= allowed,
    )


async def burst(client: Client, engine: str, stream: bool, rounds: int, slime: str | None) -> Row:
    """64 turns at once on an engine that needs no time. slime's adapter does not stream: it is
    compared in the row of whole replies."""
    best: dict[str, tuple[float, float]] = {}
    ways = ["bare", "gateway", *(["slime"] if slime and not stream else [])]
    for turn in range(rounds * len(ways)):
        name = ways[turn % len(ways)]
        started = time.perf_counter()
        session = f"{name}-{turn}"
        times = await asyncio.gather(
            *(
                client.bare(engine, question(n), 16)
                if name == "bare"
                else client.chat(slime, question(n), 16, f"{session}-{n}", False)
                if name == "slime" and slime
                else client.through(question(n), 16, f"{session}-{n}", stream)
                for n in range(STREAMS)
            )
        )
        spent = time.perf_counter() - started
        figures = (spent, percentile([t.total for t in times], 0.99))
        best[name] = min(best.get(name, figures), figures)
    told = {k: f"{ms(p99)} ({STREAMS / spent:.0f}/s)" for k, (spent, p99) in best.items()}
    if stream:
        figure, promise, kept = f"{STREAMS / best['gateway'][0]:.0f} turns/s", "-", None
    elif "slime" in best:
        figure, promise = f"slime's adapter {told['slime']}", "no slower than slime's"
        kept = best["gateway"][0] <= best["slime"][0]
    else:
        figure, promise, kept = "slime's: not run: SLIME_DIR is not set", "no slower", None
    what = f"burst of {STREAMS}, {'streamed' if stream else 'whole'}, p99"
    return Row(what, told["bare"], told["gateway"], figure, promise, kept)


async def long_session(client: Client, engine: str, turns: int, sessions: int) -> Row:
    """The gateway's time (its total less the bare engine's) late in a session and early."""
    early: list[float] = []
    late: list[float] = []
    for number in range(sessions):
        talk = question(number)[:1]
        for turn in range(1, turns + 1):
            talk.append({"role": "user", "content": f"Turn {turn}: and what about that? " * 4})
            asked = await client.through(talk, 16, f"long-{number}")
            if turn in range(2, 12) or turn > turns - 10:
                plain = await client.bare(engine, talk, 16)
                (early if turn < 12 else late).append(asked.total - plain.total)
            talk.append({"role": "assistant", "content": asked.text})
    ratio = statistics.median(late) / statistics.median(early)
    return Row(
        f"gateway's own time, turn {turns} / turn 2",
        "-",
        f"{ms(statistics.median(late))} / {ms(statistics.median(early))}",
        f"{ratio:.2f}x",
        "<= 1.5x",
        ratio <= 1.5,
    )


async def measure(options: argparse.Namespace) -> list[Row]:
    folder = Path(options.folder)
    model = Path(options.model) if options.model else tiny_tokenizer(folder, context_length=1 << 20)
    tokenizer = ChatTokenizer.load(model)
    slow, instant = free_port(), free_port()
    quick = options.quick
    engine = ["-m", "tests.fakes.engine", *(["--incremental"] if options.incremental else [])]
    rows: list[Row] = []

    async def against(
        port: int, delay: float, work: Callable[[Client, str, Meter, str | None], Awaitable[None]]
    ) -> None:
        gateway, other = free_port(), free_port()
        url = f"http://127.0.0.1:{port}"
        serve = ["-m", "benchmarks.gateway", "--serve", str(gateway), "--model", str(model),
                 "--folder", str(folder), "--engine", url]  # fmt: skip
        async with contextlib.AsyncExitStack() as stack:
            start = [*engine, "--port", str(port), "--delay", str(delay), "--tokens", "512"]
            pids = {
                "engine": await stack.enter_async_context(process(*start)),
                "gateway": await stack.enter_async_context(process(*serve)),
                "client": os.getpid(),
            }
            slime = None
            if options.slime and not delay:
                adapter = ["-m", "benchmarks.slime_adapter", "--slime", options.slime,
                           "--model", str(model), "--engine", url,
                           "--port", str(other)]  # fmt: skip
                pids["slime"] = await stack.enter_async_context(process(*adapter))
                slime = f"http://127.0.0.1:{other}"
            http = await stack.enter_async_context(
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
            )
            client = Client(http, tokenizer, f"http://127.0.0.1:{gateway}")
            for number in range(5):  # warm: imports, connections, caches
                await client.bare(url, question(10_000 + number), 4)
                await client.through(question(10_000 + number), 4, f"warm-{number}")
                if slime:
                    await client.chat(slime, question(10_000 + number), 4, f"w{number}", False)
            await work(client, url, Meter(pids), slime)

    async def add(meter: Meter, work: Awaitable[Row]) -> None:
        row, cpu = await meter.around(work)
        rows.append(replace(row, cpu=cpu))

    async def at_speed(client: Client, url: str, meter: Meter, slime: str | None) -> None:
        await add(meter, one_stream(client, url, 10 if quick else 60))
        await add(meter, many_streams(client, url, 160 if quick else 640))
        for stream in (True, False):
            await add(meter, cost(client, meter, stream, 100 if quick else 300))

    async def at_once(client: Client, url: str, meter: Meter, slime: str | None) -> None:
        for stream in (False, True):
            await add(meter, burst(client, url, stream, 2 if quick else 8, slime))
        turns, sessions = (60, 1) if quick else (200, 3)
        await add(meter, long_session(client, url, turns, sessions))

    await against(slow, TOKEN_SECONDS, at_speed)
    await against(instant, 0.0, at_once)
    return rows


def show(rows: list[Row]) -> None:
    head = Row("what", "bare engine", "gateway", "figure", "promise", None, "CPU")
    table = [(r.what, r.bare, r.gateway, r.figure, r.promise,
              "" if r.kept is None else "kept" if r.kept else "MISSED", r.cpu)
             for r in (head, *rows)]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print(" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


async def serve(options: argparse.Namespace) -> None:
    config = Config(
        model=ModelConfig(path=options.model, served_name="bench"),
        data=DataConfig(path=f"{options.folder}/journal-{options.serve}"),
        gateway=GatewayConfig(
            port=options.serve,
            context_length=1 << 20,
            max_inflight=4096,  # where it cannot keep up, the table shall say so, not stop
        ),
        engine=EngineConfig(url=options.engine),
    )
    config.journal_path.parent.mkdir()
    await run(config, on_ready=lambda url: print(url, flush=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    parser.add_argument("--incremental", action="store_true", help="engine sends only new tokens")
    parser.add_argument("--model", default="", help="folder of a tokenizer (default: a tiny one)")
    slime = os.environ.get("SLIME_DIR")
    parser.add_argument("--slime", default=slime, help="a checkout of slime (default: SLIME_DIR)")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        asyncio.run(serve(options))
        return
    with tempfile.TemporaryDirectory() as folder:
        options.folder = folder
        show(asyncio.run(measure(options)))


if __name__ == "__main__":
    main()
