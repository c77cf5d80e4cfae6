"""One step of the engine: rows in, tokens and scores out. Engine thread only.

Guarantees: one forward pass for all rows, one draw for all rows that draw, one transfer of the
results from the device; what a row is given does not depend on who else is in the step (but for
rounding).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openclaw_rl.local.attention import Row, StepPlan
from openclaw_rl.local.model import LoadedModel
from openclaw_rl.local.request import TokenScore
from openclaw_rl.local.sampling import RowSettings, draw, score
from openclaw_rl.local.sequence import Sequence

_SCORE_ROWS = 64  # positions whose float32 logits are held at once while scoring
_CPU_MULTIPLE = 16  # bfloat16 tiles of a CPU take 16 rows; fewer cost as much

Result = tuple[Sequence, tuple[TokenScore, ...], dict[str, Any] | None]


class StepRunner:
    """Keeps what stays equal from step to step."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.device = model.device
        self.tiled = self.device.type == "cpu" and model.dtype == torch.bfloat16
        self._settings: RowSettings | None = None
        self._settings_for: list[Sequence] = []

    def run(self, rows: list[tuple[Sequence, int]], context: int) -> list[Result]:
        """Computes `count` more tokens of each sequence (policy rows first). Returns those that
        got a token, or whose prompt is done and nothing more was asked."""
        total = sum(count for _, count in rows)
        pad = -total % _CPU_MULTIPLE if self.tiled and total <= 64 else 0
        ids: list[int] = []
        positions: list[int] = []
        keep: list[int] = []
        plan_rows: list[Row] = []
        scored: list[tuple[Sequence, int, int]] = []  # sequence, first position, how many
        drawing: list[Sequence] = []
        done: list[Sequence] = []
        policy_tokens = 0
        for sequence, count in rows:
            slot, start = sequence.slot, sequence.computed
            assert slot is not None
            new = sequence.tokens[start : start + count]
            first = len(ids)
            if not sequence.prompt_sent:
                # The logits at position p score token p + 1 of the prompt.
                low = max(start, sequence.score_from)
                if sequence.request.scores_prompt and not sequence.prompt_scores:
                    # SGLang's first entry has no log-prob, also where it has a predecessor.
                    token = sequence.tokens[sequence.score_from]
                    sequence.prompt_scores.append(TokenScore(token, None))
                high = min(start + count, sequence.prompt_len - 1)
                if low < high:
                    scored.append((sequence, low, high - low))
                    keep.extend(range(first + low - start, first + high - start))
            ids.extend(new)
            positions.extend(range(start, start + count))
            plan_rows.append(Row(slot, start, count))
            slot.ids[start : start + count] = new
            if sequence.request.policy:
                policy_tokens += count
        n_scored = len(keep)
        at = 0
        for sequence, count in rows:
            at += count
            if sequence.computed + count < len(sequence.tokens):
                continue
            if sequence.request.sampling.max_new_tokens > 0:
                drawing.append(sequence)
                keep.append(at - 1)
            else:
                done.append(sequence)
        ids.extend([0] * pad)
        positions.extend([0] * pad)
        plan = StepPlan(plan_rows, pad, self.model.dtype, self.device)
        self.model.switch.rows = policy_tokens
        packed = torch.tensor([ids, positions], device=self.device)
        # Nothing kept (a piece of a prompt): one row, since an empty matrix is not everywhere fine.
        kept = torch.tensor(keep or [0], device=self.device)
        logits = self.model.forward(packed[:1], packed[1:], plan, kept)
        for sequence, count in rows:
            assert sequence.slot is not None
            sequence.computed += count
            sequence.slot.length = sequence.computed
        if scored:
            self._score(logits[:n_scored], scored)
        results: list[Result] = []
        if drawing:
            results = self._draw(logits[n_scored : n_scored + len(drawing)], drawing, context)
        results.extend((sequence, (), {"type": "length", "length": 0}) for sequence in done)
        return results

    def _score(self, logits: Tensor, scored: list[tuple[Sequence, int, int]]) -> None:
        """Appends the prompt's scores."""
        at = 0
        for sequence, first, count in scored:
            request = sequence.request
            for offset in range(0, count, _SCORE_ROWS):
                size = min(_SCORE_ROWS, count - offset)
                part = logits[at + offset : at + offset + size]
                low = first + offset + 1
                targets = sequence.tokens[low : low + size]
                values, z, normaliser = score(part, torch.tensor(targets, device=self.device))
                tops = _tops(z, normaliser, request.top_logprobs)
                for token, value, top in zip(targets, values.tolist(), tops, strict=True):
                    sequence.prompt_scores.append(TokenScore(token, value, top))
            at += count

    def _draw(self, logits: Tensor, drawing: list[Sequence], context: int) -> list[Result]:
        # `==` on lists compares by identity first, and sequences have no equality of their own.
        if self._settings is None or self._settings_for != drawing:
            self._settings_for = list(drawing)
            self._settings = RowSettings.of([s.request.sampling for s in drawing], self.device)
        uniforms = [sequence.random.random() for sequence in drawing]
        counts = {i: s.counts for i, s in enumerate(drawing) if s.counts is not None}
        drawn = draw(logits, self._settings, uniforms, counts)
        # One transfer: float64 holds every token id exactly.
        ids, values = torch.stack([drawn.ids.double(), drawn.logprobs.double()]).tolist()
        results: list[Result] = []
        for i, sequence in enumerate(drawing):
            token, request = int(ids[i]), sequence.request
            row = slice(i, i + 1)
            (top,) = _tops(drawn.scaled[row], drawn.normaliser[row], request.top_logprobs)
            sequence.tokens.append(token)
            if sequence.counts is not None:
                sequence.counts[token] += 1
            finish = sequence.ended_by(token, self.model.eos_ids, context)
            if request.sampling.stop and (finish is None or finish["type"] == "length"):
                finish = self._stop_string(sequence) or finish
            results.append((sequence, (TokenScore(token, values[i], top),), finish))
        return results

    def _stop_string(self, sequence: Sequence) -> dict[str, Any] | None:
        """A stop string in the text of the last tokens. A token is at least one byte, so as many
        tokens as the longest string has bytes, and a few for a character cut in two."""
        stops = sequence.request.sampling.stop
        reach = max(len(stop.encode()) for stop in stops) + 4
        tail = sequence.tokens[max(sequence.prompt_len, len(sequence.tokens) - reach) :]
        text = self.model.tokenizer.decode(tail, skip_special_tokens=False)
        for stop in stops:
            if stop in text:
                return {"type": "stop", "matched": stop}
        return None


def _tops(z: Tensor, normaliser: Tensor, top: int) -> list[tuple[tuple[float, int], ...]]:
    """For each row of z [R, V]: the `top` best as (log-prob, id)."""
    if not top:
        return [()] * z.shape[0]
    values, ids = z.topk(top, dim=-1)
    best = (values - normaliser).tolist()
    return [tuple(zip(v, i, strict=True)) for v, i in zip(best, ids.tolist(), strict=True)]
