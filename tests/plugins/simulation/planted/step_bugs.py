"""Bugs around a step: what is durable when, what a new controller assumes, how a run ends."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from planted.planting import Planted, become, killed_at

from offbeat.controller.checkpoints import Checkpoints
from offbeat.controller.evaluation import Evaluation
from offbeat.controller.failpoints import Failpoint
from offbeat.controller.lifecycle import RunPhase
from offbeat.controller.minibatches import MinibatchAssigner
from offbeat.controller.recovery import Recovery
from offbeat.controller.rollouts import RolloutPump
from offbeat.controller.step_metrics import StepMetricsBuilder
from offbeat.controller.steps_after import StepsAfter
from offbeat.controller.train_step import TrainStep
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.training import StepResult, TrainerState
from offbeat.plugins.simulation.controller_ports import SimulatedJournal


class TheIntentIsNotDurable(Planted):
    breaks = frozenset({"I7", "I9"})
    planned_faults = (killed_at(Failpoint.FINISH_ANSWERED, 2),)

    class Step(TrainStep):
        async def _finish(
            self, calls: asyncio.TaskGroup, key: StepKey
        ) -> "asyncio.Task[StepResult]":
            state = self._state
            state.ledger.intend(key.step, key.attempt)
            call = partial(self._trainer_client.trainer.finish_train_step, state.fence, key)
            return await self._queue(calls, f"finish of step {key.step}", call)

    def plant(self) -> None:
        become(self._train_pump._one_step, self.Step)  # noqa: SLF001 - it sits inside


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
        def arrived_at_version(self) -> None:
            pass

    def plant(self) -> None:
        become(self._evaluation, self.ForgetfulEvaluation)


class AMinibatchHasMoreGroupsThanTheOthers(Planted):
    """The first chunk of an attempt is one minibatch, whatever the recipe says."""

    breaks = frozenset({"I2"})
    settings: ClassVar = {"algorithm": {"minibatches": 4}}

    class Step(TrainStep):
        def _assigner(self, step: int) -> MinibatchAssigner:
            class First(MinibatchAssigner):
                def of(self, prompt_indices: Sequence[int]) -> tuple[int, ...]:
                    return (0,) * len(prompt_indices)

            return First(1, 0, step)

    def plant(self) -> None:
        become(self._train_pump._one_step, self.Step)  # noqa: SLF001 - it sits inside


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


class AnIntendedStepIsAssumedDone(Planted):
    breaks = frozenset({"I2", "I9"})
    planned_faults = (killed_at(Failpoint.INTENT_DURABLE, 2),)

    class Start(Recovery):
        async def _sort_out_step(self, answer: TrainerState) -> None:
            intent = self._state.ledger.intent
            if intent is None:
                await super()._sort_out_step(answer)
            else:
                self._state.ledger.applied(intent.step, intent.attempt)

    def plant(self) -> None:
        become(self._recovery, self.Start)


class TheFenceIsNotRaised(Planted):
    """A new controller speaks with the fence of the one it replaces."""

    breaks = frozenset({"I13"})
    planned_faults = (killed_at(Failpoint.COMMITTED, 5),)

    def __init__(self, config: Any, fence: Fence, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, Fence(fence.run_id, 1), *args, **kwargs)

    def plant(self) -> None:
        """It is done."""


class ARewindGuessesTheVersion(Planted):
    """One step is lost at most, it is believed."""

    breaks = frozenset({"I2", "I9"})
    profile = "trainer"
    settings: ClassVar = {"checkpoint": {"interval": 3}}

    class Start(Recovery):
        async def rewind(self, reason: str, *, taking_over: bool = False) -> None:
            state, ledger = self._state, self._state.ledger
            self._sync.forget()
            self._rollouts.cancel_all("rewound")
            await self._trainer_client.restore(ledger.trainer_version)
            to_version = max(0, ledger.trainer_version - 1)
            after = await state.journal.steps_after(to_version)
            prompt_indices = ledger.rewind(to_version, reason, after)
            state.queue.clear(prompt_indices)
            state.fleet.rewound(to_version)
            for prompt_index in prompt_indices:
                self._rollouts.again(prompt_index)

    def plant(self) -> None:
        become(self._recovery, self.Start)


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
                prompt_indices = ledger.rewind(step.version - 1, reason, StepsAfter((step,), ()))
                self._state.queue.clear(prompt_indices)
                await self._again(prompt_indices)
                groups += len(prompt_indices)
            return groups

    def plant(self) -> None:
        become(self._recovery, self.Start)


class AFailedCheckpointCounts(Planted):
    breaks = frozenset({"I12"})
    profile = "trainer"
    settings: ClassVar = {"checkpoint": {"interval": 1}}

    class Saving(Checkpoints):
        async def save(self, version: int) -> None:
            await super().save(version)
            if version not in self._state.ledger.checkpoints:
                self._state.ledger.checkpointed(version, "unknown")

    def plant(self) -> None:
        become(self._train_pump._checkpoints, self.Saving)  # noqa: SLF001 - it sits inside


class ACheckpointIsDueAtItsVersionAlone(Planted):
    breaks = frozenset({"I12"})
    settings: ClassVar = {"checkpoint": {"interval": 2}}
    planned_faults = (killed_at(Failpoint.APPLIED_DURABLE, 2),)

    class Forgetting(Checkpoints):
        incarnation_began_at: int | None = None

        def is_due(self, version: int) -> bool:
            if self.incarnation_began_at is None:
                self.incarnation_began_at = version
            return (
                super().is_due(version) and version % 2 == 0 and version > self.incarnation_began_at
            )

    def plant(self) -> None:
        become(self._train_pump._checkpoints, self.Forgetting)  # noqa: SLF001 - it sits inside


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


class ATakeOverLeavesWhatIsTooOld(Planted):
    """A controller that died before the sweep after a step leaves it to nobody."""

    breaks = frozenset({"I9"})
    settings: ClassVar = {
        "sampler": {"name": "windowed", "max_staleness": 0, "over_sampling_ratio": 3.0},
        "stub": {"median_rollout_s": 0.02, "tail_sigma": 0.0, "step_s": 2.0},
        "sync": {"interval": 1},
    }
    planned_faults = (killed_at(Failpoint.APPLIED_DURABLE, 10),)

    class Pump(RolloutPump):
        def sweep(self, *, predictive: bool) -> None:
            if self._state.lifecycle.phase is not RunPhase.STARTING:
                super().sweep(predictive=predictive)

    def plant(self) -> None:
        become(self._rollout_pump, self.Pump)
