"""A recorded turn as the `Sample` that reward functions see.

Guarantees: tokens, log-probs and versions are the recorded ones; `metadata` holds copies, so that
a reward function cannot change the turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openclaw_rl.hooks import Sample
from openclaw_rl.judge.prompts import text_of
from openclaw_rl.types import Turn


def sample_of(turn: Turn, response: str) -> Sample:
    """The whole turn: `tokens` is prompt + output, the response is the output."""
    messages = [dict(message) for message in turn.messages]
    sample = Sample(
        prompt=messages,
        tokens=[*turn.prompt_ids, *turn.output_ids],
        response=response,
        response_length=len(turn.output_ids),
        loss_mask=[1] * len(turn.output_ids),
        weight_versions=list(turn.output_versions),
        rollout_log_probs=None if turn.off_policy else list(turn.output_logprobs),
        session_id=turn.session_id,
        status=Sample.Status.TRUNCATED if turn.truncated else Sample.Status.COMPLETED,
        metadata={
            "turn_id": turn.turn_id,
            "session_id": turn.session_id,
            "messages": messages,
            "reply": dict(turn.reply),
            "next_state": [dict(message) for message in turn.next_state or ()],
            "tools": [dict(tool) for tool in turn.tools],
            "template_kwargs": dict(turn.template_kwargs),
            "sampling": dict(turn.sampling),
            "finish_reason": turn.finish_reason,
            "off_policy": turn.off_policy,
            "student_topk": turn.topk.as_dict() if turn.topk is not None else None,
        },
    )
    sample.validate()
    return sample


def reply_text(reply: Mapping[str, Any]) -> str:
    """The reply as text where no tokenizer is at hand: reasoning, content and calls are named as
    Qwen and Hermes models write them."""
    parts = []
    if reply.get("reasoning_content"):
        parts.append(f"<think>\n{reply['reasoning_content']}\n</think>\n")
    parts.append(text_of(reply))
    for call in reply.get("tool_calls") or ():
        function = call.get("function", call)
        parts.append(
            f'<tool_call>\n{{"name": "{function.get("name")}", '
            f'"arguments": {function.get("arguments")}}}\n</tool_call>'
        )
    return "\n".join(part for part in parts if part)
