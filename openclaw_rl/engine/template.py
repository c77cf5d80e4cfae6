"""Messages to the text of a prompt, by the model's own chat template.

Guarantees: the text is exactly what `transformers` makes of the same messages; errors of a template
are refusals (400) without conversation text. What a template refuses or leaves out without a word
is shown to it in an equal form, found out by probes when it is loaded: system messages in
mid-conversation, and the arguments of calls as text or parsed.

The whole history is rendered each time: what a template writes for an old message may depend on
the newest one (Qwen3's does). `apply_chat_template` copies every message several times, and its
sandbox raises and catches an exception for each `message.role`, which was most of a gateway's time
late in a long session; here the same compiled template is rendered in the same sandbox by a shorter
way, three times as fast, if that gives the same text of a probe.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import jinja2
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

from openclaw_rl.errors import EngineRefused

_DICT_METHODS = frozenset(dir(dict))
_NO_REASONING = frozenset({"role", "content", "tool_calls", "tool_call_id", "name"})
"""A message with other keys may have reasoning under one of the names that templates know."""

_MARK = "a word of no meaning"
_ARGUMENTS = '{"k":1}'  # no template's own JSON lacks the space
_USER = {"role": "user", "content": "u"}
_LATE_SYSTEM: tuple[list[dict[str, Any]], ...] = (
    [{"role": "system", "content": "s"}, _USER, {"role": "system", "content": _MARK}],
    [_USER, {"role": "assistant", "content": "a"}, {"role": "system", "content": _MARK}, _USER],
)
"""A template that writes the mark in each of these takes system messages anywhere."""


def _call(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"id": "1", "type": "function", "function": function}


class ChatTemplate:
    """Of `tokenizer`, a tokenizer of `transformers`. Messages must be plain JSON values."""

    def __init__(self, tokenizer: Any) -> None:
        from transformers.utils import chat_template_utils

        self._utils: Any = chat_template_utils
        self._tokenizer = tokenizer
        self._compiled: dict[str, Any] = {}
        # What `apply_chat_template` is told by us; all else is the template's.
        options = inspect.signature(tokenizer.apply_chat_template).parameters
        self._ours = {*options, "messages"} - {"documents", "kwargs"}
        self._quick = self._is_quick_way_the_same()
        # Others want arguments parsed, and would write a quoted string of the text.
        call = {"role": "assistant", "content": "", "tool_calls": [_call(_ARGUMENTS)]}
        self._arguments_as_text = _ARGUMENTS in self._try([_USER, call])
        self._system_anywhere = all(_MARK in self._try(probe) for probe in _LATE_SYSTEM)

    @property
    def source(self) -> str:
        source = self._tokenizer.chat_template
        return "\n".join(source.values()) if isinstance(source, dict) else str(source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt up to where the assistant speaks. Raises EngineRefused(400)."""
        kwargs = dict(template_kwargs or {})
        if ours := sorted(self._ours & kwargs.keys()):
            raise EngineRefused(400, f"chat_template_kwargs may not set {', '.join(ours)}")
        if not self._system_anywhere:
            messages = only_at_the_beginning(messages)
        given = [self._plain(message) for message in messages]
        try:
            return self._apply(given, [dict(tool) for tool in tools] if tools else None, kwargs)
        except jinja2.TemplateError as error:
            # A template's own words ("roles must alternate"), raised on purpose.
            reason = str(error)[:200] or type(error).__name__
            raise EngineRefused(400, f"the chat template refuses this: {reason}") from None
        except Exception as error:
            raise EngineRefused(
                400, f"the chat template cannot render these messages ({type(error).__name__})"
            ) from None

    def end_of_reply(self, marks: Mapping[str, int]) -> int | None:
        """Of `marks` (text to id), the one that the template writes behind an assistant's reply."""
        text = self._try([_USER, {"role": "assistant", "content": _MARK}])
        rest = text[text.rfind(_MARK) + len(_MARK) :].lstrip() if _MARK in text else ""
        return next((token for mark, token in marks.items() if rest.startswith(mark)), None)

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

    def _try(self, messages: list[dict[str, Any]]) -> str:
        try:
            return self._apply(messages, None, {})
        except Exception:  # the template's own refusal, or its fault
            return ""

    # --- the short way ---------------------------------------------------------------------------

    def _apply(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        kwargs: Mapping[str, Any],
    ) -> str:
        if not self._quick or not messages or "documents" in kwargs:
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True, **kwargs
            )
            return text
        template = self._template(self._tokenizer.get_chat_template(None, tools))
        text = template.render(
            messages=[self._given(message) for message in messages],
            tools=tools,
            documents=None,
            add_generation_prompt=True,
            **{**self._tokenizer.special_tokens_map, **kwargs},
        )
        return text

    def _given(self, message: dict[str, Any]) -> dict[str, Any]:
        if None in message.values():
            message = {key: value for key, value in message.items() if value is not None}
        if not message.keys() <= _NO_REASONING:
            message = self._utils._alias_reasoning_fields([message])[0]
        return message

    def _template(self, source: str) -> Any:
        if source not in self._compiled:
            environment = self._utils._compile_jinja_template(source).environment.overlay()
            environment.getattr = _looking_up_first(environment)
            self._compiled[source] = environment.from_string(source)
        return self._compiled[source]

    def _is_quick_way_the_same(self) -> bool:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "s"},
            {**_USER, "name": None},
            {"role": "assistant", "content": "", "reasoning_content": "r"},
            {**_USER, "items": "x"},
            {"role": "assistant", "content": "", "tool_calls": [_call({"k": "<v>"})]},
            {"role": "tool", "tool_call_id": "1", "content": "t"},
        ]
        tool = {"name": "f", "description": "d", "parameters": {"type": "object"}}
        for tools in (None, [{"type": "function", "function": tool}]):
            texts = []
            for self._quick in (False, True):
                try:
                    texts.append(self._apply(messages, tools, {}))
                except Exception as error:  # a refusal must be the same one
                    texts.append(repr(error))
            if texts[0] != texts[1]:
                return False
        return True


def only_at_the_beginning(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """`messages` without a system message behind the first place.

    Each becomes the end of the user message before it, or else a user message of its own. It stays
    where it stands: moved to the front, every prompt would begin differently from the one before.
    """
    result: list[Mapping[str, Any]] = []
    for message in messages:
        if not result or message.get("role") != "system":
            result.append(message)
            continue
        text = f"<system-reminder>\n{message.get('content') or ''}\n</system-reminder>"
        before = result[-1]
        if before.get("role") == "user" and isinstance(before.get("content"), str):
            result[-1] = {**before, "content": f"{before['content']}\n\n{text}"}
        else:
            result.append({"role": "user", "content": text})
    return result


def _parsed(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
        # The model's own broken (or endlessly nested) JSON: the template shows it as text.
        with suppress(ValueError, RecursionError):
            arguments = json.loads(function["arguments"])
            return {**call, "function": {**function, "arguments": arguments}}
    return call


def _looking_up_first(environment: Any) -> Callable[[Any, str], Any]:
    """The sandbox's own `getattr`, but where its answer needs no looking: for keys of plain dicts,
    the counters of a loop, and plain values of a namespace."""
    getattr_ = environment.getattr
    missing = cache(lambda name: environment.undefined(obj={}, name=name))  # says no more of a dict

    def look_up(value: Any, name: str) -> Any:
        kind = type(value)
        if kind is dict and name not in _DICT_METHODS:
            return value[name] if name in value else missing(name)
        if kind is LoopContext and name in ("first", "last", "index", "index0"):
            return getattr(value, name)
        if kind is Namespace and not name.startswith("_"):
            found = getattr(value, name, None)
            if type(found) in (str, int, bool):
                return found
        return getattr_(value, name)

    return look_up
