"""Parts of padded rows for attention without a mask, from the segments of their tokens. Pure.

A row holds a prompt, branches behind it, and padding (``PackedRows.segments_RT``). Rows are counted end
to end: token t of row r is key ``r * T + t``. A rank's queries are some columns of each row.

Legend: R rows, T tokens of a row.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from offbeat.trainers.batches.attention_parts import AttentionPart
from offbeat.trainers.batches.packing import PROMPT, Ints


def list_row_parts(segments_RT: Ints, columns: Sequence[slice]) -> list[AttentionPart]:
    """Return parts in which each token attends to the tokens that ``packing.visible`` shows it.

    Args:
        segments_RT: Segments of whole rows. Each segment's tokens are next to each other, and a
            prompt is at the start of its row.
        columns: Columns that have queries, in the order of these.
    """
    rows, tokens = segments_RT.shape
    own = sum(each.stop - each.start for each in columns)
    return [
        AttentionPart(
            _shift(part.queries, row * own), tuple(_shift(keys, row * tokens) for keys in part.keys)
        )
        for row in range(rows)
        for part in _parts_of_row(segments_RT[row], columns)
    ]


def _parts_of_row(segments_T: Ints, columns: Sequence[slice]) -> Iterator[AttentionPart]:
    """Yield the parts of one row, with columns as keys and the queries counted from 0."""
    bounds = [0, *(np.flatnonzero(np.diff(segments_T)) + 1).tolist(), len(segments_T)]
    runs = [slice(*each) for each in pairwise(bounds)]
    prompt = runs[0] if segments_T[0] == PROMPT else slice(0, 0)
    base = 0
    for own in columns:
        for run in runs:
            first, stop = max(run.start, own.start), min(run.stop, own.stop)
            if first >= stop:
                continue
            queries = slice(base + first - own.start, base + stop - own.start)
            if prompt.stop in {0, run.start, run.stop}:
                # Without a prompt a run begins at its first token, else at the prompt's.
                yield AttentionPart(queries, (slice(run.start if not prompt.stop else 0, stop),))
            else:
                yield AttentionPart(queries, (prompt, slice(run.start, stop)))
        base += own.stop - own.start


def _shift(tokens: slice, by: int) -> slice:
    return slice(tokens.start + by, tokens.stop + by)
