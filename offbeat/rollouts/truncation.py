"""Masks samples that ran out of tokens, and punishes responses that come near the limit.

Both of them are DAPO's, arXiv:2503.14476, section 3.4. Of an evaluation nothing is changed.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np

from offbeat.config.run import RunConfig
from offbeat.messages.groups import Receipt, RolloutTask
from offbeat.transfer_queue import schema
from offbeat.transfer_queue.schema import Columns

PENALTY: Final = "overlong_penalty"
"""Name under which a receipt has what was taken off each sample's reward."""


@dataclass(frozen=True, slots=True)
class TruncationRules:
    """The settings of ``rollout`` about long samples."""

    mask_truncated: bool = False
    overlong_tokens: int | None = None  # None: no penalty
    overlong_penalty: float = 1.0
    max_new_tokens: int = 0  # where the penalty is whole

    @classmethod
    def of(cls, config: RunConfig) -> "TruncationRules":
        """Return the recipe's rules."""
        rollout = config.rollout
        return cls(
            rollout.truncated_samples == "mask_loss",
            rollout.overlong_tokens,
            rollout.overlong_penalty,
            config.generator.sampling.max_new_tokens,
        )

    def penalty(self, tokens: int) -> float:
        """Return what a response of this many tokens loses: DAPO's soft overlong punishment.

        0 up to ``max_new_tokens - overlong_tokens``, from there in proportion, and
        ``overlong_penalty`` at ``max_new_tokens``. Equation 13.
        """
        if self.overlong_tokens is None:
            return 0.0
        over = tokens - (self.max_new_tokens - self.overlong_tokens)
        return self.overlong_penalty * min(1.0, max(0.0, over / self.overlong_tokens))


def by_length(
    task: RolloutTask, receipt: Receipt, columns: Columns, rules: TruncationRules
) -> tuple[Receipt, Columns]:
    """Return the group with its long samples punished and its truncated ones masked.

    A masked one keeps its place, its reward and its part in the advantages of the others; it has no
    trained token (``valid_tokens`` 0), so it counts nowhere in the loss. A sample that failed is
    left as it is.
    """
    if task.evaluation:
        return receipt, columns
    if rules.overlong_tokens is not None:
        receipt, columns = _punished(receipt, columns, rules)
    if rules.mask_truncated and receipt.truncated_samples:
        receipt, columns = _masked(receipt, columns)
    return receipt, columns


def _punished(
    receipt: Receipt, columns: Columns, rules: TruncationRules
) -> tuple[Receipt, Columns]:
    samples = zip(receipt.valid, receipt.valid_tokens, strict=True)
    penalties = tuple(rules.penalty(tokens) if valid else 0.0 for valid, tokens in samples)
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
