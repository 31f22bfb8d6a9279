"""Finished groups that are not worth a place in a batch."""

from typing import Final

from offbeat.config.sections.filters import FilterConfig
from offbeat.messages.groups import Receipt

TRUNCATED: Final = "truncated"
ZERO_VARIANCE: Final = "zero_variance"
_STEPS_WORTH: Final = 10


class GroupFilter:
    """Refuses groups as the recipe requests, up to a limit per step.

    A prompt set on which every group is refused would keep the trainer waiting forever; beyond
    ``filters.max_per_step`` a step takes what comes. Counts live as long as the controller.
    """

    def __init__(self, config: FilterConfig, groups_per_step: int) -> None:
        self._config = config
        self.limit: Final = config.max_per_step or _STEPS_WORTH * groups_per_step
        self._filtered: dict[int, int] = {}

    def filtered(self, batch: int) -> int:
        """Groups refused for this batch so far."""
        return self._filtered.get(batch, 0)

    def refusal(self, receipt: Receipt, batch: int) -> str | None:
        """Return the reason why this group is not trained, as a counter's name; None when it is.

        Asked once a finished group, because a refusal counts for ``batch``: the one it was stamped
        for, or the one in progress. A group that is both truncated and without variance is
        ``truncated``: that explains the other.
        """
        reason = self._reason(receipt)
        if reason is None or self.filtered(batch) >= self.limit:
            return None
        self._filtered[batch] = self.filtered(batch) + 1
        return reason

    def _reason(self, receipt: Receipt) -> str | None:
        rewards, most = receipt.valid_rewards, self._config.max_truncated_fraction
        if most is not None and receipt.truncated_samples / len(rewards) > most:
            return TRUNCATED
        if not any(receipt.valid_tokens) and receipt.truncated_samples:
            return TRUNCATED  # each sample is masked: nothing of the group would be trained
        if self._config.zero_variance and min(rewards) == max(rewards):
            return ZERO_VARIANCE
        return None
