"""Implements ``windowed``: admits surplus groups, so that a step never waits for the slowest."""

import math
from dataclasses import dataclass
from itertools import islice

from offbeat.config.sections.sampler import count_trainable_groups
from offbeat.sampler.pacing import places_until
from offbeat.sampler.policy import (
    Admission,
    OutstandingGroup,
    View,
    past_bound,
    past_bound_in_flight,
)


@dataclass(frozen=True, slots=True)
class Windowed:
    """Selects any ready group of the last ``max_staleness`` versions. Discards older groups.

    The window can train ``(max_staleness + 1) * groups_per_step`` groups, and
    ``over_sampling_ratio`` times as many are admitted. This surplus has a cost: long rollouts are
    discarded more often, so trained responses are shorter on average than sampled ones.
    """

    groups_per_step: int
    max_staleness: int  # [weight versions]
    over_sampling_ratio: float = 1.0
    freshest_first: bool = False

    @property
    def max_outstanding_groups(self) -> int:
        window = count_trainable_groups(self.max_staleness, self.groups_per_step)
        return math.ceil(self.over_sampling_ratio * window)

    def admit(self, view: View) -> Admission | None:
        return Admission() if self._has_room(view, view.outstanding) else None

    def may_dispatch(self, view: View, group: OutstandingGroup) -> bool:
        del group
        return self._has_room(view, view.outstanding - view.waiting)

    def select(self, view: View) -> list[int]:
        oldest = view.trainer_version - self.max_staleness
        if self.freshest_first:
            versions = (
                version for version in sorted(view.ready_at, reverse=True) if version >= oldest
            )
            turn = (prompt_index for version in versions for prompt_index in view.ready_at[version])
        else:
            ready = view.ready.values()
            turn = (group.prompt_index for group in ready if group.oldest_version >= oldest)
        return list(islice(turn, max(0, view.groups_needed)))

    def stale(self, view: View) -> list[int]:
        return past_bound(view, self.max_staleness)

    def in_flight_to_cancel(self, view: View, *, predictive: bool) -> list[int]:
        """Return groups past the bound. ``predictive`` adds groups that no step can train in time.

        No step can train a group in time if enough ready groups that expire no earlier fill every
        step until then. With and without ``freshest_first``, these ready groups are selected before
        it. Ready groups that expire earlier do not count, because they may be gone by then and
        leave a place.
        """
        late = past_bound_in_flight(view, self.max_staleness)
        if not predictive:
            return late
        ready, too_late = 0, list[int]()
        for version in sorted(view.versions, reverse=True):
            if version + self.max_staleness < view.trainer_version:
                break
            ready += len(view.ready_at.get(version, ()))
            places = places_until(view, version + self.max_staleness, self.groups_per_step)
            if ready >= places:
                too_late += view.in_flight_at.get(version, ())
        return late + too_late

    def _has_room(self, view: View, groups: int) -> bool:
        """Return whether one more group fits next to ``groups`` and the open step's claims."""
        claimed = self.groups_per_step - view.groups_needed
        in_window = view.serving_version + self.max_staleness >= view.trainer_version
        return in_window and groups + claimed < self.max_outstanding_groups
