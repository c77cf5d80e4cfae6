"""The fake engine in vLLM's dialect: the same script, gate and faults as `FakeEngine`.

A request becomes one of `FakeEngine`'s, its events become vLLM's chunks; what vLLM does otherwise
(refusals, adapters as model names, no abort by id) is here.

By hand, or as a program that is started: `python -m tests.fakes.vllm --port 8000`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.fakes.engine import FakeEngine, Fault, Request


class FakeVLLM(FakeEngine):
    """See the module. `raw[n]` is what came for `requests[n]`."""

    owned_by = "vllm"

    def __init__(
        self,
        *,
        processed: bool = False,
        max_logprobs: int = 20,
        enable_lora: bool = True,
        updating: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(cumulative=False, **options)
        self.raw: list[dict[str, Any]] = []
        self.processed = processed
        """As with `--logprobs-mode processed_logprobs`: candidates are those at the temperature."""
        self.max_logprobs = max_logprobs
        self.enable_lora = enable_lora
        self.updating = updating
        """As with `VLLM_ALLOW_RUNTIME_LORA_UPDATING`."""

    @property
    def talks(self) -> list[dict[str, Any]]:
        """What came, but for the questions of a survey."""
        return [body for body in self.raw if not _surveys(body.get("request_id"))]

    def _add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/v1/completions", self._completions)
        router.add_get("/health", self._health)
        router.add_get("/v1/models", self._models)
        router.add_post("/v1/load_lora_adapter", self._load_adapter)
        router.add_post("/v1/unload_lora_adapter", self._unload_adapter)

    async def _load_adapter(self, http: web.Request) -> web.Response:
        if not self.updating:
            return web.json_response({"detail": "Not Found"}, status=404)
        if not self.enable_lora:
            return _error(500, "LoRA is not enabled. Use --enable-lora to enable LoRA.")
        return await super()._load_adapter(http)

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        given = await http.json()
        self.raw.append(given)
        scores = given.get("prompt_logprobs") is not None
        model = given.get("model")
        asked = max(given.get("logprobs") or 0, given.get("prompt_logprobs") or 0)
        if asked > self.max_logprobs:
            return _error(
                400,
                f"Requested sample logprobs of {asked}, which is greater than max allowed: "
                f"{self.max_logprobs}",
            )
        if model not in (None, self.model_path, *self.adapters):
            return _error(404, f"The model `{model}` does not exist.")
        body = {
            "input_ids": given["prompt"],
            "rid": given.get("request_id"),
            "stream": given.get("stream", False),
            "return_logprob": given.get("logprobs") is not None or scores,
            "top_logprobs_num": given["prompt_logprobs"] if scores else given.get("logprobs", 0),
            "logprob_start_len": 0,
            "sampling_params": {
                "max_new_tokens": 0 if scores else given["max_tokens"],
                "stop_token_ids": given.get("stop_token_ids"),
                "ignore_eos": given.get("ignore_eos"),
                "temperature": given.get("temperature"),
            },
        }
        return await self._take(http, body)

    async def _serve(self, http: web.Request, request: Request) -> web.StreamResponse:
        given = self.raw[-1]
        fault = (self.faults.popleft() if self.faults else None) or Fault()
        if fault.status is not None:
            return _error(fault.status, fault.message)
        total = len(request.ids) + given["max_tokens"]
        if total > self.context_length:
            return _error(
                400,
                f"This model's maximum context length is {self.context_length} tokens. However, "
                f"you requested {given['max_tokens']} output tokens and your prompt contains at "
                f"least {len(request.ids)} input tokens, for a total of at least {total} tokens.",
            )
        if request.sampling["max_new_tokens"] == 0:
            return web.json_response(self._scored(request, fault))
        request.base = given.get("model") in (None, self.model_path)
        if not given["stream"]:
            events = [event async for event in self._events(request, fault, whole=True)]
            if events[-1] is None:
                assert http.transport is not None
                http.transport.abort()
                return web.Response()
            text = _chunk(json.loads(events[-1]), request.reply)
            return web.Response(text=text, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        async for event in self._events(request, fault, whole=False):
            if event is None:
                assert http.transport is not None
                await asyncio.sleep(0.02)  # what was written before shall arrive
                http.transport.abort()
                return response
            await self._write(response, _chunk(json.loads(event), request.reply))
        await response.write(b"data: [DONE]\n\n")
        return response

    def _reply_for(self, request: Request) -> list[int]:
        return self.default_reply if _surveys(request.rid) else super()._reply_for(request)

    def _tops(self, request: Request, ids: Sequence[int], at: int) -> list[Any]:
        tops = super()._tops(request, ids, at)
        if not self.processed or not request.sampling["temperature"]:
            return tops
        cold = 1 / request.sampling["temperature"]
        return [[[v * cold, token, text] for v, token, text in place] for place in tops]

    def _scored(self, request: Request, fault: Fault) -> dict[str, Any]:
        meta = self._score(request)["meta_info"]
        tops = meta.get("input_top_logprobs") or [None] * len(request.ids)
        entries: list[Any] = [None]
        for (value, token, _), top in zip(meta["input_token_logprobs"][1:], tops[1:], strict=True):
            pairs = {token: value, **{other: v for v, other, _ in top or ()}}
            entries.append({str(i): {"logprob": v, "rank": 1} for i, v in pairs.items()})
        finish = "abort" if fault.abort_after is not None else "length"
        return {"choices": [{"prompt_logprobs": entries, "finish_reason": finish}]}


def _chunk(event: dict[str, Any], reply: list[int]) -> str:
    """SGLang's incremental event as vLLM's chunk."""
    meta, ids = event["meta_info"], event["output_ids"]
    finish = meta["finish_reason"] or {}
    matched = finish.get("matched")
    entries = meta.get("output_token_logprobs") or []
    tops = meta.get("output_top_logprobs") or []
    choice: dict[str, Any] = {
        "index": 0,
        "text": "x" * len(ids),
        "token_ids": ids,
        "finish_reason": finish.get("type"),
        # The model's own end of turn has no stop_reason; what was asked for has.
        "stop_reason": matched if isinstance(matched, int) and matched != 2 else None,
        "logprobs": {
            "tokens": [f"token_id:{token}" for _, token, _ in entries],
            "token_logprobs": [value for value, _, _ in entries],
            "top_logprobs": [{f"token_id:{i}": v for v, i, _ in top} for top in tops],
        },
    }
    return json.dumps({"object": "text_completion", "choices": [choice]})


def _surveys(rid: str | None) -> bool:
    return rid is not None and rid.startswith("survey-")


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


async def _main() -> None:
    parser = argparse.ArgumentParser(description="A fake vLLM with scripted tokens.")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--pid-file", type=Path, help="where its process id is written")
    options = parser.parse_args()
    engine = FakeVLLM(processed=True)
    await engine.start(options.port)
    if options.pid_file is not None:
        options.pid_file.write_text(str(os.getpid()))
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
