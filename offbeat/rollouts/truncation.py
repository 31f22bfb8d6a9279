"""Masks samples that ran out of tokens, and punishes responses that come near the limit.

Both of them are DAPO's, arXiv:2503.14476, section 3.4. Of an evaluation nothing is changed.
"""

from itertools import pairwise
from typing import Final

import msgspec
import numpy as np

from offbeat.config.sections.rollout import RolloutConfig
from offbeat.messages.groups import Receipt, RolloutTask
from offbeat.transfer_queue import schema
from offbeat.transfer_queue.schema import Columns

PENALTY: Final = "overlong_penalty"
"""Name under which a receipt has what was taken off each sample's reward."""


def overlong_penalty(tokens: int, rollout: RolloutConfig, max_new_tokens: int) -> float:
    """Return what a response of this many tokens loses: DAPO's soft overlong punishment.

    0 up to ``max_new_tokens - overlong_tokens``, from there in proportion, and
    ``overlong_penalty`` at ``max_new_tokens``. Equation 13.
    """
    if rollout.overlong_tokens is None:
        return 0.0
    over = tokens - (max_new_tokens - rollout.overlong_tokens)
    return rollout.overlong_penalty * min(1.0, max(0.0, over / rollout.overlong_tokens))


def by_length(
    task: RolloutTask,
    receipt: Receipt,
    columns: Columns,
    rollout: RolloutConfig,
    max_new_tokens: int,
) -> tuple[Receipt, Columns]:
    """Return the group with its long samples punished and its truncated ones masked.

    A masked one keeps its place, its reward and its part in the advantages of the others; it has no
    trained token (``valid_tokens`` 0), so it counts nowhere in the loss. A sample that failed is
    left as it is.
    """
    if task.evaluation:
        return receipt, columns
    if rollout.overlong_tokens is not None:
        receipt, columns = _punished(receipt, columns, rollout, max_new_tokens)
    if rollout.truncated_samples == "mask_loss" and receipt.truncated_samples:
        receipt, columns = _masked(receipt, columns)
    return receipt, columns


def _punished(
    receipt: Receipt, columns: Columns, rollout: RolloutConfig, max_new_tokens: int
) -> tuple[Receipt, Columns]:
    samples = zip(receipt.valid, receipt.valid_tokens, strict=True)
    penalties = tuple(
        overlong_penalty(tokens, rollout, max_new_tokens) if valid else 0.0
        for valid, tokens in samples
    )
    rewards = np.asarray(columns[schema.REWARDS], np.float32) - np.array(penalties, np.float32)
    changed = msgspec.structs.replace(
        receipt,
        rewards=tuple(rewards.tolist()),
        rewards_by_name=(*receipt.rewards_by_name, (PENALTY, penalties)),
    )
    return changed, {**columns, schema.REWARDS: rewards}


def _masked(receipt: Receipt, columns: Columns) -> tuple[Receipt, Columns]:
    mask = np.array(columns[schema.LOSS_MASK], np.bool_)  # a copy
    ends = np.cumsum((0, *receipt.response_tokens)).tolist()
    for is_cut, (start, end) in zip(receipt.truncated, pairwise(ends), strict=True):
        if is_cut:
            mask[start:end] = False
    valid = zip(receipt.valid_tokens, receipt.truncated, strict=True)
    valid_tokens = tuple(0 if is_cut else tokens for tokens, is_cut in valid)
    changed = msgspec.structs.replace(receipt, valid_tokens=valid_tokens)
    return changed, {**columns, schema.LOSS_MASK: mask}
