"""How few tokens a text can have, told without tokenising it.

Guarantee: never more than it has. A token stands for no more characters than it has itself, so a
text has at least its characters divided by those of the longest token. White space is left out on
both sides: added tokens may swallow any amount of it.
"""

from __future__ import annotations

from typing import Any

_BYTE_SPACES = str.maketrans("", "", "\u0120\u010a\u0109\u010d")
"""How byte-level vocabularies write space, newline, tab and carriage return."""
_NFC_SHRINKS = 4
"""Characters that Unicode composition may make one."""


class TokenBound:
    """For `backend`, a `tokenizers.Tokenizer`. Tells nothing (0) where it is not byte-level BPE, or
    rewrites the text in other ways than NFC before it reads it."""

    def __init__(self, backend: Any) -> None:
        self._longest = 0
        normalizer = backend.normalizer
        known = normalizer is None or type(normalizer).__name__ == "NFC"
        byte_level = "ByteLevel" in str(backend.pre_tokenizer)
        if known and byte_level and type(backend.model).__name__ == "BPE":
            vocabulary = backend.get_vocab(with_added_tokens=True)
            longest = max((len(token.translate(_BYTE_SPACES)) for token in vocabulary), default=0)
            self._longest = longest * (1 if normalizer is None else _NFC_SHRINKS)

    def fewest(self, text: str, limit: int) -> int:
        """A number of tokens that `text` certainly has; only looked for from `limit` on."""
        if not self._longest or len(text) < limit * self._longest:
            return 0
        return -(-len("".join(text.split())) // self._longest)
