"""The served model's tokenizer: text to ids and back, without torch.

Guarantees: `render` gives exactly the text that the model's template writes (`template.py`);
`encode` turns it into ids without adding any; what was sampled is never tokenised again, see
`continue_prompt`. All methods may be called from several threads.
"""

from __future__ import annotations

import copy
import hashlib
import json
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from openclaw_rl.engine.template import ChatTemplate
from openclaw_rl.errors import ConfigError, ContextOverflow, EngineRefused
from openclaw_rl.types import Message, Turn

SHOWN = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>"})
"""Marks that reply parsers usually read, so they stay in the text even if the tokenizer calls them
special; `ChatTokenizer.showing` sets others."""

_CHARACTERS_A_TOKEN = 100
"""More than any text has on average: one of a context's length times this need not be tokenised (a
second for a million characters) to know that it does not fit."""
_CHARACTER_TOKENS = 4
"""Tokens that one character may take: UTF-8 has at most 4 bytes. What is still no character then
never will be, and the reader sees the replacement character."""


def text_sha(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as it is served: what was said, its text with a digest, and its ids, which begin
    with the parent's prompt and output ids where it `shares_tokens`."""

    messages: Sequence[Message]
    text: str
    sha: str
    ids: Sequence[int]
    shares_tokens: bool


class ChatTokenizer:
    """See the module. `eos_ids` are the tokens that end a turn; `context_length` is the model's
    own limit in tokens (None if it does not say; the engine's may be lower); `vocab_size` the ids
    that the model has: a few more than the tokenizer, often."""

    def __init__(self, tokenizer: Any, config: Mapping[str, Any], generation: Mapping[str, Any]):
        """Of a tokenizer of `transformers`, the model's configuration and its generation
        settings. Raises ConfigError where it cannot chat."""
        if not tokenizer.chat_template:
            raise ConfigError("the model's tokenizer has no chat template; serve a chat model")
        if not getattr(tokenizer, "backend_tokenizer", None):
            raise ConfigError("the model's tokenizer has no tokenizer.json, which is needed")
        config = {**config, **(config.get("text_config") or {})}
        self._backend = tokenizer.backend_tokenizer
        self._template = ChatTemplate(tokenizer)
        self.context_length: int | None = config.get("max_position_embeddings")
        self.vocab_size: int | None = config.get("vocab_size")
        added: dict[int, Any] = tokenizer.added_tokens_decoder
        self.added_tokens: Mapping[str, int] = {t.content: id_ for id_, t in added.items()}
        told = generation.get("eos_token_id", config.get("eos_token_id"))
        ends = {*(told if isinstance(told, list) else [told]), tokenizer.eos_token_id}
        ends.add(self._template.end_of_reply(self.added_tokens))
        self.eos_ids: frozenset[int] = frozenset(ends - {None})
        self._ends = {token: self._decode([token]) for token in self.eos_ids}
        self._special = frozenset(id_ for id_, token in added.items() if token.special)
        self._hidden = self._all_hidden(SHOWN)

    @classmethod
    def load(cls, model_path: str | Path) -> ChatTokenizer:
        """From a directory in Hugging Face format, or a name on the hub. Takes seconds."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(model_path))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"no tokenizer could be loaded from {str(model_path)!r} ({type(error).__name__})"
            ) from None
        names = ("config.json", "generation_config.json")
        return cls(tokenizer, *(_read_json(model_path, name) for name in names))

    @property
    def template(self) -> str:
        """The source of the chat template."""
        return self._template.source

    def showing(self, marks: Collection[str], inner: Collection[str] = ()) -> ChatTokenizer:
        """The same tokenizer with other marks in the text of replies: `marks` are shown although
        they may be special. `inner` do not end a turn, whatever the template writes behind one."""
        other = copy.copy(self)
        other.eos_ids = self.eos_ids - {self.added_tokens.get(text, -1) for text in inner}
        other._ends = {token: text for token, text in self._ends.items() if token in other.eos_ids}
        other._hidden = other._all_hidden(marks)
        return other

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text up to where the assistant speaks. Raises EngineRefused(400)."""
        return self._template.render(messages, tools, template_kwargs)

    def encode(self, text: str) -> list[int]:
        """The ids of `text` and nothing else; special tokens in it become their ids."""
        try:
            encoding = self._backend.encode(text, add_special_tokens=False)
        except (UnicodeEncodeError, TypeError):
            raise EngineRefused(400, "a message is not valid Unicode (lone surrogate)") from None
        return cast(list[int], encoding.ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a reply: what a `stream()` of the same ids shows altogether."""
        return self._decode([token for token in ids if token not in self._hidden])

    def stream(self) -> TextStream:
        return TextStream(self._decode, self._hidden)

    def reply_ids(self, prompt: str, rendered: str) -> list[int] | None:
        """The ids of a reply as the template writes it, with the token that ends it.

        `prompt` is the text of the messages before it, `rendered` that of the same messages and
        the reply. None where the template writes the former otherwise then, or no single end.
        For replies that nobody sampled here; a sampled one is never tokenised again.
        """
        if not rendered.startswith(prompt):
            return None
        rest = rendered[len(prompt) :]
        if (found := self._first_end(rest)) is None:
            return None
        at = found[0] + len(self._ends[found[1]])
        if self._first_end(rest[at:]) is not None:
            return None  # the reply's own text holds such a mark
        ids = self.encode(rest[:at])
        return ids if ids and ids[-1] in self._ends else None

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any],
        parent: Turn | None,
        meaning: Callable[[str, str], Any],
        limit: int | None = None,
    ) -> Prompt:
        """The prompt as the template writes it.

        It continues `parent` where it can (`continue_prompt`), else it is encoded anew. Raises
        EngineRefused(400) for what the template refuses, ContextOverflow for a text that cannot but
        have `limit` tokens or more: it is not tokenised to know how many.
        """
        text = self.render(messages, tools, template_kwargs)
        if limit is not None and (fewest := len(text) // _CHARACTERS_A_TOKEN) >= limit:
            raise ContextOverflow(fewest, limit)
        shared = self.continue_prompt(parent, text, meaning) if parent is not None else None
        ids = array("i", self.encode(text)) if shared is None else shared
        return Prompt(messages, text, text_sha(text), ids, shared is not None)

    def continue_prompt(
        self, previous: Turn, rendered: str, meaning: Callable[[str, str], Any]
    ) -> array[int] | None:
        """The ids of `rendered` where it goes on from `previous`, a turn that was served: the known
        ids, then those of what is new. None where the template would not write the known turn as it
        was sampled (history rewritten, reasoning dropped).

        `meaning` turns the text of a reply, and of the prompt before it, into a value, equal for
        replies that are the same (whitespace around calls and in their JSON may differ). A reply
        that was cut off has no end token; the template's is added then, as part of the prompt.
        """
        if len(rendered) <= previous.rendered_len:
            return None
        prompt = rendered[: previous.rendered_len]
        if text_sha(prompt) != previous.rendered_sha:
            return None
        rest = rendered[previous.rendered_len :]
        if (found := self._first_end(rest)) is None:
            return None
        at, end = found
        sampled = list(previous.output_ids)
        ended = bool(sampled) and sampled[-1] in self._ends
        if ended and sampled.pop() != end:
            return None  # another end token than the template writes
        if any(token in self._ends for token in sampled):
            return None
        if meaning(rest[:at], prompt) != meaning(self.decode(sampled), prompt):
            return None
        # The end token is encoded with what follows it: some of them swallow whitespace behind.
        tail = self.encode(rest[at:])
        if not tail or tail[0] != end:
            return None
        ids = array("i", previous.prompt_ids)
        ids.extend(previous.output_ids)
        ids.extend(tail[1:] if ended else tail)
        return ids

    def _first_end(self, text: str) -> tuple[int, int] | None:
        """Where a turn first ends in `text`, and the token that ends it."""
        found = [(at, token) for token, end in self._ends.items() if (at := text.find(end)) >= 0]
        return min(found, default=None)

    def _all_hidden(self, shown: Collection[str]) -> frozenset[int]:
        """Tokens that are not part of a reply's text."""
        visible = {id_ for text, id_ in self.added_tokens.items() if text in shown}
        return (self._special | self.eos_ids) - visible

    def _decode(self, ids: Sequence[int]) -> str:
        return cast(str, self._backend.decode(ids, skip_special_tokens=False))


class TextStream:
    """Token ids to text while they arrive: joined, the pieces equal the decoding of all ids.
    Incomplete characters are held back.

    `decode` turns ids into text, special tokens included; `hidden` ids are left out.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], hidden: frozenset[int]) -> None:
        self._decode = decode
        self._hidden = hidden
        self._ids: list[int] = []
        """Ids whose text may still matter: what was shown last, then what was not shown yet."""
        self._shown = 0
        self._shown_text = ""

    def push(self, ids: Iterable[int]) -> str:
        """The text that is complete with these ids; "" while a character is not."""
        before = len(self._ids)
        self._ids += [token for token in ids if token not in self._hidden]
        if len(self._ids) == before:
            return ""
        # An incomplete character may sit behind complete ones: show as much as ends well.
        for end in range(len(self._ids), max(self._shown, len(self._ids) - _CHARACTER_TOKENS), -1):
            text = self._decode(self._ids[:end])
            if not text.endswith("\ufffd"):
                return self._show(text, end)
        if len(self._ids) - self._shown > _CHARACTER_TOKENS:
            return self.finish()
        return ""

    def finish(self) -> str:
        """What was held back, with U+FFFD for bytes that are no character."""
        if len(self._ids) == self._shown:
            return ""
        return self._show(self._decode(self._ids), len(self._ids))

    def _show(self, text: str, end: int) -> str:
        # Ids shown last are decoded again with new ones: some tokenizers drop a space where a text
        # begins.
        new = text[len(self._shown_text) :]
        self._ids = self._ids[self._shown :]
        self._shown = end - self._shown
        self._shown_text = self._decode(self._ids[: self._shown])
        return new


def _read_json(model_path: str | Path, name: str) -> dict[str, Any]:
    """A file of the model's, in its folder or on the hub; {} where there is none."""
    from transformers.utils.hub import cached_file

    try:
        path = cached_file(str(model_path), name)
        value = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
