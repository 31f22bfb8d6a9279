"""Shows a run to a staleness policy through the ledger's own indices, without copies."""

from collections.abc import Callable, Mapping

from offbeat.controller.ledger import Ledger
from offbeat.sampler.policy import Groups


class LedgerView:
    """Read access of a sampler to a run. Satisfies ``offbeat.sampler.policy.View`` without copies."""

    __slots__ = ("_groups_needed", "_ledger", "_serving_version")

    def __init__(
        self,
        ledger: Ledger,
        *,
        serving_version: Callable[[], int],
        groups_needed: Callable[[], int],
    ) -> None:
        self._ledger = ledger
        self._serving_version, self._groups_needed = serving_version, groups_needed

    @property
    def trainer_version(self) -> int:
        return self._ledger.trainer_version

    @property
    def serving_version(self) -> int:
        return self._serving_version()

    @property
    def groups_needed(self) -> int:
        return self._groups_needed()

    @property
    def waiting(self) -> int:
        return self._ledger.admitted

    @property
    def outstanding(self) -> int:
        return self._ledger.outstanding

    @property
    def versions(self) -> Mapping[int, int]:
        return self._ledger.versions

    @property
    def outstanding_by_target_step(self) -> Mapping[int | None, int]:
        return self._ledger.outstanding_by_target_step

    @property
    def batch_deficits(self) -> Mapping[int, int]:
        return self._ledger.batch_deficits

    @property
    def ready(self) -> Groups:
        return self._ledger.ready

    @property
    def ready_at(self) -> Mapping[int, Groups]:
        return self._ledger.ready_at

    @property
    def ready_for(self) -> Mapping[int | None, Groups]:
        return self._ledger.ready_for

    @property
    def in_flight_at(self) -> Mapping[int, Groups]:
        return self._ledger.in_flight_at
