"""Bugs in where every group is: the ledger, its records, the sampler that reads it."""

from typing import ClassVar

from planted.planting import LOST, SHALLOW, Planted, become

from offbeat.controller.events import (
    DropReason,
    UndoneStep,
)
from offbeat.controller.ledger import Ledger
from offbeat.controller.state import RunState
from offbeat.plugins.simulation.schedule import PlannedFault
from offbeat.sampler.ready_first import ReadyFirst

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


class TheBoundIsOneTooWide(Planted):
    """``>=`` for ``>``: one version older than allowed passes everywhere."""

    breaks = frozenset({"I4", "I8"})
    settings: ClassVar = SHALLOW

    def plant(self) -> None:
        config = self.state.config
        self.state.sampler = ReadyFirst(config.groups_per_step, 2)


class AStepIsOneGroupShort(Planted):
    breaks = frozenset({"I3"})

    class State(RunState):
        @property
        def groups_needed(self) -> int:
            ledger = self.ledger
            return self.config.groups_per_step - 1 - len(ledger.training)

    def plant(self) -> None:
        become(self.state, self.State)
