"""Planning of the microbatches that a rank computes one by one.

Assignment of branches to rows, and of rows to microbatches. Pure.

Rows of one microbatch are padded to the longest one, so they are sorted by length first.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import numpy as np

from offbeat.models.media_rules import TEXT_ONLY, MediaRules
from offbeat.trainers.batches.packing import Batch, PackedRow, PackedRows, flatten, pack
from offbeat.transfer_queue.schema import Columns

FULL_ENOUGH_TOKENS: Final = 2048  # above this, a microbatch costs far more than its overhead
SHORTER: Final = 0.8  # a row this much shorter than the longest would waste a fifth on padding


def plan_rows(batch: Batch, *, response_tokens: float, max_tokens: int) -> list[PackedRow]:
    """Assign each group's branches to rows of about ``response_tokens``, evenly filled.

    Args:
        batch: Branches without a wanted token are left out.
        response_tokens: Sum over the branches of a row. With 0, every branch gets a separate row.
        max_tokens: Maximum length of a row, unless a group's longest branch exceeds it.
    """
    rows = list[PackedRow]()
    bounds = np.searchsorted(batch.group_S, np.arange(len(batch.prompts) + 1)).tolist()
    lengths = (batch.length_S - 1).tolist()
    for group, prompt in enumerate(batch.prompts):
        branches = [s for s in range(bounds[group], bounds[group + 1]) if lengths[s] >= 0]
        branches.sort(key=lambda s: -lengths[s])
        for assigned in _assign(branches, lengths, response_tokens, max_tokens - len(prompt)):
            length = len(prompt) + sum(lengths[s] for s in assigned)
            rows.append(PackedRow(group, tuple(assigned), length))
    return rows


def plan_microbatches(rows: Sequence[PackedRow], max_tokens: int) -> Iterator[list[PackedRow]]:
    """Cut rows, longest first, into microbatches of at most ``max_tokens``, padding included.

    A longer row gets a separate microbatch. A microbatch that is full enough is closed if padding
    the next row would cost more than starting another microbatch.
    """
    current = list[PackedRow]()
    for row in sorted(rows, key=lambda each: -each.length):
        if current:
            width = current[0].length
            full_enough = len(current) * width >= FULL_ENOUGH_TOKENS
            if (len(current) + 1) * width > max_tokens or (
                full_enough and row.length < SHORTER * width
            ):
                yield current
                current = []
        current.append(row)
    if current:
        yield current


def plan_flat_microbatches(rows: Sequence[PackedRow], max_tokens: int) -> Iterator[list[PackedRow]]:
    """Assign rows, longest first, to microbatches of at most ``max_tokens`` without padding.

    Each row goes to the first microbatch with room for it. A row of more than ``max_tokens`` gets a
    separate microbatch.
    """
    microbatches, filled = list[list[PackedRow]](), list[int]()
    for row in sorted(rows, key=lambda each: -each.length):
        fits = (at for at, tokens in enumerate(filled) if tokens + row.length <= max_tokens)
        at = next(fits, len(filled))
        if at == len(filled):
            microbatches.append([])
            filled.append(0)
        microbatches[at].append(row)
        filled[at] += row.length
    return iter(microbatches)


def best_response_tokens(prompt_tokens: float, ratio_tokens: float) -> float:
    """Return the number of response tokens per row with the least compute per sample.

    A row of k samples of L tokens after a prompt of P tokens costs ``(P + kL) * linear`` and ``(P +
    kL)^2
    * pair``. The cost per sample is least at ``kL = sqrt(P (P + linear / pair))``. Long rows save
    copies of the prompt, but compute masked attention across samples.

    Args:
        prompt_tokens: P, the length of the prompt.
        ratio_tokens: ``linear / pair``: cost of a token outside attention, divided by the cost of
            one pair.
    """
    return math.sqrt(prompt_tokens * (prompt_tokens + ratio_tokens))


def _assign(
    branches: list[int], lengths: list[int], response_tokens: float, room: int
) -> list[list[int]]:
    """Assign branches, longest first, each to the emptiest row. Their sum sets the row count."""
    if not branches:
        return []
    if response_tokens <= 0:
        return [[branch] for branch in branches]
    total = sum(lengths[s] for s in branches)
    room = max(room, lengths[branches[0]])  # no split makes a branch shorter
    wanted = min(len(branches), max(1, math.ceil(total / response_tokens)))
    for count in range(wanted, len(branches) + 1):
        rows, filled = [list[int]() for _ in range(count)], [0] * count
        for branch in branches:
            emptiest = filled.index(min(filled))
            rows[emptiest].append(branch)
            filled[emptiest] += lengths[branch]
        if max(filled) <= room:
            return [row for row in rows if row]
    raise AssertionError("unreachable: a row for each branch has room")


MASKED: Final = 1.1  # cost of a pair under a mask that is read from memory; measured on a CPU
CAUSAL_OVERHANG: Final = 200
"""Pairs above the diagonal that a causal kernel's blocks compute per token, measured on a CPU."""


class RowLayout(Enum):
    """Layout of the rows of a microbatch."""

    APART = "apart"  # one branch per row, padded; causal attention
    DENSE = "dense"  # branches behind one prompt, padded; a mask of tokens squared
    SPLIT = "split"  # branches behind one prompt, rows end to end; attention segment by segment


@dataclass(frozen=True, slots=True)
class RowCosts:
    """Costs of a model's tokens and calls, in pairs.

    The unit is the time in which attention computes score and value of one pair of tokens without a
    mask, over all heads and layers, forward and backward.
    """

    token: float  # per token outside attention
    call: float  # of starting attention over one segment, in every layer, for any length

    def of(
        self, layout: RowLayout, microbatches: Sequence[Sequence[PackedRow]], batch: Batch
    ) -> float:
        """Return the cost of microbatches in a layout, padding included."""
        if layout is RowLayout.SPLIT:
            return sum(self._split(row, batch) for rows in microbatches for row in rows)
        return sum(self._estimate_padded(layout, rows) for rows in microbatches)

    def _estimate_padded(self, layout: RowLayout, rows: Sequence[PackedRow]) -> float:
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


@dataclass(frozen=True, slots=True)
class MicrobatchPlanner:
    """Splits a rank's groups into microbatches by the limits of a trainer and its model."""

    max_tokens: int  # per microbatch, padding included
    shared_prompt: bool
    ratio_tokens: float  # cost of a token outside attention, relative to a pair of tokens inside
    vocabulary: int  # token ids of the model
    call_pairs: float | None = field(default=None, kw_only=True)
    """Cost of one call of split attention, in pairs, or None if the model cannot use it."""
    media_rules: MediaRules = field(default=TEXT_ONLY, kw_only=True)
    """Rules of the media that the model reads."""

    def cut(
        self, groups: Sequence[Columns], *, only_trained: bool
    ) -> tuple[Batch | None, list[PackedRows]]:
        """Return the concatenated groups, and microbatches that have each wanted token once.

        The layout with the lowest cost is used. Without groups, the batch is None and there are no
        microbatches.

        Raises:
            UnfitColumns: Like ``flatten``.
        """
        if not groups:
            return None, []
        batch = flatten(
            groups,
            only_trained=only_trained,
            vocabulary=self.vocabulary,
            media_rules=self.media_rules,
        )
        layout, microbatches = self._cheapest(batch)
        flat = layout is RowLayout.SPLIT
        return batch, [pack(batch, each, flat=flat) for each in microbatches]

    def _cheapest(self, batch: Batch) -> tuple[RowLayout, list[list[PackedRow]]]:
        plans = dict(self._plans(batch))
        if len(plans) == 1:
            return next(iter(plans.items()))
        costs = RowCosts(self.ratio_tokens, self.call_pairs or 0.0)
        return min(plans.items(), key=lambda plan: costs.of(*plan, batch))

    def _plans(self, batch: Batch) -> Iterator[tuple[RowLayout, list[list[PackedRow]]]]:
        """Yield each layout that is exact for the model, with its microbatches."""

        def rows(response_tokens: float) -> list[PackedRow]:
            return plan_rows(batch, response_tokens=response_tokens, max_tokens=self.max_tokens)

        if self.shared_prompt:
            prompt_tokens = sum(map(len, batch.prompts)) / len(batch.prompts)
            shared = rows(best_response_tokens(prompt_tokens, self.ratio_tokens))
            yield RowLayout.DENSE, list(plan_microbatches(shared, self.max_tokens))
        if self.call_pairs is not None:
            whole = rows(math.inf if self.shared_prompt else 0.0)
            yield RowLayout.SPLIT, list(plan_flat_microbatches(whole, self.max_tokens))
        if self.call_pairs is not None or not self.shared_prompt:
            yield RowLayout.APART, list(plan_microbatches(rows(0.0), self.max_tokens))
