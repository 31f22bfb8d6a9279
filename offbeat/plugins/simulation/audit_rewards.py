"""Recounts the calls of reward functions from the workers' records and the journal: I20.

Checks that decode steps and changes of shared weights alternate: I25.
"""

from collections import Counter, defaultdict
from typing import NamedTuple

from offbeat.config.limits import max_evaluation_calls, max_reward_calls
from offbeat.config.run import RunConfig
from offbeat.controller.events import Dispatched, Returned, ReturnKind, RewardCallsMade
from offbeat.plugins.simulation.audit_groups import IN_FLIGHT, AuditedGroups
from offbeat.plugins.simulation.audit_world import AuditTable, Findings
from offbeat.plugins.simulation.records import (
    Decoded,
    EngineServes,
    Fault,
    RewardsCalled,
    TrainerStarted,
    WeightsChanging,
    WeightsUnchanged,
)


class AuditedRewards(AuditTable):
    """Calls that each worker process has made, and calls that the journal has counted."""

    def __init__(self, config: RunConfig, groups: AuditedGroups, findings: Findings) -> None:
        super().__init__(findings)
        self._budget, self._groups = config.rollout.reward_call_budget, groups
        self._per_group = max_reward_calls(config)
        self._per_evaluation = max_evaluation_calls(config)
        self._made = defaultdict[str, list[int]](list)  # counts of each process, in order
        self._is_quiet = True  # no fault, and no group cancelled
        self._known = Counter[str]()  # calls of each process, by the journal

    def on_fault(self, record: Fault) -> None:
        del record
        self._is_quiet = False

    def on_called(self, record: RewardsCalled) -> None:
        self._made[record.process].append(record.calls)

    @property
    def is_spent(self) -> bool:
        """Return whether the budget no longer covers one more group and an evaluation."""
        return self._budget is not None and not self._covers(1, self._per_evaluation)

    def on_reported(self, event: RewardCallsMade) -> None:
        """Check a count that the controller recorded."""
        if self._budget is None:
            self._add("I20", f"{event.process} called rewards that nobody counts")
            return
        if event.calls not in self._made.get(event.process, ()):
            self._add(
                "I20",
                f"the journal has {event.calls} calls of {event.process}; its counts were "
                f"{self._made.get(event.process, [])}",
            )
        if event.calls <= self._known[event.process]:
            self._add("I20", f"the count of {event.process} does not rise: {event.calls}")
        self._known[event.process] = event.calls

    def on_dispatched(self, event: Dispatched) -> None:
        """Check that the remaining budget covers every group in flight, the new one included."""
        del event
        in_flight = self._groups.counts[IN_FLIGHT]
        if self._budget is not None and not self._covers(in_flight):
            self._add(
                "I20",
                f"{in_flight} groups of up to {self._per_group} calls are in flight after "
                f"{self._known.total()} calls; the budget is {self._budget}",
            )

    def on_returned(self, event: Returned) -> None:
        self._is_quiet &= event.kind is not ReturnKind.CANCELLED

    def check_end(self) -> None:
        """Check a run without losses: each call is counted, and the budget is kept."""
        if self._budget is None or not self._is_quiet:
            return
        made = sum(counts[-1] for counts in self._made.values())
        if made != self._known.total():
            self._add("I20", f"{made} calls were made; the journal has {self._known.total()}")
        if made > self._budget:
            self._add("I20", f"{made} calls were made; the budget is {self._budget}")

    def _covers(self, groups: int, others: int = 0) -> bool:
        return self._known.total() + groups * self._per_group + others <= (self._budget or 0)


class _Use(NamedTuple):
    """Weights that an engine decodes with."""

    trainer: int
    edition: int
    since: float  # since when it may decode with them


class AuditedTurns(AuditTable):
    """Checks that no engine decoded while weights that it shares with the trainer changed.

    An edition is the weights between two changes. Engines with copies have no such records, except
    of the versions that they serve.
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
        """Let the engines that served these weights before continue."""
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
