"""Bugs in where every group is: the ledger, its records, the sampler that reads it."""

from collections.abc import Iterable
from typing import Any, ClassVar

from planted.planting import LOST, SHALLOW, Planted, become
from planted.rollout_bugs import ReceiptsAreNotChecked

from offbeat.controller.events import (
    AnyEvent,
    Claimed,
    Committed,
    DropReason,
    Returned,
    Rewound,
    StepApplied,
    UndoneStep,
)
from offbeat.controller.ledger import Ledger
from offbeat.controller.state import RunState
from offbeat.controller.table_snapshot import GroupRecord
from offbeat.messages.groups import Receipt
from offbeat.plugins.simulation.schedule import PlannedFault
from offbeat.sampler.policy import View
from offbeat.sampler.ready_first import ReadyFirst
from offbeat.sampler.windowed import Windowed

FILTERED = {"filters": {"zero_variance": True}}


class UnclaimForgetsAGroup(Planted):
    breaks = LOST
    profile = "trainer"

    class BrokenLedger(Ledger):
        def _unclaim(self) -> None:
            claimed = list(self.training)
            super()._unclaim()
            for prompt_index in claimed[-1:]:
                self._leave(self.groups.pop(prompt_index))

    def plant(self) -> None:
        become(self.state.ledger, self.BrokenLedger)


class RewoundGroupsAreNotReadmitted(Planted):
    breaks = LOST
    profile = "trainer"

    class BrokenLedger(Ledger):
        def _undo(self, step: UndoneStep) -> None:
            self.totals.trained -= len(step.prompt_indices)

    def plant(self) -> None:
        become(self.state.ledger, self.BrokenLedger)


class ReadyGroupsOfAnAbandonedLineageAreKept(Planted):
    breaks = frozenset({"I1", "I4", "I6"})
    profile = "trainer"

    class BrokenLedger(Ledger):
        def _rewound(self, event: Rewound) -> None:
            self._unclaim()
            for step in event.undone:
                self._undo(step)
            self.trainer_version, self.lineage = event.to_version, event.lineage
            self.checkpoints = [made for made in self.checkpoints if made <= event.to_version]

    def plant(self) -> None:
        become(self.state.ledger, self.BrokenLedger)


class ARefusedStepCounts(Planted):
    breaks = frozenset({"I2", "I7"})
    profile = "trainer"

    class BrokenLedger(Ledger):
        def refused(self, step: int, attempt: int, reason: str) -> None:
            del reason
            self.applied(step, attempt)

    def plant(self) -> None:
        become(self.state.ledger, self.BrokenLedger)


class ARefusedStepLeavesLaterBatchesWhereTheyAre(Planted):
    """The step is sampled anew while the batches behind it wait."""

    breaks = frozenset({"I3", "I9"})
    settings: ClassVar = {"sampler": {"name": "in_order", "max_staleness": 2}}
    planned_faults = (PlannedFault("gradient_nan", "trainer", at_step=3),)

    class BrokenLedger(Ledger):
        def _refused(self, step: int) -> None:
            del step
            self._end_step()

    def plant(self) -> None:
        become(self.state.ledger, self.BrokenLedger)


class TheFrontierIsWhatWasTrained(Planted):
    breaks = frozenset({"I1"})

    class BrokenLedger(Ledger):
        def applied(self, step: int, attempt: int) -> int:
            version, trained = self.trainer_version + 1, tuple(self.training)
            frontier = self.totals.trained + len(trained)
            self._do(StepApplied(step, attempt, version, trained, frontier))
            return version

    def plant(self) -> None:
        become(self.state.ledger, self.BrokenLedger)


class ADropIsNotJournaled(Planted):
    breaks = LOST
    settings = FILTERED

    class BrokenLedger(Ledger):
        def drop(self, prompt_index: int, reason: DropReason, *of: Any, **how: Any) -> None:
            record, self.record = self.record, lambda _: None
            super().drop(prompt_index, reason, *of, **how)
            self.record = record

    def plant(self) -> None:
        become(self.state.ledger, self.BrokenLedger)


class ADropHasNoReason(Planted):
    breaks = frozenset({"I3"})
    settings = FILTERED

    class BrokenLedger(Ledger):
        def drop(self, prompt_index: int, reason: DropReason, *of: Any, **how: Any) -> None:
            del of
            super().drop(prompt_index, reason, **how)

    def plant(self) -> None:
        become(self.state.ledger, self.BrokenLedger)


class AFilteredGroupIsCountedTwice(Planted):
    """It is replaced, and its step goes without it too."""

    breaks = frozenset({"I3"})
    settings = FILTERED

    class BrokenLedger(Ledger):
        def drop(
            self, prompt_index: int, reason: DropReason, detail: str = "", *, shrinks: int = 0
        ) -> None:
            shrinks = self.trainer_version + 1 if reason is DropReason.FILTERED else shrinks
            super().drop(prompt_index, reason, detail, shrinks=shrinks)

    def plant(self) -> None:
        become(self.state.ledger, self.BrokenLedger)


class AReturnIsNotJournaled(Planted):
    breaks = frozenset({"I1"})
    profile = "engines"

    class BrokenLedger(Ledger):
        def _do(self, event: AnyEvent) -> None:
            self.apply(event)
            if not isinstance(event, Returned):
                self.record(event)

    def plant(self) -> None:
        become(self.state.ledger, self.BrokenLedger)


class ADispatchIsStampedByBelief(Planted):
    """With the version that the trainer has, not the one that the engine acked."""

    breaks = frozenset({"I6"})

    class BrokenLedger(Ledger):
        def dispatch(self, prompt_index: int, engine: str, version: int) -> int:
            del version
            return super().dispatch(prompt_index, engine, self.trainer_version)

    def plant(self) -> None:
        become(self.state.ledger, self.BrokenLedger)


class AnAnswerOfAnotherAttemptIsCommitted(Planted):
    breaks = frozenset({"I1"})
    profile = "data"

    class BrokenLedger(Ledger):
        def commit(self, receipt: Receipt) -> None:
            self._do(Committed(receipt))

    def plant(self) -> None:
        become(self.state.ledger, self.BrokenLedger)
        become(self._rollout_pump, ReceiptsAreNotChecked.Pump)


class AClaimIsRecordedTwice(Planted):
    breaks = frozenset({"I1"})

    class BrokenLedger(Ledger):
        def claim(
            self, prompt_indices: Iterable[int], step: int, attempt: int
        ) -> list[GroupRecord]:
            groups = super().claim(prompt_indices, step, attempt)
            self.record(Claimed(step, attempt, tuple(group.prompt_index for group in groups)))
            return groups

    def plant(self) -> None:
        become(self.state.ledger, self.BrokenLedger)


class TheBoundIsOneTooWide(Planted):
    """``>=`` for ``>``: one version older than allowed passes everywhere."""

    breaks = frozenset({"I4", "I8"})
    settings: ClassVar = SHALLOW

    def plant(self) -> None:
        config = self.state.config
        self.state.sampler = ReadyFirst(config.groups_per_step, 2)


class StaleGroupsAreClaimed(Planted):
    """The policy claims what is past the bound; whoever sends the chunk notices, too late."""

    breaks = frozenset({"I4", "I9"})
    settings: ClassVar = {
        "sampler": {"name": "windowed", "max_staleness": 0, "over_sampling_ratio": 2.0}
    }

    class Policy(Windowed):
        def select(self, view: View) -> list[int]:
            return list(view.ready)[: max(0, view.groups_needed)]

        def stale(self, view: View) -> list[int]:
            del view
            return []

    def plant(self) -> None:
        self.state.sampler = self.Policy(self.state.config.groups_per_step, 0, 2.0)


class AStepIsOneGroupShort(Planted):
    breaks = frozenset({"I3"})

    class State(RunState):
        @property
        def groups_needed(self) -> int:
            ledger = self.ledger
            return self.config.groups_per_step - 1 - len(ledger.training)

    def plant(self) -> None:
        become(self.state, self.State)
