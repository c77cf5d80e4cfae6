"""Token ids to text while they arrive: joined, the pieces equal the decoding of all ids.

Incomplete characters are held back. Tokens that end a turn, and other special tokens, are not
shown; marks that the reply parser reads (`<think>`, `<tool_call>`, ...) are, special or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

_PATIENCE = 8
"""Tokens that may wait for the rest of a character. No character has more than 4 bytes, so by then
the bytes are no UTF-8, and the reader sees the replacement character."""


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
        return self._show(held=len(self._ids) - self._shown <= _PATIENCE)

    def finish(self) -> str:
        """What was held back, with U+FFFD for bytes that are no character."""
        return self._show(held=False) if len(self._ids) > self._shown else ""

    def _show(self, held: bool) -> str:
        # Decoded together with the ids before: some tokenizers drop a space where a text begins.
        text = self._decode(self._ids)
        if held and text.endswith("�"):
            return ""
        new = text[len(self._shown_text) :]
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        self._shown_text = self._decode(self._ids)
        return new
