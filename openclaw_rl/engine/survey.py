"""What an engine outside is and can do, found out from the engine itself before it serves.

Guarantees: what it is and what the settings ask for fit together, or there is a `ConfigError` of
one line that says how to start it instead. Nothing is left at the engine; the questions hold no
conversation.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from openclaw_rl.engine.client import EngineClient
from openclaw_rl.engine.kinds import KINDS, VLLM
from openclaw_rl.engine.types import Abilities
from openclaw_rl.errors import ConfigError, EngineError, EngineRefused, EngineUnavailable

_PROMPT = (11, 12, 13)
"""Ids that every vocabulary has."""
_COLD = 0.25
_CANDIDATES = 20
"""vLLM's own limit. The more, the further the first is from the last."""
_ALLOWED = re.compile(r"max allowed: ([1-9]\d*)")
_NO_FOLDER = "/no/such/adapter"
_WAIT_SECONDS = 10.0
_SECONDS = 60.0
"""For all questions together: an engine under load takes 8."""
_START_PROCESSED = "start it with --logprobs-mode processed_logprobs"


@dataclass(frozen=True, slots=True)
class Needs:
    """What the settings ask of an engine: the temperature that is trained, and the candidates of a
    token that the teacher is asked for (0: none)."""

    temperature: float = 1.0
    candidates: int = 0


@dataclass(frozen=True, slots=True)
class Survey:
    """What was found: the kind of the engine, what it can do, what it says of its model."""

    kind: str
    abilities: Abilities
    info: dict[str, Any]

    def check(self, needs: Needs) -> None:
        """Raises ConfigError where the engine cannot do what is needed."""
        able, wanted = self.abilities, needs.candidates
        if wanted > able.top_logprobs:
            fix = f": start it with --max-logprobs {wanted}" if self.kind == "vllm" else ""
            raise ConfigError(
                f"--opd-top-k asks the teacher for {wanted} candidates of a token, but this "
                f"{self.kind} gives {able.top_logprobs}{fix}"
            )
        if needs.temperature != 1 and not able.any_temperature:
            raise ConfigError(
                f"--temperature {needs.temperature:g}: this {self.kind} gives log-probs at "
                f"temperature 1 only, so nothing could be trained: {_START_PROCESSED}"
            )


async def survey(kind: str, url: str, http: aiohttp.ClientSession, candidates: int = 0) -> Survey:
    """Ask the engine at `url`. `kind` is what the settings say that it is ("auto": nothing);
    `candidates` how many of a token are wanted. Raises ConfigError, and EngineUnavailable where it
    does not answer (yet)."""
    try:
        async with asyncio.timeout(_SECONDS):
            kind = await _kind(kind, url, http)
            engine = EngineClient(kind, url, http, wait_seconds=_WAIT_SECONDS)
            info, abilities = await engine.model_info(), engine.abilities
            if kind == "vllm":
                abilities = await _log_probs(url, http, max(_CANDIDATES, candidates))
                await _check_adapters(engine)
            return Survey(kind, abilities, info)
    except TimeoutError:
        raise EngineUnavailable("it answers, but generates no token") from None
    except EngineUnavailable:
        raise
    except EngineError as error:  # a refusal, or answers that we cannot read (an old vLLM)
        raise ConfigError(f"--engine-url {url}: {error}") from error


async def _kind(said: str, url: str, http: aiohttp.ClientSession) -> str:
    """vLLM and SGLang name themselves as the owner of the models they list."""
    models = await EngineClient(None, url, http).models()
    owners = {str(model.get("owned_by")).lower() for model in models}
    found = next((name for name in KINDS if name in owners), None)
    if said == "auto" and found is None:
        raise ConfigError(
            f"--engine-url {url}: what answers there does not say that it is "
            f"{' or '.join(KINDS)}; name it: --engine {'|'.join(KINDS)}"
        )
    if said != "auto" and found not in (None, said):
        raise ConfigError(f"--engine {said}: what answers at {url} is {found}")
    return found or said


async def _log_probs(url: str, http: aiohttp.ClientSession, candidates: int) -> Abilities:
    """Asks the same twice, at temperature 1 and 0.25: raw log-probs stay as far apart as they were,
    processed ones go four times as far. And how many candidates of a token it gives."""
    # Believed at any temperature and number: whether that holds is the question.
    trusting = VLLM(replace(VLLM.abilities, any_temperature=True, top_logprobs=candidates))
    engine = EngineClient(trusting, url, http, wait_seconds=_WAIT_SECONDS)
    try:
        warm = await _spread(engine, 1.0, candidates)
    except EngineRefused as error:
        if (allowed := _ALLOWED.search(str(error))) is None:
            raise
        candidates = int(allowed.group(1))
        warm = await _spread(engine, 1.0, candidates)
    cold = await _spread(engine, _COLD, candidates)
    if warm is None or cold is None:
        raise ConfigError(f"--engine-url {url}: vLLM gives no log-probs: {_START_PROCESSED}")
    return replace(VLLM.abilities, top_logprobs=candidates, any_temperature=cold > 2 * warm)


async def _spread(engine: EngineClient, temperature: float, top: int) -> float | None:
    """How far apart the likeliest tokens after the prompt are, first and last; None where they
    have no log-probs."""
    sampling = {"max_new_tokens": 1, "temperature": temperature, "ignore_eos": True}
    spread = None
    rid = f"survey-{uuid.uuid4().hex}"
    async for delta in engine.generate(_PROMPT, sampling, rid=rid, top_logprobs=top):
        for place in delta.top or ():
            spread = place[0][0] - place[-1][0]
    return spread


async def _check_adapters(engine: EngineClient) -> None:
    """Asks for one that is not there: an engine that takes adapters says so, another one that it
    does not. The rank it takes is told at the first one only."""
    try:
        await engine.load_adapter(f"survey-{uuid.uuid4().hex}", _NO_FOLDER)
    except EngineRefused as error:
        if error.status == 501:
            raise ConfigError(
                "--engine-url: vLLM loads no adapters while it serves: start it with "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment, and --enable-lora"
            ) from error
        if "not enabled" in str(error):
            raise
