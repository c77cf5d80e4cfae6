"""Several independent votes of one judge on one turn.

Guarantees: a vote that fails, takes too long or tells nothing is an abstention; a prompt that does
not fit is shortened until it does, or all abstain; only where no vote told anything, and one of
them failed because the endpoint was away (or too slow: `EngineTooSlow`), is `EngineUnavailable`
raised, so that the turn can wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from openclaw_rl.errors import EngineError, EngineTooSlow, EngineUnavailable
from openclaw_rl.judge.llm import JudgeLLM, is_overflow
from openclaw_rl.judge.prompts import Case, new_nonce
from openclaw_rl.judge.votes import ABSTAINED, Vote, parse_vote

BuildPrompt = Callable[[Case, str, int], list[dict[str, str]]]

_FIRST_LIMIT = 48_000
"""Characters of data where the judge's context is unknown."""
_SMALLEST_LIMIT = 400


@dataclass(frozen=True, slots=True)
class Panel:
    """How to ask: `m` votes at `temperature`, each within `max_tokens` and `seconds`."""

    llm: JudgeLLM
    build: BuildPrompt
    schema: Mapping[str, Any]
    m: int
    temperature: float
    max_tokens: int
    seconds: float
    count: Callable[[str], None]

    async def votes(self, case: Case) -> list[Vote]:
        """`m` votes, abstentions among them. Raises `EngineUnavailable`, `EngineError`."""
        nonce, limit = new_nonce(), self._first_limit()
        while limit >= _SMALLEST_LIMIT:
            messages = self.build(case, nonce, limit)
            excess = await self._excess(messages)
            if excess > 1:
                limit = int(limit / excess * 0.9)
                continue
            results = await asyncio.gather(
                *(self._vote(messages, nonce) for _ in range(self.m)), return_exceptions=True
            )
            if any(isinstance(r, Exception) and is_overflow(r) for r in results):
                limit //= 2
                continue
            return self._read(results)
        self.count("judge_overflow")
        return [ABSTAINED] * self.m

    def _read(self, results: list[Vote | BaseException]) -> list[Vote]:
        votes, away = [], None
        for result in results:
            if isinstance(result, Vote):
                votes.append(result)
            elif isinstance(result, EngineError):
                votes.append(ABSTAINED)
                # Being away is the kinder explanation: it may pass.
                if away is None or isinstance(result, EngineUnavailable):
                    away = result
            else:
                raise result
        abstained = sum(vote.score is None for vote in votes)
        if away is not None and abstained == len(votes):
            raise away
        for _ in range(abstained):
            self.count("judge_abstained")
        return votes

    async def _vote(self, messages: list[dict[str, str]], nonce: str) -> Vote:
        try:
            async with asyncio.timeout(self.seconds):
                completion = await self.llm.complete(
                    messages,
                    schema=self.schema,
                    temperature=self.temperature,
                    max_tokens=self._max_tokens(),
                )
        except TimeoutError:
            self.count("judge_timeout")
            raise EngineTooSlow(f"the judge took longer than {self.seconds:g} s") from None
        return parse_vote(
            completion.text,
            in_reasoning=completion.in_reasoning,
            finished=completion.finished,
            nonce=nonce,
        )

    def _max_tokens(self) -> int:
        context = self.llm.context_tokens
        return self.max_tokens if context is None else max(1, min(self.max_tokens, context // 3))

    def _first_limit(self) -> int:
        context = self.llm.context_tokens
        if context is None:
            return _FIRST_LIMIT
        # No tokenizer makes more than a few characters of a token; `_excess` corrects the rest.
        return max(_SMALLEST_LIMIT, (context - self._max_tokens()) * 4)

    async def _excess(self, messages: list[dict[str, str]]) -> float:
        """How many times too long the prompt is, as far as that is known here."""
        tokens, context = await self.llm.count(messages), self.llm.context_tokens
        if tokens is None or context is None:
            return 0.0
        return tokens / max(1, context - self._max_tokens())
