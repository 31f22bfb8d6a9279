"""The train pump: streams ready groups into the trainer's split step, one optimizer step at a time.

    waits for                              woken by
    a chunk of ready groups                a committed group, a dropped one, the end of the prompts
    the trainer                            its replies
    the snapshot of the step before        the trainer; the acks of the release before that

    claim -> begin -> (prepare logprobs) -> advantages -> microbatch ... -> finish -> version + 1

Calls of a step are queued, not awaited one by one: the trainer refuses whatever follows a failed
one, because its key is then not the next.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import structlog

from offbeat.controller.errors import BudgetSpent, EmptyBatch, leaves
from offbeat.controller.ledger import Group
from offbeat.controller.measures import StepMeasures
from offbeat.controller.ports import Journal, Trainer
from offbeat.controller.state import RunState
from offbeat.controller.syncing import WeightSync
from offbeat.messages.failures import StepOutOfOrder, TrainStepFailed
from offbeat.messages.fences import StepKey
from offbeat.messages.groups import Receipt
from offbeat.messages.training import Chunk, LossSpec, StepResult
from offbeat.telemetry.time_accounting import TrainerTime

log = structlog.stdlib.get_logger()
T = TypeVar("T")
Advantages = Callable[[tuple[float, ...]], tuple[float, ...]]
_QUEUED_CALLS = 3  # unanswered trainer calls at most: one running, the rest ready to run


class TrainPump:
    """Takes the run from version 0 to its last step."""

    def __init__(
        self,
        state: RunState,
        trainer: Trainer,
        sync: WeightSync,
        *,
        journal: Journal,
        advantages: Advantages,
        loss: LossSpec,
        on_step: Callable[[StepMeasures], None],
        evict_stale: Callable[[], None],
    ) -> None:
        self._state, self._trainer, self._sync = state, trainer, sync
        self._journal, self._advantages, self._loss = journal, advantages, loss
        self._on_step, self._evict_stale = on_step, evict_stale
        self._not_applied_in_row = 0
        trainer_config = state.config.trainer
        self._min_tokens = (
            trainer_config.min_tokens_per_chunk
            or trainer_config.max_tokens_per_microbatch * trainer_config.data_parallel
        )
        self._whole_batches = state.config.generator.deterministic
        self._queued = 0
        self._attempts = 0  # begins so far, over all steps: no key is ever used twice

    async def run(self) -> None:
        """Return after the last step, at the end of the prompts, or when asked to stop."""
        state = self._state
        while state.step <= state.config.steps and not state.stopping:
            measures = StepMeasures(state.step, asyncio.get_running_loop().time())
            result = await self._step(measures)
            if result is None:
                break
            if result.applied:
                await self._sync_if_due(measures)
            self._state.busy.computed(result.compute_s)
            measures.close(result, state, self._sync.report)
            self._on_step(measures)
        await self._sync.settled()

    async def _sync_if_due(self, measures: StepMeasures) -> None:
        state = self._state
        version, steps = state.ledger.trainer_version, state.config.steps
        if version % state.config.sync.interval and version < steps:
            return
        self._state.busy.trainer_waits(TrainerTime.WAITING_WEIGHTS)
        with measures.timed("sync"):
            await self._sync.ask(version)
        self._state.busy.trainer_waits(TrainerTime.OTHER)
        self._evict_stale()

    # --- one step --------------------------------------------------------------------------------

    async def _step(self, measures: StepMeasures) -> StepResult | None:
        """Train one step, with retries. None: no group is left to train."""
        state, step = self._state, self._state.step
        for retry in range(state.config.trainer.step_retries + 1):
            self._attempts += 1
            attempt = self._attempts
            measures.restart(attempt)
            try:
                return await self._attempt(StepKey(step, attempt, 0), measures)
            except BaseExceptionGroup as group:
                failure = _repairable(group)
                if failure is None:
                    raise
                log.warning("step.aborted", step=step, attempt=attempt, error=str(failure))
                await self._abort(StepKey(step, attempt, 0))
                if retry == state.config.trainer.step_retries:
                    raise failure from group
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _attempt(self, key: StepKey, measures: StepMeasures) -> StepResult | None:
        state, begun = self._state, False
        async with asyncio.TaskGroup() as calls:
            while ordinals := await self._next_chunk(measures):
                groups = state.ledger.claim(ordinals, key.step, key.attempt)
                state.moved()
                if not begun:
                    begun = True
                    begin = partial(self._trainer.begin_train_step, state.fence, key, self._loss)
                    await self._queue(calls, f"begin of step {key.step}", begin)
                key = key.next()
                chunk = await self._prepared(groups, measures)
                call = partial(self._trainer.train_microbatch, state.fence, key, chunk)
                await self._queue(calls, f"microbatch {key.seq} of step {key.step}", call)
            if not begun:
                return None
            with measures.timed("sync"):
                await self._sync.snapshot_made()
            finish = await self._finish(calls, key.next())
            # Stay inside until it is answered: a task that fails while its group is being left
            # leaves its parent marked as cancelled (CPython 3.11).
            await asyncio.wait([finish])
        return self._conclude(key, finish.result())

    async def _finish(self, calls: asyncio.TaskGroup, key: StepKey) -> "asyncio.Task[StepResult]":
        """Queue ``finish``, once the journal would remember that it was meant to happen."""
        self._state.ledger.intend(key.step, key.attempt)
        await self._journal.barrier()
        call = partial(self._trainer.finish_train_step, self._state.fence, key)
        return await self._queue(calls, f"finish of step {key.step}", call)

    async def _queue(
        self, calls: asyncio.TaskGroup, who: str, call: Callable[[], Awaitable[T]]
    ) -> "asyncio.Task[T]":
        """Send the next call of the step as soon as few enough are unanswered; keeps the order."""
        state = self._state
        await state.until(who, "the trainer's queue", lambda: self._queued < _QUEUED_CALLS)
        self._queued += 1
        deadline_s = state.config.trainer.step_deadline_s * self._queued  # those before it included

        async def send() -> T:
            self._state.busy.call_opened()
            try:
                return await state.call(who, on="the trainer", deadline_s=deadline_s, reply=call())
            finally:
                self._state.busy.call_answered()
                self._queued -= 1
                state.moved()

        return calls.create_task(send(), name=who)

    async def _abort(self, key: StepKey) -> None:
        """Drop the open step: gradients gone, groups ready again, the version as it was."""
        state = self._state
        await state.call(
            f"abort of step {key.step}",
            on="the trainer",
            deadline_s=state.config.trainer.step_deadline_s,
            reply=self._trainer.abort_train_step(state.fence, key),
        )
        state.ledger.unclaim(key.step, key.attempt)
        self._evict_stale()
        state.moved()

    # --- chunks ----------------------------------------------------------------------------------

    async def _next_chunk(self, measures: StepMeasures) -> list[int]:
        """Ordinals to train next; empty when the step is complete or nothing more can come."""
        state = self._state
        self._state.busy.trainer_waits(TrainerTime.WAITING_GROUPS)
        with measures.timed("wait_groups"):
            await state.until("train pump", "ready groups", self._chunk_or_end)
        self._state.busy.trainer_waits(TrainerTime.OTHER)
        if state.quota <= 0 or state.stopping:
            return []
        return state.sampler.select(state.view())

    def _chunk_or_end(self) -> bool:
        state, ledger = self._state, self._state.ledger
        quota = state.quota
        if quota <= 0:
            if not ledger.training:
                raise EmptyBatch(state.step)
            return True
        if state.stopping and not ledger.training:
            return True
        last = self._no_more_can_come()
        enough = len(ledger.ready) >= quota or (
            ledger.ready_tokens >= self._min_tokens and not self._whole_batches
        )
        if not (enough or last):
            return False
        selected = state.sampler.select(state.view())
        if len(selected) >= quota or last:
            return True
        tokens = sum(ledger.ready[ordinal].tokens for ordinal in selected)
        return tokens >= self._min_tokens and not self._whole_batches

    def _no_more_can_come(self) -> bool:
        ledger = self._state.ledger
        return self._state.exhausted and not ledger.in_flight and not ledger.admitted

    async def _prepared(self, groups: Sequence[Group], measures: StepMeasures) -> Chunk:
        """The chunk to send: staleness checked again, extra logprobs and advantages in place."""
        state = self._state
        oldest_allowed = state.ledger.trainer_version - state.sampler.max_staleness
        receipts = list[Receipt]()
        for group in groups:
            if group.receipt is None or group.bound_version < oldest_allowed:
                raise AssertionError(f"{group} was claimed past the staleness bound")
            receipts.append(group.receipt)
        with measures.timed("advantage"):
            advantages = tuple(self._advantages(receipt.rewards) for receipt in receipts)
        measures.add(receipts, advantages, state.ledger.trainer_version)
        if self._loss.needs_policy_logprobs or self._loss.needs_reference_logprobs:
            with measures.timed("prepare_logprobs"):
                await self._prepare_logprobs(receipts)
        return self._chunk(receipts, advantages)

    async def _prepare_logprobs(self, receipts: Sequence[Receipt]) -> None:
        """Have the trainer write the columns that the loss needs and the groups do not have."""
        state = self._state
        chunk = self._chunk(receipts, ())
        prepared = await state.call(
            f"prepare_logprobs of step {state.step}",
            on="the trainer",
            deadline_s=state.config.trainer.step_deadline_s,
            reply=self._trainer.prepare_logprobs(state.fence, chunk, self._loss),
        )
        for receipt, nbytes, payload in zip(
            receipts, prepared.payload_bytes, prepared.payloads, strict=True
        ):
            state.queue.add_columns(
                receipt.ordinal, receipt.attempt, prepared.columns, nbytes, payload
            )

    def _chunk(
        self, receipts: Sequence[Receipt], advantages: tuple[tuple[float, ...], ...]
    ) -> Chunk:
        return Chunk(
            ordinals=tuple(receipt.ordinal for receipt in receipts),
            payloads=tuple(self._state.queue.payloads(receipt.ordinal) for receipt in receipts),
            advantages=advantages,
            tokens=sum(receipt.tokens for receipt in receipts),
        )

    # --- the end of a step -----------------------------------------------------------------------

    def _conclude(self, key: StepKey, result: StepResult) -> StepResult:
        """Enter the step into the books: synchronous, directly after the trainer's answer."""
        state = self._state
        trained = tuple(state.ledger.training)
        if result.applied:
            self._not_applied_in_row = 0
            state.ledger.applied(key.step)
        else:
            self._not_applied_in_row += 1
            state.ledger.refused(key.step, key.attempt, "step_not_applied")
            log.warning("step.not_applied", step=key.step, reason=result.reason)
        state.queue.clear(trained)
        state.moved()
        limit = state.config.trainer.max_steps_not_applied
        if self._not_applied_in_row >= limit:
            raise BudgetSpent(
                f"steps in a row not applied (last good version {state.ledger.trainer_version})",
                limit - 1,
                "trainer.max_steps_not_applied",
                result.reason,
            )
        return result


def _repairable(group: BaseExceptionGroup[BaseException]) -> TrainStepFailed | None:
    """The failure an abort and a retry may heal; None when anything else went wrong too."""
    failures = list(leaves(group))
    first = next((each for each in failures if isinstance(each, TrainStepFailed)), None)
    survivable = (TrainStepFailed, StepOutOfOrder)
    return first if all(isinstance(each, survivable) for each in failures) else None
