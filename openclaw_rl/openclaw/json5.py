"""JSON5 that is read with positions, so that a value can be set without touching the rest.

Guarantees: what sets or removes a member or an item changes nothing but it and the comma it needs;
comments, order, quotes and spacing of everything else stay, byte for byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from openclaw_rl.errors import ConfigError

_GAP = re.compile(r"(?:[\s\ufeff]|//[^\n\r\u2028\u2029]*|/\*.*?\*/)*", re.S)
_NAME = re.compile(r"(?:[^\W\d]|[$_])(?:\w|[$\u200c\u200d])*")
_NUMBER = re.compile(
    r"[+-]?(?:Infinity|NaN|0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
)
_PLAIN = {'"': re.compile(r'[^"\\\n\r]*'), "'": re.compile(r"[^'\\\n\r]*")}
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "0": "\0",
            "\n": "", "\r": "", "\r\n": "", "\u2028": "", "\u2029": ""}  # fmt: skip
_WORDS = {"null": None, "true": True, "false": False}
_DEEPEST = 100


@dataclass(slots=True)
class Node:
    """A value and where it stands: `text[start:end]`. Objects have `members` by name, each with
    the place where its name starts. `parts` are all members (also those that a later one of the
    same name hides) and all items (whose name is "")."""

    value: Any
    start: int
    end: int
    members: dict[str, tuple[int, Node]] = field(default_factory=dict)
    parts: list[tuple[str, Node]] = field(default_factory=list)


def parse(text: str) -> Node:
    """The tree of a JSON5 text. Raises `ConfigError` with line and column, never the content."""
    node, at = _value(text, _gap(text, 0), 0)
    if _gap(text, at) < len(text):
        raise _wrong(text, _gap(text, at))
    return node


def get(value: Any, path: Sequence[str], default: Any = None) -> Any:
    """The value at `path` in plain values, or `default`."""
    for name in path:
        if not isinstance(value, dict) or name not in value:
            return default
        value = value[name]
    return value


def strings(node: Node, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Node]]:
    """All texts in `node` with their paths."""
    if isinstance(node.value, str):
        yield path, node
    for name, part in node.parts:
        yield from strings(part, (*path, name) if name else path)


def append(text: str, path: Sequence[str], item: Any) -> str:
    """`text` with `item` at the end of the list at `path`, which is made where there is none."""
    node = _at(text, path)
    if node is None or not node.parts:
        return set_value(text, path, [item])
    last = node.parts[-1][1]
    space = _own_line(text, last.start)
    gap = " " if space is None else _newline(text) + space
    return f"{text[: last.end]},{gap}{json.dumps(item, ensure_ascii=False)}{text[last.end :]}"


def remove_item(text: str, path: Sequence[str], item: Any) -> str:
    """`text` without `item` in the list at `path`; unchanged where it is not in it."""
    node = _at(text, path)
    items = [] if node is None else [part for _, part in node.parts]
    at = next((i for i, one in enumerate(items) if one.value == item), None)
    if at is None:
        return text
    gone = items[at]
    if at > 0 and not text[items[at - 1].end : gone.start].replace(",", "", 1).strip():
        return text[: items[at - 1].end] + text[gone.end :]
    return text[: gone.start] + text[_comma(text, gone.end) or gone.end :].lstrip(" ")


def _at(text: str, path: Sequence[str]) -> Node | None:
    node = parse(text)
    for name in path:
        if name not in node.members:
            return None
        node = node.members[name][1]
    return node


def set_value(text: str, path: Sequence[str], value: Any) -> str:
    """`text` with `value` at `path`; missing objects on the way are made."""
    node, depth = parse(text), 0
    while depth < len(path) and path[depth] in node.members:
        node, depth = node.members[path[depth]][1], depth + 1
    if depth == len(path):
        if json.dumps(node.value) == json.dumps(value):  # not `==`: True is not 1 here
            return text
        dumped = _dump(value, _newline(text) + _indent(text, node.start))
        return text[: node.start] + dumped + text[node.end :]
    if not isinstance(node.value, dict):
        raise ConfigError(f"{'.'.join(path[:depth]) or 'the whole'} is not an object")
    for name in reversed(path[depth + 1 :]):
        value = {name: value}
    outer, close = _indent(text, node.start), node.end - 1
    inner, begun, comma = outer + "  ", text[: node.start + 1], ""
    if node.members:
        start, last = list(node.members.values())[-1]
        inner = _own_line(text, start) or inner
        begun, comma = text[: last.end], "" if _comma(text, last.end) else ","
    between = text[len(begun) : close].rstrip(" \t\r\n")
    line = _newline(text)
    member = f"{inner}{json.dumps(path[depth])}: {_dump(value, line + inner)}"
    return f"{begun}{comma}{between}{line}{member}{line}{outer}{text[close:]}"


def remove(text: str, path: Sequence[str]) -> str:
    """`text` without the member at `path`; unchanged where there is none."""
    node = parse(text)
    for name in path[:-1]:
        if name not in node.members:
            return text
        node = node.members[name][1]
    if path[-1] not in node.members:
        return text
    start, gone = node.members[path[-1]]
    before = text[:start].rstrip(" \t\r\n")
    comma = _comma(text, gone.end)
    names = list(node.members)
    at = names.index(path[-1])
    if comma is None and at > 0:  # the last one: the comma before it goes too
        previous = node.members[names[at - 1]][1].end
        behind = _comma(text, previous) or previous
        before = text[:previous] + before[behind:]
    return before + text[gone.end if comma is None else comma :]


def _comma(text: str, at: int) -> int | None:
    """The place behind the comma that follows `at`, if one does."""
    at = _gap(text, at)
    return at + 1 if text[at : at + 1] == "," else None


def _indent(text: str, at: int) -> str:
    """The white space at the beginning of the line that holds `at`."""
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _own_line(text: str, at: int) -> str | None:
    """The white space before `at`, if nothing else stands before it on its line."""
    space = text[text.rfind("\n", 0, at) + 1 : at]
    return space if space and not space.strip(" \t") else None


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _dump(value: Any, line: str) -> str:
    """`value` over several lines; `line` begins each of them but the first."""
    return json.dumps(value, indent=2, ensure_ascii=False).replace("\n", line)


# -- reading ---------------------------------------------------------------------------------------


def _gap(text: str, at: int) -> int:
    match = _GAP.match(text, at)
    return match.end() if match else at


def _wrong(text: str, at: int) -> ConfigError:
    line = text.count("\n", 0, at) + 1
    column = at - text.rfind("\n", 0, at)
    return ConfigError(f"not JSON5: line {line}, column {column}")


def _value(text: str, at: int, depth: int) -> tuple[Node, int]:
    start, first = at, text[at : at + 1]
    if depth > _DEEPEST:
        raise _wrong(text, at)
    if first == "{":
        return _object(text, at, depth)
    if first == "[":
        return _array(text, at, depth)
    if first in _PLAIN:
        value, at = _string(text, at)
        return Node(value, start, at), at
    if match := _NUMBER.match(text, at):
        return Node(_number(match.group()), start, match.end()), match.end()
    if (match := _NAME.match(text, at)) and match.group() in _WORDS:
        return Node(_WORDS[match.group()], start, match.end()), match.end()
    raise _wrong(text, at)


def _object(text: str, at: int, depth: int) -> tuple[Node, int]:
    node = Node({}, at, at)
    at = _gap(text, at + 1)
    while text[at : at + 1] != "}":
        start = at
        if text[at : at + 1] in _PLAIN:
            name, at = _string(text, at)
        elif match := _NAME.match(text, at):
            name, at = match.group(), match.end()
        else:
            raise _wrong(text, at)
        at = _gap(text, at)
        if text[at : at + 1] != ":":
            raise _wrong(text, at)
        member, at = _value(text, _gap(text, at + 1), depth + 1)
        node.members.pop(name, None)  # the last one counts, and stands where it stands
        node.members[name] = (start, member)
        node.parts.append((name, member))
        node.value[name] = member.value
        at = _next(text, at, "}")
    node.end = at + 1
    return node, node.end


def _array(text: str, at: int, depth: int) -> tuple[Node, int]:
    node = Node([], at, at)
    at = _gap(text, at + 1)
    while text[at : at + 1] != "]":
        item, at = _value(text, at, depth + 1)
        node.parts.append(("", item))
        node.value.append(item.value)
        at = _next(text, at, "]")
    node.end = at + 1
    return node, node.end


def _next(text: str, at: int, close: str) -> int:
    """Behind a member: the next one, or `close`."""
    at = _gap(text, at)
    if text[at : at + 1] == ",":
        return _gap(text, at + 1)
    if text[at : at + 1] != close:
        raise _wrong(text, at)
    return at


def _string(text: str, at: int) -> tuple[str, int]:
    quote, parts = text[at], []
    at += 1
    while True:
        match = _PLAIN[quote].match(text, at)
        assert match is not None  # it matches nothing as well
        parts.append(match.group())
        at = match.end()
        if text[at : at + 1] == quote:
            # Two escapes may be the halves of one character.
            whole = "".join(parts).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return whole, at + 1
        if text[at : at + 1] != "\\" or at + 1 >= len(text):
            raise _wrong(text, at)
        escape = "\r\n" if text[at + 1 : at + 3] == "\r\n" else text[at + 1]
        at += 1 + len(escape)
        digits = {"u": 4, "x": 2}.get(escape)
        if digits is None:
            parts.append(_ESCAPES.get(escape, escape))
            continue
        code = text[at : at + digits]
        if not re.fullmatch(f"[0-9a-fA-F]{{{digits}}}", code):
            raise _wrong(text, at)
        parts.append(chr(int(code, 16)))
        at += digits


def _number(text: str) -> float:
    sign, bare = (-1, text[1:]) if text[0] == "-" else (1, text.lstrip("+"))
    if bare[:2] in ("0x", "0X"):
        return sign * int(bare, 16)
    if bare.isdigit():
        return sign * int(bare)
    return sign * float(bare)
