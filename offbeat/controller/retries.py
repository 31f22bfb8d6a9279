"""Decides after a failed rollout: another attempt, a dropped prompt, or the end of the run.

Each kind of failure has a separate budget.
"""

import asyncio
import math
import random
from typing import Final

import structlog

from offbeat.config.limits import on_failed_sample
from offbeat.controller.errors import BudgetSpent, EveryRolloutFailed
from offbeat.controller.events import DropReason, ReturnKind
from offbeat.controller.ledger import GroupRecord
from offbeat.controller.outage import backoff_s
from offbeat.controller.state import RunState
from offbeat.messages.failures import (
    WORKER_LOST,
    ActorLost,
    Component,
    DeadlineExceeded,
    FailureKind,
    PayloadLost,
    RolloutFailed,
    UnfitGroup,
)
from offbeat.messages.groups import RolloutTask, group_id

log = structlog.stdlib.get_logger()
Failure = RolloutFailed | ActorLost | DeadlineExceeded
_RETURNS: Final = {
    FailureKind.INFRASTRUCTURE: ReturnKind.INFRASTRUCTURE,
    FailureKind.DATA: ReturnKind.DATA,
}


class RetryPolicy:
    """Decides about failed rollouts, records each decision in the ledger, and says when to retry.

    After an infrastructure failure, another engine may succeed. Each group has a budget of retries,
    and so has the run. Waits grow exponentially, with jitter. A group without retries left is
    dropped, which another budget limits. After a data failure, the prompt itself is at fault. After
    a few attempts it is dropped and, by policy, replaced. A bug ends the run.
    """

    def __init__(self, state: RunState, rng: random.Random) -> None:
        self._state, self._rng = state, rng
        self.outage = state.outage
        self._failures_in_row = 0
        self._counted_with = set[tuple[int, int]]()
        """Prompt index and attempt of the groups in flight when a failure was last counted."""

    def answered(self, task: RolloutTask, incarnation: str) -> None:
        """Record that a rollout of this engine incarnation was completed."""
        self.outage.answered()
        self._failures_in_row = 0
        self._state.fleet.request_answered(task.engine, incarnation)

    def after(self, task: RolloutTask, failure: Failure, incarnation: str) -> float | None:
        """Return the seconds until the group may be dispatched again, or drop it and return None.

        Args:
            task: The rollout that was requested.
            failure: Failure of the rollout.
            incarnation: The engine's incarnation that got the task.

        Raises:
            BudgetSpent: There were more failures than the recipe allows.
            RolloutFailed: The failure is of kind ``bug``.
        """
        kind, reason = _classify(failure, task.engine)
        if kind is FailureKind.BUG:
            raise failure
        now = asyncio.get_running_loop().time()
        if isinstance(failure, RolloutFailed) and failure.source is Component.ENVIRONMENT:
            counts = self.outage.failed(
                now,
                failure.detail,
                spends_last_retry=self._is_at_last_retry(task, kind),
                is_first_suspect=self._may_see_outage_first(task),
            )
        else:
            counts = True
            self.outage.returned()
        return_kind = _RETURNS[kind] if counts else ReturnKind.OUTAGE
        group = self._state.ledger.retry(task.prompt_index, return_kind, reason)
        log.warning("rollout.failed", group=task.group_id, attempt=task.attempt, error=str(failure))
        if kind is FailureKind.INFRASTRUCTURE:
            self._blame(task, failure, incarnation)
            self._count(task)
            self._check_failures_in_row(failure)
        if not counts:
            self._check_trials(kind, failure)
            wait_s: float | None = 0.0
        elif kind is FailureKind.DATA:
            wait_s = self._after_data(group, reason, failure)
        elif self._has_retries_left(group, reason, failure):
            wait_s = self._backoff_s(group.returns[ReturnKind.INFRASTRUCTURE])
        else:
            wait_s = None
        return None if wait_s is None else max(wait_s, self.outage.remaining_s(now))

    def _is_at_last_retry(self, task: RolloutTask, kind: FailureKind) -> bool:
        """Return whether one more infrastructure failure drops the group."""
        returns = self._state.ledger.groups[task.prompt_index].returns
        retries = self._state.config.rollout.infrastructure_retries
        spent = returns.get(ReturnKind.INFRASTRUCTURE, 0)
        return kind is FailureKind.INFRASTRUCTURE and spent >= retries

    def _may_see_outage_first(self, task: RolloutTask) -> bool:
        """Return whether one failure of this group may count as an outage.

        The number of such failures is limited. So a prompt whose environment never works is dropped
        in the end.
        """
        returns = self._state.ledger.groups[task.prompt_index].returns
        return returns.get(ReturnKind.OUTAGE, 0) < self._state.config.rollout.outage_failures

    def after_refusal(self, unfit: UnfitGroup) -> float | None:
        """Decide like ``after`` about a ready group that the trainer cannot read."""
        kind, reason = FailureKind.DATA, "unfit_for_trainer"
        group = self._state.ledger.refuse(unfit.prompt_index, ReturnKind.DATA, reason)
        failure = RolloutFailed(kind, unfit.prompt_index, group.attempt, reason, unfit.problem)
        log.warning("group.unfit", group=group_id(unfit.prompt_index), error=str(failure))
        return self._after_data(group, reason, failure)

    def after_loss(self, prompt_index: int, lost: PayloadLost) -> bool:
        """Readmit a ready group with lost columns, or drop it. Return False if dropped.

        The cause is a failed machine, so the failure counts against no engine.

        Raises:
            BudgetSpent: This group has failed more often than the recipe allows.
        """
        kind, reason = FailureKind.INFRASTRUCTURE, "payload_lost"
        group = self._state.ledger.refuse(prompt_index, ReturnKind.INFRASTRUCTURE, reason)
        failure = RolloutFailed(kind, prompt_index, group.attempt, reason, lost.detail)
        log.warning("group.lost", group=group_id(prompt_index), error=str(failure))
        return self._has_retries_left(group, reason, failure)

    def _check_failures_in_row(self, failure: Failure) -> None:
        limit = self._state.config.rollout.consecutive_failures
        if self._failures_in_row >= limit:
            what = "infrastructure failures in a row"
            raise BudgetSpent(
                what, limit, "rollout.consecutive_failures", str(failure)
            ) from failure

    def _check_trials(self, kind: FailureKind, failure: Failure) -> None:
        """Raise if an environment that raises errors has failed more trials than the budget allows.

        Trials of an environment that reports an outage count as failures in a row instead.
        """
        limits = self._state.config.rollout
        if kind is FailureKind.DATA and self.outage.trials >= (limits.data_retries + 1) * (
            limits.drop_budget + 1
        ):
            what, key = "all groups that may be dropped", "rollout.drop_budget"
            raise EveryRolloutFailed(what, limits.drop_budget, key, str(failure)) from failure

    def _has_retries_left(self, group: GroupRecord, reason: str, failure: Failure) -> bool:
        """Return False if the group has spent its retries and was dropped."""
        retries = self._state.config.rollout.infrastructure_retries
        if group.returns[ReturnKind.INFRASTRUCTURE] <= retries:
            return True
        self._check_infrastructure_drops(group, failure)
        self._drop(group, DropReason.INFRASTRUCTURE, reason)
        return False

    def _check_infrastructure_drops(self, group: GroupRecord, failure: Failure) -> None:
        """Check the budget of dropped prompts.

        The budget ends a run in which one prompt hangs or kills every engine that gets it.
        """
        limits = self._state.config.rollout
        budget = limits.infrastructure_drop_budget
        if budget is None:
            budget = limits.drop_budget
        if not budget:
            raise BudgetSpent(
                f"retries of {group_id(group.prompt_index)}",
                limits.infrastructure_retries,
                "rollout.infrastructure_retries or rollout.infrastructure_drop_budget",
                str(failure),
            ) from failure
        if self._state.ledger.totals.failed_prompts_infrastructure >= budget:
            raise BudgetSpent(
                "prompt groups dropped for infrastructure failures",
                budget,
                "rollout.infrastructure_drop_budget",
                str(failure),
            ) from failure

    def _after_data(self, group: GroupRecord, reason: str, failure: Failure) -> float | None:
        if group.returns[ReturnKind.DATA] <= self._state.config.rollout.data_retries:
            return self._backoff_s(group.returns[ReturnKind.DATA])
        # Checked before the drop, so the group is not lost: a resume rolls it out again.
        limits = self._state.config.rollout
        if self._state.ledger.totals.failed_prompts >= limits.drop_budget:
            raise BudgetSpent(
                "dropped prompt groups",
                limits.drop_budget,
                "rollout.drop_budget",
                str(failure),
                self._find_fix(failure),
            ) from failure
        self._drop(group, DropReason.DATA, reason)
        return None

    def _find_fix(self, failure: Failure) -> str:
        """Return the fix of a failure that spent the drop budget."""
        config = self._state.config
        if not isinstance(failure, RolloutFailed) or failure.sample is None:
            return "Fix that"
        fix = "Fix the agent" if config.environment.is_agent else "Fix the reward"
        if on_failed_sample(config) == "fail_group":
            fix += ", or set rollout.on_failed_sample=mask"
        return fix

    def _blame(self, task: RolloutTask, failure: Failure, incarnation: str) -> None:
        """Count the failure against the engine, unless another party is at fault.

        Each failure is a strike, regardless of its reason, because a live process that fails every
        request may still answer all probes. If a worker reported nothing within the deadline, it is
        unknown whether the engine is at fault, so the engine is probed.
        """
        fleet = self._state.fleet
        if isinstance(failure, RolloutFailed) and failure.source is Component.ENGINE:
            fleet.request_failed(task.engine, incarnation)
        elif (
            isinstance(failure, DeadlineExceeded)
            and fleet.engines[task.engine].incarnation == incarnation
        ):
            fleet.suspect(task.engine)

    def _count(self, task: RolloutTask) -> None:
        """Count one more failure in a row, unless this cause was counted already.

        A process that dies fails all of its groups at once.
        """
        if (task.prompt_index, task.attempt) in self._counted_with:
            return
        self._failures_in_row += 1
        # Does not iterate over all groups: after a long rewind there are millions.
        in_flight = self._state.ledger.in_flight_at.values()
        self._counted_with = {
            (prompt_index, group.attempt)
            for groups in in_flight
            for prompt_index, group in groups.items()
        }

    def _drop(self, group: GroupRecord, reason: DropReason, detail: str) -> None:
        state = self._state
        step = self._find_short_step(group)
        shrinks = step if self._may_shrink(step) else 0
        state.ledger.drop(group.prompt_index, reason, detail, shrinks=shrinks)
        log.warning("group.dropped", group=group_id(group.prompt_index), reason=detail)

    def _find_short_step(self, group: GroupRecord) -> int:
        """Return the step that has one group less without this group.

        A group that is bound to no step shortens the last step that groups admitted now would reach
        in time. If an earlier step lost a place instead, another group could become too old.
        """
        state = self._state
        if group.target_step is not None:
            # A group left by a stopped step is for the next step.
            return max(group.target_step, state.step)
        in_time = state.fleet.serving_version + state.sampler.max_staleness + 1
        return min(max(state.step, in_time), state.config.steps)

    def _may_shrink(self, step: int) -> bool:
        """Return whether the step may have one group less, so that no new prompt is needed."""
        state, limits = self._state, self._state.config.rollout
        if limits.on_dropped_prompt != "shrink":
            return False
        whole = state.config.groups_per_step
        smallest = max(1, math.ceil(limits.min_step_batch_fraction * whole))
        return whole - state.ledger.batch_deficits.get(step, 0) - 1 >= smallest

    def _backoff_s(self, failures: int) -> float:
        return backoff_s(self._state.config.rollout, failures) * self._rng.uniform(0.5, 1.0)


def _classify(failure: Failure, engine: str) -> tuple[FailureKind, str]:
    match failure:
        case ActorLost(actor=lost) if lost == engine:
            return FailureKind.INFRASTRUCTURE, "engine_lost"
        case RolloutFailed():
            return failure.kind, failure.reason
        case ActorLost():
            return FailureKind.INFRASTRUCTURE, WORKER_LOST
        case DeadlineExceeded():
            return FailureKind.INFRASTRUCTURE, "deadline"
