"""Rollout pump: keeps as many prompt groups in flight as can still be trained in time.

A prompt is drawn only when it is admitted. A failed rollout never becomes a reward. It is retried,
or dropped with a reason, or it ends the run.

Two rules keep room in the buffer: for one more group, and for a complete step.

A group has room if both bounds hold with this group and ``w`` others that go before it::

    n + w + 1 <= C                     groups
    b + (f + w + 1) * m <= B           bytes

    C, B   ``buffer.capacity_groups``, and ``buffer.capacity_mib`` in bytes
    n      groups in flight, ready or in training: all groups in the ledger except admitted ones
    b      bytes of the columns that the queue holds
    f      groups in flight, each of which may still grow to ``m`` bytes, the largest group
    w      admitted groups that are trained before this one and need room first

Groups of later steps that are ready or in flight must leave, those of the last step first, until
the remaining ``l`` groups with ``h`` bytes (``m`` for each in flight) fit next to a whole step of
``g`` groups of maximum size::

    l <= C - g    and    h <= B - g * m
"""

import asyncio
import enum
from collections.abc import Iterable
from typing import Final, NamedTuple, NoReturn

import structlog

from offbeat.config.limits import min_valid_samples
from offbeat.config.mixture import sampling_identity
from offbeat.config.sections.sampler import WindowedConfig
from offbeat.controller.engine_record import EngineRecord
from offbeat.controller.events import DropReason, ReturnKind
from offbeat.controller.failpoints import Failpoint
from offbeat.controller.lifecycle import RunPhase
from offbeat.controller.pending_waits import Pump, is_cancelled
from offbeat.controller.ports import Prompts, Rollouts
from offbeat.controller.receipts import refusal
from offbeat.controller.retries import Failure, RetryPolicy
from offbeat.controller.reward_budget import RewardBudget
from offbeat.controller.state import RunState
from offbeat.controller.waiting_groups import WaitingGroups
from offbeat.messages.failures import (
    ActorLost,
    Component,
    DeadlineExceeded,
    FailureKind,
    PayloadLost,
    RolloutFailed,
    UnfitGroup,
)
from offbeat.messages.groups import Prompt, Receipt, RolloutTask
from offbeat.sampler.filters import GroupFilter
from offbeat.sampler.policy import Admission, earliest_step


class BufferBounds(NamedTuple):
    """Bounds of the buffer of a run, which implement the module's formula."""

    capacity_groups: int  # C
    capacity_bytes: int  # B
    max_group_bytes: int  # m

    @classmethod
    def of(cls, state: RunState, max_group_bytes: int) -> "BufferBounds":
        """Return the bounds of a run with groups of at most ``max_group_bytes``."""
        buffer = state.config.buffer
        groups = buffer.capacity_groups or state.sampler.max_outstanding_groups
        return cls(groups, int(buffer.capacity_mib * 2**20), max_group_bytes)

    def has_room(self, state: RunState, waiting: int) -> bool:
        """Return whether one more group fits the buffer in addition to ``waiting`` others."""
        ledger = state.ledger
        if len(ledger.groups) - ledger.admitted + waiting >= self.capacity_groups:
            return False
        promised = (ledger.in_flight + waiting + 1) * self.max_group_bytes
        return state.queue.bytes_held + promised <= self.capacity_bytes

    def groups_without_room(self, state: RunState) -> list[int]:
        """Return groups of later steps that do not fit next to a full step of maximum-size groups.

        The groups of the last step come first.
        """
        whole_step, step, ledger = state.config.groups_per_step, state.step, state.ledger
        dispatched = [group for groups in ledger.in_flight_at.values() for group in groups.values()]
        later = sorted(
            (target_step, group.prompt_index)
            for group in (*ledger.ready.values(), *dispatched)
            if (target_step := earliest_step(group.target_step)) > step
        )

        def nbytes(prompt_index: int) -> int:
            is_ready = prompt_index in ledger.ready
            return state.queue.group_bytes(prompt_index) if is_ready else self.max_group_bytes

        groups = self.capacity_groups - whole_step
        free_bytes = self.capacity_bytes - whole_step * self.max_group_bytes
        held_bytes = sum(nbytes(prompt_index) for _, prompt_index in later)
        returned = list[int]()
        while later and (len(later) > groups or held_bytes > free_bytes):
            _, prompt_index = later.pop()
            held_bytes -= nbytes(prompt_index)
            returned.append(prompt_index)
        return returned


log = structlog.stdlib.get_logger()
_REPORT_S: Final = 5.0
"""Extra seconds for a worker to report that a rollout is late, and what it waited for."""


class _Again(enum.Enum):
    """The source of a group that is dispatched again."""

    DUE = enum.auto()
    TRIAL = enum.auto()  # in an outage of the environment


_Turn = Admission | _Again
"""The next group to dispatch: the admission of a new prompt, or the source of a returned group."""


class _Running(NamedTuple):
    task: "asyncio.Task[None]"
    engine: str
    incarnation: str  # the incarnation that the task was sent to


class RolloutPump:
    """Admits, dispatches and commits prompt groups.

    consumes   prompts, and admitted groups to dispatch again
    produces   ready groups, their columns in the queue
    waits for  room within ``max_staleness`` and the buffer, an engine that serves
    woken by   a served version, a claimed, trained or dropped group, the end of a back-off, a rewind
    """

    def __init__(
        self,
        state: RunState,
        prompts: Prompts,
        workers: Rollouts,
        retries: RetryPolicy,
        *,
        max_group_bytes: int,
    ) -> None:
        self._state, self._prompts, self._workers = state, prompts, workers
        self._retries, self._buffer = retries, BufferBounds.of(state, max_group_bytes)
        self._waiting, self._budget = WaitingGroups(state), RewardBudget(state)
        self._running: dict[int, _Running] = {}
        self._clock = asyncio.get_running_loop().time
        config = state.config
        self._sampling = sampling_identity(config)
        self._min_valid_samples = min_valid_samples(config)
        self._filter = GroupFilter(config.filters, config.groups_per_step)
        self._max_in_flight = config.rollout.max_in_flight or state.sampler.max_outstanding_groups
        sampler = config.sampler
        self._drops_evicted = isinstance(sampler, WindowedConfig) and sampler.on_evicted == "drop"

    async def run(self) -> NoReturn:
        """Admit, dispatch and commit groups forever. At the end of the prompts, stop admission."""
        state = self._state
        async with asyncio.TaskGroup() as rollouts:
            while True:
                turn = await state.waits.until(
                    Pump.ROLLOUT, "room for a prompt group", self._next_turn
                )
                if self._budget.covers_next_group:
                    self._dispatch_one(turn, rollouts)
                else:
                    self._budget.end_run()

    def again(self, prompt_index: int) -> None:
        """Dispatch an admitted group again as soon as its policy allows."""
        self._waiting.again(prompt_index)

    # --- admission -------------------------------------------------------------------------------

    def _next_turn(self) -> _Turn | None:
        """Return the next group to dispatch, if one may be dispatched now. Changes nothing."""
        if not (self._is_dispatch_open() and self._has_free_slot() and self._has_room(0)):
            return None
        turn = self._turn()
        return turn if turn is not None and self._budget.is_settled else None

    def _is_dispatch_open(self) -> bool:
        """Return whether no sync, operator or rewind blocks dispatches."""
        state, operator = self._state, self._state.operator
        is_rewinding = state.lifecycle.phase is RunPhase.REWINDING
        is_held = operator.is_stopping or operator.is_paused or is_rewinding
        return state.sync.is_gate_open and not is_held

    def _has_free_slot(self) -> bool:
        """Return whether an engine and the environment have capacity for one more rollout."""
        state = self._state
        has_slot = state.ledger.in_flight < self._max_in_flight and state.fleet.is_serving
        return has_slot and self._retries.outage.may_dispatch(self._clock())

    def _turn(self) -> _Turn | None:
        """Return the next group in turn if it has room, or else the next trial in an outage.

        Groups of the step in progress go first, then a fresh prompt for that step. Groups of later
        steps leave room for groups of earlier steps, which the step in progress may need.
        """
        due = self._waiting.next_due()
        due_step = None if due is None else earliest_step(due.target_step)
        if due_step is not None and due_step <= self._state.step:
            return _Again.DUE
        fresh = self._next_admission()
        if fresh is not None and fresh.target_step == self._state.step:
            return fresh
        if due_step is not None and self._has_room(self._waiting.before(due_step)):
            return _Again.DUE
        if due_step is None and fresh is not None and self._has_room(self._state.ledger.admitted):
            return fresh
        return _Again.TRIAL if self._waiting.next_trial(self._has_room) is not None else None

    def _has_room(self, waiting: int) -> bool:
        """Return whether one more maximum-size group fits in addition to ``waiting`` others."""
        return self._buffer.has_room(self._state, waiting)

    def _next_admission(self) -> Admission | None:
        """Return the admission of one more prompt, or None if none is needed or admitted."""
        state, config, ledger = self._state, self._state.config, self._state.ledger
        if state.prompts.is_exhausted:
            return None
        left = (config.steps - ledger.trainer_version) * config.groups_per_step
        left -= sum(ledger.batch_deficits.values()) + len(ledger.training)
        if ledger.outstanding >= left:
            return None
        return state.sampler.admit(state.view)

    def _dispatch_one(self, turn: _Turn, rollouts: asyncio.TaskGroup) -> None:
        """Dispatch the group whose turn it is, unless it needs a new prompt and there is none."""
        state = self._state
        match turn:
            case Admission():
                prompt = self._draw(turn)
            case _Again.DUE:
                prompt = self._prompt_again(self._waiting.pop_due())
            case _Again.TRIAL:
                prompt = self._prompt_again(self._waiting.pop_trial(self._has_room))
        if prompt is None:
            return
        prompt_index = prompt.prompt_index
        engine = state.fleet.pick(avoid=self._find_failed_engine(prompt_index))
        if engine is None:
            raise LookupError(
                f"no engine serves group {prompt_index} any more, although one did when the group was "
                "chosen"
            )
        attempt = state.ledger.dispatch(prompt_index, engine.name, engine.version)
        state.fleet.took(engine.name)
        self._retries.outage.dispatched()
        task = self._task(prompt, attempt, engine)
        name = task.group_id
        running = rollouts.create_task(self._rollout(task, name), name=name)
        self._running[prompt_index] = _Running(running, engine.name, engine.incarnation)

    def _find_failed_engine(self, prompt_index: int) -> str:
        """Return the engine of the group's last attempt if an infrastructure failure ended it."""
        group = self._state.ledger.groups[prompt_index]
        return group.engine if ReturnKind.INFRASTRUCTURE in group.returns else ""

    def _draw(self, admission: Admission) -> Prompt | None:
        """Admit the next prompt and return it, or None at the end of the prompts."""
        state = self._state
        prompt = self._prompts.prompt(state.ledger.totals.drawn)
        if prompt is None:
            state.prompts.is_exhausted = True
        else:
            state.ledger.admit(admission.target_step)
        return prompt

    def _prompt_again(self, prompt_index: int) -> Prompt:
        """Return a prompt that was drawn before."""
        prompt = self._prompts.prompt(prompt_index)
        if prompt is None:
            raise LookupError(
                f"the prompt source no longer has prompt {prompt_index}, drawn before"
            )
        return prompt

    def _task(self, prompt: Prompt, attempt: int, engine: EngineRecord) -> RolloutTask:
        config = self._state.config
        return RolloutTask(
            prompt=prompt,
            attempt=attempt,
            samples=config.samples_per_group,
            engine=engine.name,
            seed=group_seed(config.seed, prompt.prompt_index),
            deadline_s=config.rollout.deadline_s,
            sampling=self._sampling,
            min_valid_samples=self._min_valid_samples,
            version=engine.version,
        )

    # --- one rollout -----------------------------------------------------------------------------

    async def _rollout(self, task: RolloutTask, name: str) -> None:
        state = self._state
        since = self._clock()
        try:
            receipt, payload = await state.waits.call(
                f"rollout {name}",
                target=f"a worker and {task.engine}",
                component=Component.WORKER,
                deadline_s=task.deadline_s + _REPORT_S,
                reply=self._workers.rollout(state.fence, task),
                engine=task.engine,
            )
        except (RolloutFailed, ActorLost, DeadlineExceeded) as failure:
            if is_cancelled():  # its clean-up failed, and the group may already be out again
                log.warning("rollout.cleanup_failed", group=name, error=str(failure))
                return
            incarnation = self._release_engine(task.prompt_index)
            state.observer.rolled_out(task, name, "failed", since)
            await self._handle_failure(task, failure, incarnation)
        else:
            if is_cancelled():  # the answer came after the cancellation
                return
            state.observer.reached(Failpoint.ANSWERED)
            incarnation = self._release_engine(task.prompt_index)
            state.observer.rolled_out(task, name, "answered", since)
            await self._commit(task, receipt, payload, incarnation)

    def _release_engine(self, prompt_index: int) -> str:
        """Release the engine from this group. Return the incarnation that got the group."""
        running = self._running.pop(prompt_index)
        self._state.fleet.gave_back(running.engine)
        return running.incarnation

    async def _commit(
        self, task: RolloutTask, receipt: Receipt, payload: object, incarnation: str
    ) -> None:
        state, prompt_index = self._state, task.prompt_index
        group = state.ledger.groups[prompt_index]
        if receipt.engine_incarnation != incarnation:  # another process: it has acked no weights
            other = f"answered by {receipt.engine_incarnation}, sent to {incarnation}"
            failure = RolloutFailed(
                FailureKind.INFRASTRUCTURE, prompt_index, task.attempt, "engine_lost", other
            )
            await self._handle_failure(task, failure, incarnation)
            return
        if problem := refusal(receipt, task, group.oldest_version, state.ledger.trainer_version):
            failure = RolloutFailed(
                FailureKind.DATA, prompt_index, task.attempt, "refused_at_commit", problem
            )
            await self._handle_failure(task, failure, incarnation)
            return
        self._retries.answered(task, incarnation)
        self._waiting.outage_is_over()
        step = max(earliest_step(group.target_step), state.step)
        batch = step + state.ledger.totals.steps_refused  # a refused step uses a batch up
        if unwanted := self._filter.refusal(receipt, batch):
            state.ledger.drop(prompt_index, DropReason.FILTERED, unwanted)
        else:
            state.queue.put(
                prompt_index, task.attempt, receipt.columns, receipt.payload_bytes, payload
            )
            state.ledger.commit(receipt)
            self._evict()

    async def _handle_failure(self, task: RolloutTask, failure: Failure, incarnation: str) -> None:
        """Retry the group, now or after a back-off, or drop it. The policy may also end the run."""
        state = self._state
        wait_s = self._retries.after(task, failure, incarnation)
        if wait_s is None:
            # Wake a task that waits for the next trial of an environment in an outage.
            if rest_s := self._retries.outage.remaining_s(self._clock()):
                trial = f"a trial of the environment after {task.group_id}"
                await state.waits.pause(trial, target="its back-off", for_s=rest_s)
            return
        if wait_s:
            waiter = f"retry of {task.group_id}"
            self._waiting.back_off(task.prompt_index)
            await state.waits.pause(waiter, target="its back-off", for_s=wait_s)
        if self._retries.outage.is_open:
            self._waiting.after_all_others(task.prompt_index)
        else:
            self._waiting.again_if_admitted(task.prompt_index)

    # --- stale groups ----------------------------------------------------------------------------

    def sweep(self, *, predictive: bool) -> None:
        """Return groups to admitted if a new version has made them too old for their step.

        Ready groups leave the buffer, and groups in flight are cancelled. ``predictive`` also
        cancels groups that will be too old when it is their turn.
        """
        state = self._state
        self._evict()
        late = state.sampler.in_flight_to_cancel(state.view, predictive=predictive)
        if self._drops_evicted:
            self._drop_in_flight(late)
        else:
            self.cancel(late, "stale")

    def make_room(self) -> None:
        """Return groups of later steps until a whole step fits the buffer next to the rest.

        Called after groups of the step in progress have lost their columns. When rolled out again,
        each of them needs room for a maximum-size group. Groups of later steps could block that
        room forever.
        """
        state = self._state
        for prompt_index in self._buffer.groups_without_room(state):
            if prompt_index in self._running:
                self.cancel((prompt_index,), "no_room")
                continue
            state.queue.clear((prompt_index,))
            state.ledger.recover(prompt_index, "no_room")
            self.again(prompt_index)

    def batches_moved(self) -> None:
        """Reorder waiting groups by their new target steps after a refused step."""
        self._waiting.reorder()

    def refused(self, unfit: UnfitGroup) -> None:
        """Roll out again, or drop, a ready group that the trainer cannot read."""
        state = self._state
        state.queue.clear((unfit.prompt_index,))
        if self._retries.after_refusal(unfit) is not None:
            self.again(unfit.prompt_index)
        self.make_room()

    def lost(self, prompt_indices: Iterable[int], failure: PayloadLost) -> None:
        """Roll out again, or drop, ready groups with columns that are lost for good."""
        for prompt_index in prompt_indices:
            self._state.queue.clear((prompt_index,))
            if self._retries.after_loss(prompt_index, failure):
                self.again(prompt_index)

    def _evict(self) -> None:
        state = self._state
        for prompt_index in state.sampler.stale(state.view):
            state.queue.clear((prompt_index,))
            if self._drops_evicted:
                state.ledger.drop(prompt_index, DropReason.STALE)
            else:
                state.ledger.evict(prompt_index, "stale")
                self.again(prompt_index)

    def cancel(self, prompt_indices: Iterable[int], reason: str) -> None:
        """Cancel these groups in flight. Their prompts are admitted again."""
        for prompt_index in prompt_indices:
            self._stop(prompt_index)
            self._state.ledger.retry(prompt_index, ReturnKind.CANCELLED, reason)
            self.again(prompt_index)

    def _drop_in_flight(self, prompt_indices: Iterable[int]) -> None:
        """Cancel these groups in flight and drop their prompts, as the recipe asks."""
        for prompt_index in prompt_indices:
            self._stop(prompt_index)
            self._state.ledger.drop(prompt_index, DropReason.STALE)

    def _stop(self, prompt_index: int) -> None:
        self._running[prompt_index].task.cancel()
        self._release_engine(prompt_index)
        self._retries.outage.returned()

    def cancel_all(self, reason: str) -> None:
        """Cancel every group in flight."""
        self.cancel(list(self._running), reason)


def group_seed(seed: int, prompt_index: int) -> int:
    """Return the seed of a group, the same for every attempt."""
    return (seed * 0x9E3779B97F4A7C15 + prompt_index * 0xD1B54A32D192ED03) % 2**63
