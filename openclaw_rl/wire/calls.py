"""Tool calls as models write them: JSON, rows of marked JSON, and values in tags of their own.

Guarantees: a section is read whole or not at all, nothing in it is repaired; arguments that are
JSON stay the model's own characters. A value in tags is what its parameter's schema says it is;
JSON is taken over as the model wrote it, everything else is a string. All readers are pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Tools = Mapping[str, Mapping[str, Any]]
"""The offered tools: name to the JSON schema of its parameters."""


class Call(NamedTuple):
    """One tool call: its arguments as the JSON text of an object, and the id where the model
    itself wrote one."""

    name: str
    arguments: str
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """What stands in a section, or in the beginning of one. `calls`: none where it is not wholly
    valid. `inside`: it breaks off inside a value, of which a closing mark may be part. `then`: it
    is no call but the head of what follows: a section that `mark` opens, reasoning or content."""

    calls: list[Call] = field(default_factory=list)
    inside: bool = False
    then: Any = None
    mark: str = ""


Read = Callable[[str, str, Tools], Found]
"""`read(mark, body, tools)`: what stands behind the opening `mark`."""


def schemas(tools: Any) -> Tools:
    """Chat Completions tools by name; what is no function is left out."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools or ():
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            found[function["name"]] = parameters if isinstance(parameters, Mapping) else {}
    return found


# -- JSON ----------------------------------------------------------------------------------------


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
_SPACE = re.compile(r"[ \t\n\r]*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def is_object(text: str) -> bool:
    """Whether `text` is the JSON text of an object."""
    return _kind(text.strip()) == "object"


def read_json(mark: str, body: str, tools: Tools, separators: str = "") -> Found:
    """Objects with `name` and `arguments`, or lists of them. Between two values (and behind the
    last one) there may be one of `separators`."""
    calls: list[Call] = []
    broken = Found(inside='"' in _STRING.sub("", body))
    try:
        at = _skip(body, 0)
        while at < len(body):
            value, end = _DECODER.raw_decode(body, at)
            if isinstance(value, list):
                calls += [_call(text) for _, text in _members(body[at:end])]
            else:
                calls.append(_call(body[at:end]))
            at = _skip(body, end)
            if at < len(body):
                if body[at] not in separators:
                    return broken
                at = _skip(body, at + 1)
    except (ValueError, RecursionError):
        return broken
    return Found(calls)


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _members(text: str) -> Iterator[tuple[Any, str]]:
    """The keys (None in a list) and the texts of the values of a valid JSON object or list."""
    at = _skip(text, 1)
    while text[at] not in "]}":
        key = None
        if text[0] == "{":
            key, at = _DECODER.raw_decode(text, at)
            at = _skip(text, _skip(text, at) + 1)
        end = _DECODER.raw_decode(text, at)[1]
        yield key, text[at:end]
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)


def _call(text: str) -> Call:
    """The call in a valid JSON text; `ValueError` if it is no call."""
    if text[0] != "{":
        raise ValueError("not an object")
    fields = dict(_members(text))
    name = _DECODER.decode(fields.get("name", "null"))
    arguments = fields.get("arguments") or fields.get("parameters") or "{}"
    if arguments[0] == '"':  # encoded twice: the string is the JSON text
        arguments = _DECODER.decode(arguments)
    if not isinstance(name, str) or not name or not is_object(arguments):
        raise ValueError("no call")
    return Call(name, arguments)


def read_llama(mark: str, body: str, tools: Tools) -> Found:
    """JSON behind Llama's tag, or bare: then it may be an answer that has a key "name"."""
    found = read_json(mark, body, tools, ";")
    if not mark and any(call.name not in tools for call in found.calls):
        return Found()
    return found


def rows(row: str) -> Read:
    """Calls as rows of a pattern with the groups `name`, `arguments` (the JSON text of an object)
    and perhaps `id`."""
    pattern = re.compile(row, re.DOTALL)

    def read(mark: str, body: str, tools: Tools) -> Found:
        calls: list[Call] = []
        at = 0
        while at < len(body):
            match = pattern.match(body, at)
            if match is None or not is_object(match["arguments"]):
                return Found(inside='"' in _STRING.sub("", body))
            own = match.groupdict().get("id") or ""
            calls.append(Call(match["name"].strip(), match["arguments"].strip(), own))
            at = match.end()
        return Found(calls)

    return read


# -- values in tags ------------------------------------------------------------------------------


class Tags(NamedTuple):
    """Calls whose arguments stand in tags, as patterns: `begin` of a call (group `name`), of a
    value (group `key`), `end` of a value, `close` of the call. `value(match of key, text, schema)`
    is the JSON text of a value, None where it cannot be one."""

    begin: re.Pattern[str]
    key: re.Pattern[str]
    end: re.Pattern[str]
    close: re.Pattern[str]
    value: Callable[[re.Match[str], str, Any], str | None]

    def read(self, mark: str, body: str, tools: Tools) -> Found:
        """The calls in `body`, one or several."""
        calls: list[Call] = []
        at = 0
        while at < len(body):
            begin = self.begin.match(body, at)
            if begin is None:
                return Found()
            at, name = begin.end(), begin["name"]
            properties = tools.get(name, {}).get("properties")
            arguments, fields = "", dict[str, str]()
            if body.startswith("{", at):  # one JSON object in place of the tags
                try:
                    end = _DECODER.raw_decode(body, at)[1]
                except (ValueError, RecursionError):
                    return Found(inside=True)
                arguments, at = body[at:end], _skip(body, end)
            while (key := self.key.match(body, at)) is not None:
                closed = self.end.search(body, key.end())
                if closed is None:
                    return Found(inside=True)
                word = key["key"].strip()
                schema = properties.get(word) if isinstance(properties, Mapping) else None
                value = self.value(key, body[key.end() : closed.start()], schema)
                if value is None:
                    return Found()
                fields[word] = f"{json.dumps(word, ensure_ascii=False)}: {value}"
                at = closed.end()
            close = self.close.match(body, at)
            if close is None:
                return Found()
            calls.append(Call(name, arguments or "{" + ", ".join(fields.values()) + "}"))
            at = close.end()
        return Found(calls)


def _coder_value(key: re.Match[str], text: str, schema: Any) -> str:
    return _typed(text.removeprefix("\n").removesuffix("\n"), schema)


def _dsml_value(key: re.Match[str], text: str, schema: Any) -> str | None:
    if key["string"] == "true":
        return json.dumps(text, ensure_ascii=False)
    return text.strip() if _kind(text.strip()) else None


_CODER = Tags(
    re.compile(r"\s*<function=(?P<name>[^>\n]+)>\s*"),
    re.compile(r"<parameter=(?P<key>[^>\n]+)>"),
    re.compile(r"</parameter>\s*(?=<parameter=|</function>)"),
    re.compile(r"</function>\s*"),
    _coder_value,
)
_GLM = Tags(
    re.compile(r"\s*(?P<name>[\w.-]+)\s*"),
    re.compile(r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>", re.DOTALL),
    re.compile(r"</arg_value>\s*(?=<arg_key>|\Z)"),
    re.compile(r"\Z"),
    # Its template writes strings bare and all else as JSON, so JSON of an unknown kind is JSON.
    lambda key, text, schema: _typed(text, schema, loose=True),
)
_DSML = Tags(
    re.compile(r'\s*<｜DSML｜invoke\s+name="(?P<name>[^"]+)"\s*(?:>\s*|(?=/>))'),
    re.compile(r'<｜DSML｜parameter\s+name="(?P<key>[^"]+)"\s+string="(?P<string>true|false)"\s*>'),
    re.compile(r"</｜DSML｜parameter>\s*(?=<｜DSML｜parameter|</｜DSML｜invoke>)"),
    re.compile(r"(?:/>|</｜DSML｜invoke>)\s*"),
    _dsml_value,
)

read_dsml = _DSML.read


def read_coder(mark: str, body: str, tools: Tools) -> Found:
    """Qwen3-Coder: tagged functions; some of its kin write Hermes' JSON in the same mark."""
    json_inside = body.lstrip().startswith("{")
    return (read_json if json_inside else _CODER.read)(mark, body, tools)


def read_glm(mark: str, body: str, tools: Tools) -> Found:
    """`NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…`, one call."""
    found = _GLM.read(mark, body, tools)
    if any(call.arguments == "{}" and call.name not in tools for call in found.calls):
        return Found()  # one word in the marks: prose, unless it is a tool's name
    return found


def _typed(text: str, schema: Any, *, loose: bool = False) -> str:
    """The JSON text of a value that was written bare. `loose`: without a type, JSON is JSON."""
    kinds = _kinds(schema)
    if (kinds or loose) and kinds != {"string"}:
        bare = text.strip()
        if bare in ("True", "False"):  # Python's words
            bare = bare.lower()
        kind = _kind(bare)
        if kind == "integer" and "number" in kinds:
            kind = "number"
        if kind and (not kinds or (kind in kinds and kind != "string")):
            return bare
    return json.dumps(text, ensure_ascii=False)


def _kinds(schema: Any) -> set[str]:
    """The JSON types that a schema allows; empty where it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    kinds = {named} if isinstance(named, str) else set(named if isinstance(named, list) else ())
    for key in ("anyOf", "oneOf"):
        for option in schema.get(key) or ():
            kinds |= _kinds(option)
    if not kinds and isinstance(schema.get("enum"), list):
        kinds = {_kind_of(value) for value in schema["enum"]}
    return kinds


def _kind(text: str) -> str:
    """The JSON type that `text` is of; empty where it is no JSON."""
    try:
        return _kind_of(_DECODER.decode(text))
    except (ValueError, RecursionError):
        return ""


def _kind_of(value: Any) -> str:
    if value is None:
        return "null"
    for kind, types in (("boolean", bool), ("integer", int), ("number", float), ("string", str),
                        ("array", list)):  # fmt: skip
        if isinstance(value, types):
            return kind
    return "object"
