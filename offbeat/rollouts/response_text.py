"""Decodes the responses of an evaluation's samples, for people who read its file."""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any, Final

from numpy.typing import NDArray

from offbeat.environments.text import Tokenizer
from offbeat.messages.groups import Receipt
from offbeat.transfer_queue.schema import RESPONSE_IDS, RESPONSE_OFFSETS

RESPONSE_CHARACTERS: Final = 4096
"""Bound of a text. All samples of an evaluation go through the controller and wait there in memory:
thousands of them, of which a model may write any length."""


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


def bounded(text: str) -> str:
    """Return the text in at most ``RESPONSE_CHARACTERS``, and a note in the place of the middle.

    Characters that UTF-8 cannot encode become question marks.
    """
    encodable = text.encode(errors="replace").decode()
    left_out = len(encodable) - RESPONSE_CHARACTERS
    if left_out <= 0:
        return encodable
    half = RESPONSE_CHARACTERS // 2
    return f"{encodable[:half]} [... {left_out} characters left out ...] {encodable[-half:]}"
