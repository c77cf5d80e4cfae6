"""What the engine client costs: many streams on one event loop against the fake engine.

    python -m benchmarks.engine_client --streams 64 --tokens 400 --delay 0.02
    python -m benchmarks.engine_client --streams 64 --burst        # an instant engine

The fake engine runs in a process of its own. Prints the CPU time of the client's process per
token, and how late tokens come out (steady arrivals: wall time against tokens x delay).
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import subprocess
import sys
import time
from contextlib import aclosing

import aiohttp

from openclaw_rl.engine.client import EngineClient


async def one(
    engine: EngineClient, number: int, tokens: int, prompt: int
) -> tuple[float, list[float]]:
    """Seconds to the first token, and the gaps between tokens."""
    ids = [number % 1000, *range(prompt - 1)]
    sampling = {"max_new_tokens": tokens + 1}
    begin = last = time.perf_counter()
    first, gaps = 0.0, []
    async with aclosing(engine.generate(ids, sampling, rid=f"bench{number:08d}")) as deltas:
        async for delta in deltas:
            now = time.perf_counter()
            if not first:
                first = now - begin
            elif delta.ids:
                gaps.append(now - last)
            last = now
            assert delta.logprobs is not None
    return first, gaps


async def measure(url: str, options: argparse.Namespace) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        engine = EngineClient("sglang", url, http, wait_seconds=20)
        while not await engine.health():  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.1)
        for repeat in range(options.repeat):
            cpu, wall = time.process_time(), time.perf_counter()
            results = await asyncio.gather(
                *(
                    one(engine, repeat * options.streams + at, options.tokens, options.prompt)
                    for at in range(options.streams)
                )
            )
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            firsts = sorted(first for first, _ in results)
            gaps = sorted(gap for _, some in results for gap in some) or [0.0]
            count = options.streams * options.tokens
            print(
                f"{options.streams} streams x {options.tokens} tokens: {wall:.2f} s, client CPU "
                f"{cpu:.2f} s ({cpu / wall:.0%} of a core, {cpu / count * 1e6:.0f} us a token), "
                f"{options.streams / wall:.0f} replies a second; first token median "
                f"{statistics.median(firsts) * 1e3:.1f} ms, p99 "
                f"{firsts[int(len(firsts) * 0.99)] * 1e3:.1f} ms; gap p99 "
                f"{gaps[int(len(gaps) * 0.99)] * 1e3:.1f} ms"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--prompt", type=int, default=1000, help="prompt tokens")
    parser.add_argument("--delay", type=float, default=0.02, help="seconds a token")
    parser.add_argument("--incremental", action="store_true")
    parser.add_argument("--burst", action="store_true", help="instant engine, 16-token replies")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    if options.burst:
        options.delay, options.tokens = 0.0, 16
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.fakes.engine", "--port", str(port)]
    command += ["--delay", str(options.delay), "--tokens", str(options.tokens)]
    command += ["--incremental"] if options.incremental else []
    fake = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        asyncio.run(measure(f"http://127.0.0.1:{port}", options))
    finally:
        fake.terminate()
        fake.wait()


if __name__ == "__main__":
    main()
