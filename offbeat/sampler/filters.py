"""Filters finished groups that are not worth a place in a batch."""

from typing import Final

from offbeat.config.sections.sampler import FilterConfig
from offbeat.messages.groups import Receipt

TRUNCATED: Final = "truncated"
ZERO_VARIANCE: Final = "zero_variance"
_STEPS_WORTH: Final = 10


class GroupFilter:
    """Refuses groups as the recipe requests, up to a limit per step.

    If every group of a prompt set were refused, the trainer would wait forever. So after
    ``filters.max_per_step`` refusals a step accepts any group. Counts are lost with the controller.
    """

    def __init__(self, config: FilterConfig, groups_per_step: int) -> None:
        self._config = config
        self.limit: Final = config.max_per_step or _STEPS_WORTH * groups_per_step
        self._filtered: dict[int, int] = {}

    def filtered(self, batch: int) -> int:
        """Return the number of groups refused for this batch so far."""
        return self._filtered.get(batch, 0)

    def refusal(self, receipt: Receipt, batch: int) -> str | None:
        """Return why this group is not trained, as a counter's name, or None if it is trained.

        Call this only once per finished group, because a refusal counts for ``batch``: the group's
        target batch, or the batch in progress. A group that is truncated and without variance
        counts as ``truncated``, because truncation explains the missing variance.
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
            return TRUNCATED  # each sample is masked, so the group has nothing to train
        if self._config.zero_variance and min(rewards) == max(rewards):
            return ZERO_VARIANCE
        return None
