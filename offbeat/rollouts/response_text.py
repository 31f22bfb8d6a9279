"""Decodes responses for readers of the files, and finds sampled ids that have no text."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from offbeat.config.user_code import describe
from offbeat.environments.text import Tokenizer
from offbeat.messages.groups import Receipt
from offbeat.messages.text import SAMPLE_CHARACTERS, bound_text, join_branches
from offbeat.transfer_queue.schema import LOSS_MASK, RESPONSE_IDS, RESPONSE_OFFSETS

log = structlog.get_logger(__name__)


class TextlessTokens:
    """Counts sampled token ids that the tokenizer lacks.

    They are possible because a model's output head may have more rows than the tokenizer has
    tokens. Such a token is trained, but no reward sees it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = np.fromiter(tokenizer.get_vocab().values(), dtype=np.int64)
        self._is_known = np.zeros(ids.max(initial=-1) + 1, dtype=np.bool_)
        self._is_known[ids] = True
        self._has_warned = False

    def count(self, token_ids: NDArray[Any]) -> int:
        inside = token_ids[token_ids < len(self._is_known)]
        return len(token_ids) - int(np.count_nonzero(self._is_known[inside]))

    def count_trained(self, columns: Mapping[str, NDArray[Any]]) -> int:
        """Return how many trained tokens of a group have no text. Log a warning the first time."""
        trained = columns[RESPONSE_IDS][columns[LOSS_MASK]]
        count = self.count(trained)
        if count and not self._has_warned:
            self._has_warned = True
            log.warning(
                "rollout.tokens_without_text",
                tokens=count,
                of=len(trained),
                problem="the tokenizer has no such ids: they are trained, but no reward sees them",
                fix="cut the model's embeddings to the tokenizer, or train it not to draw them",
                metric="rollout/textless_fraction",
            )
        return count


def decode_for_reader(tokenizer: Tokenizer | None, token_ids: Sequence[int]) -> str:
    """Return the text of tokens, or the error if the tokenizer (maybe model code) raises."""
    if tokenizer is None or not token_ids:
        return ""
    try:
        return tokenizer.decode(token_ids)
    except Exception as error:  # noqa: BLE001 - a file for readers is never worth a group
        return f"tokens {list(token_ids)}, which the tokenizer refuses: {describe(error)}"


def branch_texts(tokenizer: Tokenizer, columns: Mapping[str, NDArray[Any]]) -> tuple[str, ...]:
    """Return the text of each branch of each sample of a group, special tokens included."""
    ids, offsets = columns[RESPONSE_IDS].tolist(), columns[RESPONSE_OFFSETS].tolist()
    return tuple(decode_for_reader(tokenizer, ids[start:end]) for start, end in pairwise(offsets))


def response_texts(
    tokenizer: Tokenizer, receipt: Receipt, columns: Mapping[str, NDArray[Any]]
) -> tuple[str, ...]:
    """Return the text of each sample, with special tokens because they show turns and the end.

    If a sample has several branches, its text has all of them, each with a heading. A sample
    without any turn has an empty text.
    """
    ids, offsets = columns[RESPONSE_IDS].tolist(), columns[RESPONSE_OFFSETS].tolist()
    turns = receipt.turns or (1,) * receipt.samples
    rows = pairwise(accumulate(receipt.branches or (1,) * receipt.samples, initial=0))
    return tuple(
        _join_bounded([tokenizer.decode(ids[a:b]) for a, b in pairwise(offsets[first : end + 1])])
        if count
        else ""
        for (first, end), count in zip(rows, turns, strict=True)
    )


def _join_bounded(texts: Sequence[str]) -> str:
    """Return the text of a sample's branches. If it is too long, each branch gets an equal part."""
    if sum(map(len, texts)) <= SAMPLE_CHARACTERS:
        return join_branches([bound_text(text) for text in texts])
    return join_branches([bound_text(text, SAMPLE_CHARACTERS // len(texts)) for text in texts])
