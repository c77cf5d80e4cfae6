"""slime's own OpenAI adapter as a process, to be measured beside the gateway.

    python -m benchmarks.slime_adapter --slime DIR --model FOLDER --engine URL --port N

Nothing of slime is part of this project: it is imported from the folder given. The adapter neither
streams nor stores; it gets no reply parsers, which would need SGLang.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from aiohttp import web
from transformers import AutoTokenizer


async def serve(options: argparse.Namespace) -> None:
    sys.path.insert(0, options.slime)
    from slime.agent.adapters.openai import OpenAIAdapter

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    adapter = OpenAIAdapter(tokenizer=tokenizer, sglang_url=options.engine)
    runner = web.AppRunner(adapter.app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", options.port).start()
    print(f"slime's adapter on port {options.port}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--slime", required=True, help="a checkout of slime")
    parser.add_argument("--model", required=True, help="folder of the tokenizer")
    parser.add_argument("--engine", required=True, help="URL of the engine")
    parser.add_argument("--port", type=int, required=True)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
