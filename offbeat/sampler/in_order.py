"""Implements ``in_order``: every batch holds the prompts stamped for it."""

from dataclasses import dataclass
from itertools import islice

from offbeat.config.sections.sampler import count_trainable_groups
from offbeat.sampler.policy import (
    Admission,
    OutstandingGroup,
    View,
    earliest_step,
    past_bound,
    past_bound_in_flight,
)


@dataclass(frozen=True, slots=True)
class InOrder:
    """Batches in prompt order, at most ``max_lookahead`` ahead of the batch in training.

    A group is stamped with its target step at admission. It is admitted only if, sampled now, it
    would still be within ``max_staleness`` when that step trains it. (Step t trains at version t -
    1.) With ``max_staleness`` 0 this is synchronous training.

    A batch holds exactly the prompts stamped for it. So a dropped prompt is replaced by a fresh
    prompt, never by a group of a later step. The step waits for the rollout of this prompt.

    If a stop ends a step early, the step leaves groups behind. They go first in the following
    steps, and each group that they displace moves to the next step. Groups that are bound to no
    step are treated the same way. A resumed run may have such groups from another sampler.
    """

    groups_per_step: int
    max_staleness: int  # [weight versions]
    max_lookahead: int  # [batches]

    @property
    def max_outstanding_groups(self) -> int:
        ahead = min(self.max_lookahead, self.max_staleness)
        return count_trainable_groups(ahead, self.groups_per_step)

    def admit(self, view: View) -> Admission | None:
        step = view.trainer_version + 1
        left_behind = sum(
            count
            for target_step, count in view.outstanding_by_target_step.items()
            if earliest_step(target_step) < step
        )
        places = max(0, view.groups_needed) - left_behind
        for target in range(step, self._last_step(view) + 1):
            places -= view.outstanding_by_target_step.get(target, 0)
            if places > 0:
                return Admission(target)
            places += self.groups_per_step - view.batch_deficits.get(target + 1, 0)
        return None

    def may_dispatch(self, view: View, group: OutstandingGroup) -> bool:
        return max(earliest_step(group.target_step), view.trainer_version + 1) <= self._last_step(
            view
        )

    def select(self, view: View) -> list[int]:
        step, oldest = view.trainer_version + 1, view.trainer_version - self.max_staleness
        due = (
            prompt_index
            for target_step in sorted(view.ready_for, key=earliest_step)
            if earliest_step(target_step) <= step
            for prompt_index, group in sorted(view.ready_for[target_step].items())
            if group.oldest_version >= oldest
        )
        return list(islice(due, max(0, view.groups_needed)))

    def stale(self, view: View) -> list[int]:
        return past_bound(view, self.max_staleness)

    def in_flight_to_cancel(self, view: View, *, predictive: bool) -> list[int]:
        """Return groups in flight past the bound. No group is late because of other groups."""
        del predictive
        return past_bound_in_flight(view, self.max_staleness)

    def _last_step(self, view: View) -> int:
        """Return the last step within the look-ahead for which a group sampled now is in time."""
        return min(
            view.trainer_version + 1 + self.max_lookahead,
            view.serving_version + 1 + self.max_staleness,
        )
