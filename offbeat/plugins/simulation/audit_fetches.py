"""Checks of fetches from several trainer ranks: none mixes releases, none has no end. I6, I7, I9."""

from typing import Final

from offbeat.config.run import RunConfig
from offbeat.plugins.simulation.audit_findings import AuditTable, Findings
from offbeat.plugins.simulation.records import Ended, EngineDied, Fault, FetchBegan, FetchEnded

_TRANSFER_S: Final = 4.0
"""Seconds that the buckets themselves may take. A load takes half a second on average."""

_FREEZES: Final = "engine_frozen"

Key = tuple[str, str, int]
"""Engine, incarnation and epoch."""


class AuditedFetches(AuditTable):
    """Follows each fetch of each engine by the engines' own records."""

    def __init__(self, config: RunConfig, findings: Findings) -> None:
        super().__init__(findings)
        self._limit_s = config.sync.deadline_s + _TRANSFER_S
        self._open = dict[Key, FetchBegan]()
        self._frozen = set[str]()  # engines that may stand still for long; empty name: any of them

    def on_fault(self, record: Fault) -> None:
        if record.kind == _FREEZES:
            self._frozen.add(record.target)

    def on_began(self, record: FetchBegan) -> None:
        self._open[record.engine, record.incarnation, record.epoch] = record

    def on_ended(self, record: FetchEnded) -> None:
        began = self._open.pop((record.engine, record.incarnation, record.epoch))
        self._check_wait(began, record.at)
        if record.problem:
            return
        if len(record.contents) != 1:
            self._add(
                "I7",
                f"{record.engine} loads version {began.version} of buckets that are of "
                f"{len(record.contents)} releases: {', '.join(record.contents)}",
            )
        elif record.contents[0] != began.digest:
            self._add(
                "I6",
                f"{record.engine} loads release {record.contents[0]} as version {began.version}, "
                f"which is {began.digest}",
            )

    def on_died(self, record: EngineDied) -> None:
        for key in [key for key in self._open if key[:2] == (record.engine, record.incarnation)]:
            del self._open[key]

    def on_end(self, record: Ended) -> None:
        """Check the fetches that are open at the end of the episode."""
        for began in self._open.values():
            self._check_wait(began, record.at)

    def _check_wait(self, began: FetchBegan, until_s: float) -> None:
        waited_s = until_s - began.at
        if waited_s > self._limit_s and not self._frozen & {began.engine, ""}:
            self._add(
                "I9",
                f"{began.engine} waits for version {began.version} for {waited_s:.1f} s; a fetch is "
                f"over after {self._limit_s:g} s",
            )
