"""Trains one optimizer step: ready groups are streamed into the trainer's split step as they come.

    claim -> begin -> (prepare logprobs) -> advantages -> microbatch ... -> finish -> version + 1

Calls of a step are queued, not awaited one by one. After a failed call the trainer refuses the
following calls, because their keys are not the next expected key.

Also assigns the groups of a step to minibatches, by a random draw from seed and step. So neither
the order in which groups finish (short samples first) nor the order of the prompts decides which
groups are trained together.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeVar

import msgspec
import structlog

from offbeat.config.limits import microbatch_tokens, trainer_replicas
from offbeat.config.loss_spec import LossSpec
from offbeat.controller.errors import EmptyBatch, TrainerLost
from offbeat.controller.failpoints import Failpoint
from offbeat.controller.group_moves import Place
from offbeat.controller.ledger import GroupRecord
from offbeat.controller.pending_waits import Pump
from offbeat.controller.state import RunState
from offbeat.controller.step_metrics import StepMetricsBuilder
from offbeat.controller.syncing import WeightSync
from offbeat.controller.trainer_client import TrainerClient
from offbeat.messages.failures import Component, DeadlineExceeded, UserCodeRefused
from offbeat.messages.fences import StepKey
from offbeat.messages.groups import Receipt, group_id
from offbeat.messages.training import Chunk, StepResult
from offbeat.sampler.policy import earliest_step
from offbeat.telemetry.time_accounting import TrainerTime
from offbeat.weight_sync.background import start_in_thread


class MinibatchAssigner:
    """Assigns the groups of one attempt at a step to minibatches. Pure.

    The groups may come in any number of chunks.
    """

    def __init__(self, minibatches: int, seed: int, step: int) -> None:
        self._minibatches, self._seed = minibatches, f"{seed}/{step}/minibatches"
        self._assigned = 0

    def of(self, prompt_indices: Sequence[int]) -> tuple[int, ...]:
        """Return the minibatch of each group of the next chunk, from 0, or () if only one exists.

        Over all chunks, two minibatches differ by at most one group. With one chunk the result
        depends only on the set of the groups.
        """
        if self._minibatches == 1:
            return ()
        drawn = sorted(prompt_indices)
        random.Random(f"{self._seed}/{self._assigned}").shuffle(drawn)
        minibatch_of = {
            prompt_index: (self._assigned + place) % self._minibatches
            for place, prompt_index in enumerate(drawn)
        }
        self._assigned += len(drawn)
        return tuple(minibatch_of[prompt_index] for prompt_index in prompt_indices)


log = structlog.stdlib.get_logger()
T = TypeVar("T")
Advantages = Callable[[tuple[float, ...], tuple[bool, ...]], tuple[float, ...]]
_QUEUED_CALLS: Final = 3  # unanswered trainer calls at most: one running, the rest ready to run


class _Due(NamedTuple):
    """Groups that the step in progress trains next."""

    prompt_indices: list[int]  # empty: the step is complete, or nothing more can come
    is_cut_short: bool = False  # by a stop, before its batch was complete
    is_empty_batch: bool = False  # every prompt of the step was dropped


class TrainStep:
    """Makes attempts at a step. The caller retries, or replaces the trainer.

    consumes   ready groups
    produces   a version of the trainer, or dropped groups
    waits for  a chunk of ready groups, the trainer, the snapshot of the previous step, the journal
    woken by   a committed or dropped group, the end of the prompts, the trainer's replies, the disk
    """

    def __init__(
        self,
        state: RunState,
        trainer_client: TrainerClient,
        sync: WeightSync,
        *,
        advantages: Advantages,
        advantages_within_s: float | None = None,
        loss: LossSpec,
    ) -> None:
        self._state, self._trainer_client, self._sync = state, trainer_client, sync
        self._advantages, self._loss = advantages, loss
        self._advantages_within_s = advantages_within_s
        trainer = state.config.trainer
        self._min_tokens = trainer.min_tokens_per_chunk or microbatch_tokens(
            trainer
        ) * trainer_replicas(trainer)
        # A minibatch has groups of the whole batch, so training waits until the batch is complete.
        self._whole_batches = state.config.generator.deterministic or loss.optimizer_steps > 1
        self._queued = 0

    async def attempt(self, key: StepKey, measures: StepMetricsBuilder) -> StepResult | None:
        """Train one step. Return None if no group is left to train or the run must stop.

        1. ``_next_chunk``: wait for enough ready groups; the sampler selects.
        2. ``claim``: they leave the buffer for the step; the ledger records it.
        3. ``begin_train_step``, once: the trainer opens the step.
        4. ``_prepare``: staleness is checked again, logprobs and advantages are computed.
        5. ``train_microbatch``: the chunk is queued behind the calls before it. Repeat from 1.
        6. ``wait_for_snapshot``: the weights of the previous step are copied, so they may change.
        7. ``intend``: the journal records, durably, that the step is about to be applied.
        8. ``finish_train_step``: the optimizer steps, or refuses, once per minibatch and epoch.
        9. ``applied`` or ``refused``, durably: version + 1, or dropped groups. Payloads are freed.

        If the run must stop before the batch of a step is complete, the step is still open on
        return. Its claimed groups are only part of a batch. Applying them would make this update
        smaller than all others.

        Raises:
            BaseExceptionGroup: Errors of the step's calls. The step is then still open.
        """
        state, trainer, begun = self._state, self._trainer_client.trainer, False
        assigner = self._assigner(key.step)
        async with asyncio.TaskGroup() as calls:
            while (due := await self._next_chunk(measures)).prompt_indices:
                groups = state.ledger.claim(due.prompt_indices, key.step, key.attempt)
                if not begun:
                    begun = True
                    begin = partial(trainer.begin_train_step, state.fence, key, self._loss)
                    await self._queue(calls, f"begin of step {key.step}", begin)
                key = key.next()
                chunk = await self._prepare(groups, measures)
                minibatches = assigner.of(chunk.prompt_indices)
                chunk = msgspec.structs.replace(chunk, minibatches=minibatches)
                call = partial(trainer.train_microbatch, state.fence, key, chunk)
                await self._queue(calls, f"microbatch {key.seq} of step {key.step}", call)
                state.observer.reached(Failpoint.CHUNK_SENT)
            if not begun or due.is_cut_short:
                return None
            with measures.measure_time("sync"):
                await self._sync.wait_for_snapshot()
            finish = await self._finish(calls, key.next())
            # Stay inside until it is answered: a task that fails while its group is being left
            # leaves its parent marked as cancelled (CPython 3.11).
            await asyncio.wait([finish])
        return await self._conclude(key, finish.result(), measures)

    def _assigner(self, step: int) -> MinibatchAssigner:
        return MinibatchAssigner(self._loss.minibatches, self._state.config.seed, step)

    async def _finish(self, calls: asyncio.TaskGroup, key: StepKey) -> "asyncio.Task[StepResult]":
        """Queue ``finish``, once the intent is durable in the journal."""
        state = self._state
        state.ledger.intend(key.step, key.attempt)
        await state.waits.durable(f"intent of step {key.step}")
        state.observer.reached(Failpoint.INTENT_DURABLE)
        call = partial(self._trainer_client.trainer.finish_train_step, state.fence, key)
        steps = self._loss.optimizer_steps  # each may last as long as a call of a step
        return await self._queue(calls, f"finish of step {key.step}", call, deadlines=steps)

    async def _queue(
        self,
        calls: asyncio.TaskGroup,
        waiter: str,
        call: Callable[[], Awaitable[T]],
        *,
        deadlines: int = 1,
    ) -> "asyncio.Task[T]":
        """Send the next call of the step as soon as few enough are unanswered. Keep the order.

        The call itself may last ``deadlines`` times ``trainer.step_deadline_s``. This returns only
        once the call is sent. So no later call can overtake it, regardless of what the event loop runs next.
        """
        state = self._state
        await state.waits.until(
            Pump.TRAIN, "the trainer's queue", lambda: self._queued < _QUEUED_CALLS, waiter=waiter
        )
        sent = asyncio.Event()

        async def send() -> T:
            sent.set()
            self._queued += 1  # here: a task cancelled before it begins would not decrement it
            try:
                one_s = state.config.trainer.step_deadline_s
                return await self._trainer_client.call(
                    waiter, call, one_s * (self._queued - 1 + deadlines)
                )  # those before it too
            finally:
                self._queued -= 1  # the answer of the call has notified already

        task = calls.create_task(send(), name=waiter)
        await sent.wait()
        return task

    # --- chunks ----------------------------------------------------------------------------------

    async def _next_chunk(self, measures: StepMetricsBuilder) -> "_Due":
        """Wait until groups can be trained, the step is complete, or no more groups can come.

        Raises:
            EmptyBatch: Every prompt of the step was dropped.
            TrainerLost: Another pump has found the loss.
        """
        state = self._state
        with (
            state.observer.trainer_waits(TrainerTime.WAITING_GROUPS),
            measures.measure_time("wait_groups"),
        ):
            due = await state.waits.until(
                Pump.TRAIN, "ready groups", lambda: state.trainer.lost or self._due()
            )
        if isinstance(due, TrainerLost):
            raise due
        if due.is_empty_batch:
            raise EmptyBatch(state.step)
        return due

    def _due(self) -> "_Due | None":
        """Return the groups to train now, or None to wait. Changes nothing."""
        state, ledger = self._state, self._state.ledger
        groups_needed = state.groups_needed
        if groups_needed <= 0:
            return _Due([], is_empty_batch=not ledger.training)
        last = state.prompts.is_exhausted and not ledger.in_flight and not self._more_waits()
        if state.operator.is_stopping:
            ready = state.sampler.select(state.view) if ledger.training else []
            completes = len(ready) >= groups_needed or (last and bool(ledger.training))
            return _Due(ready) if completes else _Due([], is_cut_short=True)
        enough = len(ledger.ready) >= groups_needed or (
            ledger.ready_tokens >= self._min_tokens and not self._whole_batches
        )
        if not (enough or last):
            return None
        selected = state.sampler.select(state.view)
        left = len(ledger.ready) + ledger.admitted
        if last and not selected and left and not ledger.training:
            return _Due([], is_empty_batch=True)  # all prompts of the step were dropped
        if len(selected) >= groups_needed or last:
            return _Due(selected)
        tokens = sum(ledger.ready[prompt_index].tokens for prompt_index in selected)
        is_whole_chunk = tokens >= self._min_tokens and not self._whole_batches
        return _Due(selected) if is_whole_chunk else None

    def _more_waits(self) -> bool:
        """Return whether a group of this step, not only of later ones, will be rolled out again."""
        state = self._state
        return state.ledger.admitted > 0 and any(
            group.place is Place.ADMITTED and earliest_step(group.target_step) <= state.step
            for group in state.ledger.groups.values()
        )

    async def _prepare(self, groups: Sequence[GroupRecord], measures: StepMetricsBuilder) -> Chunk:
        """Check staleness again, add extra logprobs and advantages. Return the chunk to send."""
        state = self._state
        oldest_allowed = state.ledger.trainer_version - state.sampler.max_staleness
        receipts = list[Receipt]()
        for group in groups:
            if group.receipt is None or group.oldest_version < oldest_allowed:
                raise AssertionError(f"{group} was claimed past the staleness bound")
            receipts.append(group.receipt)
        with measures.measure_time("advantage"):
            advantages = await self._compute_advantages(receipts)
        measures.add(receipts, advantages, state.ledger.trainer_version)
        loss = self._loss.config
        if loss.needs_policy_logprobs or loss.needs_reference_logprobs or loss.teacher_path:
            with measures.measure_time("prepare_logprobs"):
                await self._prepare_logprobs(receipts)
        return self._chunk(receipts, advantages)

    async def _compute_advantages(
        self, receipts: Sequence[Receipt]
    ) -> tuple[tuple[float, ...], ...]:
        """Return the advantages of each group. A function that may block runs in a thread.

        Raises:
            UserCodeRefused: The function has not returned in time. Its thread keeps running.
        """

        def compute() -> tuple[tuple[float, ...], ...]:
            return tuple(self._advantages(each.rewards, each.valid) for each in receipts)

        if self._advantages_within_s is None:
            return compute()
        try:
            return await self._state.waits.call(
                f"advantages of step {self._state.step}",
                target="the user's estimator",
                component=Component.ENVIRONMENT,
                deadline_s=self._advantages_within_s,
                reply=asyncio.wrap_future(start_in_thread(compute, "advantages")),
            )
        except DeadlineExceeded as late:
            groups = ", ".join(group_id(each.prompt_index) for each in receipts)
            problem = f"no answer within {self._advantages_within_s:g} s for the groups {groups}"
            name = f"algorithm.advantage={self._state.config.algorithm.advantage}"
            raise UserCodeRefused(name, problem, "Repair the function, then resume") from late

    async def _prepare_logprobs(self, receipts: Sequence[Receipt]) -> None:
        """Have the trainer write the columns that the loss needs and the groups do not have.

        Columns left by an aborted step may come from another version of the policy.
        """
        state = self._state
        state.queue.drop_added(receipt.prompt_index for receipt in receipts)
        chunk = self._chunk(receipts, ())
        prepared = await self._trainer_client.call(
            f"prepare_logprobs of step {state.step}",
            partial(self._trainer_client.trainer.prepare_logprobs, state.fence, chunk, self._loss),
            state.config.trainer.step_deadline_s,
        )
        for receipt, nbytes, payload in zip(
            receipts, prepared.payload_bytes, prepared.payloads, strict=True
        ):
            state.queue.add_columns(
                receipt.prompt_index, receipt.attempt, prepared.columns, nbytes, payload
            )

    def _chunk(
        self, receipts: Sequence[Receipt], advantages: tuple[tuple[float, ...], ...]
    ) -> Chunk:
        group_tokens = tuple(receipt.tokens for receipt in receipts)
        return Chunk(
            prompt_indices=tuple(receipt.prompt_index for receipt in receipts),
            payloads=tuple(
                self._state.queue.payloads(receipt.prompt_index) for receipt in receipts
            ),
            advantages=advantages,
            tokens=sum(group_tokens),
            group_tokens=group_tokens,
        )

    # --- the end of a step -----------------------------------------------------------------------

    async def _conclude(
        self, key: StepKey, result: StepResult, measures: StepMetricsBuilder
    ) -> StepResult:
        """Record the step in the ledger, directly after the trainer's reply.

        The step's payloads are released once the record is durable.
        """
        state = self._state
        trained = tuple(state.ledger.training)
        state.observer.reached(Failpoint.FINISH_ANSWERED)
        if result.applied:
            state.ledger.applied(key.step, key.attempt)
        else:
            state.ledger.refused(key.step, key.attempt, result.reason)
            log.warning("step.not_applied", step=key.step, reason=result.reason)
        measures.outcome = result
        await state.waits.durable(f"outcome of step {key.step}")
        state.observer.reached(Failpoint.APPLIED_DURABLE)
        state.queue.clear(trained)
        state.observer.reached(Failpoint.CLEARED)
        return result
