"""Applies a model's chat template: exactly as `transformers` does, in a third of the time.

`apply_chat_template` copies every message several times, and the sandbox raises and catches an
exception for each `message.role`. A gateway renders the whole history for every turn, so this is
most of its time late in a long session. Here the same compiled template is rendered by the short
way, in the same sandbox. Guarantee: where the short way does not exist (another version of
`transformers`) or differs on a probe, `apply_chat_template` is used.

The whole history is rendered each time: what a template writes for an old message may depend on
the newest one (Qwen3's does), so the text of a turn before proves nothing until it is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, Any]], str]

_METHODS = frozenset(dir(dict))
_COUNTERS = frozenset({"first", "last", "index", "index0"})
_VALUES = (str, int, bool)
_NO_REASONING = frozenset({"role", "content", "tool_calls", "tool_call_id", "name"})
"""A message with other keys may have reasoning under one of the names that templates know."""


class ChatTemplate:
    """Messages must be plain JSON values (as `json.loads` makes them)."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._quick: dict[str, Any] = {}
        self._alias: Callable[[Any], Any] | None = None
        try:
            from transformers.utils import chat_template_utils as utils

            self._compile = utils._compile_jinja_template
            self._alias = utils._alias_reasoning_fields
        except (ImportError, AttributeError):
            return
        if not self._agrees():
            self._alias = None

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        kwargs: Mapping[str, Any],
    ) -> str:
        """The prompt up to where the assistant speaks. Raises what the template raises."""
        if self._alias is None or not messages or "documents" in kwargs:
            return self._by_transformers(messages, tools, kwargs)
        return self._shortly(messages, tools, kwargs)

    def _by_transformers(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        kwargs: Mapping[str, Any],
    ) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True, **kwargs
        )
        return text

    def _shortly(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        kwargs: Mapping[str, Any],
    ) -> str:
        assert self._alias is not None
        template = self._template(self._tokenizer.get_chat_template(None, tools))
        given = [self._given(message) for message in messages]
        text: str = template.render(
            messages=given,
            tools=tools,
            documents=None,
            add_generation_prompt=True,
            **{**self._tokenizer.special_tokens_map, **kwargs},
        )
        return text

    def _given(self, message: dict[str, Any]) -> dict[str, Any]:
        if None in message.values():
            message = {key: value for key, value in message.items() if value is not None}
        if not message.keys() <= _NO_REASONING and self._alias is not None:
            message = self._alias([message])[0]
        return message

    def _template(self, source: str) -> Any:
        template = self._quick.get(source)
        if template is None:
            environment = self._compile(source).environment.overlay()
            environment.getattr = _looking_up_first(environment)
            template = self._quick[source] = environment.from_string(source)
        return template

    def _agrees(self) -> bool:
        for messages in _PROBES:
            for tools in (None, _TOOLS):
                for kwargs in ({}, {"enable_thinking": False}):
                    ways = (self._by_transformers, self._shortly)
                    texts = [_outcome(way, messages, tools, kwargs) for way in ways]
                    if texts[0] != texts[1]:
                        return False
        return True


def _looking_up_first(environment: Any) -> Callable[[Any, str], Any]:
    """The sandbox's own `getattr`, but where its answer needs no looking: for keys of plain dicts,
    the counters of a loop, and plain values of a namespace."""
    getattr_, undefined = environment.getattr, environment.undefined

    def look_up(value: Any, name: str) -> Any:
        kind = type(value)
        if kind is dict and name not in _METHODS:
            return value[name] if name in value else undefined(obj=value, name=name)
        if kind is LoopContext and name in _COUNTERS:
            return getattr(value, name)
        if kind is Namespace and not name.startswith("_"):
            found = getattr(value, name, None)
            if type(found) in _VALUES:
                return found
        return getattr_(value, name)

    return look_up


def _outcome(
    render: Render,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    kwargs: dict[str, Any],
) -> str:
    try:
        return render(messages, tools, kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Runs it.",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
        },
    }
]
_CALL = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": {"a": "<b>"}}}
_PROBES: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "one"}],
    [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "one", "name": None},
        {"role": "assistant", "content": "two", "reasoning_content": "hm"},
        {"role": "user", "content": "three"},
    ],
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ],
]
