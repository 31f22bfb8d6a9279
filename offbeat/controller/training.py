"""Runs the train pump: one optimizer step after another, to the last step or the last prompt.

If a rank is lost, all ranks are replaced and restored from the last checkpoint. The groups trained
since then are rolled out and trained again. This is a rewind.
"""

import asyncio
from collections.abc import Callable
from functools import partial

import structlog

from offbeat.controller.checkpoints import Checkpoints
from offbeat.controller.errors import TrainerBudgetSpent, TrainerLost, leaves
from offbeat.controller.evaluation import Evaluation
from offbeat.controller.events import TrainerReplaced
from offbeat.controller.failpoints import Failpoint
from offbeat.controller.lifecycle import RunPhase
from offbeat.controller.pending_waits import Pump
from offbeat.controller.recovery import Recovery
from offbeat.controller.rollouts import RolloutPump
from offbeat.controller.state import RunState
from offbeat.controller.step_metrics import StepMetricsBuilder
from offbeat.controller.syncing import WeightSync
from offbeat.controller.train_step import TrainStep
from offbeat.controller.trainer_client import TrainerClient, lost_step
from offbeat.controller.weight_guards import LogprobGapGuard
from offbeat.messages.failures import (
    OffbeatError,
    PayloadLost,
    StepOutOfOrder,
    TrainerCall,
    TrainStepFailed,
    UnfitGroup,
)
from offbeat.messages.fences import StepKey
from offbeat.messages.training import StepResult
from offbeat.telemetry.time_accounting import TrainerTime

log = structlog.stdlib.get_logger()
Repairable = TrainStepFailed | UnfitGroup | PayloadLost
"""Failures that an abort and another attempt at the step can fix."""


class TrainPump:
    """Trains the steps of the run from the present one to the last.

    consumes   ready groups, through ``TrainStep``
    produces   versions of the trainer, checkpoints, requests to sync and to evaluate
    waits for  groups and calls of a step, acks of the last release but one, a replacement of the
    trainer woken by   the events that wake a step, the engines through the sync pump, the cluster
    """

    def __init__(  # noqa: PLR0913 - what one version sets in motion, by name
        self,
        state: RunState,
        trainer_client: TrainerClient,
        step: TrainStep,
        sync: WeightSync,
        rollouts: RolloutPump,
        *,
        recovery: Recovery,
        checkpoints: Checkpoints,
        evaluation: Evaluation,
        on_step: Callable[[StepMetricsBuilder], None],
    ) -> None:
        self._state, self._trainer_client, self._one_step, self._sync = (
            state,
            trainer_client,
            step,
            sync,
        )
        self._recovery, self._checkpoints, self._evaluation = recovery, checkpoints, evaluation
        self._rollouts, self._on_step = rollouts, on_step
        self._logprob_gap = LogprobGapGuard(state.config.sync, state.config.model.dtype)
        self._not_applied_in_row = 0
        self._attempts = (
            state.first_of_incarnation
        )  # begins, over all steps: no key is ever used twice
        self._replaced = 0

    async def run(self) -> None:
        """Train until the last step, the end of the prompts, or a stop command."""
        try:
            await self._start()
        except TrainerLost as lost:
            await self._rewind(lost)
        while True:
            try:
                await self._until_done()
            except TrainerLost as lost:
                await self._rewind(lost)
            else:
                return

    async def keep_state(self, within_s: float) -> None:
        """Save the last version at the end of the run, unless it is saved or the trainer is dead.

        Failures are logged, because they must not hide why the run ended.
        """
        state, version = self._state, self._state.ledger.trainer_version
        if not self._is_unsaved(version):
            return
        key = StepKey(state.step, self._attempts + 1, 0)
        clock = asyncio.get_running_loop().time
        give_up_at = clock() + within_s
        try:
            await self._trainer_client.abort(key, within_s)
            made = await self._trainer_client.call(
                f"last checkpoint, version {version}",
                partial(self._trainer_client.trainer.save_checkpoint, state.fence, version),
                give_up_at - clock(),
            )
        except OffbeatError as failure:
            log.warning("checkpoint.failed", version=version, error=str(failure))
        else:
            state.ledger.checkpointed(made.version, made.digest)

    def _is_unsaved(self, version: int) -> bool:
        """Return whether a resumed run would have to train anything again."""
        state = self._state
        interval = state.config.checkpoint.interval
        return bool(interval and version) and version not in state.ledger.checkpoints

    async def _start(self) -> None:
        """Recover the run's position, and have the engines serve its weights."""
        await self._recovery.start()
        await self._serve()
        self._state.lifecycle.enter(RunPhase.RUNNING)

    async def _until_done(self) -> None:
        state = self._state
        self._evaluation.request_due()
        if self._checkpoints.is_due(state.ledger.trainer_version):  # a controller died before
            await self._checkpoints.save(state.ledger.trainer_version)
        while state.step <= state.config.steps and not state.operator.is_stopping:
            await self._while_paused()
            measures = StepMetricsBuilder(state.step, asyncio.get_running_loop().time())
            try:
                result = await self._step(measures)
                if result is None:
                    break
                if result.applied:
                    await self._after_version(measures)
                else:
                    self._rollouts.batches_moved()
            finally:
                if measures.outcome is not None:  # the step counts, even if the run ends here
                    self._report(measures, measures.outcome)
            self._logprob_gap.check(measures.step, result.metrics)
        await self._sync.wait_until_served()
        await self._evaluation.finished()
        version = state.ledger.trainer_version
        if self._is_unsaved(version):
            await self._checkpoints.save(version)
        await self._checkpoints.save_model()

    def _report(self, measures: StepMetricsBuilder, result: StepResult) -> None:
        """Close the metrics of a step and pass them on."""
        self._state.observer.times.add_computing(result.compute_s)
        sent = {
            "sync/unchanged_releases": self._sync.unchanged.count,
            **self._sync.deltas.take_figures(),
        }
        measures.close(result, self._state, self._sync.take_report(), sent)
        self._on_step(measures)

    async def _while_paused(self) -> None:
        state = self._state
        if state.operator.is_paused:
            with state.observer.trainer_waits(TrainerTime.WAITING_GATE):
                await state.waits.until(
                    Pump.TRAIN,
                    "an operator to resume or stop",
                    lambda: not state.operator.is_paused or state.operator.is_stopping,
                )

    async def _after_version(self, measures: StepMetricsBuilder) -> None:
        """Handle the work due at this version: weights, checkpoint, evaluation."""
        state = self._state
        version = state.ledger.trainer_version
        evaluation_due = self._evaluation.is_due(version)
        last = version >= state.config.steps
        sync_due = evaluation_due or last or version % state.config.sync.interval == 0
        self._rollouts.sweep(predictive=sync_due and state.config.sync.mode == "abort_stale")
        if sync_due:
            with (
                state.observer.trainer_waits(TrainerTime.WAITING_WEIGHTS),
                measures.measure_time("sync"),
            ):
                await self._sync.request_release(version)
        if self._checkpoints.is_due(version):
            with measures.measure_time("checkpoint"):
                await self._checkpoints.save(version)
        if evaluation_due:
            self._evaluation.request(version)

    # --- one step --------------------------------------------------------------------------------

    async def _step(self, measures: StepMetricsBuilder) -> StepResult | None:
        """Train one step, with retries. Return None if no group is left or the run must stop.

        If a group cannot be trained, or has lost its columns, this costs an attempt but no retry of
        the step. Such groups have a separate budget.
        """
        state, step = self._state, self._state.step
        retries, limit = 0, state.config.trainer.step_retries
        while True:
            self._attempts += 1
            key = StepKey(step, self._attempts, 0)
            measures.restart(self._attempts)
            try:
                result = await self._one_step.attempt(key, measures)
            except BaseExceptionGroup as group:
                failure = _repairable(group, step)
                if failure is None:
                    raise
                log.warning("step.aborted", step=step, attempt=key.attempt, error=str(failure))
                await self._abort(key, failure)
                if not isinstance(failure, TrainStepFailed):
                    continue
                if retries == limit:
                    what = f"failed attempts at step {step}"
                    raise TrainerBudgetSpent(
                        what, limit, "trainer.step_retries", str(failure)
                    ) from group
                retries += 1
            else:
                if result is not None:
                    return self._count_unapplied(result)
                if state.ledger.training:
                    claimed = len(state.ledger.training)
                    log.info("step.left_for_resume", step=step, groups_claimed=claimed)
                    await self._abort(key)
                return None

    async def _abort(self, key: StepKey, failure: Repairable | None = None) -> None:
        """Abort the open step: gradients are discarded, groups are ready again.

        If the ``failure`` was about groups that cannot be trained, those are not made ready.
        ``failure`` is None if the run stops.
        """
        state = self._state
        with state.observer.trainer_in(TrainerTime.INCIDENT, Failpoint.ABORTING):
            await self._trainer_client.abort(key, state.config.trainer.step_deadline_s)
        state.ledger.unclaim(key.step, key.attempt)
        if isinstance(failure, UnfitGroup):
            self._rollouts.refused(failure)
        elif isinstance(failure, PayloadLost):
            await self._recovery.payloads_lost(failure)
        self._rollouts.sweep(predictive=False)

    def _count_unapplied(self, result: StepResult) -> StepResult:
        """Count a step that was not applied. Raise after too many in a row."""
        self._not_applied_in_row = 0 if result.applied else self._not_applied_in_row + 1
        limit = self._state.config.trainer.max_steps_not_applied
        if self._not_applied_in_row >= limit:
            version = self._state.ledger.trainer_version
            raise TrainerBudgetSpent(
                f"steps in a row not applied (last good version {version})",
                limit - 1,
                "trainer.max_steps_not_applied",
                result.reason,
            )
        return result

    # --- rewind ----------------------------------------------------------------------------------

    async def _rewind(self, lost: TrainerLost) -> None:
        """Replace the ranks, restore them, and rewind the run to the restored version."""
        state, budget = self._state, self._state.config.trainer.restart_budget
        self._replaced += 1
        if self._replaced > budget:
            what = "replacements of the trainer"
            raise TrainerBudgetSpent(what, budget, "trainer.restart_budget", str(lost)) from lost
        log.warning("trainer.lost", step=state.step, error=str(lost))
        state.ledger.note(TrainerReplaced(reason=str(lost)))
        state.lifecycle.enter(RunPhase.REWINDING)
        with state.observer.trainer_in(TrainerTime.INCIDENT, Failpoint.REWINDING):
            try:
                await self._trainer_client.replace()
                await self._recovery.rewind(str(lost))
                state.trainer.lost = None
                await self._serve()
            except TrainerLost as again:
                state.trainer.lost = None
                await self._rewind(again)
                return
        state.lifecycle.enter(RunPhase.RUNNING)

    async def _serve(self) -> None:
        """Have the engines serve the trainer's weights."""
        await self._sync.request_release(self._state.ledger.trainer_version)
        await self._sync.wait_until_served()


def _repairable(group: BaseExceptionGroup[BaseException], step: int) -> Repairable | None:
    """Return the failure that an abort and a retry may fix, or None if there are others.

    Raises:
        TrainerLost: Only new ranks can fix it.
    """
    failures = list(leaves(group))
    if any(not isinstance(each, Repairable | StepOutOfOrder | TrainerLost) for each in failures):
        return None
    if lost := lost_step(failures):
        raise lost from group
    repairable = [each for each in failures if isinstance(each, Repairable)]
    if not repairable:  # refusals of later calls overtook the answer of the failed call
        return TrainStepFailed(0, step, TrainerCall.EARLIER, str(failures[0]))
    # A retry of the step cannot fix a problem of a group.
    return next(
        (each for each in repairable if not isinstance(each, TrainStepFailed)), repairable[0]
    )
