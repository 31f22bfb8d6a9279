"""Estimate of what the rows of a microbatch cost in each layout, to choose the cheapest. Pure.

Costs are in pairs: the time in which attention computes the score and value of one pair of tokens
without a mask, over all heads and layers, forward and backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from offbeat.trainers.batches.packing import Batch, PackedRow

MASKED: Final = 1.1  # cost of a pair under a mask that is read from memory; measured on a CPU
CAUSAL_OVERHANG: Final = 200
"""Pairs per token that a causal kernel computes above the diagonal, in its blocks; measured on a CPU."""


class RowLayout(Enum):
    """Layout of the rows of a microbatch."""

    APART = "apart"  # one branch per row, padded; causal attention
    DENSE = "dense"  # branches behind one prompt, padded; a mask of tokens squared
    SPLIT = "split"  # branches behind one prompt, rows end to end; attention segment by segment


@dataclass(frozen=True, slots=True)
class RowCosts:
    """Costs of a model's tokens and calls, in pairs."""

    token: float  # of a token outside attention
    call: float  # of starting attention over one segment, in every layer, whatever its length

    def of(
        self, layout: RowLayout, microbatches: Sequence[Sequence[PackedRow]], batch: Batch
    ) -> float:
        """Return the cost of microbatches in a layout, padding included."""
        if layout is RowLayout.SPLIT:
            return sum(self._split(row, batch) for rows in microbatches for row in rows)
        return sum(self._padded(layout, rows) for rows in microbatches)

    def _padded(self, layout: RowLayout, rows: Sequence[PackedRow]) -> float:
        width = max(row.length for row in rows)
        is_causal = all(len(row.branches) == 1 for row in rows)
        assert is_causal or layout is RowLayout.DENSE  # noqa: S101 -- by the plan of its rows
        pairs = _causal_pairs(width) if is_causal else MASKED * width**2
        return len(rows) * (width * self.token + pairs) + self.call

    def _split(self, row: PackedRow, batch: Batch) -> float:
        outside = row.length * self.token
        if len(row.branches) == 1:
            return outside + _causal_pairs(row.length) + self.call
        prompt = len(batch.prompts[row.group])
        own = sum(_causal_pairs(int(batch.length_S[each]) - 1) for each in row.branches)
        shared = _causal_pairs(prompt) + prompt * (row.length - prompt)
        return outside + own + shared + (2 + len(row.branches)) * self.call


def _causal_pairs(tokens: int) -> float:
    return min(tokens**2, tokens**2 / 2 + CAUSAL_OVERHANG * tokens)
