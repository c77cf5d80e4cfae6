"""System messages in mid-conversation, for templates that take one at the beginning only.

Agents put them there (Claude Code does in every turn); many templates refuse them (Qwen3.5's), and
some leave them out without a word. Here such a message stays where it stands, as words to the user
side: it is not moved to the front, because then every prompt would begin differently from the one
before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PROBE = "a word of no meaning"

PROBES: tuple[list[dict[str, Any]], ...] = (
    [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "system", "content": PROBE},
    ],
    [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
        {"role": "system", "content": PROBE},
        {"role": "user", "content": "u"},
    ],
)
"""A template that writes `PROBE` in each of these takes system messages anywhere."""


def only_at_the_beginning(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """`messages` without a system message behind the first place.

    Each becomes the end of the user message before it, or else a user message of its own.
    """
    result: list[Mapping[str, Any]] = []
    for index, message in enumerate(messages):
        if index == 0 or message.get("role") != "system":
            result.append(message)
            continue
        text = f"<system-reminder>\n{message.get('content') or ''}\n</system-reminder>"
        before = result[-1]
        if before.get("role") == "user" and isinstance(before.get("content"), str):
            result[-1] = {**before, "content": f"{before['content']}\n\n{text}"}
        else:
            result.append({"role": "user", "content": text})
    return result
