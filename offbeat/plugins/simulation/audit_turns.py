"""Checks that decode steps and changes of shared weights take turns: I25."""

from typing import NamedTuple

from offbeat.plugins.simulation.audit_findings import AuditTable, Findings
from offbeat.plugins.simulation.records import (
    Decoded,
    EngineServes,
    TrainerStarted,
    WeightsChanging,
    WeightsUnchanged,
)


class _Use(NamedTuple):
    """Weights that an engine decodes with."""

    trainer: int
    edition: int
    since: float  # since when it may decode with them


class AuditedTurns(AuditTable):
    """Compares when engines decoded with when the weights changed that they share with the trainer.

    An edition is the weights between two changes. Of engines with copies there are no such records,
    except of the versions that they serve.
    """

    def __init__(self, findings: Findings) -> None:
        super().__init__(findings)
        self._trainer, self._edition = 0, 0  # of the newest trainer process
        self._changing_since = dict[int, float]()  # last change of each trainer's weights
        self._uses = dict[str, _Use]()  # by engine incarnation

    def on_started(self, record: TrainerStarted) -> None:
        self._trainer, self._edition = record.incarnation, 0

    def on_changing(self, record: WeightsChanging) -> None:
        self._changing_since[record.incarnation] = record.at
        self._edition += 1

    def on_unchanged(self, record: WeightsUnchanged) -> None:
        """Permit the engines to go on that served the weights before."""
        self._edition -= 1
        for engine, use in self._uses.items():
            if use[:2] == (record.incarnation, self._edition):
                self._uses[engine] = use._replace(since=record.at)

    def on_serves(self, record: EngineServes) -> None:
        use = self._uses.get(record.incarnation)
        if use is None or use[:2] != (self._trainer, self._edition):  # else it loaded them again
            self._uses[record.incarnation] = _Use(self._trainer, self._edition, record.at)

    def on_decoded(self, record: Decoded) -> None:
        use = self._uses[record.incarnation]
        changing_since = self._changing_since.get(use.trainer, -1.0)
        began_early = record.since < use.since
        ended_late = changing_since > use.since and record.at > changing_since
        if began_early or ended_late:
            self._add(
                "I25",
                f"{record.engine} decoded from {record.since:.3f} to {record.at:.3f} s; it serves its "
                f"weights since {use.since:.3f} s, and the trainer changed them at "
                f"{changing_since:.3f} s",
            )
