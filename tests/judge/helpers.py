"""Things that the tests of the judge share."""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from openclaw_rl.config import Config, hook_args
from openclaw_rl.journal.store import Journal
from openclaw_rl.judge.models import Models
from openclaw_rl.judge.worker import JudgeWorker
from openclaw_rl.types import Turn


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def record(turn_id: str, **given: Any) -> Turn:
    output = list(given.pop("output_ids", [11, 12, 2]))
    fields: dict[str, Any] = {
        "turn_id": turn_id,
        "session_id": f"session-of-{turn_id}",
        "source": "key",
        "owner": "",
        "kind": "main",
        "kind_reason": "opens",
        "parent_id": None,
        "matched": 0,
        "shares_tokens": False,
        "prompt_ids": [1, 2, 3],
        "output_ids": output,
        "output_logprobs": [-0.5] * len(output),
        "output_versions": ["1"] * len(output),
        "finish_reason": "stop",
        "truncated": False,
        "messages": ({"role": "user", "content": "What is rain?"},),
        "reply": {"role": "assistant", "content": "Water."},
        "tools": (),
        "template_kwargs": {},
        "sampling": {"temperature": 1.0},
        "request_hash": f"r.{turn_id}",
        "node_hash": f"n.{turn_id}",
        "rendered_len": 1,
        "rendered_sha": "x",
        "created": 100.0,
    }
    return Turn(**(fields | given))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def add_turn(
    journal: Journal, turn_id: str, next_state: Sequence[dict[str, Any]] | str, **given: Any
) -> None:
    """A turn that waits for its judge."""
    if isinstance(next_state, str):
        next_state = [user(next_state)]
    journal.record_turn(record(turn_id, **given))
    assert journal.set_next_state(turn_id, next_state)


def make_args(path: Path | str | None = None, **given: Any) -> Namespace:
    """Arguments as the judge gets them: complete, here without a model; `given` differ."""
    args = hook_args(Config())
    args.hf_checkpoint, args.engine_kind = None, "auto"
    args.journal_path = str(path) if path else None
    args.judge_timeout, args.judge_concurrency, args.prm_m = 20.0, 4, 1
    for name, value in given.items():
        assert hasattr(args, name), name
        setattr(args, name, value)
    return args


def make_worker(
    journal: Journal,
    reward: Callable[..., Any],
    args: Namespace,
    *,
    clock: Callable[[], float] | None = None,
    name: str = "w",
) -> JudgeWorker:
    args.judge_models = Models(args, journal)
    return JudgeWorker(journal, reward, args, name=name, clock=clock or Clock())


async def judge_all(
    journal: Journal, reward: Callable[..., Any], args: Namespace, **more: Any
) -> None:
    """One pass over what can be judged now."""
    worker = make_worker(journal, reward, args, **more)
    try:
        await worker.run_until_idle()
    finally:
        await args.judge_models.close()


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """For what other processes and threads do."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


class FakeChat:
    """An OpenAI-compatible endpoint with scripted answers: text, a status, or a whole choice."""

    def __init__(self) -> None:
        self.answers: deque[str | int | dict[str, Any]] = deque()
        self.default: str | int | dict[str, Any] = '{"why": "", "verdict": 1}'
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.refuse: Callable[[dict[str, Any]], str | None] = lambda body: None
        self.hold: asyncio.Event | None = None
        self.holds: deque[asyncio.Event | None] = deque()
        """For one request each, before `hold`."""
        self.arrived = asyncio.Condition()
        self.most_at_once = 0
        self._now = 0
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append({k.lower(): v for k, v in request.headers.items()})
        async with self.arrived:
            self.arrived.notify_all()
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            hold = self.holds.popleft() if self.holds else self.hold
            if hold is not None:
                await hold.wait()
            await asyncio.sleep(0)
        finally:
            self._now -= 1
        reason = self.refuse(body)
        if reason is not None:
            return web.json_response({"error": {"message": reason}}, status=400)
        answer = self.answers.popleft() if self.answers else self.default
        if isinstance(answer, int):
            return web.json_response({"error": {"message": "no"}}, status=answer)
        if isinstance(answer, str):
            answer = {"message": {"content": answer}, "finish_reason": "stop"}
        return web.json_response({"choices": [answer]})

    async def __aenter__(self) -> FakeChat:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()
