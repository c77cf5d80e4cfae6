"""Token ids to text while they arrive: joined, the pieces equal the decoding of all ids.

Incomplete characters are held back. Tokens that end a turn, and other special tokens, are not
shown; marks that the reply parser reads (`<think>`, `<tool_call>`, ...) are, special or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

_LONGEST = 4
"""Tokens that one character may take: UTF-8 has at most 4 bytes. What is still no character then
never will be, and the reader sees the replacement character."""


class TextStream:
    """`decode` turns ids into text, special tokens included; `hidden` ids are left out."""

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
        for end in range(len(self._ids), max(self._shown, len(self._ids) - _LONGEST), -1):
            text = self._decode(self._ids[:end])
            if not text.endswith("\ufffd"):
                return self._show(text, end)
        if len(self._ids) - self._shown > _LONGEST:
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
