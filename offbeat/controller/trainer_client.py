"""Client of the trainer's ranks: detects their loss and replaces them."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import structlog

from offbeat.config.limits import start_deadline_s
from offbeat.controller.errors import TrainerLost
from offbeat.controller.ports import Trainer
from offbeat.controller.starting import describe_first_answer, first_answer
from offbeat.controller.state import RunState
from offbeat.messages.failures import (
    ActorLost,
    Component,
    DeadlineExceeded,
    InitialWeightsChanged,
    StepOutOfOrder,
    TrainerCall,
    TrainStepFailed,
)
from offbeat.messages.fences import StepKey
from offbeat.messages.training import TrainerState

log = structlog.stdlib.get_logger()
T = TypeVar("T")


class TrainerClient:
    """Client of all trainer ranks.

    Every call of the trainer goes through this client, which reports a lost rank as
    ``TrainerLost``.
    """

    def __init__(self, state: RunState, trainer: Trainer) -> None:
        self._state, self.trainer = state, trainer

    async def call(self, waiter: str, reply: Callable[[], Awaitable[T]], deadline_s: float) -> T:
        """Await a reply of the trainer.

        Raises:
            TrainerLost: A rank is gone, or did not reply in time.
            TrainStepFailed: A living rank reports that its work failed.
        """
        state = self._state
        state.trainer.open_calls += 1
        try:
            with state.observer.trainer_call(waiter):
                return await state.waits.call(
                    waiter,
                    target="the trainer",
                    component=Component.TRAINER,
                    deadline_s=deadline_s,
                    reply=reply(),
                )
        except (ActorLost, DeadlineExceeded) as failure:
            raise TrainerLost(waiter, str(failure)) from failure
        finally:
            state.trainer.open_calls -= 1

    async def abort(self, key: StepKey, deadline_s: float) -> None:
        """Abort the open step, if any.

        Raises:
            TrainerLost: A rank is lost, or alive but unable to abort, so its state is unknown.
        """
        waiter = f"abort of step {key.step}"
        abort = partial(self.trainer.abort_train_step, self._state.fence, key)
        try:
            await self.call(waiter, abort, deadline_s)
        except TrainStepFailed as failure:
            raise TrainerLost(waiter, str(failure)) from failure

    async def first_answer(self) -> TrainerState:
        """Wait until the ranks are up.

        Raises:
            DeadlineExceeded: They do not answer within ``trainer.start_deadline_s``.
            InitialWeightsChanged: The ranks began with different weights from the ones the run
                began with.
        """
        deadline_s = start_deadline_s(self._state.config.trainer)
        answer = await self._state.waits.call(
            "start of the trainer",
            target=describe_first_answer(self._state.config.runtime),
            component=Component.TRAINER,
            deadline_s=deadline_s,
            reply=first_answer(partial(self.trainer.state, self._state.fence), deadline_s),
        )
        known = self._state.ledger.initial_weights
        if known and answer.initial_digest not in ("", known):
            raise InitialWeightsChanged(known, answer.initial_digest)
        log.info("trainer.ready", ranks=answer.ranks, version=answer.version)
        self._state.joined(Component.TRAINER, "trainer", answer.incarnation, answer.initial_digest)
        return answer

    async def replace(self) -> None:
        """Kill all ranks and wait for new ones."""
        await self.trainer.restart()
        await self.first_answer()

    async def restore(self, at_most: int) -> TrainerState:
        """Restore the newest checkpoint of version ``at_most`` or older on all ranks."""
        return await self.call(
            f"restore of version {at_most} or older",
            lambda: self.trainer.restore(self._state.fence, at_most),
            self._state.config.checkpoint.deadline_s,
        )


def lost_step(failures: list[BaseException]) -> TrainerLost | None:
    """Return why the ranks must be replaced to undo a step, or None if it can be aborted.

    After a failed ``finish`` it is unknown whether the optimizer has stepped on every rank. If the
    trainer has no such step, it was restarted without the controller's request.
    """
    for failure in failures:
        if isinstance(failure, TrainerLost):
            return failure
        if isinstance(failure, TrainStepFailed) and failure.during is TrainerCall.FINISH:
            return TrainerLost("finish", str(failure))
    unknown = [failure for failure in failures if type(failure) is StepOutOfOrder]
    if failures and len(unknown) == len(failures):
        return TrainerLost("a step", f"it knows nothing of the step: {failures[0]}")
    return None
