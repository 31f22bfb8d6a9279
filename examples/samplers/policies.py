r"""Staleness policies of other systems, as custom samplers: the rule that each of them publishes.

    offbeat dry-run recipe.yaml sampler.name=custom sampler.max_staleness=2 \
        sampler.target=policies:CountingFifo            # from examples/samplers

What they bound differs, and offbeat bounds the oldest token on top of it, whatever a policy says: a
group that is past ``sampler.max_staleness`` is rolled out again where the others would train it.
"""

import math
from dataclasses import dataclass

from offbeat.interfaces import (
    Admission,
    OutstandingGroup,
    View,
    past_bound,
    past_bound_in_flight,
)


@dataclass(frozen=True, slots=True)
class _BoundedAhead:
    """What the three rules share: so many groups ahead, trained in arrival order, none too old."""

    groups_per_step: int
    max_staleness: int

    @property
    def max_outstanding_groups(self) -> int:
        """Groups that may be outstanding or used up."""
        raise NotImplementedError

    def used(self, view: View) -> int:
        """Return the groups that are no longer outstanding and still count: those of the open step."""
        return self.groups_per_step - view.groups_needed

    def admit(self, view: View) -> Admission | None:
        return Admission() if self._has_room(view, view.outstanding) else None

    def may_dispatch(self, view: View, group: OutstandingGroup) -> bool:
        del group
        return self._has_room(view, view.outstanding - view.waiting)

    def select(self, view: View) -> list[int]:
        """Return ready groups within the bound in arrival order, as many as the step needs."""
        oldest = view.trainer_version - self.max_staleness
        fit = [index for index, group in view.ready.items() if group.oldest_version >= oldest]
        return fit[: max(0, view.groups_needed)]

    def stale(self, view: View) -> list[int]:
        return past_bound(view, self.max_staleness)

    def in_flight_to_cancel(self, view: View, *, predictive: bool) -> list[int]:
        del predictive
        return past_bound_in_flight(view, self.max_staleness)

    def _has_room(self, view: View, groups: int) -> bool:
        return groups + self.used(view) < self.max_outstanding_groups


@dataclass(frozen=True, slots=True)
class CountingFifo(_BoundedAhead):
    """AReaL's rule, and ROLL's ``async_generation_ratio``: count rollouts, train in arrival order.

    Version ``v`` may have ``(max_staleness + v + 1) * batch`` rollouts accepted or running (AReaL,
    ``StalenessManager.get_capacity``). Steps have used ``v * batch`` of them, so at most
    ``(max_staleness + 1) * batch`` are outstanding or in the open step. The count bounds how far
    generation runs ahead, not how old a long rollout is when it is trained.
    """

    @property
    def max_outstanding_groups(self) -> int:
        return (self.max_staleness + 1) * self.groups_per_step


@dataclass(frozen=True, slots=True)
class DiscardAtConsumption(_BoundedAhead):
    """Never pause generation: what is too old when a step asks for groups is thrown away then.

    ``ahead`` times the groups of a step are outstanding or in the open step at most, which stands
    for the sequences that the engines hold. A rollout that is past the bound goes on to its end, and
    costs all of it.
    """

    ahead: float = 2.0

    def __post_init__(self) -> None:
        if not 1 <= self.ahead < math.inf:
            raise ValueError(f"ahead={self.ahead}: a step needs at least 1, its own groups")

    @property
    def max_outstanding_groups(self) -> int:
        return math.ceil(self.ahead * self.groups_per_step)

    def stale(self, view: View) -> list[int]:
        return past_bound(view, self.max_staleness) if view.groups_needed > 0 else []

    def in_flight_to_cancel(self, view: View, *, predictive: bool) -> list[int]:
        del view, predictive
        return []


@dataclass(frozen=True, slots=True)
class ThresholdPerSync(_BoundedAhead):
    """verl's ``staleness_threshold``: a budget of rollouts per weight sync, a fraction allowed.

    Between two syncs at most ``int(batch * sync_interval * (1 + threshold))`` rollouts are begun or
    left over (verl fully_async, ``max_required_samples``): those outstanding, in the open step, or
    trained since the engines took weights. ``sync_interval`` has to be ``sync.interval``.
    """

    threshold: float = 0.5
    sync_interval: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.threshold < math.inf or self.sync_interval < 1:
            raise ValueError(f"threshold={self.threshold}, sync_interval={self.sync_interval}")

    @property
    def max_outstanding_groups(self) -> int:
        return int(self.groups_per_step * self.sync_interval * (1 + self.threshold))

    def used(self, view: View) -> int:
        """Return those of the open step, and those trained since the engines took weights."""
        since_sync = (view.trainer_version - view.serving_version) * self.groups_per_step
        return self.groups_per_step - view.groups_needed + since_sync
