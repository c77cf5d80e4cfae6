"""What a version is asked before it is served: shipped prompts, and the user's own.

Everyday questions are asked without any coaching: a prompt that names the wanted style would hide
that the style was not learnt, or that only the prompt holds the replies up. Unrelated requests are
not answered: they tell what learning did to replies that nobody complained of.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openclaw_rl.engine.chat import ChatTokenizer
from openclaw_rl.errors import ConfigError, EngineRefused

EVERYDAY = (
    "Why do leaves change colour in autumn?",
    "What should I check before buying a used bicycle?",
    "How can I get ink out of a cotton shirt?",
    "What is the difference between a village and a town?",
    "How do I keep bread fresh for a few days?",
    "Why is the sea salty?",
    "Give me an idea for a quiet evening at home.",
    "How does a key open a lock?",
    "What can I cook with rice, eggs and spinach?",
    "How do I write a friendly reminder to a colleague?",
    "Why do cats purr?",
    "What helps against a stiff neck after a day at a desk?",
)
UNRELATED = (
    "Translate into French: The train leaves at noon.",
    "Write a Python function that returns the largest number of a list.",
    "List the planets of the solar system from the inside to the outside.",
    "Summarise in one sentence: The bridge was closed for repairs, so the bus took a longer way.",
    "A shop sells pens at 3 coins each. How much do 7 pens cost?",
    "Rewrite more politely: Send me the file now.",
    "Name three uses of the element copper.",
    "What is the opposite of the word generous?",
)


@dataclass(frozen=True, slots=True)
class Probes:
    """Prompts in token ids. `decode` gives the text of a reply, `ends` end one."""

    questions: Sequence[Sequence[int]]
    unrelated: Sequence[Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    ends: Collection[int]

    @classmethod
    def load(cls, file: str, tokenizer: ChatTokenizer) -> Probes:
        """The shipped ones and those of the user's own file ("": none). Raises ConfigError."""

        def encode(messages: Any) -> list[int]:
            return tokenizer.encode(tokenizer.render(messages))

        def shipped(texts: Sequence[str]) -> list[list[int]]:
            return [encode([{"role": "user", "content": text}]) for text in texts]

        own = []
        for number, messages in _read(file) if file else ():
            try:
                own.append(encode(messages))
            except EngineRefused as error:
                raise ConfigError(f"--probes {file}, line {number}: {error}") from None
        return cls(
            [*shipped(EVERYDAY), *own], shipped(UNRELATED), tokenizer.decode, tokenizer.eos_ids
        )


def _read(name: str) -> list[tuple[int, list[dict[str, Any]]]]:
    """Line numbers and messages of a file of prompts: of a `.jsonl` each line is a list of
    messages, or an object with `messages`; of any other each line is a question."""
    path = Path(name).expanduser()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--probes: {path} cannot be read ({type(error).__name__})") from None
    found: list[tuple[int, list[dict[str, Any]]]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        messages: Any = [{"role": "user", "content": line.strip()}]
        if path.suffix == ".jsonl":
            try:
                messages = json.loads(line)
            except ValueError:
                messages = None
            if isinstance(messages, dict):
                messages = messages.get("messages")
            if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
                raise ConfigError(f"--probes {path}, line {number}: not a list of messages")
        found.append((number, messages))
    return found
