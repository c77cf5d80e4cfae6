"""Calls whose arguments stand in tags of their own (Qwen3-Coder, GLM, DeepSeek V3.2), as JSON.

Each reader returns the calls (none where the text is not wholly valid) and whether the text
breaks off inside a value. A value is what its parameter's schema says it is; JSON is taken over
as the model wrote it, everything else is a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from openclaw_rl.wire.calls import Call, is_object, parse_json

Schemas = Mapping[str, Mapping[str, Any]]

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>")
_PARAMETER_END = re.compile(r"</parameter>\s*(?=<parameter=|</function>)")
_FUNCTION_END = re.compile(r"</function>\s*")

_GLM_NAME = re.compile(r"\s*([\w.-]+)\s*")
_GLM_KEY = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>", re.DOTALL)
_GLM_END = re.compile(r"</arg_value>\s*(?=<arg_key>|\Z)")

_INVOKE = re.compile(r'\s*<｜DSML｜invoke\s+name="([^"]+)"\s*(/?)>\s*')
_INVOKE_END = re.compile(r"</｜DSML｜invoke>\s*")
_DSML_PARAMETER = re.compile(r'<｜DSML｜parameter\s+name="([^"]+)"\s+string="(true|false)"\s*>')
_DSML_PARAMETER_END = re.compile(r"</｜DSML｜parameter>\s*(?=<｜DSML｜parameter|</｜DSML｜invoke>)")


def read_function(body: str, tools: Schemas) -> tuple[list[Call], bool]:
    """`<function=NAME><parameter=KEY>\\nVALUE\\n</parameter>…</function>`, one or several."""
    calls: list[Call] = []
    at = 0
    while at < len(body):
        begin = _FUNCTION.match(body, at)
        if begin is None:
            return [], False
        at = begin.end()
        fields: list[tuple[str, str]] = []
        while (parameter := _PARAMETER.match(body, at)) is not None:
            end = _PARAMETER_END.search(body, parameter.end())
            if end is None:
                return [], True
            value = body[parameter.end() : end.start()]
            value = value.removeprefix("\n").removesuffix("\n")
            fields.append((parameter[1], _typed(value, _schema(tools, begin[1], parameter[1]))))
            at = end.end()
        close = _FUNCTION_END.match(body, at)
        if close is None:
            return [], False
        calls.append(Call(begin[1], _object(fields)))
        at = close.end()
    return calls, False


def read_glm(body: str, tools: Schemas) -> tuple[list[Call], bool]:
    """`NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…`, one call."""
    begin = _GLM_NAME.match(body)
    if begin is None:
        return [], False
    name, at = begin[1], begin.end()
    fields: list[tuple[str, str]] = []
    while at < len(body):
        key = _GLM_KEY.match(body, at)
        if key is None:
            return [], False
        end = _GLM_END.search(body, key.end())
        if end is None:
            return [], True
        word = key[1].strip()
        schema = _schema(tools, name, word)
        # Its template writes strings bare and all else as JSON, so JSON of an unknown kind is JSON.
        value = body[key.end() : end.start()]
        fields.append((word, _typed(value, schema, loose=True)))
        at = end.end()
    if not fields and name not in tools:
        return [], False  # one word in the marks: prose, unless it is a tool's name
    return [Call(name, _object(fields))], False


def read_dsml(body: str) -> tuple[list[Call], bool]:
    """`<｜DSML｜invoke name="NAME">` with parameters in tags, or with one JSON object."""
    calls: list[Call] = []
    at = 0
    while at < len(body):
        begin = _INVOKE.match(body, at)
        if begin is None:
            return [], False
        at = begin.end()
        if begin[2]:
            calls.append(Call(begin[1], "{}"))
            continue
        if body.startswith("{", at):
            close = _INVOKE_END.search(body, at)
            while close is not None and not is_object(body[at : close.start()]):
                close = _INVOKE_END.search(body, close.end())
            if close is None:
                return [], True
            calls.append(Call(begin[1], body[at : close.start()].strip()))
            at = close.end()
            continue
        fields: list[tuple[str, str]] = []
        while (parameter := _DSML_PARAMETER.match(body, at)) is not None:
            end = _DSML_PARAMETER_END.search(body, parameter.end())
            if end is None:
                return [], True
            value = body[parameter.end() : end.start()]
            if parameter[2] == "true":
                value = json.dumps(value, ensure_ascii=False)
            elif not _is_json(value):
                return [], False
            fields.append((parameter[1], value.strip()))
            at = end.end()
        close = _INVOKE_END.match(body, at)
        if close is None:
            return [], False
        calls.append(Call(begin[1], _object(fields)))
        at = close.end()
    return calls, False


def _object(fields: list[tuple[str, str]]) -> str:
    """The JSON object of `(key, JSON text of the value)`; of a repeated key the last one."""
    body = ", ".join(
        f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in dict(fields).items()
    )
    return "{" + body + "}"


def _schema(tools: Schemas, name: str, key: str) -> Any:
    properties = tools.get(name, {}).get("properties")
    return properties.get(key) if isinstance(properties, Mapping) else None


def _typed(value: str, schema: Any, *, loose: bool = False) -> str:
    """The JSON text of a value that was written bare. `loose`: without a type, JSON is JSON."""
    kinds = _kinds(schema)
    if (kinds or loose) and kinds != {"string"}:
        text = value.strip()
        if text in ("True", "False"):  # Python's words
            text = text.lower()
        try:
            kind = _kind(parse_json(text))
        except ValueError:
            kind = "string"
        if kind != "string" and (not kinds or kind in kinds):
            return text
        if kind == "integer" and "number" in kinds:
            return text
        if kind == "string" and not kinds and text.startswith('"') and _is_json(text):
            return text
    return json.dumps(value, ensure_ascii=False)


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
        kinds = {_kind(value) for value in schema["enum"]}
    return kinds


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    for kind, types in (("boolean", bool), ("integer", int), ("number", float), ("string", str),
                        ("array", list)):  # fmt: skip
        if isinstance(value, types):
            return kind
    return "object"


def _is_json(text: str) -> bool:
    try:
        parse_json(text)
    except ValueError:
        return False
    return True
