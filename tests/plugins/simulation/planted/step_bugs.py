"""Bugs around a step: what is durable when, what a new controller assumes, how a run ends."""

from typing import Any, ClassVar

from planted.planting import Planted, become, killed_at

from offbeat.controller.evaluation import Evaluation
from offbeat.controller.failpoints import Failpoint
from offbeat.controller.ledger import StepsAfter
from offbeat.controller.recovery import Recovery
from offbeat.controller.step_metrics import StepMetricsBuilder
from offbeat.messages.fences import Fence
from offbeat.messages.training import TrainerState
from offbeat.plugins.simulation.controller_ports import SimulatedJournal
from offbeat.testing.samplers import rewind


class AnAdoptedStepIsNeverScored(Planted):
    """Only the train pump requests evaluations, of steps that it has finished itself."""

    breaks = frozenset({"I6"})
    planned_faults = (killed_at(Failpoint.FINISH_ANSWERED, 12),)
    settings: ClassVar = {
        "eval": {"interval": 4, "prompts": 2, "sets": {}},
        "rollout": {"reward_call_budget": None},
        "filters": {},
    }

    class ForgetfulEvaluation(Evaluation):
        def request_due(self) -> None:
            pass

    def plant(self) -> None:
        become(self._evaluation, self.ForgetfulEvaluation)


class AnIntendedStepIsCountedWithoutItsGroups(Planted):
    """The trainer's version is believed, what it trained to get there is not."""

    breaks = frozenset({"I2", "I5", "I7"})
    planned_faults = (killed_at(Failpoint.FINISH_ANSWERED, 2),)

    class Start(Recovery):
        async def _sort_out_step(self, answer: TrainerState) -> None:
            state, ledger = self._state, self._state.ledger
            if ledger.training or ledger.intent:
                ledger.unclaim(state.step, state.first_of_incarnation)
            ledger.trainer_version = answer.version

    def plant(self) -> None:
        become(self._recovery, self.Start)


class TheJournalDoesNotWaitForTheDisk(Planted):
    breaks = frozenset({"I7", "I9"})
    planned_faults = (killed_at(Failpoint.FINISH_ANSWERED, 2),)

    class Writer(SimulatedJournal):
        async def barrier(self) -> None:
            """It has been handed to the operating system; that will do."""

    def plant(self) -> None:
        become(self._ports.journal, self.Writer)


class TheFenceIsNotRaised(Planted):
    """A new controller speaks with the fence of the one it replaces."""

    breaks = frozenset({"I13"})
    planned_faults = (killed_at(Failpoint.COMMITTED, 5),)

    def __init__(self, config: Any, fence: Fence, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, Fence(fence.run_id, 1), *args, **kwargs)

    def plant(self) -> None:
        """It is done."""


class EachPartOfARewindIsOneOfItsOwn(Planted):
    """The ledger says that the trainer was restored to versions in between."""

    breaks = frozenset({"I2"})
    profile = "trainer"
    settings: ClassVar = {"checkpoint": {"interval": 6}}

    class Start(Recovery):
        async def _undo(self, to_version: int, reason: str) -> int:
            ledger, groups = self._state.ledger, 0
            after = await self._state.journal.steps_after(to_version)
            for step in reversed(after.undone):
                prompt_indices = rewind(ledger, step.version - 1, reason, StepsAfter((step,), ()))
                self._state.queue.clear(prompt_indices)
                await self._again(prompt_indices)
                groups += len(prompt_indices)
            return groups

    def plant(self) -> None:
        become(self._recovery, self.Start)


class TheTrainerIsNotClosed(Planted):
    breaks = frozenset({"I15"})

    async def _close(self) -> None:
        for actor in (self._ports.rollouts, *self._ports.generators.values()):
            await self._close_one(actor)

    def plant(self) -> None:
        """It is done."""


class AStepIsNotReported(Planted):
    breaks = frozenset({"I14"})

    def _step_done(self, measures: StepMetricsBuilder) -> None:
        if measures.step > 1:
            super()._step_done(measures)

    def plant(self) -> None:
        self._train_pump._on_step = self._step_done  # noqa: SLF001 - it sits inside
