"""Decodes the responses of an evaluation's samples, for people who read its file."""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from numpy.typing import NDArray

from offbeat.environments.text import Tokenizer
from offbeat.messages.groups import Receipt
from offbeat.messages.text import bounded
from offbeat.transfer_queue.schema import RESPONSE_IDS, RESPONSE_OFFSETS


def response_texts(
    tokenizer: Tokenizer, receipt: Receipt, columns: Mapping[str, NDArray[Any]]
) -> tuple[str, ...]:
    """Return the text of each sample, special tokens included: they show turns and the end.

    Of a sample with several branches it is the last branch, which its last turn ends. A sample
    without any turn has an empty text.
    """
    ids, offsets = columns[RESPONSE_IDS], columns[RESPONSE_OFFSETS].tolist()
    turns = receipt.turns or (1,) * receipt.samples
    last_rows = accumulate(receipt.branches or (1,) * receipt.samples, initial=-1)
    next(last_rows)
    return tuple(
        bounded(tokenizer.decode(ids[offsets[row] : offsets[row + 1]].tolist())) if count else ""
        for row, count in zip(last_rows, turns, strict=True)
    )
