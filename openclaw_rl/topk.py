"""`TopK`: for each token of a reply, K candidate tokens in its place with a log-prob each.

The policy's own (what it might have said) and a teacher's (how likely it finds them) have the same
form. Guarantees of what `of` and `of_candidates` return: as many rows as tokens, all of one width;
an id is -1 exactly where its log-prob is NaN: nothing is known there, and nothing is put in its
place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NO_ID = -1
_POSITIVE = 1e-3
"""A log-prob may exceed 0 by rounding, not by more."""


@dataclass(frozen=True, slots=True)
class TopK:
    """`ids` and `log_probs` are [R][K]; log-probs are natural logarithms."""

    ids: Sequence[Sequence[int]]
    log_probs: Sequence[Sequence[float]]

    @classmethod
    def of(cls, ids: Any, log_probs: Any, tokens: int) -> TopK:
        """From lists of anybody's, for a reply of `tokens` tokens.

        None and values that are not finite become "nothing known". Raises `ValueError` where the
        shapes do not fit, an id is twice in a row, or a log-prob is above 0.
        """
        rows = [[_id(value) for value in row] for row in ids]
        values = [[_log_prob(value) for value in row] for row in log_probs]
        if not len(rows) == len(values) == tokens:
            raise ValueError(f"{len(rows)} and {len(values)} rows for {tokens} tokens")
        if len({*map(len, rows), *map(len, values)}) > 1:
            raise ValueError("rows of several widths")
        for row, value in zip(rows, values, strict=True):
            for at, known in enumerate(value):
                if math.isnan(known) or row[at] < 0:
                    row[at], value[at] = NO_ID, math.nan
            named = [token for token in row if token >= 0]
            if len(set(named)) < len(named):
                raise ValueError("an id is twice among the candidates of a token")
        return cls(rows, values)

    @classmethod
    def of_candidates(cls, lists: Sequence[Sequence[tuple[float, int]]], k: int) -> TopK:
        """The first `k` of each list of (log-prob, id); shorter lists are filled up with none."""
        ids, values = [], []
        for one in lists:
            none = max(0, k - len(one))
            ids.append([token for _, token in one[:k]] + [NO_ID] * none)
            values.append([value for value, _ in one[:k]] + [math.nan] * none)
        return cls(ids, values)

    @classmethod
    def of_mapping(cls, value: Mapping[str, Any], tokens: int) -> TopK:
        """From `{"ids": ..., "log_probs": ...}`. Raises `ValueError`, `TypeError`, `KeyError`."""
        return cls.of(value["ids"], value["log_probs"], tokens)

    def as_dict(self) -> dict[str, list[Any]]:
        """Plain lists, as hooks see them."""
        return {
            "ids": [list(row) for row in self.ids],
            "log_probs": [list(row) for row in self.log_probs],
        }

    @property
    def width(self) -> int:
        """K; 0 for no tokens."""
        return len(self.ids[0]) if self.ids else 0

    @property
    def known(self) -> bool:
        """Whether anything is known of any token."""
        return any(token >= 0 for row in self.ids for token in row)


def _id(value: Any) -> int:
    if value is None:
        return NO_ID
    number = int(value)
    if number != value or number >= 2**31:
        raise ValueError("a candidate's id is no token id")
    return max(number, NO_ID)


def _log_prob(value: Any) -> float:
    number = math.nan if value is None else float(value)
    if number > _POSITIVE:
        raise ValueError("a candidate's log-prob is above 0")
    return number if math.isfinite(number) else math.nan
