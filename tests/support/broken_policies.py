"""Staleness policies that violate the contract of a policy, for tests of the watchdog."""

from offbeat.sampler.policy import Admission, View
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
