"""Bugs on the way of a group: dispatch, permits, checks, retries, eviction."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

import msgspec
from planted.planting import DEEP, LOST, Planted, become

from offbeat.controller.events import AnyEvent, RewardCallsMade, StepApplied, WorkerLost
from offbeat.controller.ledger import GroupRecord, Ledger
from offbeat.controller.ports import Prompts
from offbeat.controller.retries import Failure, RetryPolicy
from offbeat.controller.reward_budget import RewardBudget
from offbeat.controller.rollouts import RolloutPump
from offbeat.controller.state import RunState
from offbeat.messages.failures import ActorLost
from offbeat.messages.groups import Prompt, Receipt, RolloutTask
from offbeat.plugins.simulation.disk import SimulatedPayload
from offbeat.transfer_queue.index import QueueIndex

MASKS = {"on_failed_sample": "mask", "min_valid_samples": 1}


class ABudgetOfCallsForgetsWhatIsInFlight(Planted):
    breaks = frozenset({"I20"})
    settings: ClassVar = {
        "environment": {"name": "function", "target": "judge:reward"},
        "rollout": {"reward_call_budget": 150},
    }

    class BrokenBudget(RewardBudget):
        @property
        def covers_next_group(self) -> bool:
            return self._state.costs.reward_calls + self._per_group <= (self._limit or 0)

    def plant(self) -> None:
        become(self._rollout_pump._budget, self.BrokenBudget)  # noqa: SLF001 - a part of a part


class EvaluationsTakeCallsThatNobodyReserved(Planted):
    """Training takes the whole budget, and an evaluation goes beyond it."""

    breaks = frozenset({"I20"})
    settings: ClassVar = {
        "environment": {"name": "function", "target": "judge:reward"},
        "rollout": {"reward_call_budget": 150, "on_reward_budget_spent": "stop"},
        "eval": {"interval": 1, "prompts": 6, "samples": 4, "sets": {}},
    }

    class BrokenBudget(RewardBudget):
        def _covers(self, groups: int, evaluations: int) -> bool:
            return super()._covers(groups, 0 * evaluations)

    def plant(self) -> None:
        become(self._rollout_pump._budget, self.BrokenBudget)  # noqa: SLF001 - a part of a part
        become(self._evaluation._budget, self.BrokenBudget)  # noqa: SLF001 - as above


class AReportOfCallsIsAddedUp(Planted):
    """A count since the start of a process is taken for the calls since its last report."""

    breaks = frozenset({"I20"})
    settings = ABudgetOfCallsForgetsWhatIsInFlight.settings

    class BrokenState(RunState):
        def reward_calls(self, process: str, calls: int) -> None:
            before = self.costs.reward_calls_of.get(process, 0)
            self.ledger.note(RewardCallsMade(process, before + calls))

    def plant(self) -> None:
        become(self.state, self.BrokenState)


class ALostWorkerIsNotRecorded(Planted):
    """Its groups are sent out again, and nobody reads why."""

    breaks = frozenset({"I23"})
    profile = "engines"

    class BrokenState(RunState):
        def worker_lost(self, name: str, reason: str) -> None:
            pass

    def plant(self) -> None:
        become(self.state, self.BrokenState)


class ALostWorkerIsRecordedForEachOfItsGroups(Planted):
    breaks = frozenset({"I23"})
    profile = "engines"

    class BrokenRetries(RetryPolicy):
        def after(self, task: RolloutTask, failure: Failure, incarnation: str) -> float | None:
            if isinstance(failure, ActorLost):
                self._state.ledger.note(WorkerLost(failure.actor, failure.detail))
            return super().after(task, failure, incarnation)

    def plant(self) -> None:
        become(self._rollout_pump._retries, self.BrokenRetries)  # noqa: SLF001 - a part of a part


class ReceiptsAreNotChecked(Planted):
    """NaN rewards, short groups, tokens from the future: all is taken."""

    breaks = frozenset({"I11", "I4", "I6", "I1", "I9"})
    profile = "data"

    class Pump(RolloutPump):
        async def _commit(
            self, task: RolloutTask, receipt: Receipt, payload: object, *incarnation: str
        ) -> None:
            state = self._state
            columns, nbytes = receipt.columns, receipt.payload_bytes
            state.queue.put(task.prompt_index, task.attempt, columns, nbytes, payload)
            state.ledger.commit(receipt)

    def plant(self) -> None:
        become(self._rollout_pump, self.Pump)


class TheBufferHasNoBound(Planted):
    breaks = frozenset({"I8"})
    settings: ClassVar = {**DEEP, "buffer": {"capacity_groups": 8}}

    class Pump(RolloutPump):
        def _has_room(self, *waiting: int) -> bool:
            return True

    def plant(self) -> None:
        become(self._rollout_pump, self.Pump)


class AFailedGroupIsNotSentAgain(Planted):
    breaks = LOST
    profile = "engines"

    class Pump(RolloutPump):
        async def _handle_failure(self, task: RolloutTask, failure: Any, *incarnation: str) -> None:
            self._retries.after(task, failure, *incarnation)

    def plant(self) -> None:
        become(self._rollout_pump, self.Pump)


class APoisonPromptIsTriedForEver(Planted):
    """Sooner or later it will work, it is believed."""

    breaks = frozenset({"I3"})
    profile = "data"

    class Patient(RetryPolicy):
        def _has_retries_left(self, group: GroupRecord, reason: str, failure: Failure) -> bool:
            del group, reason, failure
            return True

    def plant(self) -> None:
        become(self._rollout_pump._retries, self.Patient)  # noqa: SLF001 - there is no other way in


class AMaskedSampleCountsInTheMean(Planted):
    """It is not trained itself, but its reward of 0.0 is part of its group's mean."""

    breaks = frozenset({"I18"})
    profile = "data"
    settings: ClassVar = {"rollout": MASKS}

    def plant(self) -> None:
        step = self._train_pump._one_step  # noqa: SLF001 - there is no other way in
        advantages = step._advantages  # noqa: SLF001

        def with_masked(rewards: tuple[float, ...], valid: tuple[bool, ...]) -> tuple[float, ...]:
            everyone = advantages(rewards, (True,) * len(rewards))
            return tuple(a if counts else 0.0 for a, counts in zip(everyone, valid, strict=True))

        step._advantages = with_masked  # noqa: SLF001


class MaskedSamplesAreCountedAsTrained(Planted):
    breaks = frozenset({"I18"})
    profile = "data"
    settings: ClassVar = {"rollout": MASKS}

    class BrokenLedger(Ledger):
        def _do(self, event: AnyEvent) -> None:
            if isinstance(event, StepApplied):
                everyone = event.samples + event.masked_samples
                event = msgspec.structs.replace(event, samples=everyone, masked_samples=0)
            super()._do(event)

    def plant(self) -> None:
        become(self.state.ledger, self.BrokenLedger)


class AReceiptForgetsWhichSamplesAreMasked(Planted):
    """So its masked samples are valid ones to advantages, counts and metrics."""

    breaks = frozenset({"I18"})
    profile = "data"
    settings: ClassVar = {"rollout": MASKS}

    class Pump(RolloutPump):
        async def _commit(
            self, task: RolloutTask, receipt: Receipt, payload: object, *incarnation: str
        ) -> None:
            if receipt.masked_samples:
                receipt = msgspec.structs.replace(receipt, statuses=())
            await super()._commit(task, receipt, payload, *incarnation)

    def plant(self) -> None:
        become(self._rollout_pump, self.Pump)


class ABranchIsLostFromTheReceipt(Planted):
    breaks = frozenset({"I18"})
    several_turns = True

    class Pump(RolloutPump):
        async def _commit(
            self, task: RolloutTask, receipt: Receipt, payload: object, *incarnation: str
        ) -> None:
            first_only = tuple(1 for _ in receipt.branches)
            receipt = msgspec.structs.replace(receipt, branches=first_only)
            await super()._commit(task, receipt, payload, *incarnation)

    def plant(self) -> None:
        become(self._rollout_pump, self.Pump)


class ABranchIsLostFromTheRowsThatAreTrained(Planted):
    breaks = frozenset({"I18"})
    several_turns = True

    class Index(QueueIndex):
        def put(
            self,
            prompt_index: int,
            attempt: int,
            columns: Iterable[str],
            payload_bytes: int,
            payload: object,
        ) -> None:
            assert isinstance(payload, SimulatedPayload)
            rows = replace(payload, branches=(1,) * len(payload.branches))
            super().put(prompt_index, attempt, columns, payload_bytes, rows)

    def plant(self) -> None:
        become(self.state.queue, self.Index)


class PromptsAreNotMixedByTheirWeights(Planted):
    """Every prompt is of the first environment, whatever the weights are."""

    breaks = frozenset({"I19"})
    settings: ClassVar[dict[str, Any]] = {"environments": {"first": {}, "second": {"weight": 3}}}

    class Prompts:
        def __init__(self, correct: Prompts) -> None:
            self._correct = correct

        def prompt(self, prompt_index: int) -> Prompt | None:
            prompt = self._correct.prompt(prompt_index)
            return None if prompt is None else msgspec.structs.replace(prompt, environment="first")

    def plant(self) -> None:
        pump = self._rollout_pump
        pump._prompts = self.Prompts(pump._prompts)  # noqa: SLF001 -- the bug
