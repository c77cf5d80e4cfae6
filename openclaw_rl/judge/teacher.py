"""The teacher: how likely the same reply is to a model that was given the hint before.

Guarantees: the teacher sees the same messages, tools and template arguments as the policy did,
with the hint at the end of the last user message; the values are of the *sampled* ids, one each,
and where asked for and given its likeliest tokens in the place of each.
Where they do not fit the teacher's context, or do not line up, there is no teacher (None), and a
counter says why. An endpoint that is away raises `EngineUnavailable`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from openclaw_rl.engine.types import Engine
from openclaw_rl.errors import EngineError, EngineUnavailable
from openclaw_rl.judge.choice import Opinion
from openclaw_rl.judge.llm import Tokenizer, is_overflow, smaller
from openclaw_rl.judge.prompts import Message, defuse

HEADING = "[hint]"


def hinted_messages(
    messages: Sequence[Message], hint: str, heading: str = HEADING
) -> list[dict[str, Any]] | None:
    """`messages` with the hint at the end of the last user message; None without such a one."""
    hinted = [dict(message) for message in messages]
    addition = "\n\n" + "\n".join(part for part in (heading, defuse(hint.strip())) if part)
    for message in reversed(hinted):
        if message.get("role") != "user":
            continue
        content = message.get("content")
        if isinstance(content, str) or content is None:
            message["content"] = (content or "") + addition
        else:
            message["content"] = [*content, {"type": "text", "text": addition}]
        return hinted
    return None


class Teacher:
    """Scores replies at `engine`. `chat` is the *policy's* tokenizer and template."""

    def __init__(
        self,
        engine: Engine,
        chat: Tokenizer,
        *,
        count: Callable[[str], None],
        seconds: float,
        context_tokens: int | None = None,
        heading: str = HEADING,
    ) -> None:
        self._engine, self._chat, self._count = engine, chat, count
        self._seconds, self._heading = seconds, heading
        self._context = smaller(context_tokens, chat.context_length)

    async def opinion(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any],
        output_ids: Sequence[int],
        hint: str,
        top: int = 0,
    ) -> Opinion | None:
        """Natural-log probability of each of `output_ids` after the hinted prompt (temperature 1),
        and the `top` likeliest tokens in the place of each.

        Raises `EngineUnavailable`, also where the teacher takes too long.
        """
        hinted = hinted_messages(messages, hint, self._heading)
        if hinted is None:
            self._count("teacher_no_user_message")
            return None
        try:
            prompt = await asyncio.to_thread(self._encode, hinted, tools, template_kwargs)
        except EngineError:
            self._count("teacher_failed")
            return None
        if self._context is not None and len(prompt) + len(output_ids) > self._context:
            self._count("teacher_overflow")
            return None
        try:
            async with asyncio.timeout(self._seconds):
                scores = await self._engine.score_top([*prompt, *output_ids], len(prompt), top)
        except TimeoutError:
            raise EngineUnavailable("the teacher took too long") from None
        except EngineUnavailable:
            raise
        except EngineError as error:
            self._count("teacher_overflow" if is_overflow(error) else "teacher_failed")
            return None
        if len(scores.log_probs) != len(output_ids):
            self._count("teacher_failed")
            return None
        values = [value if math.isfinite(value) else math.nan for value in scores.log_probs]
        return Opinion(hint, values, scores.top)

    def _encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any],
    ) -> list[int]:
        return self._chat.encode(self._chat.render(messages, tools, template_kwargs))
