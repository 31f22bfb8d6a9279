"""Defines the inputs and the decisions of a staleness policy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Admission:
    """Room for one more group, and the step that the group is bound to."""

    target_step: int | None = None
    """Step that must train the group, or None for any. A refused earlier step lowers it by one."""


def earliest_step(target_step: int | None) -> int:
    """Return the first step that may train a group, or 0 if it is bound to no step.

    A group without a target step counts as earlier than every step, so it goes first.
    """
    return 0 if target_step is None else target_step


class OutstandingGroup(Protocol):
    """Group that is not trained yet. It is in flight or ready, or waits to be dispatched."""

    @property
    def prompt_index(self) -> int: ...
    @property
    def target_step(self) -> int | None:
        """Return the target step set at admission, or None if any step may train the group."""
        ...

    @property
    def oldest_version(self) -> int:
        """Return a lower bound on the weight versions of its tokens, or -1 while it waits."""
        ...

    @property
    def arrival(self) -> int:
        """Return a number that rises with every commit. It orders ready groups by arrival."""
        ...


Groups = Mapping[int, OutstandingGroup]
"""Groups by prompt index, in the order in which they entered this mapping."""


class View(Protocol):
    """A run as a policy sees it: live and read-only. Versions are weight versions.

    Every value here is updated with each move of a group. So the cost of a policy that reads only
    the values it needs does not depend on the number of outstanding groups.
    """

    @property
    def trainer_version(self) -> int: ...
    @property
    def serving_version(self) -> int:
        """Return the lowest version that a serving generator samples under."""
        ...

    @property
    def groups_needed(self) -> int:
        """Return how many more groups the step in progress needs."""
        ...

    @property
    def waiting(self) -> int:
        """Return the number of admitted groups that are not at any engine.

        They will be sampled at ``serving_version`` or later.
        """
        ...

    @property
    def outstanding(self) -> int:
        """Return the number of groups still to be claimed: waiting, in flight or ready."""
        ...

    @property
    def versions(self) -> Mapping[int, int]:
        """Return counts of groups in flight or ready, by bound version. No zeros."""
        ...

    @property
    def outstanding_by_target_step(self) -> Mapping[int | None, int]:
        """Return counts of outstanding groups, by target step. No zeros."""
        ...

    @property
    def batch_deficits(self) -> Mapping[int, int]:
        """Return how many groups are missing from each step for good, by step."""
        ...

    @property
    def ready(self) -> Groups:
        """Return the ready groups in arrival order."""
        ...

    @property
    def ready_at(self) -> Mapping[int, Groups]:
        """Return ready groups by bound version, each in arrival order. No empty entries."""
        ...

    @property
    def ready_for(self) -> Mapping[int | None, Groups]:
        """Return ready groups by target step, each in arrival order. No empty entries."""
        ...

    @property
    def in_flight_at(self) -> Mapping[int, Groups]:
        """Return groups in flight by bound version, each in order of dispatch. No empty entries."""
        ...


class Sampler(Protocol):
    """Protocol of a staleness policy.

    A policy guarantees that every trained token is at most ``max_staleness`` versions old, provided
    that every admitted group is claimed according to ``select`` or leaves because of a failure.
    """

    @property
    def max_staleness(self) -> int: ...

    @property
    def max_outstanding_groups(self) -> int:
        """Return the maximum number of groups that are admitted but not yet trained."""
        ...

    def admit(self, view: View) -> Admission | None:
        """Return the admission of one more group, or None if there is no room for it now."""
        ...

    def may_dispatch(self, view: View, group: OutstandingGroup) -> bool:
        """Return whether a waiting group may go to an engine now, still in time to be trained.

        It is True for a group that was just admitted. A group that returns after a failure or a
        rewind may have to wait for newer weights.
        """
        ...

    def select(self, view: View) -> list[int]:
        """Return the prompts to claim now for the open step, at most ``view.groups_needed`` of them."""
        ...

    def stale(self, view: View) -> list[int]:
        """Return prompt indices of ready groups that are past the bound and can never be trained."""
        ...

    def in_flight_to_cancel(self, view: View, *, predictive: bool) -> list[int]:
        """Return prompt indices of groups in flight that can no longer be trained in time.

        Args:
            view: The run.
            predictive: Whether to include groups that will be too old when it is their turn,
                because ready groups before them fill every step until then.
        """
        ...


def past_bound(view: View, max_staleness: int) -> list[int]:
    """Return ready groups with their oldest token past ``max_staleness``."""
    return _older_than(view.ready_at, view.trainer_version - max_staleness)


def past_bound_in_flight(view: View, max_staleness: int) -> list[int]:
    """Return groups in flight with their oldest token already past the bound."""
    return _older_than(view.in_flight_at, view.trainer_version - max_staleness)


def _older_than(groups_at: Mapping[int, Groups], version: int) -> list[int]:
    late = sorted([each for each in groups_at if each < version])
    return [prompt_index for each in late for prompt_index in groups_at[each]]
