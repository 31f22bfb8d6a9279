"""Which samples share a row, and which rows share a microbatch. Numbers in, numbers out.

Rows of one microbatch are padded to the longest of them, so they are sorted by length first.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from offbeat.trainers.batches.packing import Batch, PackedRow

FULL_ENOUGH_TOKENS: Final = 2048  # from here on a microbatch costs far more than its own overhead
SHORTER: Final = 0.8  # a row this much shorter than the longest would waste a fifth on padding


def plan_rows(batch: Batch, *, response_tokens: float, max_tokens: int) -> list[PackedRow]:
    """Deal each group's samples to rows of about ``response_tokens``, evenly filled.

    Args:
        batch: Samples without a wanted token are left out.
        response_tokens: Of all samples of a row; 0 gives every sample a row of its own.
        max_tokens: No row is longer, unless the longest sample of its group alone would be.
    """
    rows = list[PackedRow]()
    bounds = np.searchsorted(batch.group_S, np.arange(len(batch.prompts) + 1)).tolist()
    lengths = (batch.length_S - 1).tolist()
    for group, prompt in enumerate(batch.prompts):
        samples = [s for s in range(bounds[group], bounds[group + 1]) if lengths[s] >= 0]
        samples.sort(key=lambda s: -lengths[s])
        for dealt in _dealt(samples, lengths, response_tokens, max_tokens - len(prompt)):
            length = len(prompt) + sum(lengths[s] for s in dealt)
            rows.append(PackedRow(group, tuple(dealt), length))
    return rows


def plan_microbatches(rows: Sequence[PackedRow], max_tokens: int) -> Iterator[list[PackedRow]]:
    """Cut rows, longest first, into microbatches of at most ``max_tokens``, padding included.

    A row longer than that is a microbatch of its own. A microbatch that is full enough is closed
    when the next row is so short that padding it would cost more than starting another.
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


def best_response_tokens(prompt_tokens: float, ratio_tokens: float) -> float:
    """How many response tokens should share one prompt, for the least compute a sample.

    A row of k samples of L tokens behind a prompt of P costs ``(P + kL) * linear`` and ``(P + kL)^2
    * pair``. A sample's share is least at ``kL = sqrt(P (P + linear / pair))``: long rows save
    copies of the prompt and pay in attention across samples that is computed and masked away.

    Args:
        prompt_tokens: P.
        ratio_tokens: ``linear / pair``: cost of a token outside attention, over that of one pair.
    """
    return math.sqrt(prompt_tokens * (prompt_tokens + ratio_tokens))


def _dealt(
    samples: list[int], lengths: list[int], response_tokens: float, room: int
) -> list[list[int]]:
    """Samples, longest first, each to the emptiest of as many rows as their total asks for."""
    if not samples:
        return []
    if response_tokens <= 0:
        return [[sample] for sample in samples]
    total = sum(lengths[s] for s in samples)
    room = max(room, lengths[samples[0]])  # no split makes a sample shorter
    wanted = min(len(samples), max(1, math.ceil(total / response_tokens)))
    for count in range(wanted, len(samples) + 1):
        rows, filled = [list[int]() for _ in range(count)], [0] * count
        for sample in samples:
            emptiest = filled.index(min(filled))
            rows[emptiest].append(sample)
            filled[emptiest] += lengths[sample]
        if max(filled) <= room:
            return [row for row in rows if row]
    raise AssertionError("unreachable: a row for each sample has room")
