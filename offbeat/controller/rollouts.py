"""The rollout pump: keeps as many prompt groups in flight as may still be trained in time.

    waits for                        woken by
    room for one more group          a served version, a claimed, trained or dropped group
    a group to dispatch again        a failed rollout after its back-off, an eviction

A prompt is drawn only once admitted. A failed rollout never becomes a reward: it is retried, or
dropped with a reason, or it ends the run.
"""

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable
from typing import NoReturn

import structlog

from offbeat.controller.errors import BudgetSpent
from offbeat.controller.fleet import Engine
from offbeat.controller.ledger import Group
from offbeat.controller.ports import PromptSource, Rollouts
from offbeat.controller.receipts import refusal
from offbeat.controller.state import RunState
from offbeat.messages.failures import ActorLost, DeadlineExceeded, FailureKind, RolloutFailed
from offbeat.messages.groups import Prompt, Receipt, RolloutTask, group_id

log = structlog.stdlib.get_logger()
OnCommit = Callable[[Receipt], None]


class RolloutPump:
    """Admits, dispatches and commits prompt groups."""

    def __init__(
        self,
        state: RunState,
        prompts: PromptSource,
        workers: Rollouts,
        *,
        max_group_bytes: int,
        rng: random.Random,
    ) -> None:
        self._state, self._prompts, self._workers = state, prompts, workers
        self._max_group_bytes, self._rng = max_group_bytes, rng
        self._again: deque[int] = deque()  # admitted already, to be dispatched once more
        self._failures_in_row = 0
        config = state.config
        self._max_in_flight = config.rollout.max_in_flight or state.sampler.reach
        self._capacity_groups = config.buffer.capacity_groups or state.sampler.reach
        self._capacity_bytes = int(config.buffer.capacity_mb * 2**20)

    async def run(self) -> NoReturn:
        """Never returns: the end of the prompts ends only the drawing."""
        state = self._state
        async with asyncio.TaskGroup() as rollouts:
            while True:
                await state.until("rollout pump", "room for a prompt group", self._can_dispatch)
                while self._can_dispatch():
                    self._dispatch_one(rollouts)
                state.moved()

    def again(self, ordinal: int) -> None:
        """Dispatch an admitted group once more; it has left its engine or the buffer."""
        self._again.append(ordinal)

    # --- admission -------------------------------------------------------------------------------

    def _can_dispatch(self) -> bool:
        state = self._state
        return (
            state.gate_open
            and not state.stopping
            and state.ledger.in_flight < self._max_in_flight
            and state.fleet.pick() is not None
            and (bool(self._again) or self._may_admit())
        )

    def _may_admit(self) -> bool:
        state, ledger = self._state, self._state.ledger
        if state.exhausted or len(ledger.groups) >= self._capacity_groups:
            return False
        promised = (ledger.admitted + ledger.in_flight + 1) * self._max_group_bytes
        if state.queue.bytes_held + promised > self._capacity_bytes:
            return False
        left = (state.config.steps - state.step) * state.config.groups_per_step + state.quota
        view = state.view()
        return view.outstanding < left and state.sampler.admit(view) is not None

    def _dispatch_one(self, rollouts: asyncio.TaskGroup) -> None:
        """Send out one group: one that comes again, or a fresh prompt."""
        state = self._state
        engine = state.fleet.pick()
        ordinal = self._again.popleft() if self._again else self._draw()
        if ordinal is None or engine is None:
            return
        prompt = self._prompts.prompt(ordinal)
        if prompt is None:
            raise LookupError(f"the prompt source no longer has ordinal {ordinal}, drawn before")
        attempt = state.ledger.dispatch(ordinal, engine.name, engine.version)
        state.fleet.took(engine.name)
        self._state.busy.engine_changed(engine)
        task = self._task(prompt, attempt, engine)
        rollouts.create_task(self._rollout(task), name=group_id(ordinal))

    def _draw(self) -> int | None:
        state = self._state
        if self._prompts.prompt(state.ledger.totals.drawn) is None:
            state.exhausted = True
            return None
        stamp = state.sampler.admit(state.view())
        return None if stamp is None else state.ledger.admit(stamp)

    def _task(self, prompt: Prompt, attempt: int, engine: Engine) -> RolloutTask:
        config = self._state.config
        return RolloutTask(
            prompt=prompt,
            attempt=attempt,
            samples=config.samples_per_group,
            engine=engine.name,
            seed=_group_seed(config.seed, prompt.ordinal, attempt),
            deadline_s=config.rollout.deadline_s,
        )

    # --- one rollout -----------------------------------------------------------------------------

    async def _rollout(self, task: RolloutTask) -> None:
        state = self._state
        try:
            receipt, payload = await state.call(
                f"rollout {task.group_id}",
                on=f"a worker and {task.engine}",
                deadline_s=task.deadline_s,
                reply=self._workers.rollout(state.fence, task),
            )
        except (RolloutFailed, ActorLost, DeadlineExceeded) as failure:
            self._gave_back(task)
            await self._failed(task, failure)
        else:
            self._gave_back(task)
            await self._commit(task, receipt, payload)

    def _gave_back(self, task: RolloutTask) -> None:
        self._state.fleet.gave_back(task.engine)
        self._state.busy.engine_changed(self._state.fleet.engines[task.engine])

    async def _commit(self, task: RolloutTask, receipt: Receipt, payload: object) -> None:
        state = self._state
        group = state.ledger.groups[task.ordinal]
        problem = refusal(receipt, task, group.bound_version, state.ledger.trainer_version)
        if problem:
            failure = RolloutFailed(
                FailureKind.DATA, task.ordinal, task.attempt, "refused_at_commit", problem
            )
            await self._failed(task, failure)
            return
        self._failures_in_row = 0
        state.queue.put(task.ordinal, task.attempt, receipt.columns, receipt.payload_bytes, payload)
        state.ledger.commit(receipt)
        self.evict_stale()
        state.moved()

    def evict_stale(self) -> None:
        """Ready groups past the bound go back: their prompts are rolled out again."""
        state = self._state
        for ordinal in state.sampler.stale(state.view()):
            state.queue.clear((ordinal,))
            state.ledger.evict(ordinal, "stale")
            self.again(ordinal)

    # --- failures --------------------------------------------------------------------------------

    async def _failed(
        self, task: RolloutTask, failure: RolloutFailed | ActorLost | DeadlineExceeded
    ) -> None:
        """Retry, drop or end the run, by the kind of failure."""
        kind, reason = _classify(failure)
        if kind is FailureKind.BUG:
            raise failure
        state, limits = self._state, self._state.config.rollout
        group = state.ledger.retry(task.ordinal, kind, reason)
        log.warning("rollout.failed", group=task.group_id, attempt=task.attempt, error=str(failure))
        if kind is FailureKind.DATA:
            if group.failures[kind] > limits.data_retries:
                self._drop(group, reason, failure)
            else:
                self.again(task.ordinal)
            state.moved()
            return
        if not isinstance(failure, RolloutFailed) or reason in (
            "engine_lost",
            "engine_unavailable",
        ):
            state.fleet.suspect(task.engine)
        self._failures_in_row += 1
        self._within_budgets(group, failure)
        state.moved()
        await asyncio.sleep(self._backoff_s(group.failures[kind]))
        self.again(task.ordinal)
        state.moved()

    def _within_budgets(self, group: Group, failure: Exception) -> None:
        limits = self._state.config.rollout
        if group.failures[FailureKind.INFRASTRUCTURE] > limits.infrastructure_retries:
            raise BudgetSpent(
                f"retries of {group_id(group.ordinal)}",
                limits.infrastructure_retries,
                "rollout.infrastructure_retries",
                str(failure),
            ) from failure
        if self._failures_in_row >= limits.consecutive_failures:
            raise BudgetSpent(
                "infrastructure failures in a row",
                limits.consecutive_failures,
                "rollout.consecutive_failures",
                str(failure),
            ) from failure

    def _drop(self, group: Group, reason: str, failure: Exception) -> None:
        state, limits = self._state, self._state.config.rollout
        state.ledger.drop(group.ordinal, reason, shrink=limits.on_dropped_prompt == "shrink")
        log.warning("group.dropped", group=group_id(group.ordinal), reason=reason)
        if state.ledger.totals.dropped.total() > limits.drop_budget:
            raise BudgetSpent(
                "dropped prompt groups", limits.drop_budget, "rollout.drop_budget", str(failure)
            ) from failure

    def _backoff_s(self, failures: int) -> float:
        limits = self._state.config.rollout
        longest = min(limits.backoff_max_s, limits.backoff_s * math.pow(2, failures - 1))
        return longest * self._rng.uniform(0.5, 1.0)


def _classify(failure: RolloutFailed | ActorLost | DeadlineExceeded) -> tuple[FailureKind, str]:
    match failure:
        case RolloutFailed():
            return failure.kind, failure.reason
        case ActorLost():
            return FailureKind.INFRASTRUCTURE, "actor_lost"
        case DeadlineExceeded():
            return FailureKind.INFRASTRUCTURE, "deadline"


def _group_seed(seed: int, ordinal: int, attempt: int) -> int:
    """Seed of one attempt of one group; an infrastructure retry draws the same samples again."""
    del attempt
    return (seed * 0x9E3779B97F4A7C15 + ordinal * 0xD1B54A32D192ED03) % 2**63
