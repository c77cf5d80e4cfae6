"""The served model's tokenizer and chat template, without torch.

Guarantees: `render` gives exactly the text that the model's template writes; `encode` turns it into
ids without adding any; errors of a template are refusals (400) without conversation text. All
methods may be called from several threads.
"""

from __future__ import annotations

import copy
import json
from array import array
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from openclaw_rl.engine.bound import TokenBound
from openclaw_rl.engine.continuation import KnownPrompt, Meaning, continuation, text_sha
from openclaw_rl.engine.system import PROBE, PROBES, only_at_the_beginning
from openclaw_rl.engine.template import ChatTemplate
from openclaw_rl.engine.text import TextStream
from openclaw_rl.errors import ConfigError, EngineRefused

__all__ = ["ChatTokenizer", "KnownPrompt", "text_sha"]

SHOWN = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>"})
"""Marks that reply parsers usually read, so they stay in the text even if the tokenizer calls them
special; `ChatTokenizer.showing` sets others."""
_RESERVED = frozenset(
    {
        "conversation",
        "messages",
        "tools",
        "chat_template",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "processor_kwargs",
    }
)
"""Arguments of `apply_chat_template` that are ours, not the template's."""


class ChatTokenizer:
    """See the module. `eos_ids` are the tokens that end a turn; `context_length` is the model's
    own limit in tokens (None if it does not say; the engine's may be lower)."""

    eos_ids: frozenset[int]
    context_length: int | None
    vocab_size: int | None
    """Ids that the model has: a few more than the tokenizer, often."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        eos_ids: Sequence[int],
        context_length: int | None,
        vocab_size: int | None = None,
    ):
        if not tokenizer.chat_template:
            raise ConfigError("the model's tokenizer has no chat template; serve a chat model")
        if not getattr(tokenizer, "backend_tokenizer", None):
            raise ConfigError("the model's tokenizer has no tokenizer.json, which is needed")
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._template = ChatTemplate(tokenizer)
        self._single: dict[int, str] = {}
        self._bound = TokenBound(self._backend)
        self.context_length = context_length
        self.vocab_size = vocab_size
        added: dict[int, Any] = tokenizer.added_tokens_decoder
        self._arguments_as_text = self._probe_arguments()
        self._system_anywhere = self._probe_system()
        self.eos_ids = frozenset(eos_ids) | self._probe_end(added)
        self._ends = {token: self._backend.decode([token], False) for token in self.eos_ids}
        self.added_tokens: Mapping[str, int] = {t.content: id_ for id_, t in added.items()}
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
        config = _read_json(model_path, "config.json")
        generation = _read_json(model_path, "generation_config.json")
        text_config = config.get("text_config")
        if isinstance(text_config, dict):
            config = {**config, **text_config}
        eos: set[int] = set()
        for value in (
            generation.get("eos_token_id", config.get("eos_token_id")),
            tokenizer.eos_token_id,
        ):
            eos.update(value if isinstance(value, list) else [] if value is None else [value])
        return cls(
            tokenizer,
            eos_ids=sorted(eos),
            context_length=config.get("max_position_embeddings"),
            vocab_size=config.get("vocab_size"),
        )

    @property
    def template(self) -> str:
        """The source of the chat template."""
        source = self._tokenizer.chat_template
        return "\n".join(source.values()) if isinstance(source, dict) else str(source)

    def showing(self, marks: Collection[str], inner: Collection[str] = ()) -> ChatTokenizer:
        """The same tokenizer with other marks in the text of replies: `marks` are shown although
        they may be special. `inner` do not end a turn, whatever the template writes behind one."""
        other = copy.copy(self)
        not_ends = {self.added_tokens[text] for text in inner if text in self.added_tokens}
        other.eos_ids = self.eos_ids - not_ends
        other._ends = {token: text for token, text in self._ends.items() if token in other.eos_ids}
        other._hidden = other._all_hidden(marks)
        return other

    # --- text and ids --------------------------------------------------------------------------

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text up to where the assistant speaks. Raises EngineRefused(400)."""
        kwargs = dict(template_kwargs or {})
        if ours := sorted(_RESERVED & kwargs.keys()):
            raise EngineRefused(400, f"chat_template_kwargs may not set {', '.join(ours)}")
        if not self._system_anywhere:
            messages = only_at_the_beginning(messages)
        return self._apply([self._plain(message) for message in messages], tools, kwargs)

    def encode(self, text: str) -> list[int]:
        """The ids of `text` and nothing else; special tokens in it become their ids."""
        try:
            encoding = self._backend.encode(text, add_special_tokens=False)
        except (UnicodeEncodeError, TypeError):
            raise EngineRefused(400, "a message is not valid Unicode (lone surrogate)") from None
        return cast(list[int], encoding.ids)

    def fewest(self, text: str, limit: int) -> int:
        """A number of tokens that `text` certainly has, without tokenising it; 0 where that is no
        matter of certainty, or surely below `limit`."""
        return self._bound.fewest(text, limit)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a reply: what a `stream()` of the same ids shows altogether."""
        return self._decode_all([token for token in ids if token not in self._hidden])

    def stream(self) -> TextStream:
        return TextStream(self._decode_all, self._hidden)

    def reply_ids(self, prompt: str, rendered: str) -> list[int] | None:
        """The ids of a reply as the template writes it, with the token that ends it.

        `prompt` is the text of the messages before it, `rendered` that of the same messages and
        the reply. None where the template writes the former otherwise then, or no single end.
        For replies that nobody sampled here; a sampled one is never tokenised again.
        """
        if not rendered.startswith(prompt):
            return None
        rest = rendered[len(prompt) :]
        ends = sorted((at, end) for end in self._ends.values() if (at := rest.find(end)) >= 0)
        if not ends:
            return None
        at = ends[0][0] + len(ends[0][1])
        if any(end in rest[at:] for end in self._ends.values()):
            return None  # the reply's own text holds such a mark
        ids = self.encode(rest[:at])
        return ids if ids and ids[-1] in self._ends else None

    def continue_prompt(
        self, previous: KnownPrompt, rendered: str, meaning: Meaning | None = None
    ) -> array[int] | None:
        """The ids of `rendered` where it goes on from `previous`: the known ids, then those of
        what is new. None where the template would not write the known turn as it was sampled.
        `meaning` compares the two texts of the reply (default: `continuation.reply_meaning`)."""
        return continuation(
            previous,
            rendered,
            encode=self.encode,
            decode=self.decode,
            ends=self._ends,
            meaning=meaning,
        )

    # --- inside --------------------------------------------------------------------------------

    def _all_hidden(self, shown: Collection[str]) -> frozenset[int]:
        """Tokens that are not part of a reply's text."""
        visible = {id_ for text, id_ in self.added_tokens.items() if text in shown}
        return (self._special | self.eos_ids) - visible

    def _decode_all(self, ids: Sequence[int]) -> str:
        if len(ids) != 1:
            return cast(str, self._backend.decode(list(ids), skip_special_tokens=False))
        # A stream decodes each token alone as well; there are no more of them than the vocabulary.
        text = self._single.get(ids[0])
        if text is None:
            text = cast(str, self._backend.decode(list(ids), skip_special_tokens=False))
            self._single[ids[0]] = text
        return text

    def _apply(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: dict[str, Any],
    ) -> str:
        import jinja2

        try:
            return self._template.render(
                messages, [dict(tool) for tool in tools] if tools else None, kwargs
            )
        except jinja2.TemplateError as error:
            # A template's own words ("roles must alternate"), raised on purpose.
            reason = str(error)[:200] or type(error).__name__
            raise EngineRefused(400, f"the chat template refuses this: {reason}") from None
        except Exception as error:
            raise EngineRefused(
                400, f"the chat template cannot render these messages ({type(error).__name__})"
            ) from None

    def _plain(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message as templates expect it: content a string, arguments as this template does."""
        if type(message) is dict and message.get("content") and "tool_calls" not in message:
            return message  # nothing to change, and templates cannot
        plain = dict(message)
        if plain.get("content") is None:
            plain["content"] = ""
        if not plain.get("tool_calls"):
            plain.pop("tool_calls", None)
        elif not self._arguments_as_text:
            plain["tool_calls"] = [_parsed(call) for call in plain["tool_calls"]]
        return plain

    def _probe_arguments(self) -> bool:
        """Whether the template takes a call's arguments as JSON text and writes them unchanged.

        Others want them parsed, and would write a quoted string of the text.
        """
        arguments = '{"k":1}'  # no template's own JSON lacks the space
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        try:
            text = self._apply(
                [
                    {"role": "user", "content": "u"},
                    {"role": "assistant", "content": "", "tool_calls": [call]},
                ],
                None,
                {},
            )
        except EngineRefused:
            return False
        return arguments in text

    def _probe_system(self) -> bool:
        """Whether the template takes system messages in mid-conversation, and writes them."""
        try:
            return all(PROBE in self._apply(probe, None, {}) for probe in PROBES)
        except EngineRefused:
            return False

    def _probe_end(self, added: Mapping[int, Any]) -> frozenset[int]:
        """The added token that the template writes behind an assistant's message."""
        reply = "a reply of no meaning"
        probe = [{"role": "user", "content": "u"}, {"role": "assistant", "content": reply}]
        try:
            text = self._apply(probe, None, {})
        except EngineRefused:
            return frozenset()
        rest = text[text.rfind(reply) + len(reply) :].lstrip() if reply in text else ""
        ids = [id_ for id_, token in added.items() if rest.startswith(token.content)]
        return frozenset(ids[:1])


def _parsed(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
        # The model's own broken (or endlessly nested) JSON: the template shows it as text.
        with suppress(ValueError, RecursionError):
            arguments = json.loads(function["arguments"])
            return {**call, "function": {**function, "arguments": arguments}}
    return call


def _read_json(model_path: str | Path, name: str) -> dict[str, Any]:
    from transformers.utils.hub import cached_file

    try:
        path = cached_file(str(model_path), name)
        value = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
