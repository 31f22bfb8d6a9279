"""Admits only groups that have a place, for the policies that discard nothing."""

from dataclasses import dataclass
from typing import Final

from offbeat.config.sections.sampler import count_trainable_groups
from offbeat.sampler.policy import (
    Admission,
    OutstandingGroup,
    View,
    past_bound,
    past_bound_in_flight,
)

_TO_ANY_STEP: Final = Admission()


@dataclass(frozen=True, slots=True)
class Paced:
    """Admits as many groups as can be trained before they become too old.

    A group sampled at version o expires at o + ``max_staleness``, its *expiry*: it may be trained
    while the trainer is at that version or an earlier one. By earliest deadline first, all groups
    can be trained in time if and only if, for every version w from the trainer's version on::

        groups with expiry <= w   <=   places in the steps trained at w or before

    ``admit`` and ``may_dispatch`` keep this true when groups are added. New samples expire last, so
    it is enough to count all groups. ``select`` must keep it true when places are filled.
    """

    groups_per_step: int
    max_staleness: int  # [weight versions]

    @property
    def max_outstanding_groups(self) -> int:
        return count_trainable_groups(self.max_staleness, self.groups_per_step)

    def admit(self, view: View) -> Admission | None:
        return _TO_ANY_STEP if view.outstanding < self._room(view) else None

    def may_dispatch(self, view: View, group: OutstandingGroup) -> bool:
        """Return whether a waiting group has a place.

        After a rewind more groups may wait than have places.
        """
        del group
        return view.outstanding - view.waiting < self._room(view)

    def stale(self, view: View) -> list[int]:
        return past_bound(view, self.max_staleness)

    def in_flight_to_cancel(self, view: View, *, predictive: bool) -> list[int]:
        """Return groups past the bound.

        Every other group has its place, so no group needs to be cancelled in advance.
        """
        del predictive
        return past_bound_in_flight(view, self.max_staleness)

    def _room(self, view: View) -> int:
        """Return the places for groups sampled now and for all older groups."""
        return places_until(view, view.serving_version + self.max_staleness, self.groups_per_step)


def places_until(view: View, version: int, groups_per_step: int) -> int:
    """Return the places in the steps trained while the trainer is at ``version`` or before.

    They are the places left in the open step plus all places of later steps, minus the groups that
    these steps are trained without.
    """
    trainer_version = view.trainer_version
    if version < trainer_version:
        return 0
    places = view.groups_needed + (version - trainer_version) * groups_per_step
    if deficits := view.batch_deficits:
        step = trainer_version + 1
        places -= sum(count for at, count in deficits.items() if step < at <= version + 1)
    return places
