"""Staleness policies that violate the contract of a policy, for tests of the watchdog."""

from offbeat.sampler.policy import Admission, OutstandingGroup, View
from offbeat.sampler.ready_first import ReadyFirst


class NeverAdmits(ReadyFirst):
    """Policy that admits no prompt."""

    def admit(self, view: View) -> Admission | None:
        del view


class NeverSelects(ReadyFirst):
    """Policy that selects no batch."""

    def select(self, view: View) -> list[int]:
        del view
        return []


class ForgetsItsBound:
    """Policy that promises a bound of 0 and paces groups by another one."""

    def __init__(self, groups_per_step: int, paced_by: int) -> None:
        self._paced = ReadyFirst(groups_per_step, paced_by)
        self.max_staleness = 0
        self.max_outstanding_groups = self._paced.max_outstanding_groups

    def admit(self, view: View) -> Admission | None:
        return self._paced.admit(view)

    def may_dispatch(self, view: View, group: OutstandingGroup) -> bool:
        return self._paced.may_dispatch(view, group)

    def select(self, view: View) -> list[int]:
        return self._paced.select(view)

    def stale(self, view: View) -> list[int]:
        return self._paced.stale(view)

    def in_flight_to_cancel(self, view: View, *, predictive: bool) -> list[int]:
        return self._paced.in_flight_to_cancel(view, predictive=predictive)
