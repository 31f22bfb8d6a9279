"""Assignment of branches to rows, and of rows to microbatches. Pure.

Rows of one microbatch are padded to the longest one, so they are sorted by length first.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from offbeat.trainers.batches.packing import Batch, PackedRow

FULL_ENOUGH_TOKENS: Final = 2048  # from here on, the cost of a microbatch is far above its overhead
SHORTER: Final = 0.8  # a row this much shorter than the longest would waste a fifth on padding


def plan_rows(batch: Batch, *, response_tokens: float, max_tokens: int) -> list[PackedRow]:
    """Assign each group's branches to rows of about ``response_tokens``, evenly filled.

    Args:
        batch: Branches without a wanted token are left out.
        response_tokens: Sum over the branches of a row; 0 gives every branch a row of its own.
        max_tokens: Longest row, unless the longest branch of its group alone exceeds it.
    """
    rows = list[PackedRow]()
    bounds = np.searchsorted(batch.group_S, np.arange(len(batch.prompts) + 1)).tolist()
    lengths = (batch.length_S - 1).tolist()
    for group, prompt in enumerate(batch.prompts):
        branches = [s for s in range(bounds[group], bounds[group + 1]) if lengths[s] >= 0]
        branches.sort(key=lambda s: -lengths[s])
        for assigned in _assigned(branches, lengths, response_tokens, max_tokens - len(prompt)):
            length = len(prompt) + sum(lengths[s] for s in assigned)
            rows.append(PackedRow(group, tuple(assigned), length))
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


def plan_flat_microbatches(rows: Sequence[PackedRow], max_tokens: int) -> Iterator[list[PackedRow]]:
    """Assign rows, longest first, to microbatches of at most ``max_tokens`` without padding.

    Each goes to the first that has room for it. A row longer than that is a microbatch of its own.
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

    A row of k samples of L tokens behind a prompt of P costs ``(P + kL) * linear`` and ``(P + kL)^2
    * pair``. The cost per sample is least at ``kL = sqrt(P (P + linear / pair))``: long rows save
    copies of the prompt, but compute attention across samples that is masked out.

    Args:
        prompt_tokens: P.
        ratio_tokens: ``linear / pair``: cost of a token outside attention, over that of one pair.
    """
    return math.sqrt(prompt_tokens * (prompt_tokens + ratio_tokens))


def _assigned(
    branches: list[int], lengths: list[int], response_tokens: float, room: int
) -> list[list[int]]:
    """Assign branches, longest first, each to the emptiest row; their total sets the row count."""
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
